"""The secrets of API keys: made, replaced with an overlap, stored again under a new pepper when met under an old one.

Stored is only a digest. A secret that was met under several peppers has a row for each; they end together.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.ids import new_uuid
from tenants import credentials
from tenants import key_queries as queries
from tenants.credentials import API_KEY_PREFIX, Peppers, pepper_id
from tenants.errors import invalid
from tenants.key_types import PepperUse
from tenants.tables import ApiKeySecretRow

VISIBLE_PREFIX = len(API_KEY_PREFIX) + 4
OVERLAP_MAX = timedelta(days=30)

digest = credentials.digest


def mint() -> str:
    """Return a fresh key: ``tg_``, 40 random base62 characters, 6 of their CRC-32."""
    return credentials.mint(API_KEY_PREFIX)


def well_formed(text: str) -> bool:
    """Say offline whether `text` can be a key of ours; a typo is not."""
    return credentials.well_formed(API_KEY_PREFIX, text)


def add(
    session: AsyncSession,
    tenant_id: UUID,
    key_id: UUID,
    *,
    pepper: bytes,
    secret: str | None = None,
    now: datetime | None = None,
) -> str:
    """Give the key one more secret, in the open transaction, and return it."""
    secret = mint() if secret is None else secret
    if not well_formed(secret):
        raise ValueError("an API key is made by mint()")
    row = ApiKeySecretRow(
        digest=digest(pepper, secret),
        id=new_uuid(),
        tenant_id=tenant_id,
        key_id=key_id,
        prefix=secret[:VISIBLE_PREFIX],
        last4=secret[-4:],
        pepper_id=pepper_id(pepper),
    )
    if now is not None:
        row.created_at = now
    session.add(row)
    return secret


async def replace(
    session: AsyncSession, tenant_id: UUID, key_id: UUID, *, pepper: bytes, overlap: timedelta, now: datetime
) -> str:
    """Add a secret to a locked key. The newest one before it works for `overlap` longer, the others end now.

    Raises:
        PlatformError: invalid for an overlap below 0 or above `OVERLAP_MAX`.
    """
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise invalid("overlap_s", f"The overlap is 0 seconds to {OVERLAP_MAX.days} days.")
    living = {
        row.id: row
        for row in await queries.secrets(session, tenant_id, [key_id])
        if row.revoked_at is None and (row.expires_at is None or row.expires_at > now)
    }
    kept = list(living)[-1:] if overlap else []
    for secret_id in kept:
        ends = min(living[secret_id].expires_at or now + overlap, now + overlap)
        await queries.end_secrets(session, tenant_id, key_id, [secret_id], expires_at=ends)
    await queries.end_secrets(session, tenant_id, key_id, living.keys() - set(kept), revoked_at=now)
    return add(session, tenant_id, key_id, pepper=pepper, now=now)


async def rehash(session: AsyncSession, pairs: Mapping[bytes, bytes], pepper_name: str) -> int:
    """Store secrets that were met by an old digest under the current pepper's too; return how many were new.

    The old digest stays: a process that was not restarted yet knows the old pepper alone.
    """
    if not pairs:
        return 0
    keys = await queries.rehash(session, pairs, pepper_name)
    for key_id in keys:
        await record_config_change(session, "api_key", key_id)
    return len(keys)


async def pepper_use(session: AsyncSession, peppers: Peppers) -> Sequence[PepperUse]:
    """Return, pepper by pepper, what would stop working without it: the current one first, unknown ones last."""
    keys = await queries.secrets_by_pepper(session, peppers.ids)
    tokens = await queries.operator_tokens_by_pepper(session, peppers.ids)
    current, *_ = ids = peppers.ids
    others = sorted((keys.keys() | tokens.keys()) - set(ids))
    return [
        PepperUse(name, name == current, name in ids, keys.get(name, 0), tokens.get(name, 0))
        for name in (*ids, *others)
    ]
