"""What was refused is known afterwards, by second, key, model and limit, and costs bounded memory."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from api.inference import refusals as recorder
from api.inference.directory import Offer
from api.inference.job import Job
from api.inference.refusals import Refusals, RefusalWriter, by_minute
from api.inference.request import parse
from core import db
from core.clock import ManualClock
from core.demand import Demand, DemandKind
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from core.settings import Database
from core.tiers import Tier
from tenants import refusals
from tenants.refusals import NOBODY, Refusal
from tests.factories.gateway import FixedPrices, principal, served_model
from tests.factories.stack import Stack, chat

RATE = PlatformError(
    "RATE_LIMITED",
    ErrorKind.RATE_LIMITED,
    "The limit is reached.",
    retry_after_s=1,
    fields={"level": "key", "metric": "requests_per_minute", "limit": 10, "model": ""},
)
COUNT = "SELECT coalesce(sum(requests), 0)::int FROM refusal"


class World:
    """A recorder with its writer, and what they counted about themselves."""

    def __init__(self, sessions: db.Sessions, start: datetime | None = None) -> None:
        self.sessions = sessions
        self.clock = ManualClock(start or datetime.now(UTC).replace(minute=0, second=0, microsecond=0))
        self.figures: Counter[str] = Counter()
        self.counted = Refusals(self.clock, new_uuid, self._count)
        self.writer = RefusalWriter(self.counted, sessions, new_uuid, self._count)

    def _count(self, name: str, step: int) -> None:
        self.figures[name] += step

    def refuse(self, times: int = 1, error: PlatformError = RATE, *, name: str = "small", **key: Any) -> None:
        who = principal(**key)
        model = served_model(name, "")
        schedule = FixedPrices((Tier.STANDARD,), input_=1, cached=1, output=1).schedule(
            model.model_id, Tier.STANDARD, who.currency, who.tenant_id
        )
        assert schedule is not None
        for _ in range(times):
            job = Job(new_uuid(), 0.0)
            job.principal, job.call = who, parse("chat", orjson.dumps(chat("x", max_tokens=7)))
            job.offer = Offer(who, model, Tier.STANDARD, schedule, 2**62, (), b"")
            self.counted.note(job, error)

    async def rows(self) -> list[Any]:
        async with db.transaction(self.sessions) as session:
            return list((await session.execute(text("SELECT * FROM refusal ORDER BY at, requests"))).all())

    async def written(self) -> int:
        async with db.transaction(self.sessions) as session:
            return int((await session.execute(text(COUNT))).scalar_one())


@pytest.fixture
def world(sessions: db.Sessions) -> World:
    return World(sessions)


async def test_a_refused_call_is_recorded_with_its_limit(stack: Stack, sessions: db.Sessions) -> None:
    rig = stack.rig
    writer = RefusalWriter(rig.gateway.refusals, sessions, new_uuid, rig.gateway.metrics.add)
    assert (await stack.chat("x")).status_code == 200
    assert rig.gateway.refusals.take(last=True) == []  # one that passes leaves nothing
    rig.admission.refusal = RATE
    body = orjson.dumps(chat("x" * 1000, max_tokens=100, n=3))
    for _ in range(2):
        assert (await stack.client.post("/v1/chat/completions", content=body)).status_code == 429
    rig.admission.refusal = PlatformError("INSUFFICIENT_CREDIT", ErrorKind.PAYMENT, "No credit.")
    last = await stack.client.post("/v1/chat/completions", content=body)
    await writer.step(last=True)
    async with db.transaction(sessions) as session:
        rows = (await session.execute(text("SELECT * FROM refusal ORDER BY requests"))).all()
    credit, rate = rows
    template = rig.models["sim"].template_tokens
    assert (rate.code, rate.level, rate.metric, rate.mode) == ("RATE_LIMITED", "key", "requests_per_minute", "hard")
    assert (rate.requests, int(rate.input_tokens), int(rate.output_tokens)) == (2, 2 * (len(body) + template), 600)
    assert (rate.key_id, rate.tenant_id) == (rig.principal.key_id, rig.principal.tenant_id)
    assert (rate.model, rate.model_id) == ("sim", rig.models["sim"].model_id)
    assert (credit.code, credit.level, credit.metric) == ("INSUFFICIENT_CREDIT", "tenant", "credit")
    assert last.headers["x-request-id"] == f"gen_{credit.sample_request_id.hex}"


async def test_a_soft_or_dark_limit_that_was_passed_is_recorded_and_refuses_nothing(stack: Stack) -> None:
    rig, owner = stack.rig, f"project:{stack.rig.principal.project_id.hex}"
    demands = (
        Demand(DemandKind.RATE, f"{owner}:rpm:dark", 1, 5, "RATE_LIMITED", 60, enforced=False),
        Demand(DemandKind.SPEND, f"{owner}:m:{'0' * 32}:spend:m:2026-11:soft", 0, 5, "BUDGET_EXCEEDED", enforced=False),
    )
    rig.admission.over = demands
    for _ in range(2):
        assert (await stack.chat("x")).status_code == 200
    found = rig.gateway.refusals.take(last=True)
    assert {(one.code, one.level, one.metric, one.limit_model, one.mode): one.requests for one in found} == {
        ("RATE_LIMITED", "project", "requests_per_minute", "", "dark"): 2,
        ("BUDGET_EXCEEDED", "project", "spend_per_month", "sim", "soft"): 2,
    }


async def test_what_is_no_refusal_is_not_recorded(stack: Stack) -> None:
    for error in ("INVALID_REQUEST", "INTERNAL", "UPSTREAM_ERROR"):
        stack.rig.admission.refusal = PlatformError(error, ErrorKind.INVALID, "x")
        await stack.chat("x")
    stack.rig.admission.refusal = None
    await stack.client.post("/v1/chat/completions", json=chat("x", model="none"))
    await stack.client.post("/v1/chat/completions", content=b"{")
    assert stack.rig.gateway.refusals.take(last=True) == []


async def test_a_second_is_one_row_for_each_key_model_and_limit(world: World) -> None:
    key, other = UUID(int=1), UUID(int=2)
    tokens = PlatformError("TOKENS_LIMITED", ErrorKind.RATE_LIMITED, "x", fields={"level": "tenant", "metric": "t"})
    world.refuse(3, key_id=key)
    world.refuse(2, key_id=key, name="large")
    world.refuse(1, tokens, key_id=key)
    world.refuse(4, key_id=other)
    await world.writer.step()
    assert await world.written() == 0  # the second is not over
    world.clock.advance(1)
    world.refuse(1, key_id=key)
    world.clock.advance(1)
    await world.writer.step()
    rows = await world.rows()
    assert [(row.requests, row.model, row.code, row.key_id.int) for row in rows] == [
        (1, "small", "TOKENS_LIMITED", 1),
        (2, "large", "RATE_LIMITED", 1),
        (3, "small", "RATE_LIMITED", 1),
        (4, "small", "RATE_LIMITED", 2),
        (1, "small", "RATE_LIMITED", 1),
    ]
    assert rows[-1].at - rows[0].at == timedelta(seconds=1)
    assert {row.span_s for row in rows} == {1}


async def test_a_crowd_of_keys_shares_a_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "SECOND_MAX", 3)
    world.clock.advance(1)
    for number in range(10):
        world.refuse(key_id=UUID(int=number + 1))
    world.clock.advance(1)
    await world.writer.step()
    rows = await world.rows()
    assert [row.requests for row in rows] == [1, 1, 1, 7]
    assert (rows[-1].tenant_id, rows[-1].key_id, rows[-1].code) == (NOBODY, NOBODY, "RATE_LIMITED")
    assert world.figures == {"refusals_crowded_total": 7}


async def test_entries_are_bounded_when_nobody_takes_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "ENTRIES_MAX", 5)
    for second in range(10):
        world.refuse(2, key_id=UUID(int=second + 1))
        world.clock.advance(1)
    assert len(world.counted.take()) == 5
    assert world.figures == {"refusals_dropped_total": 10}


@asynccontextmanager
async def nowhere() -> AsyncIterator[db.Sessions]:
    """A database that does not answer."""
    engine = db.create_engine(Database.model_validate({"url": "postgresql://x:y@127.0.0.1:1/none"}))
    yield db.create_sessions(engine)
    await engine.dispose()


async def test_nothing_is_lost_while_postgres_is_away_but_its_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums stay exact; only when it takes long are they by the minute."""
    monkeypatch.setattr(recorder, "PENDING_MAX", 20)
    async with nowhere() as away:
        world.writer._sessions = away
        for _ in range(90):
            world.refuse(2, tenant_id=UUID(int=9), key_id=UUID(int=1))
            world.clock.advance(1)
            await world.writer.step()
        assert world.figures["refusal_write_failures_total"] == 90
        assert len(world.writer._pending) <= 20
    world.writer._sessions = world.sessions
    await world.writer.step()
    assert await world.written() == 180
    rows = await world.rows()
    assert len(rows) <= 22
    assert {row.span_s for row in rows} == {1, 60}
    assert "refusals_dropped_total" not in world.figures


