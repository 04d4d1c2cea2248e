"""Tenants: the customers."""

import secrets
from collections.abc import Sequence
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from core.money import Currency
from tenants import queries
from tenants.errors import invalid, not_found
from tenants.tables import TenantRow
from tenants.types import DEFAULT_PLAN_ID, BillingMode, Status, Tenant

CACHE_SEED_BYTES = 32


def _tenant(row: TenantRow) -> Tenant:
    return Tenant(
        id=row.id,
        name=row.name,
        currency=Currency(row.currency),
        tz=row.tz,
        status=Status(row.status),
        billing_mode=BillingMode(row.billing_mode),
        plan_id=row.plan_id,
        created_at=row.created_at,
    )


async def _row(session: AsyncSession, tenant_id: UUID) -> TenantRow:
    row = await queries.tenant(session, tenant_id)
    if row is None:
        raise not_found(IdKind.TENANT)
    return row


_OF_THE_HOST = ("posix/", "right/", "posixrules", "localtime", "Factory")  # found in some hosts' files, and no zones


def _checked_zone(tz: str) -> str:
    try:
        known = not tz.startswith(_OF_THE_HOST) and ZoneInfo(tz) is not None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        known = False
    if not known:
        raise invalid("tz", f"{tz[:64]!r} is not an IANA time zone such as Europe/Berlin.")
    return tz


async def create(
    session: AsyncSession,
    *,
    name: str,
    currency: Currency,
    tz: str = "UTC",
    billing_mode: BillingMode = BillingMode.PREPAID,
) -> Tenant:
    """Make a tenant; its ledger accounts are opened by `billing.ledger.open_tenant` in the same transaction.

    Raises:
        PlatformError: conflict for a name in use, invalid for an unknown time zone.
    """
    row = TenantRow(
        id=new_uuid(),
        name=name,
        currency=currency,
        tz=_checked_zone(tz),
        billing_mode=billing_mode,
        plan_id=DEFAULT_PLAN_ID,
        cache_seed=secrets.token_bytes(CACHE_SEED_BYTES),
    )
    await queries.insert_named(session, row, "tenant")
    return _tenant(row)


async def get(session: AsyncSession, tenant_id: UUID) -> Tenant:
    return _tenant(await _row(session, tenant_id))


async def list_tenants(session: AsyncSession, *, after: UUID | None, limit: int) -> Sequence[Tenant]:
    """Return at most `limit` tenants, newest first."""
    return [_tenant(row) for row in await queries.tenants(session, after, limit)]


async def update(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    name: str | None = None,
    status: Status | None = None,
    tz: str | None = None,
) -> Tenant:
    """Change what is not None; gateways see it within a second of the commit.

    Raises:
        PlatformError: not_found; conflict for a closed tenant, which stays as it is, and for a name in use; invalid for
            a status or zone.
    """
    row = await _row(session, tenant_id)
    if row.status == Status.CLOSED:
        raise PlatformError("TENANT_CLOSED", ErrorKind.CONFLICT, "This tenant is closed for good.")
    if status is Status.CLOSED:
        raise invalid("status", "A tenant is closed by its own route, which asks for its name.")
    if name is not None and name != row.name:
        row.name = name
        await queries.flush_name(session, "tenant")
    if status is not None:
        row.status = status
    if tz is not None:
        row.tz = _checked_zone(tz)
    if session.is_modified(row):
        await session.flush()
        await record_config_change(session, "tenant", tenant_id)
    return _tenant(row)


async def set_billing_mode(session: AsyncSession, tenant_id: UUID, mode: BillingMode) -> None:
    """Note how a tenant pays, in the transaction that changes it in the books."""
    row = await _row(session, tenant_id)
    row.billing_mode = mode
    await session.flush()


async def suspend(session: AsyncSession, tenant_id: UUID, *, hard: bool = False) -> Tenant:
    """Refuse all calls of the tenant until resumed; nothing is lost. With `hard` running answers are cut too."""
    tenant = await update(session, tenant_id, status=Status.SUSPENDED)
    if hard:
        await record_config_change(session, "tenant.end", tenant_id)
    return tenant


async def resume(session: AsyncSession, tenant_id: UUID) -> Tenant:
    return await update(session, tenant_id, status=Status.ACTIVE)
