"""Signing in with a password: the try, the second factor, and a new password when the old one is lost.

The steps are apart because each is a transaction of its own: tries stay counted whatever comes of them, and no
transaction is open while a hash is computed.
"""

import base64
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core import mail, outbox, sealing
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from core.tasks import TaskContext
from tenants import credentials, letters, people, people_queries, second_factor, sessions, throttle
from tenants import sign_in_queries as queries
from tenants.credentials import Peppers
from tenants.people import person_of
from tenants.tables import PersonRow, PersonTokenRow
from tenants.types import Person, PersonStatus

RESETS_AN_HOUR = 3
RESET_JOB = "people.reset_password"
_SECOND_FACTOR = "second_factor"
_RESET = "password_reset"
_TOKENS = {  # purpose → how it begins, and how long it is good
    _SECOND_FACTOR: ("tgc_", timedelta(minutes=5)),
    _RESET: ("tgr_", timedelta(hours=1)),
}
_SEALED_FOR_RESET = b"password reset"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who it would be, if the password is right. Without an account of that address everything is empty."""

    email: str
    person_id: UUID | None = None
    password_hash: str = ""
    status: PersonStatus = PersonStatus.ACTIVE
    has_second_factor: bool = False


def wrong_password() -> PlatformError:
    """The answer to a wrong password, and to an address that nobody has."""
    return PlatformError("SIGN_IN_REFUSED", ErrorKind.UNAUTHENTICATED, "The email address or the password is wrong.")


def wrong_own_password() -> PlatformError:
    """The answer to somebody signed in who does not prove that it is still them."""
    return PlatformError("SIGN_IN_REFUSED", ErrorKind.UNAUTHENTICATED, "This is not your password.")


def wrong_code() -> PlatformError:
    return PlatformError(
        "SECOND_FACTOR_WRONG", ErrorKind.UNAUTHENTICATED, "This code is wrong or was used already. Wait for the next."
    )


def _wrong_link(code: str) -> PlatformError:
    return PlatformError(code, ErrorKind.INVALID, "This is not valid any more. Begin again.", param="token")


async def begin(
    session: AsyncSession, *, pepper: bytes, email: str, address: str, now: datetime, device: str = ""
) -> Candidate:
    """Count a try, and return whom the password must belong to.

    Args:
        session: the transaction that counts.
        pepper: the key of digests.
        email: as it was typed.
        address: where the try comes from.
        now: the present.
        device: the one it comes from, when `devices.recognise` knows it.

    Raises:
        PlatformError: rate_limited, when what it counts for is locked.
    """
    await throttle.take(session, now, *throttle.of_sign_in(pepper, email, address, device))
    row = await people_queries.person_by_email(session, email.strip().lower())
    return Candidate(email) if row is None else _candidate(row)


async def begin_again(session: AsyncSession, person_id: UUID, *, pepper: bytes, now: datetime) -> Candidate:
    """The same for somebody who is signed in and must prove it is still them."""
    row = await people_queries.person(session, person_id)
    if row is None:
        raise wrong_password()
    await throttle.take(session, now, throttle.of_proof(pepper, person_id))
    return _candidate(row)


def _candidate(row: PersonRow) -> Candidate:
    return Candidate(
        email=row.email,
        person_id=row.id,
        password_hash=row.password_hash or "",
        status=PersonStatus(row.status),
        has_second_factor=row.totp_confirmed_at is not None,
    )


async def pass_again(session: AsyncSession, person_id: UUID, *, pepper: bytes) -> None:
    """Forget the tries of `begin_again`: the password was right."""
    await throttle.clear(session, throttle.of_proof(pepper, person_id))


async def pass_password(
    session: AsyncSession, candidate: Candidate, *, pepper: bytes, address: str, now: datetime, device: str = ""
) -> str | None:
    """Go on after the right password: None when that was all, else the challenge that the second factor answers.

    Raises:
        PlatformError: forbidden for somebody who is suspended.
    """
    person_id = _known(candidate)
    nearest, *wider = throttle.of_sign_in(pepper, candidate.email, address, device)
    await throttle.clear(session, nearest)
    await throttle.give_back(session, now, *wider)  # what failed before stays counted there
    if candidate.has_second_factor:
        return await _issue(session, person_id, _SECOND_FACTOR, pepper=pepper, now=now)
    return None


def require_active(candidate: Candidate) -> UUID:
    """Return who signs in.

    Raises:
        PlatformError: forbidden for somebody who is suspended.
    """
    if candidate.status is not PersonStatus.ACTIVE:
        raise PlatformError("PERSON_SUSPENDED", ErrorKind.FORBIDDEN, "This account is suspended. Ask your operator.")
    return _known(candidate)


def _known(candidate: Candidate) -> UUID:
    if candidate.person_id is None:
        raise LookupError("a password matched nobody's hash")
    return candidate.person_id


async def begin_second_factor(session: AsyncSession, challenge: str, *, pepper: bytes, now: datetime) -> None:
    """Count a try at a code.

    Raises:
        PlatformError: unauthenticated for a challenge that is over, rate_limited when locked.
    """
    found = await queries.token(session, credentials.digest(pepper, challenge), _SECOND_FACTOR, now)
    if found is None:
        raise PlatformError("SIGN_IN_EXPIRED", ErrorKind.UNAUTHENTICATED, "Sign in with your password again.")
    _, row = found
    await throttle.take(session, now, throttle.of_second_factor(pepper, row.email))


async def pass_second_factor(
    session: AsyncSession,
    challenge: str,
    code: str,
    *,
    peppers: Peppers,
    sealing_key: bytes,
    now: datetime,
) -> Person:
    """Return who it is, when the code is right; the challenge and the code are used up.

    Raises:
        PlatformError: unauthenticated for a wrong or used code or challenge, forbidden for somebody suspended.
    """
    found = await queries.token(session, credentials.digest(peppers.current, challenge), _SECOND_FACTOR, now)
    if found is None:
        raise PlatformError("SIGN_IN_EXPIRED", ErrorKind.UNAUTHENTICATED, "Sign in with your password again.")
    token, row = found
    require_active(_candidate(row))
    right = await second_factor.use(session, row.id, code, peppers=peppers, sealing_key=sealing_key, now=now)
    if not right or not await queries.use_token(session, token.id, now):
        raise wrong_code()
    await throttle.clear(session, throttle.of_second_factor(peppers.current, row.email))
    return person_of(row)


async def set_password(session: AsyncSession, person_id: UUID, password_hash: str, now: datetime) -> Person:
    """Put another password in force; every session of the person ends, and every link and challenge that is about."""
    row = await queries.lock_person(session, person_id)
    if row is None:
        raise wrong_password()
    row.password_hash = password_hash
    row.password_changed_at = now
    await session.flush()
    await queries.use_tokens_of(session, person_id, now)
    await sessions.end_all(session, person_id, now)
    return person_of(row)


async def rehash(session: AsyncSession, person_id: UUID, old_hash: str, new_hash: str) -> None:
    """Keep the same password at today's cost, unless it changed meanwhile."""
    row = await queries.lock_person(session, person_id)
    if row is not None and row.password_hash == old_hash:
        row.password_hash = new_hash


