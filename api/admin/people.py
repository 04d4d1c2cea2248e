"""Operators: people, and inviting them: the first owner of a tenant, and other operators."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from api.deps import CurrentPaging, InviteId, PersonId, ReadSession, Session, TenantId
from api.guard import GuardedRoute
from api.people_shapes import (
    InviteIn,
    InviteOut,
    InvitePage,
    MemberPage,
    OperatorInviteIn,
    StandingName,
    invite_out,
    member_out,
    post_of,
    project_in,
)
from api.permissions import ADMIN, PERSON, TENANT
from api.schemas import (
    NO_REASON,
    Output,
    RoleName,
    SuspendIn,
    because,
    problems,
)
from api.visit import CurrentVisit, Visit
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.pagination import Page, page_of
from tenants import invites, members, operators, people, person_status, tenants, vouching
from tenants.roles import OPERATOR_PERMISSIONS, OperatorPermission, Rights
from tenants.types import Invite, OperatorRole, Person, Role

router = APIRouter(route_class=GuardedRoute, tags=["people"])

EVERYTHING = Rights(frozenset({Role.OWNER}))  # an operator who may invite into a tenant may invite its owner
OPERATOR_INVITE = f"{ADMIN}/operator-invites/{{invite_id}}"


class PersonRightsOut(Output):
    """An organisation that somebody belongs to."""

    tenant_id: str
    roles: list[RoleName]


class PersonOut(Output):
    """Somebody with an account."""

    id: str
    email: str
    name: str
    status: StandingName
    has_password: bool
    has_second_factor: bool
    created_at: datetime


class PersonDetailOut(PersonOut):
    """Somebody with an account, and where they belong."""

    tenants: list[PersonRightsOut]
    operator_id: str | None


class PersonPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[PersonOut]
    next_after: str | None


def _out(person: Person) -> PersonOut:
    return PersonOut.model_validate(
        {
            "id": format_id(IdKind.PERSON, person.id),
            "email": person.email,
            "name": person.name,
            "status": person.status,
            "has_password": person.has_password,
            "has_second_factor": person.has_second_factor,
            "created_at": person.created_at,
        }
    )


@router.get(f"{ADMIN}/people", summary="List people")
async def list_people(
    session: ReadSession,
    paging: CurrentPaging,
    email: Annotated[str, Query(max_length=254, description="A part of the address.")] = "",
) -> PersonPage:
    found = await people.list_people(session, email=email, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda person: person.id)
    return PersonPage(
        items=[_out(person) for person in page.items],
        next_after=page.next_after and format_id(IdKind.PERSON, page.next_after),
    )


@router.get(PERSON, summary="Read a person")
async def get_person(person_id: PersonId, session: ReadSession) -> PersonDetailOut:
    person = await people.get_present(session, person_id)
    rights = await members.of_person(session, person_id)
    operator = await operators.of_person(session, person_id)
    return PersonDetailOut(
        **_out(person).model_dump(),
        tenants=[
            PersonRightsOut(
                tenant_id=format_id(IdKind.TENANT, tenant_id),
                roles=sorted(held.roles.union(*held.of_project.values())),
            )
            for tenant_id, held in sorted(rights.items())
        ],
        operator_id=operator and format_id(IdKind.OPERATOR, operator.id),
    )


async def _require_reach(session: Session, visit: Visit, person_id: PersonId) -> None:
    """Let only who looks after operators touch the account of one."""
    me = visit.caller.operator
    mine = OPERATOR_PERMISSIONS[me.role] if me is not None else frozenset()
    if OperatorPermission.OPERATOR_WRITE not in mine and await operators.of_person(session, person_id) is not None:
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "Your role does not allow this for operators.")


@router.post(f"{PERSON}/suspend", status_code=204, summary="Suspend a person")
async def suspend_person(
    person_id: PersonId, session: Session, visit: CurrentVisit, body: SuspendIn = NO_REASON
) -> None:
    """Refuse a person, their sessions at once and their API keys within a second, until resumed."""
    await _require_reach(session, visit, person_id)
    await person_status.suspend(session, person_id, now=visit.now)
    visit.act.on(person_id, **because(body.reason))


@router.post(f"{PERSON}/resume", status_code=204, summary="Resume a person")
async def resume_person(person_id: PersonId, session: Session, visit: CurrentVisit) -> None:
    """Let a person in again; they sign in anew."""
    await _require_reach(session, visit, person_id)
    await person_status.resume(session, person_id)
    visit.act.on(person_id)


@router.delete(PERSON, status_code=204, summary="Delete a person for good")
async def delete_person(person_id: PersonId, session: Session, visit: CurrentVisit) -> None:
    """Forget a person: sessions, memberships and API keys end. Whoever gets the address later inherits nothing.

    A tenant may be left without an owner by this; invite another one.
    """
    await _require_reach(session, visit, person_id)
    await person_status.delete(session, person_id, now=visit.now)
    visit.act.on(person_id)


@router.get(f"{TENANT}/members", summary="List a tenant's members")
async def list_tenant_members(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> MemberPage:
    await tenants.get(session, tenant_id)
    found = await members.list_members(session, tenant_id, projects_=None, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda one: one[0].id)
    return MemberPage(
        items=[member_out(*one) for one in page.items],
        next_after=page.next_after and format_id(IdKind.MEMBER, page.next_after),
    )


def _inviter(visit: Visit) -> str:
    signed_in = visit.caller.signed_in
    return "Your operator" if signed_in is None else signed_in.person.email


def _who(visit: Visit) -> UUID | None:
    """Who answers for whom they invite, until they are confirmed."""
    operator = visit.caller.operator
    return None if operator is None else vouching.who(operator, visit.caller.signed_in)


def _page(page: Page[Invite]) -> InvitePage:
    return InvitePage(
        items=[invite_out(one) for one in page.items],
        next_after=page.next_after and format_id(IdKind.INVITE, page.next_after),
    )


@router.get(f"{TENANT}/invites", summary="List invites into a tenant")
async def list_tenant_invites(
    tenant_id: TenantId, session: ReadSession, paging: CurrentPaging, visit: CurrentVisit
) -> InvitePage:
    await tenants.get(session, tenant_id)
    found = await invites.list_invites(
        session, tenant_id, projects_=None, after=paging.after, limit=paging.limit_probe, now=visit.now
    )
    return _page(page_of(found, paging.limit, lambda one: one.id))


@router.post(
    f"{TENANT}/invites", status_code=201, summary="Invite somebody into a tenant", responses=problems(409, 429)
)
async def invite_into_tenant(tenant_id: TenantId, body: InviteIn, session: Session, visit: CurrentVisit) -> InviteOut:
    """Mail a link, good once and for seven days, e.g. to a tenant's first owner."""
    signed_in = visit.caller.signed_in
    invite = await invites.into_tenant(
        session,
        tenant_id,
        email=body.email,
        role=body.role,
        project_id=project_in(body.project_id),
        by=EVERYTHING,
        invited_by=None if signed_in is None else signed_in.person.id,
        inviter=_inviter(visit),
        post=post_of(visit.services),
        now=visit.now,
    )
    visit.act.on(invite.id, role=invite.role)
    return invite_out(invite)


