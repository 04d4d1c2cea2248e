"""The outbox: nothing lost, nothing done twice, nothing tried for ever."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from core import db, outbox, outbox_queries
from core.clock import ManualClock
from core.outbox import ATTEMPTS_MAX, Outcome
from core.settings import Database, Settings
from core.tasks import Job, TaskContext

EFFECT = text("INSERT INTO audit_record (id, actor_kind, action) VALUES (gen_random_uuid(), 'system', :action)")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def context(sessions: db.Sessions, database_settings: Database, clock: ManualClock, tmp_path: Path) -> TaskContext:
    settings = Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": {"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32},
            "database": database_settings,
            "valkey": {"url": "unix:///none", "broker_url": "unix:///none"},
        }
    )
    return TaskContext(settings, sessions, clock)


async def _effect(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    await session.execute(EFFECT, {"action": arguments["action"]})


async def _crash(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    await _effect(context, session, arguments)
    raise RuntimeError("failed at postgresql://app:hunter2@db/x")


JOBS = {"effect": Job("effect", _effect), "crash": Job("crash", _crash)}


async def _add(context: TaskContext, task: str = "effect", action: str = "a") -> None:
    async with db.transaction(context.sessions) as session:
        await outbox.add(session, task, {"action": action})


async def _effects(context: TaskContext) -> list[str]:
    async with db.transaction(context.sessions) as session:
        return list((await session.execute(text("SELECT action FROM audit_record ORDER BY action"))).scalars())


async def test_a_row_is_claimed_once_done_once_and_gone(context: TaskContext, clock: ManualClock) -> None:
    await _add(context)
    (row,) = await outbox.claim(context)
    assert await outbox.claim(context) == []
    assert await outbox.execute(context, JOBS, row) is Outcome.DONE
    assert await outbox.execute(context, JOBS, row) is Outcome.SKIPPED
    clock.advance(86_400)
    assert await outbox.claim(context) == []
    assert await _effects(context) == ["a"]
    assert await outbox.count(context) == (0, 0)


async def test_a_rolled_back_transaction_asks_for_nothing(context: TaskContext) -> None:
    async def add_and_fail() -> None:
        async with db.transaction(context.sessions) as session:
            await outbox.add(session, "effect", {"action": "a"})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await add_and_fail()
    assert await outbox.claim(context) == []


async def test_a_message_that_the_broker_lost_is_sent_again(context: TaskContext, clock: ManualClock) -> None:
    await _add(context)
    first = await outbox.claim(context)  # sent, and lost
    clock.advance(4.9)
    assert await outbox.claim(context) == []
    clock.advance(0.2)
    assert await outbox.claim(context) == first


async def test_a_failure_leaves_no_half_effect_and_is_tried_later_and_later(
    context: TaskContext, clock: ManualClock
) -> None:
    await _add(context, "crash")
    for wait in (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, None):
        (row,) = await outbox.claim(context)
        assert await outbox.execute(context, JOBS, row) is Outcome.FAILED
        if wait is not None:
            assert not await _due(context, clock, wait - 0.1)
            assert await _due(context, clock, wait)
            clock.advance(wait)
    assert ATTEMPTS_MAX == 12
    clock.advance(1_000_000)  # the last was given up
    assert await _effects(context) == []
    assert await outbox.claim(context) == []
    assert await outbox.count(context) == (0, 1)
    async with db.transaction(context.sessions) as session:
        error = (await session.execute(text("SELECT last_error FROM outbox"))).scalar_one()
    assert error == "RuntimeError: failed at postgresql://app:***@db/x"


async def _due(context: TaskContext, clock: ManualClock, seconds: float) -> bool:
    """Look whether a row would be claimed `seconds` from now, and take it back."""
    now = clock.now() + timedelta(seconds=seconds)
    async with context.sessions() as session:
        return bool(await outbox_queries.claim(session, now, ATTEMPTS_MAX, 1))  # closed without commit


async def test_parallel_deliveries_make_one_effect(context: TaskContext) -> None:
    for number in range(5):
        await _add(context, action=str(number))
    rows = list(await outbox.claim(context))
    outcomes = await asyncio.gather(*(outbox.execute(context, JOBS, row) for row in rows * 4))
    assert outcomes.count(Outcome.DONE) == 5
    assert outcomes.count(Outcome.FAILED) == 0
    assert await _effects(context) == ["0", "1", "2", "3", "4"]


async def test_two_relays_share_the_rows(context: TaskContext) -> None:
    for _ in range(outbox.BATCH + 20):
        await _add(context)
    one, two = await asyncio.gather(outbox.claim(context), outbox.claim(context))
    three = await outbox.claim(context)
    assert len({*one, *two, *three}) == len(one) + len(two) + len(three) == outbox.BATCH + 20
    assert max(len(one), len(two)) <= outbox.BATCH


async def test_an_unknown_job_waits_for_a_release_that_knows_it(context: TaskContext, clock: ManualClock) -> None:
    await _add(context)
    (row,) = await outbox.claim(context)
    assert await outbox.execute(context, {}, row) is Outcome.FAILED
    clock.advance(6)
    assert await outbox.claim(context) == [row]
    assert await outbox.execute(context, JOBS, row) is Outcome.DONE


async def test_a_job_beyond_its_time_is_ended(context: TaskContext) -> None:
    async def hang(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    await _add(context)
    (row,) = await outbox.claim(context)
    assert await outbox.execute(context, {"effect": Job("effect", hang, timeout_s=0.01)}, row) is Outcome.FAILED


async def test_done_rows_are_forgotten_after_a_week(context: TaskContext, clock: ManualClock) -> None:
    await _add(context)
    await _add(context, "crash")
    for row in await outbox.claim(context):
        await outbox.execute(context, JOBS, row)
    clock.advance(6 * 86_400)
    await outbox.prune(context)
    clock.advance(2 * 86_400)
    async with db.transaction(context.sessions) as session:
        assert (await session.execute(text("SELECT count(*) FROM outbox"))).scalar_one() == 2
    await outbox.prune(context)
    async with db.transaction(context.sessions) as session:
        assert (await session.execute(text("SELECT task FROM outbox"))).scalar_one() == "crash"
