"""Members: who belongs to their organisation, with which role."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from api.deps import CurrentCaller, CurrentPaging, MemberId, ReadSession, Session, TenantId
from api.guard import Caller, GuardedRoute
from api.people_shapes import MemberOut, MemberPage, ProjectIdIn, StandingName, member_out, project_in, shown_id
from api.permissions import ME, MY_MEMBER, MY_TENANT
from api.schemas import Input, Reason, RoleName, because, problems
from api.visit import CurrentVisit
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from tenants import members, people
from tenants.errors import not_found
from tenants.invites import require_giving
from tenants.roles import Permission
from tenants.types import Member, Status

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


class MemberIn(Input):
    """A further role for somebody who is a member already, in one project or in all of the organisation."""

    person_id: Annotated[str, Field(max_length=64)]
    role: RoleName
    project_id: ProjectIdIn | None = None


class MemberChange(Input):
    """What is left out stays. A suspended member keeps the role and may not use it."""

    role: RoleName | None = None
    status: StandingName | None = None
    reason: Reason | None = None


class LeaveIn(Input):
    """Which organisation to leave."""

    tenant_id: Annotated[str, Field(max_length=64)]


def _shown(member: Member) -> dict[str, Any]:
    return {
        "role": member.role,
        "status": member.status,
        "project_id": shown_id(IdKind.PROJECT, member.project_id),
    }


def _require_seeing(caller: Caller, member: Member) -> None:
    """Show members of projects to whoever may see these, all others to whoever may see all."""
    visible = caller.rights.projects_with(Permission.MEMBER_READ)
    if visible is not None and member.project_id not in visible:
        raise not_found(IdKind.MEMBER)


@router.get(f"{MY_TENANT}/members", summary="List the members")
async def list_members(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging
) -> MemberPage:
    """Return memberships: somebody may have one of the whole organisation, and others of single projects."""
    visible = caller.rights.projects_with(Permission.MEMBER_READ)
    found = await members.list_members(
        session, tenant_id, projects_=visible, after=paging.after, limit=paging.limit_probe
    )
    page = page_of(found, paging.limit, lambda one: one[0].id)
    return MemberPage(
        items=[member_out(*one) for one in page.items],
        next_after=page.next_after and format_id(IdKind.MEMBER, page.next_after),
    )


@router.get(MY_MEMBER, summary="Read a member")
async def get_member(
    tenant_id: TenantId, member_id: MemberId, session: ReadSession, caller: CurrentCaller
) -> MemberOut:
    member, person = await members.get(session, tenant_id, member_id)
    _require_seeing(caller, member)
    return member_out(member, person)


@router.post(f"{MY_TENANT}/members", status_code=201, summary="Give a member a further role", responses=problems(409))
async def add_member(tenant_id: TenantId, body: MemberIn, session: Session, visit: CurrentVisit) -> MemberOut:
    """Let somebody who is a member somewhere in the organisation be one of another project, or of all of it."""
    person_id, project_id = parse_id(IdKind.PERSON, body.person_id), project_in(body.project_id)
    require_giving(visit.caller.rights, body.role, project_id)
    if not (await members.rights_in(session, tenant_id, person_id)).any:
        raise not_found(IdKind.PERSON)
    member = await members.add(session, tenant_id, person_id, body.role, project_id=project_id)
    visit.act.on(member.id, person_id=body.person_id, after=_shown(member))
    return member_out(member, await people.get(session, person_id))


@router.patch(MY_MEMBER, summary="Change a member's role, suspend or resume a member", responses=problems(409))
async def update_member(
    tenant_id: TenantId, member_id: MemberId, body: MemberChange, session: Session, visit: CurrentVisit
) -> MemberOut:
    """Change a membership, up to one's own rights. The last owner stays one. Keys of theirs follow within a second."""
    await _require_writing(session, tenant_id, member_id, visit.caller)
    before, after = await members.change(
        session,
        tenant_id,
        member_id,
        by=visit.caller.rights,
        now=visit.now,
        role=body.role,
        status=body.status and Status(body.status),
    )
    visit.act.on(member_id, before=_shown(before), after=_shown(after), **because(body.reason))
    return member_out(after, await people.get(session, after.person_id))


@router.delete(MY_MEMBER, status_code=204, summary="Remove a member", responses=problems(409))
async def remove_member(tenant_id: TenantId, member_id: MemberId, session: Session, visit: CurrentVisit) -> None:
    """End a membership; API keys that hang on it stop within a second. The last owner stays."""
    await _require_writing(session, tenant_id, member_id, visit.caller)
    before = await members.remove(session, tenant_id, member_id, by=visit.caller.rights, now=visit.now)
    visit.act.on(member_id, person_id=format_id(IdKind.PERSON, before.person_id), before=_shown(before))


async def _require_writing(session: Session, tenant_id: UUID, member_id: UUID, caller: Caller) -> None:
    member, _ = await members.get(session, tenant_id, member_id)
    _require_seeing(caller, member)
    if not caller.rights.allow(Permission.MEMBER_WRITE, member.project_id):
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "Your role does not allow this there (member.write).")


@router.post(f"{ME}/leave", status_code=204, summary="Leave an organisation", responses=problems(409))
async def leave(body: LeaveIn, session: Session, visit: CurrentVisit) -> None:
    """End every membership of yours in it. The last owner stays."""
    tenant_id, person_id = parse_id(IdKind.TENANT, body.tenant_id), visit.caller.person_id
    await members.leave(session, tenant_id, person_id, now=visit.now)
    visit.act.on(person_id, tenant_id=tenant_id)
