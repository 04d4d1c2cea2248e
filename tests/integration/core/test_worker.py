"""The worker as a process, with a real broker and a real database."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from core import db, outbox, worker
from core.settings import Database, Settings
from core.tasks import Job, Periodic, TaskContext

EFFECT = text("INSERT INTO audit_record (id, actor_kind, action) VALUES (gen_random_uuid(), 'system', :action)")
COUNT = text("SELECT count(*) FROM audit_record WHERE action = :action")
BOUND_S = 30.0


async def _tick(context: TaskContext) -> None:
    async with context.valkey() as client, db.transaction(context.sessions) as session:
        assert await client.call("PING") is not None
        await session.execute(EFFECT, {"action": "tick"})


async def _fail(context: TaskContext) -> None:
    raise RuntimeError("every time")


async def _effect(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    await session.execute(EFFECT, {"action": arguments["action"]})


async def _long(context: TaskContext) -> None:
    async with db.transaction(context.sessions) as session:
        await session.execute(EFFECT, {"action": "long began"})
    async with db.transaction(context.sessions) as session:
        await session.execute(text("SELECT pg_sleep(20)"))  # until it is cancelled


async def _also(context: TaskContext) -> None:
    async with context.valkey() as client, db.transaction(context.sessions) as session:
        assert await client.call("PING") is not None
        await session.execute(EFFECT, {"action": "also apart"})


LONG = Periodic("test.long", _long, every_s=1, apart=True)
ALSO = Periodic("test.also_long", _also, every_s=1, apart=True)
TASKS = (Periodic("test.tick", _tick, every_s=1), Periodic("test.fail", _fail, every_s=1), Job("test.effect", _effect))


def _serve(settings: Settings, pipe: Connection, apart: tuple[Periodic, ...]) -> None:
    worker.serve(settings, lambda: pipe.send("ready"), (*apart, *TASKS))
    pipe.send("ended")


@pytest.fixture
def settings(database_settings: Database, valkey: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": {"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32},
            "database": database_settings,
            "valkey": {"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}?db=1"},
        }
    )


@pytest.fixture
async def start(settings: Settings) -> AsyncIterator[Callable[[], Any]]:
    """Start a worker; whatever is left is killed."""
    processes: list[Any] = []

    async def start_one(*apart: Periodic) -> tuple[Any, Connection]:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_serve, args=(settings, theirs, apart))
        process.start()
        processes.append(process)
        assert await asyncio.to_thread(ours.poll, BOUND_S)
        assert ours.recv() == "ready"
        return process, ours

    yield start_one
    for process in processes:
        process.kill()
        process.join(BOUND_S)


async def _until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not await true():  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)


async def _made(sessions: db.Sessions, action: str) -> int:
    async with db.transaction(sessions) as session:
        count: int = (await session.execute(COUNT, {"action": action})).scalar_one()
        return count


async def _add(sessions: db.Sessions, action: str) -> None:
    async with db.transaction(sessions) as session:
        await outbox.add(session, "test.effect", {"action": action})


async def test_it_does_what_is_due_survives_a_lost_broker_and_ends_cleanly(
    settings: Settings, sessions: db.Sessions, valkey: Path, start: Callable[[], Any]
) -> None:
    await _add(sessions, "before the start")
    process, pipe = await start()
    await _until(lambda: _made(sessions, "before the start"))
    await _until(lambda: _made(sessions, "tick"))

    with redis.Redis(unix_socket_path=str(valkey)) as client:
        client.flushall()  # every message is lost
    await _add(sessions, "after the loss")
    await _until(lambda: _made(sessions, "after the loss"))

    figures = settings.home / "metrics" / "worker.prom"
    assert "tidegate_outbox_dead 0.0" in figures.read_text()
    os.kill(process.pid, signal.SIGTERM)
    await asyncio.to_thread(process.join, BOUND_S)
    assert process.exitcode == 0
    assert pipe.poll(1)
    assert pipe.recv() == "ended"
    assert await _made(sessions, "before the start") == await _made(sessions, "after the loss") == 1


async def test_what_takes_long_holds_nobody(
    settings: Settings, sessions: db.Sessions, start: Callable[..., Any]
) -> None:
    """It runs once however often it is due; jobs and other tasks go on; the end of the worker ends it."""
    process, pipe = await start(LONG)
    await _until(lambda: _made(sessions, "long began"))
    ticks = await _made(sessions, "tick")
    await _add(sessions, "beside it")
    await _until(lambda: _made(sessions, "beside it"))

    async def ticked() -> bool:
        return await _made(sessions, "tick") >= ticks + 3

    await _until(ticked)
    assert await _made(sessions, "long began") == 1
    os.kill(process.pid, signal.SIGTERM)
    await asyncio.to_thread(process.join, BOUND_S)
    assert (process.exitcode, pipe.recv()) == (0, "ended")
    running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(20)%' AND pid <> pg_backend_pid()"
    async with db.transaction(sessions) as session:
        assert (await session.execute(text(running))).scalar_one() == 0


async def test_what_runs_apart_fails_alone(sessions: db.Sessions, start: Callable[..., Any]) -> None:
    await start(Periodic("test.fail_apart", _fail, every_s=1, apart=True), ALSO)
    await _until(lambda: _made(sessions, "also apart"))


async def test_a_killed_worker_loses_no_row(
    sessions: db.Sessions, database_settings: Database, start: Callable[[], Any]
) -> None:
    process, _ = await start()
    for number in range(30):
        await _add(sessions, f"row {number}")
    process.kill()
    await asyncio.to_thread(process.join, BOUND_S)
    async with db.transaction(sessions) as session:  # let the waits of what was sent be over, instead of waiting
        await session.execute(text("UPDATE outbox SET sent_at = sent_at - interval '1 day' WHERE done_at IS NULL"))
    await start()

    async def all_made() -> bool:
        return [await _made(sessions, f"row {number}") for number in range(30)] == [1] * 30

    await _until(all_made)


def test_broker_urls_are_put_the_way_kombu_wants() -> None:
    assert worker.broker_url("unix:///run/v.sock?db=1") == "redis+socket:///run/v.sock?virtual_host=1"
    assert worker.broker_url("unix:///run/v.sock") == "redis+socket:///run/v.sock?virtual_host=0"
    for url in ("redis://:pw@127.0.0.1:6379/1", "redis+socket:///run/v.sock?virtual_host=1"):
        assert worker.broker_url(url) == url


def test_two_tasks_of_one_name_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("twice_tasks")
    module.TASKS = TASKS + TASKS[:1]  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "twice_tasks", module)
    with pytest.raises(ValueError, match="same name"):
        worker.collect(["twice_tasks"])
