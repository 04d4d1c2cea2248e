"""The controller over real Postgres and Valkey, with the engine simulator as engine and a clock that tests move."""

import asyncio
import os
import signal

import httpx
import psycopg
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from catalog import deployments, observed
from catalog.types import DeploymentChange, DeploymentKind, EngineKind
from core import db, keyspace
from core.clock import SystemClock
from core.errors import PlatformError
from core.load import LAYOUT
from core.settings import Database
from engine import launcher, processes, simulator
from engine.simulator import Options
from knative.leader import Leadership
from knative.queries import LEADER_LOCK
from knative.types import ReplicaState
from knative.wake import READY
from scheduler import commands
from scheduler.scraper import Scraper
from tests.factories.catalog import NOW, deploy
from tests.factories.controller import POLICY, Stage
from tests.factories.scheduler import load_text
from tests.waiting import until


async def test_three_hundred_first_calls_start_one_engine_and_all_are_answered(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions)
    await stage.begin()
    assert (await stage.reach(deployment_id, ReplicaState.ABSENT)).eta_s >= 1
    states = await asyncio.gather(*(stage.feed.wait_ready(deployment_id, 20) for _ in range(300)))
    assert stage.backend.starts == 1
    (endpoint,) = {state.endpoints[0] for state in states}
    transport = httpx.AsyncHTTPTransport(uds=endpoint.url.removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as engine:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
        assert (await engine.post("/v1/chat/completions", json=body)).status_code == 200

    async def written() -> bool:
        rows = await stage.replicas()
        return [(row.state, row.pid) for row in rows] == [("ready", stage.record(deployment_id).pid)]

    await until(written)


async def test_without_work_it_becomes_idle_and_then_sleeps_and_its_load_time_is_the_next_estimate(
    stage: Stage,
) -> None:
    deployment_id = await deploy(stage.sessions, engine_args={"load_ms": 50})
    await stage.begin()
    await stage.feed.wait_ready(deployment_id, 20)
    pid, since = stage.record(deployment_id).pid, stage.record(deployment_id).started_ms
    await stage.client.call("DEL", keyspace.wake(deployment_id))
    await stage.reach(deployment_id, ReplicaState.IDLE, step_s=1)
    await stage.client.call("SET", keyspace.deployment(deployment_id), load_text(last_us=stage.clock.now_us()))
    await stage.reach(deployment_id, ReplicaState.READY)  # somebody was served
    await stage.reach(deployment_id, ReplicaState.ABSENT, step_s=20)
    assert not processes.is_alive(pid, since)

    async def forgotten() -> bool:
        async with db.transaction(stage.sessions) as session:
            loads = await observed.load_history(session)
        return await stage.replicas() == [] and len(loads.get(deployment_id, ())) == 1

    await until(forgotten)
    await stage.feed.wait_ready(deployment_id, 20)  # and it wakes again
    assert stage.backend.starts == 2


async def test_a_crashed_engine_is_started_again(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions)
    await stage.begin()
    before = await stage.feed.wait_ready(deployment_id, 20)
    os.kill(stage.record(deployment_id).pid, signal.SIGKILL)
    after = await stage.reach(deployment_id, ReplicaState.LOADING)
    assert "SIGKILL" in after.reason
    after = await stage.reach(deployment_id, ReplicaState.READY, step_s=0.02)
    assert after.endpoints[0].replica != before.endpoints[0].replica
    assert stage.registry.get_sample_value("tidegate_engine_starts_total") == 2
    assert stage.registry.get_sample_value("tidegate_engine_failures_total") == 1


async def test_an_engine_that_cannot_start_fails_with_its_reason_until_it_is_changed(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, engine_args={"dialect": "klingon"})
    await stage.begin()
    stage.feed.request_wake(deployment_id)
    failed = await stage.reach(deployment_id, ReplicaState.FAILED, step_s=0.02)
    assert stage.backend.starts == POLICY.attempts_max
    assert "status 2" in failed.reason  # argparse refuses the dialect
    with pytest.raises(PlatformError) as caught:
        await stage.feed.wait_ready(deployment_id, 0.05)
    assert caught.value.code == "UPSTREAM_ERROR"
    assert "status 2" not in caught.value.message
    await stage.change(deployment_id, DeploymentChange(engine_args={"dialect": "vllm"}, min_scale=1))
    await stage.reach(deployment_id, ReplicaState.READY)


async def test_an_engine_is_stopped_only_after_the_requests_in_flight(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, min_scale=1)
    await stage.begin()
    await stage.reach(deployment_id, ReplicaState.READY)
    pid, since = stage.record(deployment_id).pid, stage.record(deployment_id).started_ms
    await stage.client.call("SET", keyspace.deployment(deployment_id), load_text(inflight=1))
    await stage.change(deployment_id, DeploymentChange(min_scale=0, max_scale=0))
    assert (await stage.reach(deployment_id, ReplicaState.DRAINING)).endpoints == ()
    stage.clock.advance(20)
    await asyncio.sleep(0.2)  # several looks
    assert processes.is_alive(pid, since)
    await stage.client.call("SET", keyspace.deployment(deployment_id), load_text())
    await stage.reach(deployment_id, ReplicaState.ABSENT)
    assert not processes.is_alive(pid, since)


async def test_changed_arguments_and_retirement_end_the_old_engine(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, min_scale=1)
    await stage.begin()
    first = await stage.reach(deployment_id, ReplicaState.READY)
    await stage.change(deployment_id, DeploymentChange(engine_args={"slots": 3}))
    await stage.reach(deployment_id, ReplicaState.DRAINING)
    second = await stage.reach(deployment_id, ReplicaState.READY, step_s=0.1)
    assert second.endpoints[0].replica != first.endpoints[0].replica
    pid, since = stage.record(deployment_id).pid, stage.record(deployment_id).started_ms
    async with db.transaction(stage.sessions) as session:
        await deployments.retire(session, deployment_id, now=NOW)

    def gone() -> bool:
        stage.clock.advance(0.1)
        return not processes.is_alive(pid, since)

    await until(gone)

    async def withdrawn() -> bool:
        return not await stage.client.call("HKEYS", keyspace.STATE)

    await until(withdrawn)


async def test_what_valkey_lost_is_published_anew(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions)
    await stage.begin()
    await stage.feed.wait_ready(deployment_id, 20)
    await stage.client.call("FLUSHALL")

    async def there() -> bool:
        return bool(await stage.client.call("HEXISTS", keyspace.STATE, deployment_id.hex))

    await until(there)
    assert stage.backend.starts == 1


async def test_the_leader_goes_on_after_its_connection_broke(stage: Stage, database_settings: Database) -> None:
    deployment_id = await deploy(stage.sessions)
    await stage.begin()
    await stage.feed.wait_ready(deployment_id, 20)
    term = stage.leadership.term
    assert database_settings.owner_url is not None
    with psycopg.connect(database_settings.owner_url.get_secret_value(), autocommit=True) as connection:
        query = (
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert connection.execute(query, (LEADER_LOCK,)).fetchall() == [(True,)]
    assert await stage.leadership.confirm()  # the loss is seen: nobody else can lead meanwhile
    assert await stage.leadership.confirm()  # and made good
    await stage.reach(deployment_id, *READY)
    assert (stage.leadership.term, stage.backend.starts) == (term, 1)


async def test_a_leader_steps_down_when_another_led_meanwhile(sessions: db.Sessions, engine: AsyncEngine) -> None:
    first, second = (Leadership(engine, sessions, name, SystemClock()) for name in ("one", "two"))
    assert await first.acquire()
    assert not await second.acquire()
    await first.release()
    assert await second.acquire()
    assert second.term == first.term + 1
    await second.release()
    assert not await first.confirm()
    await first.release()


async def test_an_engine_whose_record_was_lost_is_found_and_replaced(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, min_scale=1)
    name = stage.folder / deployment_id.hex
    async with db.transaction(stage.sessions) as session:
        deployment = await deployments.get(session, deployment_id)
    lock = launcher.take_lock(name.with_suffix(".lock"))
    assert lock is not None
    launch = launcher.plan_launch(deployment, f"{name}.sock", f"{name}.lock", stage.folder)
    orphan = launcher.spawn(launch, lock, name.with_suffix(".log"))
    os.close(lock)
    await stage.begin()
    await stage.reach(deployment_id, ReplicaState.READY, step_s=0.1)
    assert stage.record(deployment_id).pid != orphan.pid
    assert await asyncio.to_thread(orphan.wait, 10) is not None


async def test_an_external_server_is_offered_while_it_is_well(stage: Stage) -> None:
    runner = await simulator.serve(Options(), SystemClock())
    host, port = runner.addresses[0][:2]
    deployment_id = await deploy(
        stage.sessions,
        kind=DeploymentKind.EXTERNAL,
        engine=EngineKind.OPENAI,
        base_url=f"http://{host}:{port}/v1",
        credential="sk-upstream",
    )
    await stage.begin()
    found = await stage.feed.wait_ready(deployment_id, 10)
    assert found.endpoints[0].url == f"http://{host}:{port}"
    await runner.cleanup()
    failed = await stage.reach(deployment_id, ReplicaState.FAILED, step_s=0.2)
    assert "cannot be reached" in failed.reason
    assert failed.endpoints == ()


async def test_the_memory_that_an_operator_states_becomes_the_cap_in_valkey(stage: Stage) -> None:
    """80 GB and 1.2 GB: 26, whether the engine is a server elsewhere or one of ours, from the start or changed."""
    server = await simulator.serve(Options(), SystemClock())
    host, port = server.addresses[0][:2]
    try:
        await stage.begin()
        outside = await deploy(
            stage.sessions,
            "outside",
            kind=DeploymentKind.EXTERNAL,
            engine=EngineKind.OPENAI,
            base_url=f"http://{host}:{port}",
            gpu_memory_mb=80_000,
            kv_request_mb=1_200,
        )
        local = await deploy(stage.sessions, "local", min_scale=1)
        for deployment in (outside, local):
            await stage.reach(deployment, ReplicaState.READY, step_s=0.1)
        await stage.change(local, DeploymentChange(gpu_memory_mb=80_000, kv_request_mb=1_200))

        async def told() -> bool:
            seen = [stage.feed.current(deployment) for deployment in (outside, local)]
            return all(state is not None and state.kv_request_mb == 1_200 for state in seen)

        await until(told)
        await stage.client.call("FUNCTION", "LOAD", "REPLACE", commands.LIBRARY)
        await stage.client.call("SET", keyspace.EPOCH, "e")
        scraper = Scraper(stage.client, holder="s", clock=SystemClock(), seats=256, registry=CollectorRegistry())
        await scraper.turn()
        for deployment in (outside, local):
            load = await stage.client.call("GET", keyspace.deployment(deployment))
            assert LAYOUT.unpack(load)[5] == 26.0
    finally:
        await server.cleanup()
