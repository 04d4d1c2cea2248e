"""What other limits would have done: recorded traffic, loaded from books and refusals, replayed in a thread."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy.ext.asyncio import AsyncSession

from billing import traffic
from catalog import models
from core.errors import ErrorKind, PlatformError
from tenants import proposals, quotas, recorded, refusals
from tenants.limit_merge import SPENDS, LimitBook
from tenants.proposals import Proposal
from tenants.recorded import Sum
from tenants.types import LimitMetric, LimitRule, Tenant
from tenants.what_if import EPOCH, WARM_UP, Outcome, Replay, Tally, Traffic, run

ROWS_MAX = 100_000  # of traffic, over all tenants of one question
REFUSALS_MAX = 50_000  # of one tenant
TENANTS_MAX = 200
SPAN_MAX = timedelta(days=31)
SPAN_DEFAULT = timedelta(days=7)
MINUTE = timedelta(minutes=1)
_LIMIT_CODES = frozenset(
    {quotas.RATE_LIMITED, quotas.TOKENS_LIMITED, quotas.CONCURRENCY_LIMITED, quotas.BUDGET_EXCEEDED}
)

Fact = tuple[str, str, str, str, str]
"""Code, level, metric, model of the limit, mode."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Of one tenant: what was, and what the proposed limits would have done. `since` is how far back it goes."""

    tenant: Tenant
    since: datetime
    rows: int
    by_minute: int  # requests that are known by the minute only
    outcome: Outcome
    now: Tally  # the same replay under the limits in force: how far it can be trusted
    in_fact: Mapping[Fact, int]
    otherwise: int  # requests refused for money or capacity, which are not replayed