async def test_what_finds_no_room_is_dropped_oldest_first_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PENDING_MAX", 4)
    async with nowhere() as away:
        world.writer._sessions = away
        for minute in range(10):
            world.refuse(minute + 1, key_id=UUID(int=minute + 1))
            world.clock.advance(60)
            await world.writer.step()
    world.writer._sessions = world.sessions
    await world.writer.step()
    # the first is in the batch that was tried; of the others the last four are kept: 7, 8, 9, 10
    assert await world.written() == 1 + 7 + 8 + 9 + 10
    assert world.figures["refusals_dropped_total"] == 2 + 3 + 4 + 5 + 6


async def test_a_commit_without_an_answer_is_not_counted_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])

    @asynccontextmanager
    async def unreliable(sessions: db.Sessions) -> AsyncIterator[Any]:
        async with db.transaction(sessions) as session:
            yield session
        if not next(answers):
            raise OSError("the connection was cut after the commit")

    monkeypatch.setattr(recorder, "transaction", unreliable)
    world.refuse(5)
    world.clock.advance(1)
    await world.writer.step()
    assert await world.written() == 5
    await world.writer.step()
    assert await world.written() == 5
    assert world.writer._batch == []


async def test_a_batch_that_postgres_refuses_by_its_values_does_not_stand_in_the_way(sessions: db.Sessions) -> None:
    world = World(sessions, datetime(1999, 1, 1, tzinfo=UTC))  # a clock that is wrong: no partition is made for it
    world.refuse(3)
    world.clock.advance(1)
    await world.writer.step()
    assert world.figures == {"refusal_write_failures_total": 1, "refusals_dropped_total": 3}
    assert world.writer._batch == []


