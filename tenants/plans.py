"""Plans: named bundles of limits and prices. Every tenant is on one."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import entitlements, limit_queries, limits
from tenants.errors import not_found
from tenants.limit_tables import PlanRow
from tenants.limits import Why
from tenants.types import DEFAULT_PLAN_ID


@dataclass(frozen=True, slots=True)
class Plan:
    """A bundle. `price_book_id` is a book of `billing`; None means the list's prices."""

    id: UUID
    name: str
    description: str
    price_book_id: UUID | None
    created_at: datetime


def _plan(row: PlanRow) -> Plan:
    return Plan(row.id, row.name, row.description, row.price_book_id, row.created_at)


async def _row(session: AsyncSession, plan_id: UUID, *, lock: bool = False) -> PlanRow:
    row = await limit_queries.plan(session, plan_id, lock=lock)
    if row is None:
        raise not_found(IdKind.PLAN)
    return row


async def create(session: AsyncSession, *, name: str, description: str = "", price_book_id: UUID | None = None) -> Plan:
    """Make a plan without limits.

    Raises:
        PlatformError: conflict for a name in use.
    """
    row = PlanRow(id=new_uuid(), name=name, description=description, price_book_id=price_book_id)
    await limit_queries.save_plan(session, row)
    return _plan(row)


async def get(session: AsyncSession, plan_id: UUID) -> Plan:
    return _plan(await _row(session, plan_id))


async def list_plans(session: AsyncSession, *, after: UUID | None, limit: int) -> Sequence[Plan]:
    """Return at most `limit` plans, newest first."""
    return [_plan(row) for row in await limit_queries.plans(session, after, limit)]


async def update(
    session: AsyncSession, plan_id: UUID, *, name: str | None = None, description: str | None = None
) -> Plan:
    """Change what is not None."""
    row = await _row(session, plan_id, lock=True)
    if name is not None:
        row.name = name
    if description is not None:
        row.description = description
    await limit_queries.save_plan(session, row)
    return _plan(row)


async def set_price_book(session: AsyncSession, plan_id: UUID, price_book_id: UUID | None) -> Plan:
    """Give a plan prices of its own, or with None the list's; requests that were admitted keep theirs."""
    row = await _row(session, plan_id, lock=True)
    if row.price_book_id != price_book_id:
        row.price_book_id = price_book_id
        await session.flush()
        await record_config_change(session, "plan", plan_id)
    return _plan(row)


async def delete(session: AsyncSession, plan_id: UUID, why: Why) -> None:
    """Take a plan away with its limits and weights; the history of both stays.

    Raises:
        PlatformError: conflict while a tenant is on it, and for the plan that new tenants get.
    """
    row = await _row(session, plan_id, lock=True)
    if plan_id == DEFAULT_PLAN_ID:
        raise PlatformError("PLAN_IN_USE", ErrorKind.CONFLICT, "New tenants are put on this plan: it has to stay.")
    found = await limit_queries.tenants_on(session, plan_id)
    if found:
        message = f"{found} tenants are on this plan. Put them on another one first."
        raise PlatformError("PLAN_IN_USE", ErrorKind.CONFLICT, message, fields={"tenants": found})
    for rule in await limits.list_at(session, plan_id=plan_id):
        await limits.remove(session, rule, why)
    await entitlements.remove_all_of_plan(session, plan_id, why)
    await session.delete(row)
    await session.flush()


async def put_tenant(session: AsyncSession, tenant_id: UUID, plan_id: UUID) -> tuple[Plan, Plan]:
    """Put a tenant on a plan; its own limits stay. Gateways follow within a second of the commit.

    Returns:
        The plan before, and the plan now.
    """
    after = await get(session, plan_id)
    tenant = await limit_queries.lock_tenant(session, tenant_id)
    if tenant is None:
        raise not_found(IdKind.TENANT)
    before = await get(session, tenant.plan_id)
    if before.id != after.id:
        tenant.plan_id = after.id
        await session.flush()
        await record_config_change(session, "tenant", tenant_id)
    return before, after


async def tenants_with_book(session: AsyncSession, price_book_id: UUID) -> frozenset[UUID]:
    """Return the tenants on plans that have this book of prices today."""
    return frozenset(await limit_queries.tenants_with_book(session, price_book_id))
