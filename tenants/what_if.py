"""Pure: recorded traffic replayed under other limits, by the rules of the admission script.

What is counted how: rates in 60 buckets a window, each leaving 61 buckets after it began; requests at once from their
admission to their end; spend by calendar day and month of the tenant's time zone. A request takes all it needs or
nothing; the limit that stopped it is the first in the script's order (at once, rates, spend; narrowest level first).
A soft or dark limit counts on a counter of its own and stops nothing.

Where traffic was recorded as sums, the requests of one sum are alike and come together.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from heapq import heappop, heappush
from typing import Protocol
from uuid import UUID

import msgspec

from tenants.limit_merge import SPENDS
from tenants.quotas import WINDOW_S, day_of, month_of
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode

BUCKETS = 60
BUCKET_US = WINDOW_S * 1_000_000 // BUCKETS
HOUR_US = 3_600_000_000
WARM_UP = timedelta(minutes=2)  # what was admitted before can still fill a window
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Traffic(msgspec.Struct, frozen=True, gc=False):
    """Requests of one key for one model that came together: a single one, or a recorded sum.

    Tokens and nano are their sums, `model` is the model's own name; `refused` says that limits refused them.
    """

    at_us: int
    until_us: int  # when they ended; `at_us` where nobody knows, which takes nothing of requests at once
    project_id: UUID
    key_id: UUID
    model: str
    requests: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    nano: int = 0
    refused: bool = False


class Tally(msgspec.Struct):
    """Of some requests: what happened, and what would have."""

    requests: int = 0
    refused_in_fact: int = 0
    refused: int = 0  # under the limits that were tried
    newly_refused: int = 0  # of those that were served
    newly_served: int = 0  # of those that were refused

    def add(self, item: Traffic, passed: int) -> None:
        self.requests += item.requests
        self.refused += item.requests - passed
        if item.refused:
            self.refused_in_fact += item.requests
            self.newly_served += passed
        else:
            self.newly_refused += item.requests - passed


class Outcome(msgspec.Struct):
    """What a replay gives. `passed` is how many requests of each item would have been served."""

    passed: list[int]
    total: Tally
    by_hour: dict[tuple[int, str], Tally]  # by the hour's beginning (Unix µs) and model
    refused_by: dict[Limit, int]  # requests by the limit that stops them
    over: dict[Limit, int]  # requests by the soft or dark limit that they pass


LimitsOf = Callable[[UUID, UUID], Sequence[Limit]]
Spent = Mapping[tuple[UUID, str, LimitMetric], int]
"""Nano spent before the replay in the period in which it begins, by owner's id, model (empty: all) and metric."""


class _Counter(Protocol):
    def held(self, at_us: int) -> int: ...

    def take(self, item: Traffic, amount: int) -> None: ...


_Check = tuple[Limit, _Counter, int]
"""A limit, its counter, and the place of what it counts among requests, input tokens, output tokens and nano."""


class _Rate:
    """A sliding window in buckets."""

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()  # number, amount
        self._sum = 0

    def held(self, at_us: int) -> int:
        gone = at_us // BUCKET_US - BUCKETS - 1
        buckets = self._buckets
        while buckets and buckets[0][0] <= gone:
            self._sum -= buckets.popleft()[1]
        return self._sum

    def take(self, item: Traffic, amount: int) -> None:
        bucket = item.at_us // BUCKET_US
        if self._buckets and self._buckets[-1][0] >= bucket:
            self._buckets[-1][1] += amount
        else:
            self._buckets.append([bucket, amount])
        self._sum += amount


