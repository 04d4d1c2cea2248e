"""Spools known to the books: each poster reports what it follows, so that a lost disk or host is seen, and in time."""

import asyncio
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import orphans, spool_queries
from core.db import Sessions, transaction


class SpoolReport(msgspec.Struct, frozen=True):
    """What a poster last saw of a spool. Counts are at least so many where a backlog is long."""

    host: str
    name: str
    replica: str
    live: bool
    unposted_bytes: int
    events: int
    tenants: int
    oldest_at: datetime | None
    reported_at: datetime


async def report(sessions: Sessions, spool_dir: Path, now: datetime) -> None:
    """Write down the spools of this host as they are now. The files are read beside the loop."""
    found = await asyncio.to_thread(_look, spool_dir)
    async with transaction(sessions) as session:
        await spool_queries.put(session, socket.gethostname(), found, now)


def _look(spool_dir: Path) -> list[tuple[orphans.SpoolState, orphans.Contents]]:
    states = orphans.list_spools(spool_dir)
    return [(state, orphans.contents(spool_dir / state.name)) for state in states]


async def all_of(session: AsyncSession) -> list[SpoolReport]:
    """Return what is known of every spool, those with usage that is not posted first."""
    return [_report(row) for row in await spool_queries.reports(session)]


def _report(row: Row[Any]) -> SpoolReport:
    return SpoolReport(**{name: getattr(row, name) for name in SpoolReport.__struct_fields__})


def blocking(reports: Sequence[SpoolReport], end: datetime) -> list[str]:
    """Return why a month that ended then may miss usage that is on a disk: one line per spool. Pure.

    A spool that was adopted elsewhere is judged by the copy.
    """
    copied = {one.name.split("-", 1)[1].rsplit("-", 1)[0] for one in reports if one.name.startswith("adopted-")}
    found = []
    for one in reports:
        name = f"{one.name} of {one.host}"
        if one.name in copied and one.reported_at < end:
            continue
        if one.events and (one.oldest_at is None or one.oldest_at < end):
            since = (
                "" if one.oldest_at is None else f", the oldest of {one.oldest_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
            )
            found.append(f"{name}: {one.events:,} events are not posted{since}")
        elif one.live and one.reported_at < end:
            heard = _minute(one.reported_at)
            found.append(f"{name}: a gateway wrote to it, and nothing was heard of it since {heard}")
    return found


def _minute(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
