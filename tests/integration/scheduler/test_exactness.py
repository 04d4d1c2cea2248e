"""Four replicas, more demand than the limits allow, replicas killed at random: never above a limit, 98 % of it used."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.demand import Demand, Unit
from scheduler.types import Grant
from tests.factories.scheduler import Fleet, ask, concurrency, outcomes, rate, served_model, tokens

REPLICAS, STEP_S, SECONDS, WINDOW_US = 4, 0.5, 183, 60_000_000
ESTIMATE = 100  # tokens of a request


@dataclass
class Request:
    """One that was let in. Its tokens count as estimated until it has ended; if its replica was killed, for ever."""

    grant: Grant
    replica: int
    ends: float
    ended: bool = False
    tokens: int = ESTIMATE

    @property
    def at_us(self) -> int:
        return self.grant.reply[3]


@dataclass
class World:
    """What really runs and ran; time goes in steps."""

    fleet: Fleet
    draw: random.Random
    demands: tuple[Demand, ...]
    lasts: tuple[float, float]
    now: float = 0.0
    requests: list[Request] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    model = served_model()

    @property
    def alive(self) -> list[int]:
        return [n for n in range(len(self.fleet.replicas)) if n not in self.killed]

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.ended]

    async def step(self, asks: int) -> None:
        """Time passes, what is done ends, perhaps a replica dies, and more comes than fits."""
        await self.fleet.advance(STEP_S)
        self.now += STEP_S
        for n in self.alive:
            await self.fleet.replicas[n].heartbeat()
        for n in self.alive:
            await self.fleet.replicas[n].tick()
        for request in self.running:
            if request.ends <= self.now:
                request.ended, request.tokens = True, self.draw.randrange(ESTIMATE + 1)
                self.fleet.replicas[request.replica].release(request.grant, 0, request.tokens, 0)
        for n in self.alive:
            await self.fleet.replicas[n].heartbeat()  # its answer comes after what it gave back
        if asks and self.draw.random() < 0.03:
            await self.kill(self.draw.choice(self.alive))
        await self.demand(asks)

    async def kill(self, n: int) -> None:
        """End it and what it serves, as SIGKILL does: nobody is told. Another takes its place."""
        await self.fleet.clients[n].close()
        self.killed.add(n)
        for request in self.running:
            request.ended |= request.replica == n
        await self.fleet.replica()

    async def demand(self, asks: int) -> None:
        who = [self.draw.choice(self.alive) for _ in range(asks)]
        got = await outcomes(
            *(
                asyncio.ensure_future(ask(self.fleet.replicas[n], self.model, *self.demands, used=(ESTIMATE, 0)))
                for n in who
            )
        )
        for n, one in zip(who, got, strict=True):
            if isinstance(one, Grant):
                self.requests.append(Request(one, n, self.now + self.draw.uniform(*self.lasts)))

    def fullest_windows(self) -> tuple[int, int]:
        """Return the most requests and the most tokens of any 60 s."""
        most = most_tokens = first = count = held = 0
        for request in self.requests:  # in the order in which they came
            count, held = count + 1, held + request.tokens
            while self.requests[first].at_us < request.at_us - WINDOW_US:
                count, held, first = count - 1, held - self.requests[first].tokens, first + 1
            most, most_tokens = max(most, count), max(most_tokens, held)
        return most, most_tokens


async def world(valkey: Path, seed: int, demands: tuple[Demand, ...], lasts: tuple[float, float]) -> World:
    fleet = await Fleet.open(valkey)
    for _ in range(REPLICAS):
        await fleet.replica()
    return World(fleet, random.Random(seed), demands, lasts)


@pytest.mark.parametrize("seed", range(2))
async def test_requests_per_minute(valkey: Path, seed: int) -> None:
    found = await world(valkey, seed, (rate(300),), (0.2, 3.0))
    for _ in range(int(SECONDS / STEP_S)):
        await found.step(12)  # nearly five times as many as the limit allows
    assert found.killed
    assert found.fullest_windows()[0] <= 300
    assert len(found.requests) >= 0.98 * 300 * SECONDS / 60
    await found.fleet.close()


@pytest.mark.parametrize("seed", range(2))
async def test_requests_at_once(valkey: Path, seed: int) -> None:
    found = await world(valkey, seed, (concurrency(20),), (1.0, 6.0))
    held = []
    for _ in range(int(SECONDS / STEP_S)):
        await found.step(15)
        assert len(found.running) <= 20
        held.append(await found.fleet.running("key:k"))  # with what killed ones still hold, up to 11 s
    assert found.killed
    assert max(held) == 20
    assert sum(held) >= 0.98 * 20 * len(held)
    for _ in range(24):
        await found.step(0)
    assert await found.fleet.running("key:k") == len(found.running)
    await found.fleet.close()


@pytest.mark.parametrize("seed", range(2))
async def test_tokens_per_minute(valkey: Path, seed: int) -> None:
    """What runs counts as estimated, so that used tokens alone are fewer; all together they are never above."""
    found = await world(valkey, seed, (tokens(15_000, Unit.INPUT_TOKEN),), (0.2, 3.0))
    for _ in range(int(SECONDS / STEP_S)):
        await found.step(12)
        assert found.fullest_windows()[1] <= 15_000
    assert found.killed
    end_us = await found.fleet.server_us()
    counted = sum((await found.fleet.rated("key:k:itpm")).values())
    assert counted == sum(one.tokens for one in found.requests if one.at_us // 10**6 > end_us // 10**6 - 61)
    used = sum(one.tokens for one in found.requests)
    assert used >= 0.98 * 15_000 * SECONDS / 60
    await found.fleet.close()
