"""Members: people with a role in a tenant, or in one of its projects."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from tenants import people_queries as queries
from tenants import projects
from tenants.roles import Rights, rights_of
from tenants.tables import MemberRow
from tenants.types import Member, Role, Status


def member_of(row: MemberRow) -> Member:
    return Member(
        id=row.id,
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        person_id=row.person_id,
        role=Role(row.role),
        status=Status(row.status),
        origin=row.origin,
        created_at=row.created_at,
    )


def _rights(members: Sequence[Member]) -> Rights:
    return rights_of((member.project_id, member.role) for member in members if member.status is Status.ACTIVE)


async def add(
    session: AsyncSession,
    tenant_id: UUID,
    person_id: UUID,
    role: Role,
    *,
    project_id: UUID | None = None,
    origin: str = "",
) -> Member:
    """Give a person a role in the tenant, or in one project of it.

    Raises:
        PlatformError: not_found for a project that is not the tenant's, conflict for a member there already.
    """
    if project_id is not None:
        await projects.get(session, tenant_id, project_id)
    row = MemberRow(
        id=new_uuid(), tenant_id=tenant_id, project_id=project_id, person_id=person_id, role=role, origin=origin
    )
    if not await queries.insert_member(session, row):
        raise PlatformError("MEMBER_EXISTS", ErrorKind.CONFLICT, "This person is a member already. Change the role.")
    await record_config_change(session, "member", row.id)
    return member_of(row)


async def rights_in(session: AsyncSession, tenant_id: UUID, person_id: UUID) -> Rights:
    """Return what the person may do in the tenant; nothing at all when no active member."""
    return _rights([member_of(row) for row in await queries.members_in(session, tenant_id, person_id)])


async def of_person(session: AsyncSession, person_id: UUID) -> Mapping[UUID, Rights]:
    """Return the tenants in which the person may do anything, with the rights there."""
    by_tenant: dict[UUID, list[Member]] = {}
    for row in await queries.members_of_person(session, person_id):
        by_tenant.setdefault(row.tenant_id, []).append(member_of(row))
    found = {tenant_id: _rights(members) for tenant_id, members in by_tenant.items()}
    return {tenant_id: rights for tenant_id, rights in found.items() if rights.any}