def span(since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """Return the time to replay, in whole minutes; the minute that runs is in it.

    Raises:
        PlatformError: INVALID_RANGE.
    """
    until = _minute(min(until or now, now) + MINUTE - timedelta(microseconds=1))
    since = _minute(since or until - SPAN_DEFAULT)
    if not timedelta() < until - since <= SPAN_MAX:
        message = f"The time to replay lies in the past and is {SPAN_MAX.days} days at most."
        raise PlatformError("INVALID_RANGE", ErrorKind.INVALID, message, param="since")
    return since, until


def _minute(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(second=0, microsecond=0)


async def preview(
    session: AsyncSession,
    tenants: Sequence[Tenant],
    wanted: Sequence[Proposal],
    since: datetime,
    until: datetime,
) -> list[Preview]:
    """Replay each tenant's traffic; those for which there is no room any more are left out."""
    names = {model.id: model.name for model in await models.list_models(session)}
    room, found = ROWS_MAX, []
    for tenant in tenants:
        if room <= 0:
            break
        rules = await proposals.rules_of(session, tenant)
        tried = proposals.applied(rules, wanted)
        trace = await _load(session, tenant, since, until, names=names, room=room)
        if any(rule.slot.metric in SPENDS for rule in (*rules, *tried)):
            trace.spent = await _spent(session, tenant, trace.begin, names)
        found.append(await asyncio.to_thread(_replay, tenant, trace, rules, tried))
        room -= trace.rows
    return found


@dataclass(slots=True)
class _Trace:
    """What is recorded of one tenant, from `begin`; told is what came from `since` on."""

    begin: datetime
    since: datetime
    served: list[traffic.Served]
    refused: list[refusals.SecondOfRefusals]
    names: Mapping[UUID, str]
    spent: dict[tuple[UUID, str, LimitMetric], int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.served) + len(self.refused)


async def _load(
    session: AsyncSession, tenant: Tenant, since: datetime, until: datetime, *, names: Mapping[UUID, str], room: int
) -> _Trace:
    """Load what is recorded, the newest that there is room for, and a little before it that fills the windows."""
    begin = since - WARM_UP
    known = await traffic.recorded(session, tenant.id, begin, until, rows_max=room)
    refused = await refusals.by_second(session, tenant.id, known.since, until, limit=REFUSALS_MAX)
    served, start = known.served, known.since
    if len(refused) == REFUSALS_MAX:
        start = refused[-1].at.replace(second=0) + MINUTE
        refused = [one for one in refused if one.at >= start]
        served = [one for one in served if one.came_at >= start]
    return _Trace(start, max(start, since), served, refused, names)


async def _spent(
    session: AsyncSession, tenant: Tenant, begin: datetime, names: Mapping[UUID, str]
) -> dict[tuple[UUID, str, LimitMetric], int]:
    """What was spent before in the day and month it is then, and ever, of every key, project and model."""
    zone = ZoneInfo(tenant.tz)
    day, month = quotas.day_of(tenant.tz, begin)[0], quotas.month_of(tenant.tz, begin)[0]
    sums: dict[tuple[UUID, str, LimitMetric], int] = {}
    for metric, start in (
        (LimitMetric.SPEND_PER_DAY, datetime.combine(day, time(), zone)),
        (LimitMetric.SPEND_PER_MONTH, datetime.combine(month, time(), zone)),
        (LimitMetric.SPEND_TOTAL, EPOCH),
    ):
        for one in await traffic.spent(session, tenant.id, start.astimezone(UTC), begin):
            for owner in (one.key_id, one.project_id, tenant.id):
                for model in ("", names.get(one.model_id, "")):
                    key = (owner, model, metric)
                    sums[key] = sums.get(key, 0) + one.nano
    return sums


def _us(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def _replay(tenant: Tenant, trace: _Trace, rules: Sequence[LimitRule], tried: Sequence[LimitRule]) -> Preview:
    """Compute; takes seconds where there is much."""
    items = _items(trace)
    since_us = _us(trace.since)

    def under(chosen: Sequence[LimitRule]) -> Outcome:
        book = LimitBook(chosen)
        replay = Replay(
            tenant.id,
            tenant.tz,
            lambda project_id, key_id: book.limits(tenant.plan_id, tenant.id, project_id, key_id),
            trace.spent,
            _us(trace.begin),
        )
        return run(replay, items, since_us)

    in_fact: dict[Fact, int] = {}
    otherwise = 0
    for one in trace.refused:
        if one.at >= trace.since and one.code in _LIMIT_CODES:
            fact = (one.code, one.level, one.metric, one.limit_model, one.mode)
            in_fact[fact] = in_fact.get(fact, 0) + one.requests
        elif one.at >= trace.since:
            otherwise += one.requests
    return Preview(
        tenant,
        trace.since,
        trace.rows,
        sum(one.requests for one in trace.served if one.by_minute and one.came_at >= trace.since),
        under(tried),
        under(rules).total,
        in_fact,
        otherwise,
    )


def _items(trace: _Trace) -> list[Traffic]:
    """The traffic to replay, in the order in which it came."""
    items: list[Traffic] = []
    for one in trace.served:
        model, at_us = trace.names.get(one.model_id, one.model), _us(one.came_at)
        if one.by_minute:
            sums = (one.requests, one.input_tokens, one.output_tokens, one.nano)
            items += recorded.spread(Sum(at_us, recorded.MINUTE_US, one.project_id, one.key_id, model, *sums))
        else:
            sums = (one.requests, one.input_tokens, one.output_tokens, one.nano)
            items.append(Traffic(at_us, _us(one.ended_at), one.project_id, one.key_id, model, *sums))
    means = recorded.means_of(items)
    for found in trace.refused:
        if found.mode == "hard" and found.code in _LIMIT_CODES:
            model, span_us = trace.names.get(found.model_id, found.model), found.span_s * recorded.SECOND_US
            sums = (found.requests, found.input_tokens, found.output_tokens, 0)
            one_sum = Sum(_us(found.at), span_us, found.project_id, found.key_id, model, *sums)
            items += recorded.refused(one_sum, means)
    items.sort(key=lambda item: item.at_us)
    return items
