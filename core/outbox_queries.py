"""The SQL of the outbox."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

_INSERT = text("INSERT INTO outbox (task, arguments) VALUES (:task, cast(:arguments AS jsonb)) RETURNING id")
# Sent rows come again after 5, 10, 20 … seconds, at most an hour, until done or given up. A row at work is locked.
_CLAIM = text(
    """
    UPDATE outbox SET sent_at = :now, attempts = attempts + 1
    WHERE id IN (
        SELECT id FROM outbox
        WHERE done_at IS NULL AND attempts < :attempts_max
          AND (sent_at IS NULL OR sent_at + least(5 * 2 ^ (attempts - 1), 3600) * interval '1 second' <= :now)
        ORDER BY id LIMIT :most FOR UPDATE SKIP LOCKED
    )
    RETURNING id
    """
)
_OPEN = text("SELECT task, arguments FROM outbox WHERE id = :id AND done_at IS NULL FOR UPDATE SKIP LOCKED")
_DONE = text("UPDATE outbox SET done_at = :now, last_error = NULL WHERE id = :id")
_FAILED = text("UPDATE outbox SET last_error = :error WHERE id = :id AND done_at IS NULL RETURNING task, attempts")
_COUNT = text(
    """
    SELECT count(*) FILTER (WHERE attempts < :attempts_max), count(*) FILTER (WHERE attempts >= :attempts_max)
    FROM outbox WHERE done_at IS NULL
    """
)
_PRUNE = text("DELETE FROM outbox WHERE id IN (SELECT id FROM outbox WHERE done_at < :before ORDER BY id LIMIT :most)")


async def insert(session: AsyncSession, task: str, arguments: Mapping[str, Any]) -> int:
    row = await session.execute(_INSERT, {"task": task, "arguments": orjson.dumps(dict(arguments)).decode()})
    identity: int = row.scalar_one()
    return identity


async def claim(session: AsyncSession, now: datetime, attempts_max: int, most: int) -> Sequence[int]:
    rows = await session.execute(_CLAIM, {"now": now, "attempts_max": attempts_max, "most": most})
    return sorted(rows.scalars().all())


async def lock_open(session: AsyncSession, row_id: int) -> tuple[str, Mapping[str, Any]] | None:
    """Return task and arguments of a row that waits, locked; None when done or being done."""
    row = (await session.execute(_OPEN, {"id": row_id})).one_or_none()
    return None if row is None else (row.task, row.arguments)


async def mark_done(session: AsyncSession, row_id: int, now: datetime) -> None:
    await session.execute(_DONE, {"id": row_id, "now": now})


async def mark_failed(session: AsyncSession, row_id: int, error: str) -> tuple[str, int] | None:
    """Return task and attempts so far."""
    row = (await session.execute(_FAILED, {"id": row_id, "error": error})).one_or_none()
    return None if row is None else (row.task, row.attempts)


async def count(session: AsyncSession, attempts_max: int) -> tuple[int, int]:
    """Return how many rows wait, and how many were given up."""
    row = (await session.execute(_COUNT, {"attempts_max": attempts_max})).one()
    return row[0], row[1]


async def prune(session: AsyncSession, before: datetime, most: int) -> None:
    await session.execute(_PRUNE, {"before": before, "most": most})
