"""Sessions of people who signed in: a random token in a cookie, of which only the keyed digest is kept."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from hmac import compare_digest
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.ids import IdKind, new_uuid
from tenants import credentials, identity_queries, sign_in_queries
from tenants import people_queries as queries
from tenants.errors import not_found
from tenants.people import person_of
from tenants.tables import SessionRow
from tenants.types import OpenSession, PersonStatus, SignedIn, SignInMethod

PREFIX = "tgs_"
SEEN_EVERY = timedelta(seconds=60)  # how often the last use is written down
USER_AGENT_MAX = 400
OPEN_MAX = 50  # sessions of one person at once; the oldest ends for one more


async def open_session(
    session: AsyncSession,
    person_id: UUID,
    *,
    pepper: bytes,
    now: datetime,
    absolute_s: int,
    method: SignInMethod,
    provider_id: UUID | None = None,
    second_factor: bool = False,
    ip: str = "",
    user_agent: str = "",
) -> str:
    """Open a session and return its token, once."""
    token = credentials.mint(PREFIX)
    session.add(
        SessionRow(
            id=new_uuid(),
            person_id=person_id,
            digest=credentials.digest(pepper, token),
            method=method,
            provider_id=provider_id,
            second_factor=second_factor,
            created_at=now,
            seen_at=now,
            expires_at=now + timedelta(seconds=absolute_s),
            ip=ip,
            user_agent=user_agent[:USER_AGENT_MAX],
        )
    )
    await session.flush()
    for old in await sign_in_queries.open_sessions_beyond(session, person_id, OPEN_MAX):
        await queries.end_session(session, old, now)
    return token


async def find(
    session: AsyncSession, token: str, *, pepper: bytes, now: datetime, idle_s: int
) -> tuple[SignedIn, bool] | None:
    """Return the open session of this token, and whether its last use should be written down (`see`).

    None when it ended, was idle too long or is too old, or when its person may not sign in any more.
    """
    if not credentials.well_formed(PREFIX, token):
        return None
    found = await queries.session_by_digest(session, credentials.digest(pepper, token))
    if found is None:
        return None
    row, person, only_tenant = found
    over = row.ended_at is not None or now >= row.expires_at or now - row.seen_at >= timedelta(seconds=idle_s)
    if over or row.created_at < person.sessions_valid_from or person.status != PersonStatus.ACTIVE:
        return None
    signed_in = SignedIn(
        id=row.id,
        person=person_of(person),
        method=SignInMethod(row.method),
        provider_id=row.provider_id,
        second_factor=row.second_factor,
        created_at=row.created_at,
        expires_at=row.expires_at,
        only_tenant=only_tenant,
    )
    return signed_in, now - row.seen_at >= SEEN_EVERY


async def see(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    """Write down that the session is in use."""
    await queries.see_session(session, session_id, now)


async def end(session: AsyncSession, session_id: UUID, now: datetime) -> None:
    """End a session; again is the same as once."""
    await queries.end_session(session, session_id, now)


async def end_token(session: AsyncSession, token: str, *, pepper: bytes, now: datetime) -> None:
    """End the session of a token, if it is one."""
    if credentials.well_formed(PREFIX, token):
        await sign_in_queries.end_session_by_digest(session, credentials.digest(pepper, token), now)


async def end_own(session: AsyncSession, person_id: UUID, session_id: UUID, now: datetime) -> None:
    """End one of a person's sessions; again is the same as once.

    Raises:
        PlatformError: not_found for one that is not theirs.
    """
    if not await sign_in_queries.end_session_of(session, person_id, session_id, now):
        raise not_found(IdKind.SESSION)


async def end_all(session: AsyncSession, person_id: UUID, now: datetime) -> None:
    """End every session of a person; none opened before now is good any more."""
    row = await sign_in_queries.lock_person(session, person_id)
    if row is not None:
        row.sessions_valid_from = max(now, row.sessions_valid_from)
        await session.flush()
    await sign_in_queries.end_sessions_of(session, person_id, now)


async def renew(
    session: AsyncSession, signed_in: SignedIn, *, pepper: bytes, now: datetime, second_factor: bool
) -> str:
    """Put another session with another token in the place of this one, which ends; return the token, once.

    It may live as long as the old one might, no longer.
    """
    row = await queries.session(session, signed_in.id)
    await queries.end_session(session, signed_in.id, now)
    token = await open_session(
        session,
        signed_in.person.id,
        pepper=pepper,
        now=now,
        absolute_s=int((signed_in.expires_at - now).total_seconds()),
        method=signed_in.method,
        provider_id=signed_in.provider_id,
        second_factor=second_factor,
        ip=row.ip if row else "",
        user_agent=row.user_agent if row else "",
    )
    await identity_queries.move_provider_session(session, signed_in.id, credentials.digest(pepper, token))
    return token


async def list_open(session: AsyncSession, person_id: UUID, *, now: datetime, idle_s: int) -> Sequence[OpenSession]:
    """Return a person's sessions that are good now, newest first; at most `OPEN_MAX`."""
    rows = await sign_in_queries.open_sessions(session, person_id, now, now - timedelta(seconds=idle_s))
    return [
        OpenSession(
            id=row.id,
            method=SignInMethod(row.method),
            second_factor=row.second_factor,
            created_at=row.created_at,
            seen_at=row.seen_at,
            expires_at=row.expires_at,
            ip=row.ip,
            user_agent=row.user_agent,
        )
        for row in rows
    ]


async def forget(session: AsyncSession, before: datetime) -> None:
    """Delete the sessions and links that were over before."""
    await sign_in_queries.forget_sessions(session, before)


def csrf_token(signing: bytes, token: str) -> str:
    """Return what a page must send beside the cookie with every change; only our own pages can read it."""
    return blake2b(token.encode(), digest_size=24, key=signing, person=b"tg-csrf").hexdigest()


def csrf_matches(signing: bytes, token: str, given: str) -> bool:
    return compare_digest(csrf_token(signing, token).encode(), given.encode("utf-8", "surrogatepass"))