async def ask_reset(
    session: AsyncSession,
    email: str,
    *,
    pepper: bytes,
    sealing_key: bytes,
    address: str,
    now: datetime,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> None:
    """Have a link to a new password mailed, if anybody has this address. The worker looks: here nobody can tell.

    Raises:
        PlatformError: rate_limited, when the caller asked too often; invalid for what is no address.
    """
    checked = people.checked_email(email)
    await throttle.take(session, now, throttle.of_reset(pepper, address))
    nonce = random_bytes(sealing.NONCE_BYTES)
    sealed = sealing.seal(sealing_key, checked.encode(), context=_SEALED_FOR_RESET, nonce=nonce)
    await outbox.add(session, RESET_JOB, {"sealed": base64.b64encode(sealed).decode()})


async def mail_reset(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    """The worker's half of `ask_reset`."""
    settings, now = context.settings, context.clock.now()
    key, pepper = sealing.sealing_key(settings.secrets.sealing), credentials.pepper_of(settings.secrets)
    email = sealing.unseal(key, base64.b64decode(arguments["sealed"]), context=_SEALED_FOR_RESET).decode()
    row = await people_queries.person_by_email(session, email)
    if row is None or row.status != PersonStatus.ACTIVE or row.password_hash is None:
        return
    if await queries.tokens_since(session, row.id, _RESET, now - timedelta(hours=1)) >= RESETS_AN_HOUR:
        return
    token = await _issue(session, row.id, _RESET, pepper=pepper, now=now)
    await mail.post(session, letters.reset(person_of(row), settings.base_url, token), sealing_key=key)


async def find_reset(session: AsyncSession, token: str, *, pepper: bytes, now: datetime) -> Person:
    """Return whose new password a link is for.

    Raises:
        PlatformError: invalid for a link that is used, too old or unknown.
    """
    found = await queries.token(session, credentials.digest(pepper, token), _RESET, now)
    if found is None or found[1].status != PersonStatus.ACTIVE:
        raise _wrong_link("RESET_LINK_WRONG")
    return person_of(found[1])


async def reset(
    session: AsyncSession, token: str, password_hash: str, *, pepper: bytes, address: str, now: datetime
) -> Person:
    """Put the new password in force, once for each link; see `set_password`. The account is not locked there any more.

    Raises:
        PlatformError: invalid for a link that is used, too old or unknown.
    """
    found = await queries.token(session, credentials.digest(pepper, token), _RESET, now)
    if (
        found is None
        or found[1].status != PersonStatus.ACTIVE
        or not await queries.use_token(session, found[0].id, now)
    ):
        raise _wrong_link("RESET_LINK_WRONG")
    for counter in throttle.of_sign_in(pepper, found[1].email, address)[:2]:
        await throttle.clear(session, counter)
    return await set_password(session, found[1].id, password_hash, now)


async def _issue(session: AsyncSession, person_id: UUID, purpose: str, *, pepper: bytes, now: datetime) -> str:
    """Make a token and return it, once."""
    prefix, valid = _TOKENS[purpose]
    token = credentials.mint(prefix)
    session.add(
        PersonTokenRow(
            id=new_uuid(),
            person_id=person_id,
            purpose=purpose,
            digest=credentials.digest(pepper, token),
            created_at=now,
            expires_at=now + valid,
        )
    )
    await session.flush()
    return token
