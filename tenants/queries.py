"""Every query of the package. What a tenant owns takes `tenant_id` first."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, DateTime, Row, Select, bindparam, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.errors import name_taken
from tenants.limit_tables import PlanRow
from tenants.tables import ApiKeyRow, OperatorRow, OperatorTokenRow, ProjectRow, TenantRow

UNIQUE_VIOLATION = "23505"
PrincipalRow = Row[*tuple[Any, ...]]

# A key revoked or expired for longer is unknown to the gateways: their memory of dead keys stays bounded.
DEAD_KEY_MEMORY = func.make_interval(0, 0, 0, 30)

_IS_EXPIRED = func.coalesce(ApiKeyRow.expires_at <= func.now(), False)
_IS_FORGOTTEN = func.coalesce(
    func.least(ApiKeyRow.revoked_at, ApiKeyRow.expires_at) <= func.now() - DEAD_KEY_MEMORY, False
)


def _principals(*where: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    return (
        select(
            ApiKeyRow.digest,
            ApiKeyRow.id,
            ApiKeyRow.tenant_id,
            ApiKeyRow.project_id,
            ApiKeyRow.scopes,
            ApiKeyRow.tier_default,
            ApiKeyRow.tier_max,
            ApiKeyRow.model_patterns,
            ApiKeyRow.allowed_networks,
            ApiKeyRow.expires_at,
            ApiKeyRow.revoked_at.is_not(None).label("revoked"),
            _IS_EXPIRED.label("expired"),
            _IS_FORGOTTEN.label("forgotten"),
            ProjectRow.status.label("project_status"),
            TenantRow.status.label("tenant_status"),
            TenantRow.currency,
            TenantRow.cache_seed,
            TenantRow.tz,
            TenantRow.plan_id,
            PlanRow.price_book_id,
        )
        .join(ProjectRow, ProjectRow.id == ApiKeyRow.project_id)
        .join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)
        .join(PlanRow, PlanRow.id == TenantRow.plan_id)
        .where(*where)
    )


async def principal_rows(session: AsyncSession) -> Sequence[PrincipalRow]:
    """Return every key that gateways should know."""
    return (await session.execute(_principals(~_IS_FORGOTTEN))).all()


async def principal_rows_of(session: AsyncSession, kind: str, entity_id: UUID) -> Sequence[PrincipalRow]:
    """Return the keys that a change of this key, project or tenant touches, forgotten ones too."""
    column = {"api_key": ApiKeyRow.id, "project": ApiKeyRow.project_id, "tenant": ApiKeyRow.tenant_id}[kind]
    return (await session.execute(_principals(column == entity_id))).all()


async def principal_row_by_digest(session: AsyncSession, digest: bytes) -> PrincipalRow | None:
    return (await session.execute(_principals(ApiKeyRow.digest == digest, ~_IS_FORGOTTEN))).one_or_none()


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


async def projects(session: AsyncSession, tenant_id: UUID, after: UUID | None, limit: int) -> Sequence[ProjectRow]:
    query = select(ProjectRow).where(ProjectRow.tenant_id == tenant_id).order_by(ProjectRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(ProjectRow.id < after)
    return (await session.scalars(query)).all()


async def api_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKeyRow | None:
    query = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
    return (await session.scalars(query)).one_or_none()


async def api_keys(session: AsyncSession, tenant_id: UUID, after: UUID | None, limit: int) -> Sequence[ApiKeyRow]:
    query = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id).order_by(ApiKeyRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(ApiKeyRow.id < after)
    return (await session.scalars(query)).all()


async def mark_used(session: AsyncSession, uses: Sequence[tuple[UUID, UUID, datetime]]) -> None:
    """Move the last use of keys forward, never back; each is tenant, key, instant."""
    newest = func.greatest(ApiKeyRow.last_used_at, bindparam("used_at", type_=DateTime(timezone=True)))
    statement = (
        update(ApiKeyRow)
        .where(ApiKeyRow.tenant_id == bindparam("of_tenant"), ApiKeyRow.id == bindparam("of_key"))
        .values(last_used_at=newest)
    )
    values = [{"of_tenant": tenant_id, "of_key": key_id, "used_at": at} for tenant_id, key_id, at in uses]
    connection = await session.connection()
    await connection.execute(statement, values)


async def operator(session: AsyncSession, operator_id: UUID) -> OperatorRow | None:
    return await session.get(OperatorRow, operator_id)


async def operators(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[OperatorRow]:
    query = select(OperatorRow).order_by(OperatorRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(OperatorRow.id < after)
    return (await session.scalars(query)).all()


async def operator_by_name(session: AsyncSession, name: str) -> OperatorRow | None:
    return (await session.scalars(select(OperatorRow).where(OperatorRow.name == name))).one_or_none()


async def operator_by_digest(session: AsyncSession, digest: bytes) -> OperatorRow | None:
    """Return the operator whose token this is, when both may be used now."""
    query = (
        select(OperatorRow)
        .join(OperatorTokenRow, OperatorTokenRow.operator_id == OperatorRow.id)
        .where(
            OperatorTokenRow.digest == digest,
            OperatorTokenRow.revoked_at.is_(None),
            func.coalesce(OperatorTokenRow.expires_at > func.now(), True),
            OperatorRow.disabled_at.is_(None),
        )
    )
    return (await session.scalars(query)).one_or_none()


async def operator_of_person(session: AsyncSession, person_id: UUID) -> OperatorRow | None:
    return (await session.scalars(select(OperatorRow).where(OperatorRow.person_id == person_id))).one_or_none()


async def revoke_operator_tokens(session: AsyncSession, operator_id: UUID) -> None:
    await session.execute(
        update(OperatorTokenRow)
        .where(OperatorTokenRow.operator_id == operator_id, OperatorTokenRow.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )
