"""Every query about people, memberships and sessions. What a tenant owns takes `tenant_id` first."""

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.identity_tables import IdentityProviderRow
from tenants.queries import UNIQUE_VIOLATION
from tenants.tables import InviteRow, MemberRow, OperatorRow, PersonRow, SessionRow, TenantRow
from tenants.types import PersonStatus, Role, Status


async def person(session: AsyncSession, person_id: UUID) -> PersonRow | None:
    return await session.get(PersonRow, person_id)


async def person_by_email(session: AsyncSession, email: str) -> PersonRow | None:
    query = select(PersonRow).where(PersonRow.email == email, PersonRow.status != PersonStatus.DELETED)
    return (await session.scalars(query)).one_or_none()


async def insert_person(session: AsyncSession, row: PersonRow) -> bool:
    """Insert and read back; False when somebody has this address."""
    return await _insert(session, row)


async def insert_member(session: AsyncSession, row: MemberRow) -> bool:
    """Insert and read back; False when the person is a member there already."""
    return await _insert(session, row)


async def _insert(session: AsyncSession, row: PersonRow | MemberRow) -> bool:
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


async def members_of_person(session: AsyncSession, person_id: UUID) -> Sequence[MemberRow]:
    query = select(MemberRow).where(MemberRow.person_id == person_id).order_by(MemberRow.id)
    return (await session.scalars(query)).all()


async def members_in(session: AsyncSession, tenant_id: UUID, person_id: UUID) -> Sequence[MemberRow]:
    """Return one person's memberships in the tenant and its projects."""
    query = select(MemberRow).where(MemberRow.tenant_id == tenant_id, MemberRow.person_id == person_id)
    return (await session.scalars(query)).all()


async def session_by_digest(session: AsyncSession, digest: bytes) -> tuple[SessionRow, PersonRow, UUID | None] | None:
    """Return the session, whose it is, and whose own provider opened it if one did; ended and expired ones too."""
    query = (
        select(SessionRow, PersonRow, IdentityProviderRow.tenant_id)
        .join(PersonRow, PersonRow.id == SessionRow.person_id)
        .outerjoin(IdentityProviderRow, IdentityProviderRow.id == SessionRow.provider_id)
        .where(SessionRow.digest == digest)
    )
    row = (await session.execute(query)).one_or_none()
    return None if row is None else (row[0], row[1], row[2])


async def session(session: AsyncSession, session_id: UUID) -> SessionRow | None:
    return await session.get(SessionRow, session_id)


async def end_session(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    await session.execute(
        update(SessionRow).where(SessionRow.id == session_id, SessionRow.ended_at.is_(None)).values(ended_at=now)
    )


async def see_session(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    await session.execute(update(SessionRow).where(SessionRow.id == session_id).values(seen_at=now))


async def people(session: AsyncSession, email: str, after: UUID | None, limit: int) -> Sequence[PersonRow]:
    """Return people newest first, those whose address has `email` in it; deleted ones never."""
    query = select(PersonRow).where(PersonRow.status != PersonStatus.DELETED).order_by(PersonRow.id.desc()).limit(limit)
    if email:
        query = query.where(PersonRow.email.contains(email, autoescape=True))
    if after is not None:
        query = query.where(PersonRow.id < after)
    return (await session.scalars(query)).all()


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> None:
    """Keep others from changing who owns the tenant until this transaction ends."""
    await session.execute(select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True))


async def member(session: AsyncSession, tenant_id: UUID, member_id: UUID) -> tuple[MemberRow, PersonRow] | None:
    query = (
        select(MemberRow, PersonRow)
        .join(PersonRow, PersonRow.id == MemberRow.person_id)
        .where(MemberRow.tenant_id == tenant_id, MemberRow.id == member_id)
        .execution_options(populate_existing=True)
    )
    row = (await session.execute(query)).one_or_none()
    return None if row is None else (row[0], row[1])


async def members(
    session: AsyncSession, tenant_id: UUID, projects: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[tuple[MemberRow, PersonRow]]:
    """Return members newest first, each with who it is; all, or those of these projects only."""
    query = (
        select(MemberRow, PersonRow)
        .join(PersonRow, PersonRow.id == MemberRow.person_id)
        .where(MemberRow.tenant_id == tenant_id)
        .order_by(MemberRow.id.desc())
        .limit(limit)
    )
    if projects is not None:
        query = query.where(MemberRow.project_id.in_(projects))
    if after is not None:
        query = query.where(MemberRow.id < after)
    return [(row[0], row[1]) for row in (await session.execute(query)).all()]


async def active_with_roles(
    session: AsyncSession, tenant_id: UUID, project_id: UUID | None, roles: Collection[Role], limit: int
) -> Sequence[PersonRow]:
    """Return active people with an active membership of one of these roles, of the whole tenant or of that project."""
    place = MemberRow.project_id.is_(None) if project_id is None else MemberRow.project_id == project_id
    query = (
        select(PersonRow)
        .join(MemberRow, MemberRow.person_id == PersonRow.id)
        .where(MemberRow.tenant_id == tenant_id, place, MemberRow.role.in_(roles), MemberRow.status == Status.ACTIVE)
        .where(PersonRow.status == PersonStatus.ACTIVE)
        .distinct()
        .order_by(PersonRow.id)
        .limit(limit)
    )
    return (await session.scalars(query)).all()


async def other_owners(session: AsyncSession, tenant_id: UUID, person_id: UUID) -> int:
    """Count the owners of the whole tenant who may sign in, without this person."""
    query = (
        select(func.count())
        .select_from(MemberRow)
        .join(PersonRow, PersonRow.id == MemberRow.person_id)
        .where(
            MemberRow.tenant_id == tenant_id,
            MemberRow.project_id.is_(None),
            MemberRow.role == Role.OWNER,
            MemberRow.status == Status.ACTIVE,
            MemberRow.person_id != person_id,
            PersonRow.status == PersonStatus.ACTIVE,
        )
    )
    return (await session.execute(query)).scalar_one()


async def delete_member(session: AsyncSession, tenant_id: UUID, member_id: UUID) -> None:
    await session.execute(delete(MemberRow).where(MemberRow.tenant_id == tenant_id, MemberRow.id == member_id))


async def delete_memberships(session: AsyncSession, person_id: UUID) -> None:
    """Take a person out of every tenant."""
    await session.execute(delete(MemberRow).where(MemberRow.person_id == person_id))


async def revoke_invites_by(
    session: AsyncSession, person_id: UUID, now: datetime, tenant_id: UUID | None = None
) -> None:
    """Revoke the open invites that a person made, all or those into one tenant."""
    statement = update(InviteRow).where(
        InviteRow.invited_by == person_id, InviteRow.accepted_at.is_(None), InviteRow.revoked_at.is_(None)
    )
    if tenant_id is not None:
        statement = statement.where(InviteRow.tenant_id == tenant_id)
    await session.execute(statement.values(revoked_at=now))


async def disable_operator_of(session: AsyncSession, person_id: UUID, now: datetime) -> None:
    await session.execute(
        update(OperatorRow)
        .where(OperatorRow.person_id == person_id, OperatorRow.disabled_at.is_(None))
        .values(disabled_at=now)
    )
