"""A person's second factor: an authenticator app, and recovery codes for the day it is lost."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core import sealing
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from tenants import credentials, totp
from tenants import sign_in_queries as queries
from tenants.credentials import Peppers
from tenants.errors import invalid
from tenants.tables import PersonRow, RecoveryCodeRow


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What an app must be told, shown once: the secret as text, and as an address for a QR code."""

    secret: str
    uri: str


def _conflict(code: str, message: str) -> PlatformError:
    return PlatformError(code, ErrorKind.CONFLICT, message)


async def _locked(session: AsyncSession, person_id: UUID) -> PersonRow:
    row = await queries.lock_person(session, person_id)
    if row is None:
        raise LookupError("somebody who is signed in is a person")
    return row


async def start(
    session: AsyncSession,
    person_id: UUID,
    *,
    sealing_key: bytes,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> Enrolment:
    """Make a secret for an app. It counts for nothing until `confirm`; starting again replaces it.

    Raises:
        PlatformError: conflict, when there is a second factor already, or no password that it would be second to.
    """
    row = await _locked(session, person_id)
    if row.totp_confirmed_at is not None:
        raise _conflict("SECOND_FACTOR_EXISTS", "You have a second factor already. Remove it first.")
    if row.password_hash is None:
        raise _conflict("NO_PASSWORD", "You sign in with an identity provider, which asks for second factors itself.")
    secret = totp.new_secret(random_bytes)
    nonce = random_bytes(sealing.NONCE_BYTES)
    row.totp_secret = sealing.seal(sealing_key, secret, context=person_id.bytes, nonce=nonce)
    await session.flush()
    return Enrolment(totp.text_of(secret), totp.uri(secret, row.email))


async def confirm(
    session: AsyncSession, person_id: UUID, code: str, *, pepper: bytes, sealing_key: bytes, now: datetime
) -> tuple[str, ...]:
    """Put the second factor in force, when the app shows the right code; return recovery codes, once.

    Raises:
        PlatformError: conflict without a start, invalid for a wrong code.
    """
    row = await _locked(session, person_id)
    if row.totp_secret is None or row.totp_confirmed_at is not None:
        raise _conflict("SECOND_FACTOR_NOT_STARTED", "Nothing waits to be confirmed. Start anew.")
    secret = sealing.unseal(sealing_key, row.totp_secret, context=person_id.bytes)
    step = totp.matching_step(secret, code, now, 0)
    if step is None:
        raise invalid("code", "This is not the code that the app should show now. Is its clock right?")
    row.totp_confirmed_at, row.totp_last_step = now, step
    await session.flush()
    return await _fresh_codes(session, person_id, pepper)


async def use(
    session: AsyncSession, person_id: UUID, code: str, *, peppers: Peppers, sealing_key: bytes, now: datetime
) -> bool:
    """Say whether this is the app's code or a recovery code, and use it up: it is good once."""
    row = await _locked(session, person_id)
    if row.totp_secret is None or row.totp_confirmed_at is None:
        return False
    secret = sealing.unseal(sealing_key, row.totp_secret, context=person_id.bytes)
    step = totp.matching_step(secret, code, now, row.totp_last_step)
    if step is not None:
        row.totp_last_step = step
        await session.flush()
        return True
    return await queries.use_recovery_code(session, person_id, peppers.digests(_digested(code)), now)


async def renew_codes(session: AsyncSession, person_id: UUID, *, pepper: bytes) -> tuple[str, ...]:
    """Return fresh recovery codes; the old ones are good for nothing.

    Raises:
        PlatformError: conflict without a second factor.
    """
    row = await _locked(session, person_id)
    if row.totp_confirmed_at is None:
        raise _conflict("NO_SECOND_FACTOR", "You have no second factor.")
    return await _fresh_codes(session, person_id, pepper)


async def remove(session: AsyncSession, person_id: UUID) -> None:
    """Take the second factor and its recovery codes away; again is the same as once."""
    row = await _locked(session, person_id)
    row.totp_secret, row.totp_confirmed_at = None, None
    await session.flush()
    await queries.delete_recovery_codes(session, person_id)


async def codes_left(session: AsyncSession, person_id: UUID) -> int:
    return await queries.recovery_codes_left(session, person_id)


async def _fresh_codes(session: AsyncSession, person_id: UUID, pepper: bytes) -> tuple[str, ...]:
    await queries.delete_recovery_codes(session, person_id)
    codes = totp.recovery_codes()
    for code in codes:
        digest = credentials.digest(pepper, _digested(code))
        session.add(RecoveryCodeRow(id=new_uuid(), person_id=person_id, digest=digest))
    await session.flush()
    return codes


def _digested(code: str) -> str:
    return f"recovery {totp.recovery_text(code)}"
