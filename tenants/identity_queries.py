"""Every query about identity providers, whom they vouch for, and their sessions."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, and_, any_, delete, func, literal, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.identity_tables import GroupMappingRow, IdentityProviderRow, PersonIdentityRow, ProviderSessionRow
from tenants.limit_tables import PlanRow
from tenants.queries import UNIQUE_VIOLATION
from tenants.tables import MemberRow, OperatorRow, PersonRow, ProjectRow, SessionRow, TenantRow


async def flush_unique(session: AsyncSession) -> bool:
    """Send what was changed; False when it breaks a rule of uniqueness, and the transaction is at its end."""
    try:
        await session.flush()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
            raise
        return False
    return True


async def provider(session: AsyncSession, provider_id: UUID) -> IdentityProviderRow | None:
    return await session.get(IdentityProviderRow, provider_id)


async def providers(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[IdentityProviderRow]:
    query = select(IdentityProviderRow).order_by(IdentityProviderRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(IdentityProviderRow.id < after)
    return (await session.scalars(query)).all()


async def providers_shown(session: AsyncSession, domain: str, limit: int) -> Sequence[IdentityProviderRow]:
    """Return the enabled providers of the platform, and those of tenants that are for this e-mail domain."""
    theirs = literal(domain) == any_(IdentityProviderRow.email_domains)
    query = select(IdentityProviderRow).where(
        IdentityProviderRow.enabled, IdentityProviderRow.tenant_id.is_(None) | theirs
    )
    return (await session.scalars(query.order_by(IdentityProviderRow.name).limit(limit))).all()


async def gateway_providers(session: AsyncSession) -> Sequence[IdentityProviderRow]:
    """Return the enabled providers whose tokens gateways take."""
    query = select(IdentityProviderRow).where(IdentityProviderRow.enabled, IdentityProviderRow.gateway_audience != "")
    return (await session.scalars(query.order_by(IdentityProviderRow.id))).all()


async def mappings(session: AsyncSession, provider_ids: Sequence[UUID]) -> Sequence[GroupMappingRow]:
    query = select(GroupMappingRow).where(GroupMappingRow.provider_id.in_(provider_ids))
    return (await session.scalars(query.order_by(GroupMappingRow.group_name, GroupMappingRow.id))).all()


async def delete_mappings(session: AsyncSession, provider_id: UUID) -> None:
    await session.execute(delete(GroupMappingRow).where(GroupMappingRow.provider_id == provider_id))


async def identity(session: AsyncSession, provider_id: UUID, subject: str) -> PersonIdentityRow | None:
    """Return the identity, locked until the transaction ends: two sign-ins of one person take turns."""
    query = select(PersonIdentityRow).where(
        PersonIdentityRow.provider_id == provider_id, PersonIdentityRow.subject == subject
    )
    return (await session.scalars(query.with_for_update(key_share=True))).one_or_none()


async def delete_identities(session: AsyncSession, person_id: UUID) -> None:
    """Forget by which subjects a person signed in; should one come back, it is somebody new."""
    sessions = select(SessionRow.id).where(SessionRow.person_id == person_id)
    await session.execute(delete(ProviderSessionRow).where(ProviderSessionRow.session_id.in_(sessions)))
    await session.execute(delete(PersonIdentityRow).where(PersonIdentityRow.person_id == person_id))


async def given_members(session: AsyncSession, person_id: UUID, origin: str) -> Sequence[MemberRow]:
    """Return the memberships that a provider gave a person."""
    query = select(MemberRow).where(MemberRow.person_id == person_id, MemberRow.origin == origin)
    return (await session.scalars(query)).all()


async def member_tenants(session: AsyncSession, person_id: UUID) -> set[UUID]:
    """Return the tenants in which the person is a member, suspended or not."""
    return set((await session.scalars(select(MemberRow.tenant_id).where(MemberRow.person_id == person_id))).all())


async def end_sessions_of(session: AsyncSession, provider_id: UUID, now: datetime) -> None:
    """End every session that this provider opened."""
    await session.execute(
        update(SessionRow)
        .where(SessionRow.provider_id == provider_id, SessionRow.ended_at.is_(None))
        .values(ended_at=now)
    )


async def session_id_by_digest(session: AsyncSession, digest: bytes) -> UUID:
    return (await session.scalars(select(SessionRow.id).where(SessionRow.digest == digest))).one()


async def move_provider_session(session: AsyncSession, session_id: UUID, digest: bytes) -> None:
    """Let the session of this digest go on with what its predecessor had of its provider, if it had anything."""
    successor = select(SessionRow.id).where(SessionRow.digest == digest).scalar_subquery()
    await session.execute(
        update(ProviderSessionRow).where(ProviderSessionRow.session_id == session_id).values(session_id=successor)
    )


async def provider_session(session: AsyncSession, session_id: UUID) -> ProviderSessionRow | None:
    return await session.get(ProviderSessionRow, session_id)


async def claim_due(
    session: AsyncSession, session_id: UUID, now: datetime, until: datetime
) -> ProviderSessionRow | None:
    """Return the session when its groups are to be read now, put off until `until` for everybody else."""
    statement = (
        update(ProviderSessionRow)
        .where(ProviderSessionRow.session_id == session_id, ProviderSessionRow.due_at <= now)
        .values(due_at=until)
        .returning(ProviderSessionRow)
    )
    return (await session.scalars(statement)).one_or_none()


async def delete_provider(session: AsyncSession, provider_id: UUID, origin: str) -> Sequence[UUID]:
    """Delete a provider with all it gave, and return the people concerned."""
    people = (
        await session.scalars(
            select(PersonIdentityRow.person_id).where(PersonIdentityRow.provider_id == provider_id).distinct()
        )
    ).all()
    await session.execute(
        update(OperatorRow)
        .where(OperatorRow.origin == origin, OperatorRow.disabled_at.is_(None))
        .values(disabled_at=func.now())
    )
    await session.execute(delete(MemberRow).where(MemberRow.origin == origin))
    for table in (ProviderSessionRow, PersonIdentityRow, GroupMappingRow):
        await session.execute(delete(table).where(table.provider_id == provider_id))
    await session.execute(delete(IdentityProviderRow).where(IdentityProviderRow.id == provider_id))
    return people


async def people_of_member(session: AsyncSession, member_id: UUID) -> Sequence[UUID]:
    return (await session.scalars(select(MemberRow.person_id).where(MemberRow.id == member_id))).all()


async def tenant_of_project(session: AsyncSession, project_id: UUID) -> UUID | None:
    return (await session.scalars(select(ProjectRow.tenant_id).where(ProjectRow.id == project_id))).one_or_none()


async def bearer_rows(session: AsyncSession, person_ids: Sequence[UUID]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return each project that each of these people is a member of, by a membership in it or in its tenant."""
    query = (
        select(
            MemberRow.person_id,
            MemberRow.id.label("member_id"),
            MemberRow.project_id.label("member_project_id"),
            MemberRow.role,
            MemberRow.origin,
            MemberRow.status.label("member_status"),
            ProjectRow.id.label("project_id"),
            ProjectRow.status.label("project_status"),
            ProjectRow.keep_answers,
            TenantRow.id.label("tenant_id"),
            TenantRow.status.label("tenant_status"),
            TenantRow.currency,
            TenantRow.cache_seed,
            TenantRow.tz,
            TenantRow.plan_id,
            PlanRow.price_book_id,
        )
        .join(TenantRow, TenantRow.id == MemberRow.tenant_id)
        .join(PlanRow, PlanRow.id == TenantRow.plan_id)
        .join(
            ProjectRow,
            and_(
                ProjectRow.tenant_id == MemberRow.tenant_id,
                MemberRow.project_id.is_(None) | (MemberRow.project_id == ProjectRow.id),
            ),
        )
        .where(MemberRow.person_id.in_(person_ids))
        .order_by(MemberRow.project_id.is_(None), MemberRow.id, ProjectRow.id)
    )
    return (await session.execute(query)).all()


async def identities_in(
    session: AsyncSession, keys: Sequence[tuple[UUID, str]]
) -> Sequence[tuple[UUID, str, UUID, str]]:
    """Return provider, subject, person and the person's status of these identities; unknown ones are left out."""
    query = (
        select(PersonIdentityRow.provider_id, PersonIdentityRow.subject, PersonRow.id, PersonRow.status)
        .join(PersonRow, PersonRow.id == PersonIdentityRow.person_id)
        .where(tuple_(PersonIdentityRow.provider_id, PersonIdentityRow.subject).in_(keys))
    )
    return [(row[0], row[1], row[2], row[3]) for row in (await session.execute(query)).all()]
