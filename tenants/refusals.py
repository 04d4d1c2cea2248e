"""Refusals: what was not served, and which soft and dark limits were passed, as sums by second. Gateways write them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import Sessions, transaction
from tenants import refusal_queries as queries

DAYS_AHEAD = 3
KEEP_DAYS = 35  # a whole month can be replayed
NOBODY = UUID(int=0)  # in place of ids that a gateway had no room to keep apart
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Refusal(msgspec.Struct, gc=False):
    """Requests of one key for one model that met one limit in one second (or minute, where `span_s` is 60).

    `code` is the error that the caller got, or would have got; `level` and `metric` name the limit, `limit_model` is
    empty for one over all models. `mode` says what became of the requests: hard ones were refused, the others served.
    Tokens are estimates at the door, summed.
    """

    id: UUID
    at_s: int  # Unix seconds, the beginning
    span_s: int
    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    model_id: UUID
    model: str
    code: str
    level: str
    metric: str
    limit_model: str
    mode: str
    requests: int
    input_tokens: int
    output_tokens: int
    sample_request_id: UUID


class HourOfRefusals(msgspec.Struct, frozen=True):
    """The same summed by hour over all keys, with one request as a sample."""

    hour: datetime
    model: str
    code: str
    level: str
    metric: str
    limit_model: str
    mode: str
    requests: int
    input_tokens: int
    output_tokens: int
    sample_request_id: UUID


async def write(session: AsyncSession, found: Sequence[Refusal]) -> None:
    """Insert what one gateway counted. Again is the same as once: a row is known by its id."""
    rows = [
        (
            one.id,
            EPOCH + timedelta(seconds=one.at_s),
            one.span_s,
            one.tenant_id,
            one.project_id,
            one.key_id,
            one.model_id,
            one.model,
            one.code,
            one.level,
            one.metric,
            one.limit_model,
            one.mode,
            one.requests,
            one.input_tokens,
            one.output_tokens,
            one.sample_request_id,
        )
        for one in found
    ]
    if rows:
        for day in sorted({at.date() for _, at, *_ in rows}):
            await queries.ensure_partition(session, day)
        await queries.insert(session, rows)


async def roll_partitions(sessions: Sessions, clock: Clock) -> int:
    """Make the partitions of the days ahead and drop those beyond `KEEP_DAYS`; returns how many were dropped."""
    today = clock.now().astimezone(UTC).date()
    for ahead in range(DAYS_AHEAD + 1):
        async with transaction(sessions) as session:
            await queries.ensure_partition(session, today + timedelta(days=ahead))
    async with transaction(sessions) as session:
        return await queries.drop_partitions(session, today - timedelta(days=KEEP_DAYS))


class SecondOfRefusals(msgspec.Struct, frozen=True, gc=False):
    """The same over all gateways: what met one limit in one second, or one minute where `span_s` is 60."""

    at: datetime
    span_s: int
    project_id: UUID
    key_id: UUID
    model_id: UUID
    model: str
    code: str
    level: str
    metric: str
    limit_model: str
    mode: str
    requests: int
    input_tokens: int
    output_tokens: int


async def by_second(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, limit: int
) -> list[SecondOfRefusals]:
    """Return at most `limit` sums, the newest first."""
    rows = await queries.by_second(session, tenant_id, since, until, limit)
    return [SecondOfRefusals(*row) for row in rows]


async def by_limit(
    session: AsyncSession, tenant_id: UUID, since: datetime, *, project_id: UUID, key_id: UUID | None
) -> dict[tuple[str, str, str, str], int]:
    """Return how many requests met a limit since then, by level, metric, model and mode of the limit.

    Those of level key are counted for `key_id`, or without one for all keys of the project.
    """
    rows = await queries.by_limit(session, tenant_id, since, project_id, key_id)
    return {(row.level, row.metric, row.limit_model, row.mode): row.requests for row in rows}


async def by_hour(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, limit: int
) -> list[HourOfRefusals]:
    """Return at most `limit` sums, the newest hour first; a tenant's refusals of the last second may be missing."""
    rows = await queries.by_hour(session, tenant_id, since, until, limit)
    return [HourOfRefusals(*row) for row in rows]
