"""Queries of what posters report of their spools. They are hosts', not tenants'."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.orphans import Contents, SpoolState

REPORTS_MAX = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def put(session: AsyncSession, host: str, found: Sequence[tuple[SpoolState, Contents]], now: datetime) -> None:
    """Set the reports of these spools of a host; others stay as they were heard of last."""
    statement = """
        INSERT INTO spool_report (host, name, replica, live, unposted_bytes, events, tenants, oldest_at, reported_at)
        VALUES (:host, :name, :replica, :live, :bytes, :events, :tenants, :oldest, :now)
        ON CONFLICT (host, name) DO UPDATE SET replica = excluded.replica, live = excluded.live,
            unposted_bytes = excluded.unposted_bytes, events = excluded.events, tenants = excluded.tenants,
            oldest_at = excluded.oldest_at, reported_at = excluded.reported_at
    """
    rows = [
        {
            "host": host[:255],
            "name": state.name[:255],
            "replica": state.replica,
            "live": state.live,
            "bytes": state.unposted_bytes,
            "events": inside.events,
            "tenants": inside.tenants,
            "oldest": None if inside.oldest_us is None else _EPOCH + timedelta(microseconds=inside.oldest_us),
            "now": now,
        }
        for state, inside in found
    ]
    if rows:
        await session.execute(text(statement), rows)


async def reports(session: AsyncSession) -> Sequence[Row[Any]]:
    """Return the reports, those of spools with events that are not posted first, then the newest."""
    statement = """
        SELECT * FROM spool_report ORDER BY events = 0, reported_at DESC, host, name LIMIT :page
    """
    return (await session.execute(text(statement), {"page": REPORTS_MAX})).all()