class _AtOnce:
    """Requests that run."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []  # when, how many
        self._held = 0

    def held(self, at_us: int) -> int:
        while self._ends and self._ends[0][0] <= at_us:
            self._held -= heappop(self._ends)[1]
        return self._held

    def take(self, item: Traffic, amount: int) -> None:
        if item.until_us > item.at_us and amount:
            heappush(self._ends, (item.until_us, amount))
            self._held += amount


class Calendar:
    """Which day and month it is in a time zone, asked in the order of time."""

    def __init__(self, tz: str) -> None:
        self._tz = tz
        self._known: dict[LimitMetric, tuple[date, int]] = {}

    def period(self, metric: LimitMetric, at_us: int) -> date | None:
        """Return the first day of the period that a spend is counted in; None for a total."""
        if metric is LimitMetric.SPEND_TOTAL:
            return None
        known = self._known.get(metric)
        if known is None or at_us >= known[1]:
            now = EPOCH + timedelta(microseconds=at_us)
            find = day_of if metric is LimitMetric.SPEND_PER_DAY else month_of
            known = self._known[metric] = find(self._tz, now)
        return known[0]


class _Spend:
    """What was spent in the period it is."""

    def __init__(self, metric: LimitMetric, calendar: Calendar, begin_us: int, spent: int) -> None:
        self._metric = metric
        self._calendar = calendar
        self._period = calendar.period(metric, begin_us)
        self._spent = spent

    def held(self, at_us: int) -> int:
        period = self._calendar.period(self._metric, at_us)
        if period != self._period:
            self._period, self._spent = period, 0
        return self._spent

    def take(self, item: Traffic, amount: int) -> None:  # noqa: ARG002 - counters are alike
        self._spent += amount


class Replay:
    """Counters of one tenant.

    Args:
        tenant_id: whose.
        tz: its time zone.
        limits_of: what holds for a key of a project, narrowest level first.
        spent: what was spent before.
        begin_us: when the first of the traffic came at the earliest, Unix µs.
    """

    def __init__(self, tenant_id: UUID, tz: str, limits_of: LimitsOf, spent: Spent, begin_us: int) -> None:
        self._tenant_id = tenant_id
        self._limits_of = limits_of
        self._spent = spent
        self._begin_us = begin_us
        self._calendar = Calendar(tz)
        self._counters: dict[tuple[UUID, str, LimitMetric, LimitMode], _Counter] = {}
        self._checks: dict[tuple[UUID, UUID, str], list[_Check]] = {}
        self.refused_by: dict[Limit, int] = {}
        self.over: dict[Limit, int] = {}

    def offer(self, item: Traffic, *, counted: bool = True) -> int:
        """Let requests come, later than any before, and return how many pass; not `counted` ones only take."""
        key = (item.project_id, item.key_id, item.model)
        checks = self._checks.get(key)
        if checks is None:
            checks = self._checks[key] = self._checks_of(item)
        sums = (item.requests, item.input_tokens, item.output_tokens, item.nano)
        passed, stopped_by, over = _fit(checks, item, sums)
        if passed:
            whole = passed == item.requests
            for _, counter, what in checks:
                counter.take(item, sums[what] if whole else passed * _each(sums[what], item.requests))
        if counted and stopped_by is not None:
            self.refused_by[stopped_by] = self.refused_by.get(stopped_by, 0) + item.requests - passed
        for limit, fitting in over:
            if counted and passed > fitting:
                self.over[limit] = self.over.get(limit, 0) + passed - fitting
        return passed

    def _checks_of(self, item: Traffic) -> list[_Check]:
        """The limits that apply, in the script's order."""
        applying = [one for one in self._limits_of(item.project_id, item.key_id) if one.model in ("", item.model)]
        return [(limit, self._counter(limit, item), _place(limit.metric)) for limit in sorted(applying, key=_kind)]

    def _counter(self, limit: Limit, item: Traffic) -> _Counter:
        owners = {LimitLevel.KEY: item.key_id, LimitLevel.PROJECT: item.project_id, LimitLevel.TENANT: self._tenant_id}
        owner = owners[limit.level]
        name = (owner, limit.model, limit.metric, limit.mode)
        counter = self._counters.get(name)
        if counter is None:
            if limit.metric in SPENDS:
                spent = self._spent.get((owner, limit.model, limit.metric), 0)
                counter = _Spend(limit.metric, self._calendar, self._begin_us, spent)
            else:
                counter = _AtOnce() if limit.metric is LimitMetric.CONCURRENCY else _Rate()
            self._counters[name] = counter
        return counter


def _each(total: int, requests: int) -> int:
    """What one of so many requests takes, rounded up."""
    return total if requests == 1 else -(-total // requests)


def _fit(
    checks: Iterable[_Check], item: Traffic, sums: tuple[int, ...]
) -> tuple[int, Limit | None, list[tuple[Limit, int]]]:
    """Return how many pass, the hard limit that stops the others, and how many fit tighter soft and dark ones."""
    passed, stopped_by = item.requests, None
    over: list[tuple[Limit, int]] = []
    for limit, counter, what in checks:
        each = _each(sums[what], item.requests)
        room = limit.amount - counter.held(item.at_us)
        if not each or room >= each * passed:
            continue
        fitting = max(0, room // each)
        if limit.mode is not LimitMode.HARD:
            over.append((limit, fitting))
            continue
        passed, stopped_by = fitting, limit
        if not passed:
            break
    return passed, stopped_by, over


def _kind(limit: Limit) -> int:
    """The script checks what runs at once first, then rates, then spend; within each narrowest first, as given."""
    if limit.metric is LimitMetric.CONCURRENCY:
        return 0
    return 2 if limit.metric in SPENDS else 1


def _place(metric: LimitMetric) -> int:
    """Which of requests, input tokens, output tokens and nano a limit counts."""
    if metric is LimitMetric.INPUT_TOKENS_PER_MINUTE:
        return 1
    if metric is LimitMetric.OUTPUT_TOKENS_PER_MINUTE:
        return 2
    return 3 if metric in SPENDS else 0


def run(replay: Replay, traffic: Iterable[Traffic], since_us: int) -> Outcome:
    """Replay traffic in the order of time; what came before `since_us` fills the counters and is not told."""
    passed_all: list[int] = []
    total, by_hour = Tally(), dict[tuple[int, str], Tally]()
    for item in traffic:
        counted = item.at_us >= since_us
        passed = replay.offer(item, counted=counted)
        passed_all.append(passed)
        if counted:
            total.add(item, passed)
            by_hour.setdefault((item.at_us - item.at_us % HOUR_US, item.model), Tally()).add(item, passed)
    return Outcome(passed_all, total, by_hour, replay.refused_by, replay.over)
