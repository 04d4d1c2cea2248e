"""Queries about a tenant's own life: its billing profile, its closing, and what is forgotten after that."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.tables import ApiKeyRow, InviteRow, LegalProfileRow, MemberRow, ProjectRow, ServiceAccountRow, TenantRow
from tenants.types import Status


async def legal_profile(session: AsyncSession, tenant_id: UUID) -> LegalProfileRow | None:
    return await session.get(LegalProfileRow, tenant_id)


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> TenantRow | None:
    query = select(TenantRow).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    return (await session.scalars(query)).one_or_none()


async def tenant_state(session: AsyncSession, tenant_id: UUID) -> str | None:
    return await session.scalar(select(TenantRow.status).where(TenantRow.id == tenant_id))


async def revoke_keys(session: AsyncSession, tenant_id: UUID, now: datetime) -> None:
    live = (ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.revoked_at.is_(None))
    await session.execute(update(ApiKeyRow).where(*live).values(revoked_at=now))


async def tenants_to_erase(session: AsyncSession, closed_before: datetime, limit: int) -> Sequence[UUID]:
    query = (
        select(TenantRow.id)
        .where(TenantRow.status == Status.CLOSED, TenantRow.closed_at <= closed_before, TenantRow.erased_at.is_(None))
        .order_by(TenantRow.id)
        .limit(limit)
        .with_for_update(key_share=True, skip_locked=True)
    )
    return (await session.scalars(query)).all()


async def erase_people_of(session: AsyncSession, tenant_id: UUID, now: datetime) -> None:
    """Delete who was there, and replace names by ids. A name has to stay unique, so the id is in it."""
    for table in (MemberRow, InviteRow, LegalProfileRow):
        await session.execute(delete(table).where(table.tenant_id == tenant_id))
    for named in (ProjectRow, ApiKeyRow, ServiceAccountRow):
        erased = func.concat("erased ", named.id)
        await session.execute(update(named).where(named.tenant_id == tenant_id).values(name=erased))
    erased = func.concat("erased ", TenantRow.id)
    await session.execute(update(TenantRow).where(TenantRow.id == tenant_id).values(name=erased, erased_at=now))
