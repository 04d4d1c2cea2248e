"""Counts refusals by second, key, model and limit, and writes the sums to Postgres beside the traffic.

Nothing here is touched by a request that passes all its limits. Memory is bounded: what finds no room is counted under
nobody's name, and what cannot be written for long is summed by minute, then dropped, oldest first, and counted.
"""

import asyncio
from collections.abc import Callable, Iterable
from uuid import UUID

import structlog
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from api.inference import estimate
from api.inference.job import Job
from billing.posting import refuses_values
from core.clock import Clock
from core.db import Sessions, transaction
from core.demand import Demand
from core.errors import PlatformError
from scheduler.refusals import metric_of
from tenants import refusals
from tenants.refusals import NOBODY, Refusal

SECOND_MAX = 500  # kinds of refusals of one second that are kept apart
ENTRIES_MAX = 20_000  # not handed to the writer yet
PENDING_MAX = 20_000  # not written yet
BATCH = 1000
WRITE_EVERY_S = 1.0
WRITE_TIMEOUT_S = 5.0
LAST_WRITE_S = 2.0
COARSE_S = 60
SECOND_US = 1_000_000

# What a request is refused with before it reaches an engine, and the limit where the error does not name one.
_LIMIT_OF_CODE = {
    "RATE_LIMITED": ("", ""),
    "TOKENS_LIMITED": ("", ""),
    "CONCURRENCY_LIMITED": ("", ""),
    "BUDGET_EXCEEDED": ("", ""),
    "INSUFFICIENT_CREDIT": ("tenant", "credit"),
    "MODEL_BUSY": ("model", "capacity"),
    "MODEL_LOADING": ("model", "capacity"),
    "SERVICE_UNAVAILABLE": ("platform", "capacity"),
}

_log = structlog.get_logger("gateway")

Key = tuple[int | str, ...]
Count = Callable[[str, int], None]


class Refusals:
    """What was refused here and is not written yet."""

    def __init__(self, clock: Clock, new_id: Callable[[], UUID], count: Count) -> None:
        self._clock = clock
        self._new_id = new_id
        self._count = count
        self._second = 0
        self._room = SECOND_MAX
        self._entries: dict[Key, Refusal] = {}

    def note(self, job: Job, error: PlatformError) -> None:
        """Count a request that ended with `error`, when that is a refusal of limits, money or capacity."""
        limit = _LIMIT_OF_CODE.get(error.code)
        if limit is None or job.relay is not None or job.principal is None or not hasattr(job, "offer"):
            return
        named = error.fields
        level, metric = str(named.get("level", limit[0])), str(named.get("metric", limit[1]))
        self._add(job, error.code, level, metric, "hard", of_model=bool(named.get("model")))

    def note_over(self, job: Job, over: Iterable[Demand]) -> None:
        """Count a request that was let in although it passed these soft or dark limits."""
        for demand in over:
            level, _, rest = demand.counter.partition(":")
            mode = "dark" if rest.endswith(":dark") else "soft"
            of_model = ":m:" in rest.partition(":spend:")[0]
            self._add(job, demand.refusal, level, metric_of(demand).value, mode, of_model=of_model)

    def _add(self, job: Job, code: str, level: str, metric: str, mode: str, *, of_model: bool) -> None:
        second = self._clock.now_us() // SECOND_US
        if second != self._second:
            self._second, self._room = second, SECOND_MAX
        offer = job.offer
        principal, model = offer.principal, offer.model
        limit_model = (model.model_name or model.name) if of_model else ""
        key: Key = (second, principal.key_id.int, model.name, code, level, metric, limit_model, mode)
        entry = self._entries.get(key)
        if entry is None and len(self._entries) >= ENTRIES_MAX:
            self._count("refusals_dropped_total", 1)
            return
        if entry is None and self._room > 0:
            self._room -= 1
            ids = (principal.tenant_id, principal.project_id, principal.key_id, model.model_id)
            entry = self._new(key, ids, model.name, (code, level, metric, limit_model, mode), job.id)
        elif entry is None:
            self._count("refusals_crowded_total", 1)
            key = (second, 0, "", code, mode)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._new(key, (NOBODY,) * 4, "", (code, "", "", "", mode), job.id)
        entry.requests += 1
        entry.input_tokens += estimate.prompt_tokens(job.call, model)
        entry.output_tokens += estimate.output_tokens(job.call, model)

    def _new(self, key: Key, ids: tuple[UUID, ...], model: str, limit: tuple[str, ...], sample: UUID) -> Refusal:
        tenant, project, key_id, model_id = ids
        code, level, metric, limit_model, mode = limit
        entry = Refusal(
            id=self._new_id(),
            at_s=self._second,
            span_s=1,
            tenant_id=tenant,
            project_id=project,
            key_id=key_id,
            model_id=model_id,
            model=model,
            code=code,
            level=level,
            metric=metric,
            limit_model=limit_model,
            mode=mode,
            requests=0,
            input_tokens=0,
            output_tokens=0,
            sample_request_id=sample,
        )
        self._entries[key] = entry
        return entry

    def take(self, *, last: bool = False) -> list[Refusal]:
        """Return what seconds that are over have counted, once; with `last` also the running one."""
        now = self._clock.now_us() // SECOND_US
        entries = self._entries
        if last:
            self._entries = {}
            return list(entries.values())
        self._entries = {key: entry for key, entry in entries.items() if entry.at_s == now}
        return [entry for entry in entries.values() if entry.at_s != now]


