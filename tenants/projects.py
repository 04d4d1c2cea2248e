"""Projects: the parts of a tenant that keys and limits hang on."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.ids import IdKind, new_uuid
from tenants import queries, tenants
from tenants.errors import not_found
from tenants.tables import ProjectRow
from tenants.types import Project, Status


def _project(row: ProjectRow) -> Project:
    return Project(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        status=Status(row.status),
        created_at=row.created_at,
        keep_answers=row.keep_answers,
    )


async def _row(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> ProjectRow:
    row = await queries.project(session, tenant_id, project_id)
    if row is None:
        raise not_found(IdKind.PROJECT)
    return row


async def create(session: AsyncSession, tenant_id: UUID, *, name: str) -> Project:
    """Make a project.

    Raises:
        PlatformError: not_found for an unknown tenant, conflict for a name the tenant has already.
    """
    await tenants.get(session, tenant_id)
    row = ProjectRow(id=new_uuid(), tenant_id=tenant_id, name=name)
    await queries.insert_named(session, row, "project of this tenant")
    await record_config_change(session, "project", row.id)  # members of the tenant may call in it by their own tokens
    return _project(row)


async def get(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> Project:
    return _project(await _row(session, tenant_id, project_id))


async def ids(session: AsyncSession, tenant_id: UUID) -> Sequence[UUID]:
    """Return every project of the tenant, by id alone."""
    return await queries.project_ids(session, tenant_id)


async def list_projects(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    only: frozenset[UUID] | None = None,
    after: UUID | None,
    limit: int,
) -> Sequence[Project]:
    """Return at most `limit` projects of the tenant, newest first; with `only` no others than these."""
    return [_project(row) for row in await queries.projects(session, tenant_id, only, after, limit)]


async def update(
    session: AsyncSession,
    tenant_id: UUID,
    project_id: UUID,
    *,
    name: str | None = None,
    status: Status | None = None,
    keep_answers: bool | None = None,
) -> Project:
    """Change what is not None; gateways see it within a second of the commit.

    Raises:
        PlatformError: not_found; conflict for a name the tenant has already.
    """
    row = await _row(session, tenant_id, project_id)
    if name is not None and name != row.name:
        row.name = name
        await queries.flush_name(session, "project of this tenant")
    if status is not None:
        row.status = status
    if keep_answers is not None:
        row.keep_answers = keep_answers
    if session.is_modified(row):
        await session.flush()
        await record_config_change(session, "project", project_id)
    return _project(row)


async def suspend(session: AsyncSession, tenant_id: UUID, project_id: UUID, *, hard: bool = False) -> Project:
    """Refuse all calls of the project until resumed. With `hard` running answers are cut too."""
    project = await update(session, tenant_id, project_id, status=Status.SUSPENDED)
    if hard:
        await record_config_change(session, "project.end", project_id)
    return project


async def resume(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> Project:
    return await update(session, tenant_id, project_id, status=Status.ACTIVE)
