"""Sessions that a provider opened: its tokens, sealed, and its groups read again while the session is in use."""

import os
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.db import Sessions, transaction
from core.errors import ErrorKind, PlatformError
from core.logging import get_logger
from core.sealing import NONCE_BYTES, seal, unseal
from core.settings import Oidc
from tenants import audit, credentials, identities, identity_providers, people, sessions
from tenants import identity_queries as queries
from tenants.identity_tables import ProviderSessionRow
from tenants.oidc.claims import Given
from tenants.oidc.clients import Clients
from tenants.oidc.errors import GrantRefusedError
from tenants.oidc.flow import Profile, Registration, renew
from tenants.types import Actor, ActorKind

CLAIM_S = 30  # one refresh at a time; when its process dies or the provider does not answer, the next is after this

log = get_logger(__name__)


class _Tokens(msgspec.Struct, frozen=True):
    refresh: str
    identity: str  # the hint of whom to sign out


@dataclass(frozen=True, slots=True)
class _Due:
    """A session whose groups are to be read again."""

    session_id: UUID
    provider_id: UUID
    subject: str
    tokens: _Tokens = field(repr=False)
    read_at: datetime
    registration: Registration | None = field(repr=False)


def _sealed(sealing_key: bytes, provider_id: UUID, profile: Profile) -> bytes:
    plain = msgspec.json.encode(_Tokens(profile.refresh_token, profile.id_token))
    context = provider_id.bytes + profile.subject.encode()
    return seal(sealing_key, plain, context=context, nonce=os.urandom(NONCE_BYTES))


def _opened(sealing_key: bytes, row: ProviderSessionRow) -> _Tokens:
    plain = unseal(sealing_key, row.tokens, context=row.provider_id.bytes + row.subject.encode())
    return msgspec.json.decode(plain, type=_Tokens)


async def keep(
    session: AsyncSession,
    token: str,
    provider_id: UUID,
    profile: Profile,
    *,
    pepper: bytes,
    sealing_key: bytes,
    settings: Oidc,
    now: datetime,
) -> None:
    """Remember with the session of `token` what its provider gave."""
    session_id = await queries.session_id_by_digest(session, credentials.digest(pepper, token))
    session.add(
        ProviderSessionRow(
            session_id=session_id,
            provider_id=provider_id,
            subject=profile.subject,
            tokens=_sealed(sealing_key, provider_id, profile),
            read_at=now,
            due_at=now + timedelta(seconds=settings.refresh_every_s),
        )
    )
    await session.flush()


async def logout_hint(session: AsyncSession, session_id: UUID, *, sealing_key: bytes) -> str:
    """Return the ID token that tells the provider whom to sign out; empty when there is none."""
    row = await queries.provider_session(session, session_id)
    return "" if row is None else _opened(sealing_key, row).identity


async def refresh_if_due(
    database: Sessions, clients: Clients, session_id: UUID, person_id: UUID, *, sealing_key: bytes, now: datetime
) -> bool:
    """Read the groups of a session again when they are older than `refresh_every_s`; False when the session has ended.

    One caller at a time asks the provider, outside any transaction; others go on with what is known. A provider that
    refuses ends the session at once, one that is away after `refresh_trust_s`.
    """
    async with transaction(database) as session:
        row = await queries.provider_session(session, session_id)
        if row is not None and row.due_at > now:
            return True
        due = None if row is None else await _claim(session, session_id, sealing_key=sealing_key, now=now)
        if row is None:  # nobody could ever read its groups again
            await sessions.end(session, session_id, now)
    if due is None:
        return row is not None
    settings = clients.settings
    trusted = now - due.read_at <= timedelta(seconds=settings.refresh_trust_s)
    profile: Profile | None = None
    reason = ""
    if due.registration is None:
        reason = "provider_disabled"
    elif not due.tokens.refresh:
        reason = "" if trusted else "no_refresh_token"
    else:
        profile, reason = await _renewed(clients, due.registration, due, trusted=trusted)
    actor = Actor(ActorKind.PERSON, person_id)
    async with transaction(database) as session:
        if profile is not None:
            reason = await _apply(session, due, profile, actor, sealing_key=sealing_key, settings=settings, now=now)
        if reason:
            await sessions.end(session, session_id, now)
            audit.record(session, actor, "session.end", target_id=session_id, details={"reason": reason})
    return not reason


async def _claim(session: AsyncSession, session_id: UUID, *, sealing_key: bytes, now: datetime) -> _Due | None:
    row = await queries.claim_due(session, session_id, now, now + timedelta(seconds=CLAIM_S))
    if row is None:
        return None
    return _Due(
        row.session_id,
        row.provider_id,
        row.subject,
        _opened(sealing_key, row),
        row.read_at,
        await identity_providers.registration(session, row.provider_id, sealing_key=sealing_key),
    )


async def _renewed(
    clients: Clients, registration: Registration, due: _Due, *, trusted: bool
) -> tuple[Profile | None, str]:
    """Ask the provider; returns a profile, or why the session ends, or neither when to try again later."""
    try:
        return await renew(clients, registration, refresh_token=due.tokens.refresh, subject=due.subject), ""
    except GrantRefusedError:
        return None, "provider_refused"
    except PlatformError as error:
        log.warning("provider_session.not_refreshed", code=error.code, provider_id=due.provider_id.hex)
        if error.kind is ErrorKind.UNAUTHENTICATED:
            return None, "provider_refused"
        return None, "" if trusted else "provider_away"


async def _apply(
    session: AsyncSession,
    due: _Due,
    profile: Profile,
    actor: Actor,
    *,
    sealing_key: bytes,
    settings: Oidc,
    now: datetime,
) -> str:
    """Give what the groups give now; returns why the session ends, if it does."""
    provider = await identity_providers.get(session, due.provider_id)
    row = await queries.provider_session(session, due.session_id)
    if row is None:
        return "provider_disabled"
    row.tokens = _sealed(sealing_key, due.provider_id, profile)
    row.read_at, row.due_at = now, now + timedelta(seconds=settings.refresh_every_s)
    try:
        recognised = await identities.recognise(session, provider, profile, now=now)
    except PlatformError as error:
        person = await people.get(session, actor.id or due.session_id)
        await identities.apply(session, provider, person, Given(), now=now)
        return error.code.lower()
    if recognised.changed:
        audit.record(session, actor, "identity.refresh", target_id=recognised.person.id, details=recognised.changed)
    return ""