async def test_the_rest_is_written_at_the_end(world: World) -> None:
    world.refuse(2)
    await world.writer.close()
    assert await world.written() == 2


async def test_old_days_are_dropped(sessions: db.Sessions) -> None:
    now = datetime.now(UTC)
    for age in (0, 10, refusals.KEEP_DAYS, refusals.KEEP_DAYS + 1, refusals.KEEP_DAYS + 9):
        world = World(sessions, now - timedelta(days=age))
        world.refuse(age + 1)
        await world.writer.close()
    clock = ManualClock(now)
    assert await refusals.roll_partitions(sessions, clock) == 2
    assert await refusals.roll_partitions(sessions, clock) == 0
    assert sorted(row.requests for row in await World(sessions).rows()) == [1, 11, refusals.KEEP_DAYS + 1]
    with pytest.raises(Exception, match="younger than a week"):
        await refusals.roll_partitions(sessions, ManualClock(now + timedelta(days=30)))


async def test_hours_are_summed_for_reading(world: World) -> None:
    tenant, hour = UUID(int=5), world.clock.now()
    world.clock.advance(3600)
    for _ in range(3):
        world.refuse(2, tenant_id=tenant)
        world.clock.advance(10)
    world.refuse(1, tenant_id=UUID(int=6))
    await world.writer.close()
    async with db.transaction(world.sessions) as session:
        rows = await refusals.by_hour(session, tenant, hour, hour + timedelta(hours=2), limit=10)
    [row] = rows
    assert (row.hour, row.model, row.metric, row.requests) == (
        hour + timedelta(hours=1),
        "small",
        "requests_per_minute",
        6,
    )


@st.composite
def found(draw: st.DrawFn) -> list[Refusal]:
    def one(at_s: int, key: int, code: str, requests: int) -> Refusal:
        ids = (NOBODY, NOBODY, UUID(int=key), NOBODY)
        return Refusal(NOBODY, at_s, 1, *ids, "m", code, "", "", "", "hard", requests, 2 * requests, 3, NOBODY)

    number = st.integers(0, 300)
    rows = st.tuples(number, st.integers(0, 2), st.sampled_from("ab"), st.integers(1, 9))
    return [one(*row) for row in draw(st.lists(rows, max_size=60))]


@given(found())
def test_summing_by_minute_keeps_every_sum(rows: list[Refusal]) -> None:
    before: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        before[row.at_s // 60, row.key_id, row.code] += row.requests
    tokens = sum(row.input_tokens for row in rows)
    merged = by_minute([msgspec.structs.replace(row) for row in rows], new_uuid)
    assert {(row.at_s // 60, row.key_id, row.code): row.requests for row in merged} == before
    assert sum(row.input_tokens for row in merged) == tokens
    assert len({row.id for row in merged}) == len(merged)
    assert all((row.at_s % 60, row.span_s) == (0, 60) for row in merged)
