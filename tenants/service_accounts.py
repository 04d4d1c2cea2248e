"""Service accounts: owners of API keys that are programs, not people. They cannot sign in."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import projects
from tenants import service_account_queries as queries
from tenants.errors import name_taken, not_found
from tenants.roles import Permission, Rights, may_give
from tenants.tables import ServiceAccountRow
from tenants.types import PersonStatus, Role, ServiceAccount


def _account(row: ServiceAccountRow) -> ServiceAccount:
    return ServiceAccount(
        id=row.id,
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        name=row.name,
        role=Role(row.role),
        status=PersonStatus(row.status),
        created_at=row.created_at,
    )


def _require(by: Rights, role: Role, project_id: UUID) -> None:
    if not by.allow(Permission.SERVICE_ACCOUNT_WRITE, project_id):
        raise PlatformError(
            "FORBIDDEN", ErrorKind.FORBIDDEN, "Your role does not allow this there (service_account.write)."
        )
    if not may_give(by, role, project_id):
        raise PlatformError("ROLE_ABOVE_YOURS", ErrorKind.FORBIDDEN, f"The role {role.value} may do more than you may.")


async def create(
    session: AsyncSession, tenant_id: UUID, project_id: UUID, *, name: str, role: Role, by: Rights
) -> ServiceAccount:
    """Make an account in a project of the tenant.

    Raises:
        PlatformError: forbidden above one's rights `by`; not_found for the project; conflict for a name in use.
    """
    _require(by, role, project_id)
    await projects.get(session, tenant_id, project_id)
    row = ServiceAccountRow(id=new_uuid(), tenant_id=tenant_id, project_id=project_id, name=name, role=role)
    if not await queries.save(session, tenant_id, row):
        raise name_taken("service account of this tenant")
    return _account(row)


async def list_accounts(
    session: AsyncSession, tenant_id: UUID, *, projects_: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[ServiceAccount]:
    """Return at most `limit` accounts of the tenant, newest first; with `projects_` only those of these projects."""
    return [_account(row) for row in await queries.service_accounts(session, tenant_id, projects_, after, limit)]


async def change(
    session: AsyncSession,
    tenant_id: UUID,
    account_id: UUID,
    *,
    by: Rights,
    name: str | None = None,
    role: Role | None = None,
    status: PersonStatus | None = None,
) -> tuple[ServiceAccount, ServiceAccount]:
    """Change what is not None; return it as it was and as it is. Its keys follow within a second.

    A suspended account's keys are refused until it is resumed, a deleted one's for ever; its name is free again, its id
    never.

    Raises:
        PlatformError: forbidden above one's rights `by`; not_found; conflict for a name in use.
    """
    row = await _found(session, tenant_id, account_id)
    before = _account(row)
    _require(by, before.role, before.project_id)
    if role is not None:
        _require(by, role, before.project_id)
        row.role = role
    row.name = row.name if name is None else name
    row.status = row.status if status is None else status
    if not await queries.save(session, tenant_id, row):
        raise name_taken("service account of this tenant")
    after = _account(row)
    if after != before:
        await record_config_change(session, "service_account", account_id)
    return before, after


async def _found(session: AsyncSession, tenant_id: UUID, account_id: UUID) -> ServiceAccountRow:
    row = await queries.service_account(session, tenant_id, account_id)
    if row is None:
        raise not_found(IdKind.SERVICE_ACCOUNT)
    return row