@router.post(f"{TENANT}/invites/{{invite_id}}/resend", summary="Send an invite again", responses=problems(409, 429))
async def resend_tenant_invite(
    tenant_id: TenantId, invite_id: InviteId, session: Session, visit: CurrentVisit
) -> InviteOut:
    invite = await invites.resend(
        session, tenant_id, invite_id, inviter=_inviter(visit), post=post_of(visit.services), now=visit.now
    )
    visit.act.on(invite.id, role=invite.role)
    return invite_out(invite)


@router.post(f"{TENANT}/invites/{{invite_id}}/revoke", summary="Revoke an invite", responses=problems(409))
async def revoke_tenant_invite(
    tenant_id: TenantId, invite_id: InviteId, session: Session, visit: CurrentVisit
) -> InviteOut:
    invite = await invites.revoke(session, tenant_id, invite_id, now=visit.now)
    visit.act.on(invite.id, role=invite.role)
    return invite_out(invite)


@router.get(f"{ADMIN}/operator-invites", summary="List invites to the operators")
async def list_operator_invites(session: ReadSession, paging: CurrentPaging, visit: CurrentVisit) -> InvitePage:
    found = await invites.list_operator_invites(session, after=paging.after, limit=paging.limit_probe, now=visit.now)
    return _page(page_of(found, paging.limit, lambda one: one.id))


@router.post(f"{ADMIN}/operator-invites", status_code=201, summary="Invite an operator", responses=problems(409, 429))
async def invite_operator(body: OperatorInviteIn, session: Session, visit: CurrentVisit) -> InviteOut:
    """Mail a link, good once and for seven days, to somebody who shall run the platform with this role."""
    invite = await invites.to_operators(
        session,
        email=body.email,
        role=OperatorRole(body.role),
        invited_by=_who(visit),
        inviter=_inviter(visit),
        post=post_of(visit.services),
        now=visit.now,
    )
    visit.act.on(invite.id, role=invite.operator_role)
    return invite_out(invite)


@router.post(f"{OPERATOR_INVITE}/resend", summary="Send an operator's invite again", responses=problems(409))
async def resend_operator_invite(invite_id: InviteId, session: Session, visit: CurrentVisit) -> InviteOut:
    invite = await invites.resend(
        session,
        None,
        invite_id,
        inviter=_inviter(visit),
        post=post_of(visit.services),
        now=visit.now,
        vouched_by=_who(visit),
    )
    visit.act.on(invite.id, role=invite.operator_role)
    return invite_out(invite)


@router.post(f"{OPERATOR_INVITE}/revoke", summary="Revoke an operator's invite", responses=problems(409))
async def revoke_operator_invite(invite_id: InviteId, session: Session, visit: CurrentVisit) -> InviteOut:
    invite = await invites.revoke(session, None, invite_id, now=visit.now)
    visit.act.on(invite.id, role=invite.operator_role)
    return invite_out(invite)
