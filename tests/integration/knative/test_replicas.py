"""Several engines of one deployment: each has a life of its own."""

import asyncio
import os
import signal

import httpx

from catalog.types import DeploymentChange
from core import keyspace
from engine import processes
from knative.types import ReplicaState, Seat
from tests.factories.catalog import deploy
from tests.factories.controller import Stage
from tests.factories.scheduler import load_text
from tests.waiting import until

READY = ReplicaState.READY


async def test_one_crashes_and_the_others_go_on(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, min_scale=3, max_scale=3)
    await stage.begin()
    await stage.offers(deployment_id, 3)
    before = {index: stage.record(deployment_id, index) for index in range(3)}
    os.kill(before[1].pid, signal.SIGKILL)
    found = await stage.offers(deployment_id, 2)
    assert (found.state, "SIGKILL" in found.reason) == (READY, True)
    found = await stage.offers(deployment_id, 3, step_s=0.02)
    after = {index: stage.record(deployment_id, index) for index in range(3)}
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1].replica_id != before[1].replica_id
    assert [endpoint.url for endpoint in found.endpoints] == [after[index].url for index in range(3)]

    async def written() -> bool:
        return [(row.index, row.pid) for row in await stage.replicas()] == [(i, after[i].pid) for i in range(3)]

    await until(written)


async def test_one_more_for_those_who_wait_and_fewer_when_nobody_did_for_the_idle_window(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, max_scale=2)
    await stage.begin()
    await stage.feed.wait_ready(deployment_id, 20)
    load = keyspace.deployment(deployment_id)
    await stage.client.call("SET", load, load_text(inflight=4, waiting=2))
    await stage.offers(deployment_id, 2, step_s=0.05)
    first, second = (stage.record(deployment_id, index) for index in range(2))
    assert stage.backend.starts == 2
    await stage.client.call("SET", load, load_text(inflight=1))  # four each were too many: one fits in one
    await stage.offers(deployment_id, 1, step_s=5)
    await until(lambda: stage.backend.record(Seat(deployment_id, 1)) is None)
    assert not processes.is_alive(second.pid, second.started_ms)
    assert stage.record(deployment_id) == first


async def test_a_draining_engine_finishes_its_own_stream_however_busy_the_others_are(stage: Stage) -> None:
    deployment_id = await deploy(stage.sessions, min_scale=2, max_scale=2)
    await stage.begin()
    await stage.offers(deployment_id, 2)
    going = stage.record(deployment_id, 1)
    await stage.client.call("SET", keyspace.deployment(deployment_id), load_text(inflight=7))
    transport = httpx.AsyncHTTPTransport(uds=going.url.removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as engine:
        words = "[[sim n=2 t=0 d=900000]]"  # two words, nearly a second apart
        body = {"model": "sim", "messages": [{"role": "user", "content": words}]}
        answer = asyncio.create_task(engine.post("/v1/chat/completions", json=body))
        await until(lambda: _running(going.url))
        await stage.change(deployment_id, DeploymentChange(min_scale=1, max_scale=1))
        await stage.offers(deployment_id, 1)
        stage.clock.advance(2)  # gateways have seen it
        assert (await answer).status_code == 200
    await until(lambda: stage.backend.record(Seat(deployment_id, 1)) is None)  # long before the drain's timeout
    assert stage.record(deployment_id).pid


async def _running(url: str) -> bool:
    transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as engine:
        return "vllm:num_requests_running 1\n" in (await engine.get("/metrics")).text
