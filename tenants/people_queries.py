"""Every query about people, memberships and sessions. What a tenant owns takes `tenant_id` first."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.queries import UNIQUE_VIOLATION
from tenants.tables import MemberRow, PersonRow, SessionRow
from tenants.types import PersonStatus


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


async def session_by_digest(session: AsyncSession, digest: bytes) -> tuple[SessionRow, PersonRow] | None:
    """Return the session and whose it is, ended and expired ones too."""
    query = select(SessionRow, PersonRow).join(PersonRow, PersonRow.id == SessionRow.person_id)
    row = (await session.execute(query.where(SessionRow.digest == digest))).one_or_none()
    return None if row is None else (row[0], row[1])


async def end_session(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    await session.execute(
        update(SessionRow).where(SessionRow.id == session_id, SessionRow.ended_at.is_(None)).values(ended_at=now)
    )


async def see_session(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    await session.execute(update(SessionRow).where(SessionRow.id == session_id).values(seen_at=now))
