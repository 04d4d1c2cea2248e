"""Every query on entitlements and their history. What a tenant owns takes `tenant_id` first; None: a plan's."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.entitlement_tables import EntitlementChangeRow, EntitlementRow
from tenants.tables import TenantRow

_OWN, _CHANGE = EntitlementRow, EntitlementChangeRow


async def lock_model(session: AsyncSession, model: str) -> None:
    """One change at a time of what is promised of a model: sums over tenants stay right."""
    await session.execute(text("SELECT pg_advisory_xact_lock(7481235, hashtext(:model))"), {"model": model})


async def at(session: AsyncSession, tenant_id: UUID | None, plan_id: UUID | None, model: str) -> EntitlementRow | None:
    query = select(_OWN).where(
        _OWN.tenant_id.is_not_distinct_from(tenant_id), _OWN.plan_id.is_not_distinct_from(plan_id), _OWN.model == model
    )
    return (await session.scalars(query)).one_or_none()


async def one(
    session: AsyncSession, tenant_id: UUID | None, plan_id: UUID | None, entitlement_id: UUID
) -> EntitlementRow | None:
    query = select(_OWN).where(
        _OWN.tenant_id.is_not_distinct_from(tenant_id),
        _OWN.plan_id.is_not_distinct_from(plan_id),
        _OWN.id == entitlement_id,
    )
    return (await session.scalars(query)).one_or_none()


async def owned(
    session: AsyncSession, tenant_id: UUID | None, plan_id: UUID | None, limit: int
) -> Sequence[EntitlementRow]:
    query = select(_OWN).where(
        _OWN.tenant_id.is_not_distinct_from(tenant_id), _OWN.plan_id.is_not_distinct_from(plan_id)
    )
    return (await session.scalars(query.order_by(_OWN.model).limit(limit))).all()


async def everything(session: AsyncSession) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return what gateways need of all: of tenants those that may call."""
    query = (
        select(_OWN.id, _OWN.tenant_id, _OWN.plan_id, _OWN.model, _OWN.weight, _OWN.guarantee, _OWN.deserved,
               _OWN.capability)
        .join(TenantRow, TenantRow.id == _OWN.tenant_id, isouter=True)
        .where(_OWN.plan_id.is_not(None) | (TenantRow.status == "active"))
    )  # fmt: skip
    return (await session.execute(query)).all()


async def promised(session: AsyncSession, tenant_id: UUID | None, model: str) -> tuple[int, int]:
    """Return the sum of guarantees of a model, and how many tenants are promised something, but for this tenant."""
    query = (
        select(func.coalesce(func.sum(_OWN.guarantee), 0), func.count())
        .join(TenantRow, TenantRow.id == _OWN.tenant_id)
        .where(_OWN.model == model, TenantRow.status != "closed", _OWN.tenant_id.is_distinct_from(tenant_id))
        .where(func.num_nonnulls(_OWN.guarantee, _OWN.deserved, _OWN.capability) > 0)
    )
    total, count = (await session.execute(query)).one()
    return int(total or 0), count


async def changes(
    session: AsyncSession, tenant_id: UUID | None, plan_id: UUID | None, *, after: UUID | None, limit: int
) -> Sequence[EntitlementChangeRow]:
    query = select(_CHANGE).where(
        _CHANGE.tenant_id.is_not_distinct_from(tenant_id), _CHANGE.plan_id.is_not_distinct_from(plan_id)
    )
    if after is not None:
        query = query.where(_CHANGE.id < after)
    return (await session.scalars(query.order_by(_CHANGE.id.desc()).limit(limit))).all()


async def change(
    session: AsyncSession, tenant_id: UUID | None, plan_id: UUID | None, change_id: UUID
) -> EntitlementChangeRow | None:
    query = select(_CHANGE).where(
        _CHANGE.tenant_id.is_not_distinct_from(tenant_id),
        _CHANGE.plan_id.is_not_distinct_from(plan_id),
        _CHANGE.id == change_id,
    )
    return (await session.scalars(query)).one_or_none()
