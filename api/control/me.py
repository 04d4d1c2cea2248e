"""People: one's own profile, password, second factor and sessions."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field

from api.control.sign_in import Code, NewPassword
from api.deps import ReadSession, Session, SessionId
from api.guard import GuardedRoute
from api.permissions import ME
from api.schemas import Input, Name, Output, problems
from api.visit import CurrentVisit
from core import mail
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from tenants import letters, people, person_status, second_factor, sessions, sign_in
from tenants.types import OpenSession, Person

router = APIRouter(route_class=GuardedRoute, tags=["yourself"])

LanguageName = Literal["en", "zh-CN"]
MethodName = Literal["password", "oidc"]
OwnPassword = Annotated[str, Field(max_length=1024, description="To prove that it is you; empty if you have none.")]


class MyselfOut(Output):
    """You."""

    id: str
    email: str
    name: str
    language: LanguageName
    has_password: bool
    has_second_factor: bool


class OpenSessionOut(Output):
    """One of your sessions."""

    id: str
    current: bool
    method: MethodName
    second_factor: bool
    created_at: datetime
    seen_at: datetime = Field(description="To the minute.")
    expires_at: datetime
    ip: str
    user_agent: str


class SessionsOut(Output):
    """Newest first."""

    items: list[OpenSessionOut]


class ProfileIn(Input):
    """What is left out stays."""

    name: Name | None = None
    language: LanguageName | None = None


class PasswordChangeIn(Input):
    """The old and the new one."""

    current_password: OwnPassword
    new_password: NewPassword


class ProofIn(Input):
    """Your password again."""

    password: OwnPassword


class CodeIn(Input):
    """What the app shows now."""

    code: Code


class EnrolmentOut(Output):
    """What an authenticator app must be told; shown this once."""

    secret: str
    uri: str = Field(description="For a QR code.")


class RecoveryCodesOut(Output):
    """Each good once, instead of the app's code; shown this once."""

    recovery_codes: list[str]


class RenewedOut(Output):
    """The session goes on under a fresh token, and so with a fresh X-CSRF-Token."""

    csrf_token: str


class ConfirmedOut(RecoveryCodesOut, RenewedOut):
    """The second factor is in force, and the session goes on under a fresh token."""


def person_out(person: Person) -> MyselfOut:
    return MyselfOut.model_validate(
        {
            "id": format_id(IdKind.PERSON, person.id),
            "email": person.email,
            "name": person.name,
            "language": person.language,
            "has_password": person.has_password,
            "has_second_factor": person.has_second_factor,
        }
    )


@router.patch(ME, summary="Change your profile")
async def update_me(body: ProfileIn, session: Session, visit: CurrentVisit) -> MyselfOut:
    before = visit.caller.own.person
    person = await people.update(session, before.id, name=body.name, language=body.language)
    visit.act.on(person.id, before={"language": before.language}, after={"language": person.language})
    return person_out(person)


@router.post(f"{ME}/password", summary="Change your password", responses=problems(409, 429))
async def change_password(body: PasswordChangeIn, session: Session, visit: CurrentVisit) -> RenewedOut:
    """Put a new password in force. Your other sessions end; this one goes on under a fresh token."""
    me, services = visit.caller.own.person, visit.services
    if not me.has_password:  # a provider vouches for them; a password would outlive what it vouches for
        message = "You sign in by your organisation's identity provider: there is no password to change."
        raise PlatformError("PASSWORD_NOT_SET", ErrorKind.CONFLICT, message)
    await visit.prove_again(body.current_password)
    fresh = await services.passwords.new(body.new_password, email=me.email, name=me.name)
    await sign_in.set_password(session, me.id, fresh, visit.now)
    await mail.post(session, letters.password_changed(me), sealing_key=services.sealing_key)
    visit.act.on(me.id)
    return RenewedOut(csrf_token=await visit.renew(session, second_factor=visit.caller.own.second_factor))


