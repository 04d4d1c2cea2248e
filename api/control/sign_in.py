"""People: signing in and out, and a new password when the old one is lost."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field

from api.deps import Session
from api.guard import GuardedRoute
from api.permissions import AUTH
from api.schemas import Input, Output, problems
from api.visit import CurrentVisit
from core import mail
from core.db import transaction
from tenants import letters, sessions, sign_in

router = APIRouter(route_class=GuardedRoute, tags=["signing in"])

Email = Annotated[str, Field(min_length=3, max_length=254)]
Password = Annotated[str, Field(min_length=1, max_length=1024)]
NewPassword = Annotated[str, Field(min_length=1, max_length=1024, description="12 to 256 characters, hard to guess.")]
Token = Annotated[str, Field(min_length=1, max_length=128)]
Code = Annotated[str, Field(min_length=6, max_length=32, description="Of the app, or a recovery code.")]


class PasswordIn(Input):
    """Who wants to sign in."""

    email: Email
    password: Password


class SecondFactorIn(Input):
    """The answer to `second_factor_needed`."""

    challenge: Token
    code: Code


class ResetIn(Input):
    """Whose password is lost."""

    email: Email


class ResetConfirmIn(Input):
    """The token of the mail, and the new password."""

    token: Token
    password: NewPassword


class SignInOut(Output):
    """`signed_in` comes with the cookie; `second_factor_needed` with a challenge, good for five minutes."""

    state: Literal["signed_in", "second_factor_needed"]
    csrf_token: str | None = Field(None, description="To be sent as X-CSRF-Token with every change.")
    challenge: str | None = None


@router.post(f"{AUTH}/password", summary="Sign in with a password", responses=problems(401, 403, 429))
async def sign_in_with_password(body: PasswordIn, session: Session, visit: CurrentVisit) -> SignInOut:
    """Open a session, or ask for the second factor.

    A wrong password and an unknown address look alike, also in time, and both are counted: after five tries at an
    account from one address each further one has to wait longer, up to 15 minutes; after a hundred from many addresses
    every one, but for those from a device on which the account was signed in before.
    """
    visit.check_origin()
    candidate = await visit.prove(body.email, body.password)
    person_id = sign_in.require_active(candidate)
    passwords, pepper = visit.services.passwords, visit.services.pepper
    if passwords.outdated(candidate.password_hash):
        await sign_in.rehash(session, person_id, candidate.password_hash, await passwords.again(body.password))
    challenge = await sign_in.pass_password(
        session, candidate, pepper=pepper, address=visit.address, now=visit.now, device=visit.device(body.email)
    )
    visit.act.by(person_id)
    visit.act.on(person_id, second_factor_needed=challenge is not None)
    if challenge is not None:
        return SignInOut(state="second_factor_needed", challenge=challenge)
    visit.know_device(body.email)
    return SignInOut(state="signed_in", csrf_token=await visit.open(session, person_id))


@router.post(f"{AUTH}/totp", summary="Answer for the second factor", responses=problems(401, 403, 429))
async def answer_second_factor(body: SecondFactorIn, session: Session, visit: CurrentVisit) -> SignInOut:
    """Open the session. A code is good once; wrong ones are counted with wrong passwords."""
    visit.check_origin()
    services = visit.services
    async with transaction(services.sessions) as counting:
        await sign_in.begin_second_factor(counting, body.challenge, pepper=services.pepper, now=visit.now)
    person = await sign_in.pass_second_factor(
        session,
        body.challenge,
        body.code,
        peppers=services.peppers,
        sealing_key=services.sealing_key,
        now=visit.now,
    )
    visit.know_device(person.email)
    visit.act.by(person.id)
    visit.act.on(person.id)
    return SignInOut(state="signed_in", csrf_token=await visit.open(session, person.id, second_factor=True))


@router.post(f"{AUTH}/password-reset", status_code=202, summary="Ask for a link to a new password")
async def ask_for_reset(body: ResetIn, session: Session, visit: CurrentVisit) -> None:
    """Mail a link that is good once, for an hour. The answer is the same whether or not there is such an account."""
    visit.check_origin()
    await sign_in.ask_reset(
        session,
        body.email,
        pepper=visit.services.pepper,
        sealing_key=visit.services.sealing_key,
        address=visit.address,
        now=visit.now,
    )


@router.post(f"{AUTH}/password-reset/confirm", status_code=204, summary="Set a new password by a mailed link")
async def confirm_reset(body: ResetConfirmIn, session: Session, visit: CurrentVisit) -> None:
    """Put a new password in force. Every session of the person ends; sign in with it afterwards."""
    visit.check_origin()
    services = visit.services
    async with transaction(services.sessions) as looking:
        person = await sign_in.find_reset(looking, body.token, pepper=services.pepper, now=visit.now)
    fresh = await services.passwords.new(body.password, email=person.email, name=person.name)
    await sign_in.reset(session, body.token, fresh, pepper=services.pepper, address=visit.address, now=visit.now)
    visit.know_device(person.email)  # who has the mail is let in, whoever locked the account
    await mail.post(session, letters.password_changed(person), sealing_key=services.sealing_key)
    visit.act.by(person.id)
    visit.act.on(person.id)


@router.post(f"{AUTH}/sign-out", status_code=204, summary="Sign out")
async def sign_out(session: Session, visit: CurrentVisit) -> None:
    """End this session."""
    await sessions.end_own(session, visit.caller.person_id, visit.caller.own.id, visit.now)
    visit.forget()
    visit.act.on(visit.caller.own.id)


@router.post(f"{AUTH}/sign-out-everywhere", status_code=204, summary="Sign out everywhere")
async def sign_out_everywhere(session: Session, visit: CurrentVisit) -> None:
    """End every session of yours, this one too."""
    await sessions.end_all(session, visit.caller.person_id, visit.now)
    visit.forget()
    visit.act.on(visit.caller.person_id)
