"""Every query about service accounts. What a tenant owns takes `tenant_id` first."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.queries import UNIQUE_VIOLATION
from tenants.tables import ServiceAccountRow
from tenants.types import PersonStatus


async def save(session: AsyncSession, tenant_id: UUID, row: ServiceAccountRow) -> bool:
    """Insert or update; False when another account of the tenant has this name."""
    if row.tenant_id != tenant_id:
        raise ValueError("another tenant's row")
    try:
        async with session.begin_nested():
            session.add(row)
            await session.flush()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
            raise
        return False
    await session.refresh(row)
    return True


async def service_account(session: AsyncSession, tenant_id: UUID, account_id: UUID) -> ServiceAccountRow | None:
    """Return an account, locked; a deleted one is not there."""
    query = select(ServiceAccountRow).where(
        ServiceAccountRow.tenant_id == tenant_id,
        ServiceAccountRow.id == account_id,
        ServiceAccountRow.status != PersonStatus.DELETED,
    )
    return (await session.scalars(query.with_for_update(key_share=True))).one_or_none()


async def service_accounts(
    session: AsyncSession, tenant_id: UUID, projects: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[ServiceAccountRow]:
    """Return accounts newest first, all or those of these projects; deleted ones never."""
    query = (
        select(ServiceAccountRow)
        .where(ServiceAccountRow.tenant_id == tenant_id, ServiceAccountRow.status != PersonStatus.DELETED)
        .order_by(ServiceAccountRow.id.desc())
        .limit(limit)
    )
    if projects is not None:
        query = query.where(ServiceAccountRow.project_id.in_(projects))
    if after is not None:
        query = query.where(ServiceAccountRow.id < after)
    return (await session.scalars(query)).all()
