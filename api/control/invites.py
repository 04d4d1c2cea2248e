"""Members: inviting people into their organisation; the invited: accepting."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from api.control.sign_in import NewPassword, Token
from api.deps import CurrentCaller, CurrentPaging, InviteId, ReadSession, Session, TenantId
from api.guard import GuardedRoute
from api.people_shapes import InviteIn, InviteOut, InvitePage, invite_out, post_of, project_in, shown_id
from api.permissions import AUTH, ME, MY_INVITE, MY_TENANT
from api.schemas import Input, Name, Output, problems
from api.visit import CurrentVisit, Visit
from core.db import transaction
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import api_keys, invites, people, sign_in
from tenants.roles import Permission
from tenants.types import Invite

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


class AcceptAsNewIn(Input):
    """The token of the mail, and who you are."""

    token: Token
    name: Name
    password: NewPassword


class AcceptIn(Input):
    """The token of the mail."""

    token: Token


class AcceptedOut(Output):
    """Where you belong now."""

    tenant_id: str | None
    project_id: str | None
    csrf_token: Annotated[str, Field(description="To be sent as X-CSRF-Token with every change.")] | None = None


def _accepted(invite: Invite, csrf_token: str | None = None) -> AcceptedOut:
    return AcceptedOut(
        tenant_id=shown_id(IdKind.TENANT, invite.tenant_id),
        project_id=shown_id(IdKind.PROJECT, invite.project_id),
        csrf_token=csrf_token,
    )


def _details(invite: Invite) -> dict[str, Any]:
    return {
        "role": invite.role or invite.operator_role,
        "project_id": shown_id(IdKind.PROJECT, invite.project_id),
    }


def _inviter(visit: Visit) -> str:
    """How the mail calls who invites: by the proved address, since a name can say anything."""
    signed_in = visit.caller.signed_in
    return "Somebody" if signed_in is None else signed_in.person.email


async def _by(session: Session, visit: Visit) -> UUID | None:
    """Return the person with whom the invite ends: who signed in, or the owner of the key that manages."""
    principal = visit.caller.principal
    if principal is None:
        return visit.caller.person_id
    return (await api_keys.get(session, principal.tenant_id, principal.key_id)).owner.person_id


@router.get(f"{MY_TENANT}/invites", summary="List invites")
async def list_invites(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging, visit: CurrentVisit
) -> InvitePage:
    """Return open invites and those that are over; never their links."""
    found = await invites.list_invites(
        session,
        tenant_id,
        projects_=caller.rights.projects_with(Permission.MEMBER_READ),
        after=paging.after,
        limit=paging.limit_probe,
        now=visit.now,
    )
    page = page_of(found, paging.limit, lambda one: one.id)
    return InvitePage(
        items=[invite_out(one) for one in page.items],
        next_after=page.next_after and format_id(IdKind.INVITE, page.next_after),
    )


@router.post(f"{MY_TENANT}/invites", status_code=201, summary="Invite somebody", responses=problems(409, 429))
async def create_invite(tenant_id: TenantId, body: InviteIn, session: Session, visit: CurrentVisit) -> InviteOut:
    """Mail somebody a link, good once and for seven days, never with a role above your own."""
    invite = await invites.into_tenant(
        session,
        tenant_id,
        email=body.email,
        role=body.role,
        project_id=project_in(body.project_id),
        by=visit.caller.rights,
        invited_by=await _by(session, visit),
        inviter=_inviter(visit),
        post=post_of(visit.services),
        now=visit.now,
    )
    visit.act.on(invite.id, **_details(invite))
    return invite_out(invite)


@router.post(f"{MY_INVITE}/resend", summary="Send an invite again", responses=problems(409, 429))
async def resend_invite(tenant_id: TenantId, invite_id: InviteId, session: Session, visit: CurrentVisit) -> InviteOut:
    """Mail a fresh link, good for seven days from now; the one before is good for nothing."""
    await _require_giving(session, tenant_id, invite_id, visit)
    invite = await invites.resend(
        session, tenant_id, invite_id, inviter=_inviter(visit), post=post_of(visit.services), now=visit.now
    )
    visit.act.on(invite.id, **_details(invite))
    return invite_out(invite)


@router.post(f"{MY_INVITE}/revoke", summary="Revoke an invite", responses=problems(409))
async def revoke_invite(tenant_id: TenantId, invite_id: InviteId, session: Session, visit: CurrentVisit) -> InviteOut:
    """Make the link good for nothing. Repeating is harmless."""
    await _require_giving(session, tenant_id, invite_id, visit)
    invite = await invites.revoke(session, tenant_id, invite_id, now=visit.now)
    visit.act.on(invite.id, **_details(invite))
    return invite_out(invite)


async def _require_giving(session: Session, tenant_id: TenantId, invite_id: InviteId, visit: Visit) -> None:
    invite = await invites.get(session, tenant_id, invite_id, visit.now)
    if invite.role is not None:
        invites.require_giving(visit.caller.rights, invite.role, invite.project_id)


@router.post(f"{AUTH}/invites/accept", summary="Accept an invite as somebody new", responses=problems(403, 409, 429))
async def accept_as_new(body: AcceptAsNewIn, session: Session, visit: CurrentVisit) -> AcceptedOut:
    """Make an account with a password, become what the invite says, and be signed in.

    409 `SIGN_IN_FIRST`: there is an account of this address; sign in, then accept at /api/v1/me/invites/accept.
    """
    visit.check_origin()
    services = visit.services
    async with transaction(services.sessions) as looking:
        invite = await invites.find(looking, body.token, peppers=services.peppers, now=visit.now)
        if await people.by_email(looking, invite.email) is not None:
            raise PlatformError(
                "SIGN_IN_FIRST", ErrorKind.CONFLICT, f"There is an account of {invite.email}. Sign in, then accept."
            )
    fresh = await services.passwords.new(body.password, email=invite.email, name=body.name)
    person = await people.create(session, email=invite.email, name=body.name)
    person = await sign_in.set_password(session, person.id, fresh, visit.now)
    accepted = await invites.accept(session, body.token, person, peppers=services.peppers, now=visit.now)
    visit.act.by(person.id)
    visit.act.on(accepted.id, tenant_id=accepted.tenant_id, **_details(accepted))
    return _accepted(accepted, await visit.open(session, person.id))


@router.post(f"{ME}/invites/accept", summary="Accept an invite", responses=problems(409))
async def accept_as_me(body: AcceptIn, session: Session, visit: CurrentVisit) -> AcceptedOut:
    """Become what the invite says, when it is for your address."""
    person = visit.caller.own.person
    accepted = await invites.accept(session, body.token, person, peppers=visit.services.peppers, now=visit.now)
    visit.act.on(accepted.id, tenant_id=accepted.tenant_id, **_details(accepted))
    return _accepted(accepted)
