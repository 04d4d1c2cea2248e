"""Two replicas behind one gateway: what the router is told of real requests, on every ending."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from api.inference.sweeper import sweep
from core.clock import SystemClock
from engine import simulator
from engine.simulator import SIMULATOR, Options, Simulator
from scheduler.router.fleet import Fleet
from scheduler.router.replica import Phase
from scheduler.router.router import Router
from tests.factories.gateway import Rig, rig
from tests.factories.stack import chat, until

TEXT = "".join(random.Random(3).choices("abcdefghij ", k=20_000))


@dataclass(frozen=True)
class Pair:
    """A gateway with two engines of one model."""

    rig: Rig
    engines: tuple[Simulator, ...]
    client: httpx.AsyncClient
    deployment: str

    async def chat(self, prompt: str, **members: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat(prompt, model="pair", **members))

    @property
    def fleet(self) -> Fleet:
        return self.rig.gateway.router._fleets[self.deployment]

    def asked(self) -> list[int]:
        return [engine.sequence for engine in self.engines]


@pytest.fixture
async def pair(service_folder: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        engines, urls = [], []
        for number in range(2):
            uds = service_folder / f"pair-{number}.sock"
            runner = await simulator.serve(Options(log=str(tmp_path / f"{number}.jsonl")), SystemClock(), uds=str(uds))
            stack.push_async_callback(runner.cleanup)
            stack.callback(uds.unlink, missing_ok=True)
            engines.append(runner.app[SIMULATOR])
            urls.append(f"unix:{uds}")
        made = await stack.enter_async_context(rig({}, clock=SystemClock()))
        made.gateway.router = Router(random=random.Random(1).random)
        model = made.sleeping("pair")
        made.wake(model, *urls)
        headers = {"Authorization": f"Bearer {made.key}"}
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=made.url, headers=headers, timeout=20))
        yield Pair(made, tuple(engines), client, model.deployment_id.hex)


async def test_a_conversation_stays_where_it_was_read(pair: Pair) -> None:
    for length in (5_000, 9_000, 14_000, 20_000):
        assert (await pair.chat(TEXT[:length])).status_code == 200
    assert sorted(pair.asked()) == [0, 4]


async def test_others_are_spread(pair: Pair) -> None:
    for number in range(8):
        assert (await pair.chat(f"{number} {TEXT[number * 2000 : number * 2000 + 2000]}")).status_code == 200
    assert min(pair.asked()) >= 2  # of two at random the better one, and both may be the same one


async def test_on_every_ending_nothing_is_left_counted(pair: Pair) -> None:
    plans = ("n=2", "fault=refuse", "fault=busy", "fault=garbage", "fault=die at=1", "fault=error at=1", "fault=close")
    for plan in plans:
        for stream in (False, True):
            await pair.chat(f"[[sim {plan}]]", stream=stream)
    for stream in (False, True):
        task = asyncio.create_task(pair.chat("[[sim n=50 t=30000000]]", stream=stream))
        await until(lambda: any(engine.running for engine in pair.engines))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pair.rig.settled()
    assert [replica.inflight for replica in pair.fleet.replicas.values()] == [0, 0]


async def test_a_replica_that_breaks_down_is_left_alone(pair: Pair) -> None:
    """Both are asked with what makes an engine fail, until one is left alone; the other one stays, whatever it does."""
    for _ in range(12):
        await pair.chat("[[sim fault=refuse]]")
    phases = [replica.phase for replica in pair.fleet.replicas.values()]
    assert sorted(phases) == [Phase.EJECTED, Phase.SERVING]
    before = pair.asked()
    for _ in range(4):
        assert (await pair.chat("x")).status_code == 200
    left = phases.index(Phase.EJECTED)
    assert pair.asked()[left] == before[left]


async def test_callers_mistakes_and_a_full_engine_are_no_failures(pair: Pair) -> None:
    for _ in range(12):
        await pair.chat("[[sim fault=busy]]")
        await pair.chat("x", temperature="warm")
    assert {replica.phase for replica in pair.fleet.replicas.values()} == {Phase.SERVING}


async def test_one_hung_replica_costs_the_others_callers_nothing(pair: Pair) -> None:
    hanging = asyncio.create_task(pair.chat("[[sim n=50 t=30000000]]"))
    await until(lambda: any(engine.running for engine in pair.engines))
    at = next(index for index, engine in enumerate(pair.engines) if engine.running)
    now = pair.rig.gateway.clock.monotonic()
    sweep(pair.rig.gateway, now)
    sweep(pair.rig.gateway, now + 1.6)
    before = pair.asked()
    for _ in range(6):
        assert (await pair.chat("x")).status_code == 200
    assert pair.asked()[at] == before[at]
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_replica_that_drains_gets_nothing_more(pair: Pair) -> None:
    await pair.chat("x")
    model = pair.rig.models["pair"]
    state = pair.rig.states.states[model.deployment_id]
    pair.rig.wake(model, state.endpoints[1].url)
    before = pair.asked()
    for _ in range(3):
        assert (await pair.chat(TEXT)).status_code == 200
    assert [after - old for after, old in zip(pair.asked(), before, strict=True)] == [0, 3]
