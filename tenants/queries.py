"""Every query of the package. What a tenant owns takes `tenant_id` first."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import limit_tables as _plans  # noqa: F401 - a tenant's row refers to its plan's table
from tenants.errors import name_taken
from tenants.tables import OperatorRow, OperatorTokenRow, ProjectRow, TenantRow
from tenants.types import OperatorRole

UNIQUE_VIOLATION = "23505"


async def insert_named(session: AsyncSession, row: TenantRow | ProjectRow | OperatorRow, noun: str) -> None:
    """Insert and read back what the database filled in.

    Raises:
        PlatformError: conflict, when the name is in use.
    """
    session.add(row)
    try:
        await session.flush()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
            raise
        raise name_taken(noun) from error
    await session.refresh(row)


async def flush_name(session: AsyncSession, noun: str) -> None:
    """Write a changed name.

    Raises:
        PlatformError: conflict, when the name is in use.
    """
    try:
        await session.flush()
    except IntegrityError as error:
        if getattr(error.orig, "sqlstate", "") != UNIQUE_VIOLATION:
            raise
        raise name_taken(noun) from error


async def tenant(session: AsyncSession, tenant_id: UUID) -> TenantRow | None:
    return await session.get(TenantRow, tenant_id)


async def tenants(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[TenantRow]:
    query = select(TenantRow).order_by(TenantRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(TenantRow.id < after)
    return (await session.scalars(query)).all()


async def project(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> ProjectRow | None:
    query = select(ProjectRow).where(ProjectRow.tenant_id == tenant_id, ProjectRow.id == project_id)
    return (await session.scalars(query)).one_or_none()


async def project_ids(session: AsyncSession, tenant_id: UUID) -> Sequence[UUID]:
    return (await session.scalars(select(ProjectRow.id).where(ProjectRow.tenant_id == tenant_id))).all()


async def projects(
    session: AsyncSession, tenant_id: UUID, only: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[ProjectRow]:
    """Return projects newest first; with `only` no others than these."""
    query = select(ProjectRow).where(ProjectRow.tenant_id == tenant_id).order_by(ProjectRow.id.desc()).limit(limit)
    if only is not None:
        query = query.where(ProjectRow.id.in_(only))
    if after is not None:
        query = query.where(ProjectRow.id < after)
    return (await session.scalars(query)).all()


async def operator(session: AsyncSession, operator_id: UUID) -> OperatorRow | None:
    return await session.get(OperatorRow, operator_id)


async def operators(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[OperatorRow]:
    query = select(OperatorRow).order_by(OperatorRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(OperatorRow.id < after)
    return (await session.scalars(query)).all()


async def operator_by_name(session: AsyncSession, name: str) -> OperatorRow | None:
    return (await session.scalars(select(OperatorRow).where(OperatorRow.name == name))).one_or_none()


async def operator_by_digest(session: AsyncSession, digest: bytes) -> tuple[OperatorRow, UUID | None] | None:
    """Return the operator whose token this is, when both may be used now, and who issued the token."""
    query = (
        select(OperatorRow, OperatorTokenRow.issued_by)
        .join(OperatorTokenRow, OperatorTokenRow.operator_id == OperatorRow.id)
        .where(
            OperatorTokenRow.digest == digest,
            OperatorTokenRow.revoked_at.is_(None),
            func.coalesce(OperatorTokenRow.expires_at > func.now(), True),
            OperatorRow.disabled_at.is_(None),
        )
    )
    found = (await session.execute(query)).one_or_none()
    return None if found is None else (found[0], found[1])


_STORE_ANEW = """
    INSERT INTO operator_token (id, operator_id, issued_by, prefix, last4, digest, pepper_id, created_at, expires_at)
    SELECT :id, operator_id, issued_by, prefix, last4, :new, :pepper, created_at, expires_at FROM operator_token
    WHERE digest = :old AND revoked_at IS NULL
    ON CONFLICT DO NOTHING
"""


async def rehash_operator_token(session: AsyncSession, old: bytes, new: bytes, token_id: UUID, pepper_id: str) -> None:
    """Store a token, found by its old digest, under a new one as well."""
    await session.execute(text(_STORE_ANEW), {"id": token_id, "old": old, "new": new, "pepper": pepper_id})


async def operator_of_person(session: AsyncSession, person_id: UUID) -> OperatorRow | None:
    return (await session.scalars(select(OperatorRow).where(OperatorRow.person_id == person_id))).one_or_none()


async def answer_for_tokens(session: AsyncSession, operator_id: UUID, person_id: UUID) -> None:
    """Have a person answer for the operator's tokens that nobody answers for."""
    await session.execute(
        update(OperatorTokenRow)
        .where(OperatorTokenRow.operator_id == operator_id, OperatorTokenRow.issued_by.is_(None))
        .values(issued_by=person_id)
    )


async def addresses_of_other_operators(
    session: AsyncSession, emails: Sequence[str], person_id: UUID | None
) -> Sequence[str]:
    statement = """
        SELECT p.email FROM person p JOIN operator o ON o.person_id = p.id
        WHERE p.email = ANY(:emails) AND p.id IS DISTINCT FROM CAST(:person AS uuid)
        UNION
        SELECT i.email FROM invite i
        WHERE i.email = ANY(:emails) AND i.operator_role IS NOT NULL AND i.accepted_at IS NULL
          AND i.revoked_at IS NULL AND (i.invited_by IS NULL OR i.invited_by IS DISTINCT FROM CAST(:person AS uuid))
    """
    return (await session.scalars(text(statement), {"emails": list(emails), "person": person_id})).all()


async def lock_operator(session: AsyncSession, operator_id: UUID) -> OperatorRow | None:
    """Lock an operator, read anew."""
    query = select(OperatorRow).where(OperatorRow.id == operator_id).with_for_update()
    return (await session.scalars(query.execution_options(populate_existing=True))).one_or_none()


async def revoke_operator_tokens(session: AsyncSession, operator_id: UUID) -> None:
    await session.execute(
        update(OperatorTokenRow)
        .where(OperatorTokenRow.operator_id == operator_id, OperatorTokenRow.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )


async def lock_admins(session: AsyncSession) -> Sequence[UUID]:
    """Return the operators with every right who are not locked out; none can change until this transaction ends."""
    query = select(OperatorRow.id).where(OperatorRow.role == OperatorRole.ADMIN, OperatorRow.disabled_at.is_(None))
    return (await session.scalars(query.order_by(OperatorRow.id).with_for_update())).all()
