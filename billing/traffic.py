"""A tenant's usage as traffic, for whoever asks what other limits would have done."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import traffic_queries as queries
from core.money import nano_up

DAY = timedelta(days=1)
MINUTE = timedelta(minutes=1)


class Served(msgspec.Struct, frozen=True, gc=False):
    """Requests of one key on one model: a single one, or with `by_minute` all that were admitted in one minute.

    `came_at` is when a request stood at the door: its admission less its time in the queue. Tokens and nano are sums.
    """

    came_at: datetime
    ended_at: datetime
    project_id: UUID
    key_id: UUID
    model_id: UUID
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    nano: int
    by_minute: bool = False


class Recorded(msgspec.Struct, frozen=True):
    """What is known, oldest day first, in no order within a day. What came before `since` is left out."""

    since: datetime
    served: list[Served]


class Spent(msgspec.Struct, frozen=True):
    """What one key spent on one model."""

    project_id: UUID
    key_id: UUID
    model_id: UUID
    nano: int


async def recorded(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, rows_max: int
) -> Recorded:
    """Return what was served, as far as it is posted, the newest at most `rows_max` rows.

    A day is told request by request; by the minute where its events are no longer kept or would be too many. Where
    minutes are too many as well the oldest are left out, and `since` of the answer is later than asked for.

    Args:
        session: reads.
        tenant_id: whose.
        since: a whole minute, included.
        until: a whole minute, not included.
        rows_max: how much to return.
    """
    counted = await queries.requests_by_day(session, tenant_id, since, until)
    left = rows_max
    days: list[list[Served]] = []
    for day in sorted(counted, reverse=True):
        begin, end = max(since, _begin(day)), min(until, _begin(day + DAY))
        found: list[Served] = []
        if counted[day] <= left:
            found = [_event(row) for row in await queries.events(session, tenant_id, begin, end, left)]
        if len(found) < counted[day]:
            rows = list(await queries.minutes(session, tenant_id, begin, end, left + 1))
            if len(rows) > left:
                since = rows[-1].minute + MINUTE  # that minute may not be whole
            found = [_minute(row) for row in rows if row.minute >= since]
        days.append(found)
        left -= len(found)
        if since > begin:
            break
    return Recorded(since, [one for found in reversed(days) for one in found])


def _begin(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _event(row: Row[Any]) -> Served:
    return Served(
        row.admitted_at - timedelta(microseconds=row.queue_us),
        row.ended_at,
        row.project_id,
        row.key_id,
        row.model_id,
        row.model,
        1,
        row.input,
        row.output,
        nano_up(row.amount_pico),
    )


def _minute(row: Row[Any]) -> Served:
    return Served(
        row.minute,
        row.minute + MINUTE,
        row.project_id,
        row.key_id,
        row.model_id,
        row.model,
        row.requests,
        row.input,
        row.output,
        nano_up(int(row.amount_pico)),
        by_minute=True,
    )


async def spent(session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime) -> list[Spent]:
    """Return what the tenant's keys spent in this time, to the minute, by model; nano, rounded up for each."""
    rows = await queries.spent(session, tenant_id, since, until)
    return [Spent(row.project_id, row.key_id, row.model_id, nano_up(int(row.amount_pico))) for row in rows]
