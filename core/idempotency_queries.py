"""The SQL of kept answers."""

from datetime import datetime
from typing import Any

from sqlalchemy import CursorResult, Row, text
from sqlalchemy.ext.asyncio import AsyncSession

_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:number)")
_FIND = text("SELECT fingerprint, status, sealed FROM idempotency_answer WHERE digest = :digest AND expires_at > :now")
_INSERT = text(
    """
    INSERT INTO idempotency_answer AS a (digest, fingerprint, status, sealed, expires_at)
    VALUES (:digest, :fingerprint, :status, :sealed, :expires)
    ON CONFLICT (digest) DO UPDATE SET fingerprint = excluded.fingerprint, status = excluded.status,
        sealed = excluded.sealed, expires_at = excluded.expires_at
    WHERE a.expires_at <= :now
    """
)
_FORGET = text(
    """
    DELETE FROM idempotency_answer WHERE digest IN (
        SELECT digest FROM idempotency_answer WHERE expires_at <= :now ORDER BY expires_at LIMIT :most
        FOR UPDATE SKIP LOCKED
    )
    """
)


async def try_lock(session: AsyncSession, number: int) -> bool:
    """Take a lock of this transaction, which waits for nobody; tells whether it is ours."""
    taken: bool = (await session.execute(_TRY_LOCK, {"number": number})).scalar_one()
    return taken


async def find(session: AsyncSession, digest: bytes, now: datetime) -> Row[Any] | None:
    return (await session.execute(_FIND, {"digest": digest, "now": now})).one_or_none()


async def insert(  # noqa: PLR0917 - the columns
    session: AsyncSession,
    digest: bytes,
    fingerprint: bytes,
    status: int,
    sealed: bytes,
    expires: datetime,
    now: datetime,
) -> bool:
    """Keep an answer, in the place of one that expired; tells whether it is kept."""
    values = {
        "digest": digest,
        "fingerprint": fingerprint,
        "status": status,
        "sealed": sealed,
        "expires": expires,
        "now": now,
    }
    result = await session.execute(_INSERT, values)
    assert isinstance(result, CursorResult)  # noqa: S101 - what an INSERT returns
    return bool(result.rowcount == 1)


async def forget(session: AsyncSession, now: datetime, most: int) -> int:
    """Delete answers that expired, at most so many; returns how many."""
    result = await session.execute(_FORGET, {"now": now, "most": most})
    assert isinstance(result, CursorResult)  # noqa: S101 - what a DELETE returns
    return int(result.rowcount)
