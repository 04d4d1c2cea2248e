"""Closing a tenant: its keys stop for good, its books and usage stay; people's data goes when the policy says so."""

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind
from tenants import tenant_queries as queries
from tenants.errors import not_found
from tenants.types import Status

ERASE_MAX = 100  # tenants at a time


async def close(session: AsyncSession, tenant_id: UUID, *, confirm_name: str, now: datetime) -> None:
    """Close the tenant for good: every key is revoked, nothing can be changed any more, all can still be read.

    Raises:
        PlatformError: not_found, conflict when it is closed already, invalid when the name is not the tenant's.
    """
    row = await queries.lock_tenant(session, tenant_id)
    if row is None:
        raise not_found(IdKind.TENANT)
    if row.status == Status.CLOSED:
        raise PlatformError("TENANT_CLOSED", ErrorKind.CONFLICT, "This organisation is closed already.")
    if confirm_name != row.name:
        raise PlatformError(
            "NAME_NOT_CONFIRMED",
            ErrorKind.INVALID,
            "Closing is for good. Write the organisation's name exactly as it is to confirm.",
            param="confirm_name",
        )
    row.status, row.closed_at = Status.CLOSED, now
    await queries.revoke_keys(session, tenant_id, now)
    await session.flush()
    await record_config_change(session, "tenant", tenant_id)


async def require_open(session: AsyncSession, tenant_id: UUID) -> None:
    """Refuse what would change a tenant that is suspended or closed.

    Raises:
        PlatformError: forbidden, with which of both.
    """
    row = await queries.tenant_state(session, tenant_id)
    if row is not None and row != Status.ACTIVE:
        raise PlatformError(f"TENANT_{row.upper()}", ErrorKind.FORBIDDEN, f"This organisation is {row}.")


async def require_not_closed(session: AsyncSession, tenant_id: UUID) -> None:
    """Refuse what would change a tenant that was closed.

    Raises:
        PlatformError: conflict.
    """
    if await queries.tenant_state(session, tenant_id) == Status.CLOSED:
        raise PlatformError("TENANT_CLOSED", ErrorKind.CONFLICT, "This tenant is closed for good.")


async def erase_due(session: AsyncSession, *, now: datetime, keep: timedelta) -> list[UUID]:
    """Forget the people of tenants closed longer than `keep` ago.

    Members, invites and the billing profile go, and the names of keys, projects and service accounts. Ids, usage and
    books stay, since invoices and audits need them.

    Returns:
        Whose data went; at most `ERASE_MAX`, the rest comes with the next call.
    """
    due = await queries.tenants_to_erase(session, now - keep, ERASE_MAX)
    for tenant_id in due:
        await queries.erase_people_of(session, tenant_id, now)
    return list(due)
