"""Members: people with a role in a tenant, or in one of its projects."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import people_queries as queries
from tenants import projects
from tenants.errors import not_found
from tenants.people import person_of
from tenants.roles import PERMISSIONS, Permission, Rights, may_give, rights_of
from tenants.tables import MemberRow, PersonRow
from tenants.types import Member, Person, Role, Status

TOLD_MAX = 100
"""People who are told of one thing."""


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
    await record_config_change(session, "person", person_id)
    return member_of(row)


async def is_member(session: AsyncSession, tenant_id: UUID, person_id: UUID, project_id: UUID | None) -> bool:
    """Say whether the person has a membership there, of the whole tenant or of that very project."""
    found = await queries.members_in(session, tenant_id, person_id)
    return any(row.project_id == project_id for row in found)


async def list_members(
    session: AsyncSession, tenant_id: UUID, *, projects_: frozenset[UUID] | None, after: UUID | None, limit: int
) -> Sequence[tuple[Member, Person]]:
    """Return at most `limit` memberships of the tenant, newest first, each with who it is.

    With `projects_` only those of these projects, without it all.
    """
    found = await queries.members(session, tenant_id, projects_, after, limit)
    return [(member_of(row), person_of(person)) for row, person in found]


async def who_hold(
    session: AsyncSession, tenant_id: UUID, permission: Permission, project_id: UUID | None = None
) -> list[Person]:
    """Return at most `TOLD_MAX` active people whose role holds a permission: of the tenant's, or of the project's.

    Where nobody has such a role in the project, those of the tenant.
    """
    roles = [role for role, held in PERMISSIONS.items() if permission in held]
    rows = await queries.active_with_roles(session, tenant_id, project_id, roles, TOLD_MAX)
    if project_id is not None and not rows:
        rows = await queries.active_with_roles(session, tenant_id, None, roles, TOLD_MAX)
    return [person_of(row) for row in rows]


async def get(session: AsyncSession, tenant_id: UUID, member_id: UUID) -> tuple[Member, Person]:
    """Return a membership and who it is.

    Raises:
        PlatformError: not_found.
    """
    row, person = await _found(session, tenant_id, member_id)
    return member_of(row), person_of(person)


async def change(
    session: AsyncSession,
    tenant_id: UUID,
    member_id: UUID,
    *,
    by: Rights,
    now: datetime,
    role: Role | None = None,
    status: Status | None = None,
) -> tuple[Member, Member]:
    """Change what is not None; return the membership as it was and as it is. Gateways follow within a second.

    Args:
        session: the transaction.
        tenant_id: whose member it is.
        member_id: which one.
        by: the rights of who does it: nobody gives, or takes from, more than they have.
        now: the present; open invites of somebody suspended, or who may do less now, end with it.
        role: the new role.
        status: suspended or active.

    Raises:
        PlatformError: not_found; forbidden above one's own rights; conflict for the last owner, and for a role that an
            identity provider gives.
    """
    await queries.lock_tenant(session, tenant_id)
    row, _ = await _found(session, tenant_id, member_id)
    before = member_of(row)
    _require_above(by, before.role, before.project_id)
    if role is not None and role is not before.role:
        _require_above(by, role, before.project_id)
        if before.origin:  # it would be put back at the next sign-in
            message = "A group at the identity provider gives this role. Change the group, or what it gives."
            raise PlatformError("ROLE_FROM_PROVIDER", ErrorKind.CONFLICT, message, param="role")
        row.role = role
    if status is not None:
        row.status = status
    after = member_of(row)
    if after == before:
        return before, after
    if _owns(before) and not _owns(after):
        await _require_another_owner(session, tenant_id, before.person_id)
    await session.flush()
    if after.status is Status.SUSPENDED or not PERMISSIONS[before.role] <= PERMISSIONS[after.role]:
        await queries.revoke_invites_by(session, after.person_id, now, tenant_id)
    await record_config_change(session, "person", after.person_id)
    return before, after


async def remove(
    session: AsyncSession, tenant_id: UUID, member_id: UUID, *, by: Rights, now: datetime, own: bool = False
) -> Member:
    """Take a membership away, with the invites its person made; return what it was. Their keys stop within a second.

    Raises:
        PlatformError: not_found; forbidden above one's rights, unless it is one's `own`; conflict for the last owner.
    """
    await queries.lock_tenant(session, tenant_id)
    row, _ = await _found(session, tenant_id, member_id)
    member = member_of(row)
    if not own:
        _require_above(by, member.role, member.project_id)
    if _owns(member):
        await _require_another_owner(session, tenant_id, member.person_id)
    await queries.delete_member(session, tenant_id, member_id)
    await queries.revoke_invites_by(session, member.person_id, now, tenant_id)
    await record_config_change(session, "person", member.person_id)
    return member


async def leave(session: AsyncSession, tenant_id: UUID, person_id: UUID, *, now: datetime) -> None:
    """Take all memberships of a person in the tenant away, at their own wish.

    Raises:
        PlatformError: not_found for whoever is no member; conflict for the last owner.
    """
    found = await queries.members_in(session, tenant_id, person_id)
    if not found:
        raise not_found(IdKind.TENANT)
    for row in found:
        await remove(session, tenant_id, row.id, by=Rights(), now=now, own=True)


async def require_other_owners(session: AsyncSession, person_id: UUID) -> None:
    """Refuse, while the person is the last owner of any tenant.

    Raises:
        PlatformError: conflict.
    """
    owned = [member_of(row) for row in await queries.members_of_person(session, person_id)]
    for tenant_id in sorted(member.tenant_id for member in owned if _owns(member)):
        await queries.lock_tenant(session, tenant_id)
        await _require_another_owner(session, tenant_id, person_id)


def _owns(member: Member) -> bool:
    return member.role is Role.OWNER and member.project_id is None and member.status is Status.ACTIVE


async def _require_another_owner(session: AsyncSession, tenant_id: UUID, person_id: UUID) -> None:
    if not await queries.other_owners(session, tenant_id, person_id):
        raise PlatformError(
            "LAST_OWNER", ErrorKind.CONFLICT, "This is the last owner. Make somebody else an owner first."
        )


def _require_above(by: Rights, role: Role, project_id: UUID | None) -> None:
    if not may_give(by, role, project_id):
        raise PlatformError("ROLE_ABOVE_YOURS", ErrorKind.FORBIDDEN, f"The role {role.value} may do more than you may.")


async def _found(session: AsyncSession, tenant_id: UUID, member_id: UUID) -> tuple[MemberRow, PersonRow]:
    found = await queries.member(session, tenant_id, member_id)
    if found is None:
        raise not_found(IdKind.MEMBER)
    return found


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