class RefusalWriter:
    """Writes them every second, off the path of requests; survives Postgres's absence."""

    def __init__(self, counted: Refusals, sessions: Sessions, new_id: Callable[[], UUID], count: Count) -> None:
        self._counted = counted
        self._sessions = sessions
        self._new_id = new_id
        self._count = count
        self._pending: list[Refusal] = []
        self._failing = False
        self._batch: list[Refusal] = []  # being written, or written without an answer: said again as it is

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.step()

    async def step(self, *, last: bool = False) -> None:
        """Write what is over. What Postgres does not take now is kept, bounded; what it refuses as data is dropped."""
        self._pending += self._counted.take(last=last)
        self._bound()
        while self._batch or self._pending:
            if not self._batch:
                self._batch, self._pending = self._pending[:BATCH], self._pending[BATCH:]
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S), transaction(self._sessions) as session:
                    await refusals.write(session, self._batch)
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                self._count("refusal_write_failures_total", 1)
                if not self._failing:
                    _log.warning("refusals.not_written", error=type(error).__name__)
                self._failing = True
                if not (isinstance(error, DBAPIError) and refuses_values(error)):
                    return
                self._count("refusals_dropped_total", sum(one.requests for one in self._batch))
            else:
                self._failing = False
            self._batch = []

    async def close(self) -> None:
        """Write what is left, if that is quick."""
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self.step(last=True)
        except TimeoutError:
            _log.warning("refusals.left_behind", waiting=len(self._pending) + len(self._batch))

    def _bound(self) -> None:
        if len(self._pending) <= PENDING_MAX:
            return
        self._pending = by_minute(self._pending, self._new_id)
        surplus = len(self._pending) - PENDING_MAX
        if surplus > 0:
            dropped, self._pending = self._pending[:surplus], self._pending[surplus:]
            self._count("refusals_dropped_total", sum(one.requests for one in dropped))


def by_minute(found: Iterable[Refusal], new_id: Callable[[], UUID]) -> list[Refusal]:
    """Sum refusals of the same kind by minute, oldest first. Those summed get ids of their own."""
    merged: dict[tuple[object, ...], Refusal] = {}
    for one in found:
        minute = one.at_s - one.at_s % COARSE_S
        key = (minute, one.tenant_id, one.key_id, one.model, one.code, one.level, one.metric, one.limit_model, one.mode)
        into = merged.get(key)
        if into is None:
            one.at_s, one.span_s, one.id = minute, COARSE_S, new_id()
            merged[key] = one
        else:
            into.requests += one.requests
            into.input_tokens += one.input_tokens
            into.output_tokens += one.output_tokens
    return sorted(merged.values(), key=lambda one: one.at_s)
