"""Every query about invites. What a tenant owns takes `tenant_id` first."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.tables import InviteRow


def _open(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return InviteRow.accepted_at.is_(None), InviteRow.revoked_at.is_(None), InviteRow.expires_at > now


async def open_count(session: AsyncSession, tenant_id: UUID, now: datetime) -> int:
    query = select(func.count()).select_from(InviteRow).where(InviteRow.tenant_id == tenant_id, *_open(now))
    return (await session.execute(query)).scalar_one()


async def open_operator_count(session: AsyncSession, now: datetime) -> int:
    query = select(func.count()).select_from(InviteRow).where(InviteRow.tenant_id.is_(None), *_open(now))
    return (await session.execute(query)).scalar_one()


async def revoke_same(
    session: AsyncSession, tenant_id: UUID, project_id: UUID | None, email: str, now: datetime
) -> None:
    """End open invites of this address to the same place."""
    statement = update(InviteRow).where(
        InviteRow.tenant_id == tenant_id,
        InviteRow.project_id.is_not_distinct_from(project_id),
        InviteRow.email == email,
        *_open(now),
    )
    await session.execute(statement.values(revoked_at=now))


async def revoke_same_operator(session: AsyncSession, email: str, now: datetime) -> None:
    """End open invites of this address to the operators."""
    statement = update(InviteRow).where(InviteRow.tenant_id.is_(None), InviteRow.email == email, *_open(now))
    await session.execute(statement.values(revoked_at=now))


async def invite(session: AsyncSession, tenant_id: UUID, invite_id: UUID) -> InviteRow | None:
    query = select(InviteRow).where(InviteRow.tenant_id == tenant_id, InviteRow.id == invite_id).with_for_update()
    return (await session.scalars(query)).one_or_none()


async def operator_invite(session: AsyncSession, invite_id: UUID) -> InviteRow | None:
    query = select(InviteRow).where(InviteRow.tenant_id.is_(None), InviteRow.id == invite_id).with_for_update()
    return (await session.scalars(query)).one_or_none()


async def invites(
    session: AsyncSession, tenant_id: UUID, projects: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[InviteRow]:
    """Return invites newest first, into the whole tenant and every project, or into these projects only."""
    query = select(InviteRow).where(InviteRow.tenant_id == tenant_id).order_by(InviteRow.id.desc()).limit(limit)
    if projects is not None:
        query = query.where(InviteRow.project_id.in_(projects))
    if after is not None:
        query = query.where(InviteRow.id < after)
    return (await session.scalars(query)).all()


async def operator_invites(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[InviteRow]:
    query = select(InviteRow).where(InviteRow.tenant_id.is_(None)).order_by(InviteRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(InviteRow.id < after)
    return (await session.scalars(query)).all()


async def lock_by_digest(session: AsyncSession, digests: Sequence[bytes]) -> InviteRow | None:
    """Return the invite of a token, which nobody else can use or revoke until this transaction ends."""
    query = select(InviteRow).where(InviteRow.digest.in_(digests)).with_for_update()
    return (await session.scalars(query.execution_options(populate_existing=True))).one_or_none()
