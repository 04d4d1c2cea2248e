"""Days of usage events: made ahead, closed and dropped by policy, with what they came to kept, proven and chained.

A day goes when it is older than the policy keeps it, its months are closed, its transactions sealed, nothing of it
waits in quarantine, and the whole of the books was verified in the transaction that drops it. It is closed before that:
it takes no more events, and usage of that day that turns up later goes to quarantine, because nobody can tell any more
whether it was posted. What stays are the rollup by minute, and what the dropped events came to by transaction and by
minute, which cannot change any more. `verify` proves the rest of the books with that.
"""

from datetime import UTC, date, datetime, timedelta

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import day_chain, verify, verify_queries
from billing import usage_day_queries as queries
from billing.seals import SealHead
from billing.verify import Finding
from core.db import Sessions, transaction
from core.logging import get_logger
from tenants import audit
from tenants.types import SYSTEM

DROPPED_MAX = 31  # days of one run
_log = get_logger(__name__)


class Day(msgspec.Struct, frozen=True):
    """A day older than the policy keeps. `hindrance`: why it stays; empty when it may go."""

    day: date
    hindrance: str


class Dropped(msgspec.Struct, frozen=True):
    """A day whose events are gone."""

    day: date
    events: int
    hash: bytes


async def due(session: AsyncSession, now: datetime, keep_days: int) -> list[Day]:
    """Return the days that the policy no longer keeps, the earliest first, at most of one run; 0 keeps for ever."""
    if not keep_days:
        return []
    last = now.astimezone(UTC).date() - timedelta(days=keep_days)
    found = [day for day in await queries.days(session) if day < last][:DROPPED_MAX]
    return [Day(day, await _hindrance(session, day)) for day in found]


async def is_dropped(session: AsyncSession, day: date) -> bool:
    """Whether the events of that day are no longer kept."""
    return any(row.state == "dropped" for row in await queries.known(session, [day]))


async def _hindrance(session: AsyncSession, day: date) -> str:
    row = await queries.hindrances(session, day)
    if row.open:
        return f"{row.open} transactions are in a month that is not closed"
    if row.unsealed:
        return f"{row.unsealed} transactions are not sealed"
    return f"{row.undecided} usage events wait in quarantine" if row.undecided else ""


async def drop_due(
    sessions: Sessions, now: datetime, keep_days: int, by: str, *, anchor: SealHead
) -> tuple[list[Dropped], list[Day], Finding | None]:
    """Drop the days that are due, or none of them when the books are not right, also against the home's `anchor`.

    Returns:
        what was dropped; what is due and stays, and why; and the wrong row, if there is one.
    """
    async with transaction(sessions) as session:
        await verify_queries.allow_time(session)
        found = await due(session, now, keep_days)
        for one in found:
            if not one.hindrance:
                await queries.close(session, one.day)
    free = [one.day for one in found if not one.hindrance]
    staying = [one for one in found if one.hindrance]
    if not free:
        return [], staying, None
    async with transaction(sessions) as session:
        await verify_queries.freeze(session, read_only=False)
        wrong = await verify.check(session, anchor)
        if wrong is not None:
            return [], staying, wrong
        dropped = [await _drop(session, day, now) for day in free]
        for gone in dropped:
            details = {"day": f"{gone.day}", "events": gone.events, "hash": gone.hash.hex(), "by": by}
            audit.record(session, SYSTEM, "usage_day.drop", details=details)
    for gone in dropped:
        _log.info("usage.day_dropped", day=f"{gone.day}", events=gone.events, hash=gone.hash.hex())
    return dropped, staying, None


async def _drop(session: AsyncSession, day: date, now: datetime) -> Dropped:
    before = await day_chain.head(session)
    seq = before.seq + 1
    events = await queries.keep_sums(session, day)
    kept = await day_chain.kept_digest(session, day)
    chained = day_chain.day_hash(seq, day, events, kept, before.hash)
    await queries.mark_dropped(session, day, now, seq=seq, events=events, kept=kept, prev=before.hash, sha256=chained)
    await queries.drop(session, day)
    return Dropped(day, events, chained)