@router.post(f"{ME}/totp", summary="Begin with a second factor", responses=problems(409, 429))
async def start_second_factor(body: ProofIn, session: Session, visit: CurrentVisit) -> EnrolmentOut:
    """Return what to tell an authenticator app. It counts for nothing until it is confirmed with a code."""
    await visit.prove_again(body.password)
    made = await second_factor.start(session, visit.caller.person_id, sealing_key=visit.services.sealing_key)
    visit.act.on(visit.caller.person_id)
    return EnrolmentOut(secret=made.secret, uri=made.uri)


@router.post(f"{ME}/totp/confirm", summary="Confirm the second factor", responses=problems(409))
async def confirm_second_factor(body: CodeIn, session: Session, visit: CurrentVisit) -> ConfirmedOut:
    """Put the second factor in force. Your other sessions end; this one goes on under a fresh token."""
    person_id, services = visit.caller.person_id, visit.services
    codes = await second_factor.confirm(
        session, person_id, body.code, pepper=services.pepper, sealing_key=services.sealing_key, now=visit.now
    )
    await sessions.end_all(session, person_id, visit.now)
    visit.act.on(person_id)
    csrf_token = await visit.renew(session, second_factor=True)
    return ConfirmedOut(recovery_codes=list(codes), csrf_token=csrf_token)


@router.post(f"{ME}/totp/remove", summary="Remove the second factor", responses=problems(429))
async def remove_second_factor(body: ProofIn, session: Session, visit: CurrentVisit) -> RenewedOut:
    """Sign in with the password alone from now on."""
    await visit.prove_again(body.password)
    await second_factor.remove(session, visit.caller.person_id)
    visit.act.on(visit.caller.person_id)
    return RenewedOut(csrf_token=await visit.renew(session, second_factor=False))


@router.post(f"{ME}/recovery-codes", summary="Get new recovery codes", responses=problems(409, 429))
async def renew_recovery_codes(body: ProofIn, session: Session, visit: CurrentVisit) -> RecoveryCodesOut:
    """Return fresh codes; the old ones are good for nothing from now on."""
    await visit.prove_again(body.password)
    codes = await second_factor.renew_codes(session, visit.caller.person_id, pepper=visit.services.pepper)
    visit.act.on(visit.caller.person_id)
    return RecoveryCodesOut(recovery_codes=list(codes))


def _session_out(found: OpenSession, current_id: UUID) -> OpenSessionOut:
    return OpenSessionOut.model_validate(
        {
            "id": format_id(IdKind.SESSION, found.id),
            "current": found.id == current_id,
            "method": found.method,
            "second_factor": found.second_factor,
            "created_at": found.created_at,
            "seen_at": found.seen_at,
            "expires_at": found.expires_at,
            "ip": found.ip,
            "user_agent": found.user_agent,
        }
    )


@router.get(f"{ME}/sessions", summary="List your sessions")
async def list_my_sessions(session: ReadSession, visit: CurrentVisit) -> SessionsOut:
    own = visit.caller.own
    idle_s = visit.services.settings.control.session_idle_s
    found = await sessions.list_open(session, own.person.id, now=visit.now, idle_s=idle_s)
    return SessionsOut(items=[_session_out(one, own.id) for one in found])


@router.delete(f"{ME}/sessions/{{session_id}}", status_code=204, summary="End one of your sessions")
async def end_my_session(session_id: SessionId, session: Session, visit: CurrentVisit) -> None:
    await sessions.end_own(session, visit.caller.person_id, session_id, visit.now)
    visit.act.on(session_id)


@router.post(f"{ME}/delete", status_code=204, summary="Delete your account", responses=problems(409, 429))
async def delete_me(body: ProofIn, session: Session, visit: CurrentVisit) -> None:
    """Forget you for good: sessions, memberships and API keys of yours end. The last owner of an organisation stays."""
    await visit.prove_again(body.password)
    await person_status.leave(session, visit.caller.person_id, now=visit.now)
    visit.forget()
    visit.act.on(visit.caller.person_id)
