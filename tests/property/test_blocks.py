"""Blocks against a plain model: four replicas on a real Valkey, much that comes, ends, dies and is changed at random.

Checked after each step: what really runs, was let in or was charged is within every limit; what Valkey counts is
never less, and is the sum of its leases; in the end nothing is left.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand, Unit
from core.errors import PlatformError
from core.ids import new_uuid
from core.tiers import Tier
from scheduler import commands
from scheduler.types import Grant, Prepared
from tests.factories.credit_figures import add_outstanding, figure_of, set_figure
from tests.factories.scheduler import Fleet, concurrency, rate, served_model, spend, tokens, until_ready

REPLICAS, STEPS, ASKS = 4, 60, 90
START_US, WINDOW_US = 1_800_000_000_000_000, 60_000_000
HOLD, INPUT, OUTPUT = 1000, 20, 10


@dataclass(frozen=True)
class Limits:
    """Of all, of the model, of one key (requests at once, requests and input tokens a minute), credit and budget."""

    platform: int = 40_000
    model: int = 40_000
    at_once: int = 40_000
    rpm: int = 400_000
    itpm: int = 8_000_000
    credit: int = 10**9
    budget: int = 10**9


@dataclass
class Request:
    grant: Grant
    replica: int
    ends: float
    ended: bool = False
    input: int = INPUT
    at_us: int = 0

    @property
    def in_block(self) -> bool:
        return self.grant.block is not None


@dataclass
class World:
    fleet: Fleet
    draw: random.Random
    limits: Limits
    lasts: tuple[float, float]
    tenant: UUID = field(default_factory=uuid4)
    model: ServedModel = field(default_factory=served_model)
    now: float = 0.0
    requests: list[Request] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    unposted: dict[str, int] = field(default_factory=dict)  # of ended requests, charges
    lost: set[str] = field(default_factory=set)  # requests of killed replicas
    askers: int = 2  # of the replicas, those that have callers
    prepared: dict[int, Prepared] = field(default_factory=dict)  # by replica
    posted: int = 0
    local: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def alive(self) -> list[int]:
        return [n for n in range(len(self.fleet.replicas)) if n not in self.killed]

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.ended]

    @property
    def now_us(self) -> int:
        return START_US + int(self.now * 1_000_000)

    @classmethod
    async def open(cls, valkey: Path, seed: int, limits: Limits, lasts: tuple[float, float]) -> "World":
        world = cls(await Fleet.open(valkey), random.Random(seed), limits, lasts)
        world.model = served_model(inflight_max=limits.model)
        await world.fleet.client.call("FLUSHALL")
        await world.set_time()
        await world.fleet.set_credit(world.tenant, limits.credit)
        for _ in range(REPLICAS):
            await world.join()
        return world

    async def set_time(self) -> None:
        """Valkey's clock stands still between steps, so that it never runs ahead of the replicas'."""
        await self.fleet.client.call("SET", commands.OFFSET, f"@{self.now_us}")

    async def join(self) -> None:
        await self.fleet.replica(blocks=True, global_inflight_max=self.limits.platform, budget_loader=self.load_budget)

    async def load_budget(self, _: UUID, spends: tuple[Demand, ...]) -> None:
        figure = await figure_of(self.fleet.client, self.tenant)
        for demand in spends:
            await self.fleet.client.call(
                "SET", keyspace.counter(demand.counter), self.posted + figure.outstanding, "NX"
            )

    def caller(self, n: int) -> Prepared:
        if n not in self.prepared:
            limits = self.limits
            demands = (
                concurrency(limits.at_once),
                rate(limits.rpm),
                tokens(limits.itpm, Unit.INPUT_TOKEN),
                spend(limits.budget, counter="key:k:spend:t"),
            )
            self.prepared[n] = self.fleet.replicas[n].prepare(demands, self.model, self.tenant.hex)
        return self.prepared[n]

    async def ask(self, n: int, *, wait_s: float = 0.0) -> None:
        replica, request_id, prepared = self.fleet.replicas[n], new_uuid(), self.caller(n)
        grant = replica.take(request_id, prepared, HOLD, INPUT, OUTPUT, Tier.STANDARD)
        if grant is None:
            try:
                grant = await replica.acquire(
                    request_id,
                    prepared,
                    hold=HOLD,
                    input_tokens=INPUT,
                    output_tokens=OUTPUT,
                    tier=Tier.STANDARD,
                    wait_s=wait_s,
                )
            except PlatformError as error:
                self.refused.append(error.code)
                return
        else:
            self.local += 1
            await self.check_instant()
        # of a block's request the time is that of the block: it was let in now, which may be later
        self.requests.append(Request(grant, n, self.now + self.draw.uniform(*self.lasts)))
        self.requests[-1].at_us = self.now_us

    async def check_instant(self) -> None:
        running = len(self.running) + 1
        assert running <= min(self.limits.platform, self.limits.model, self.limits.at_once)

    def end(self, request: Request) -> None:
        charge = self.draw.choice((None, 0, 300, HOLD, HOLD + 50))
        request.ended, request.input = True, self.draw.randrange(INPUT + 1)
        self.fleet.replicas[request.replica].release(request.grant, charge, request.input, OUTPUT)
        if charge is not None:
            self.unposted[request.grant.key.decode()] = charge

    async def step(self, asks: int, *, seconds: float = 0.5) -> None:
        self.now += seconds
        self.fleet.clock.advance(seconds)
        await self.set_time()
        for n in self.alive:
            await self.fleet.replicas[n].heartbeat()
        for n in self.alive:
            await self.fleet.replicas[n].tick()
        for request in self.running:
            if request.ends <= self.now and request.replica not in self.killed:
                self.end(request)
        await self.turn()
        for _ in range(3):
            who = [self.draw.choice(self.alive[: self.askers]) for _ in range(asks // 3)]
            await asyncio.gather(*(self.ask(n) for n in who))
            await self.settled()
        await self.turn()
        await self.check()

    async def turn(self) -> None:
        for n in self.alive:
            self.fleet.replicas[n].blocks.turn()
        await self.settled()

    async def settled(self) -> None:
        for _ in range(3):  # an answer may make a replica say something more
            for n in self.alive:
                await self.fleet.replicas[n].heartbeat()

    async def post(self) -> None:
        """What the poster does: some of what has ended is in the books, and taken out of what is outstanding."""
        for key in self.draw.sample(sorted(self.unposted), len(self.unposted) // 2):
            charge = self.unposted.pop(key)
            if await self.fleet.client.call("HDEL", keyspace.outstanding(self.tenant), key):
                await add_outstanding(self.fleet.client, self.tenant, -charge)
            self.posted += charge
            await set_figure(self.fleet.client, self.tenant, available=self.limits.credit - self.posted)

    async def trouble(self, turn: int) -> None:
        """What comes between: postings, deaths, a lost connection, other limits."""
        match turn % 8:
            case 1 | 4:
                await self.post()
            case 2:
                await self.kill(self.draw.choice(self.alive[:2]))
            case 5:
                for n in self.alive:
                    await self.cut(n)
            case 6:  # those of before still have the old ones in hand
                self.limits = replace(self.limits, rpm=self.limits.rpm // 2, at_once=self.limits.at_once // 2)
                self.prepared.clear()
            case _:
                pass

    async def cut(self, n: int) -> None:
        """Its connection breaks; what it had not been answered may be done or not."""
        client, lost = self.fleet.clients[n], asyncio.Event()
        client.watch(lambda connected: None if connected else lost.set())
        assert client._connection is not None
        client._connection.abort("cut by the test")
        await asyncio.wait_for(lost.wait(), 10)
        await until_ready(self.fleet.replicas[n])

    async def kill(self, n: int) -> None:
        await self.fleet.clients[n].close()
        self.fleet.replicas[n].blocks.dissolve_all()  # a process that is gone does nothing any more
        self.killed.add(n)
        for request in self.running:
            if request.replica == n:
                request.ended = True
                self.lost.add(request.grant.key.decode())
        await self.join()

    async def check(self) -> None:
        fleet, running = self.fleet, len(self.running)
        await self.check_rates()
        inflight, _ = await fleet.load(self.model)
        for held in (inflight, await fleet.count("global"), await fleet.running("key:k")):
            assert running <= held
        available, _, outstanding = await figure_of(fleet.client, self.tenant)
        out = await fleet.outstanding(self.tenant)
        assert sum(out.values()) == outstanding
        held_money = sum(self.unposted.values()) + HOLD * running
        assert held_money <= outstanding <= available
        assert held_money + self.posted <= await fleet.count("key:k:spend:t") <= self.limits.budget
        assert await fleet.replicas[self.alive[0]].recount(now=True) == []
        for counter in ("rpm", "itpm"):
            await fleet.rated(f"key:k:{counter}")

    async def check_rates(self) -> None:
        since = self.now_us - WINDOW_US
        recent = [request for request in self.requests if request.at_us > since]
        assert len(recent) <= self.limits.rpm
        assert sum(r.input if r.ended and r.grant.key.decode() not in self.lost else INPUT for r in recent) <= (
            self.limits.itpm
        )

    async def finish(self) -> None:
        """All ends; the dead are reaped; then nothing is held but what was charged, or is not known of the dead."""
        for request in self.running:
            self.end(request)
        for _ in range(4):
            await self.turn()
        for _ in range(12):
            await self.step(0, seconds=1.0)
        fleet = self.fleet
        assert sum(len(fleet.replicas[n].blocks) for n in self.alive) == 0
        assert await fleet.load(self.model) == (0, 0)
        assert (await fleet.count("global"), await fleet.running("key:k")) == (0, 0)
        owed = set()
        for n in self.killed:
            owed |= {key.decode() for key in await fleet.client.call("HKEYS", keyspace.owed(f"r{n}"))}
        out = await fleet.outstanding(self.tenant)
        assert {key: nano for key, nano in out.items() if key not in owed} == {
            key: charge for key, charge in self.unposted.items() if key in out
        }
        missing = self.unposted.keys() - out.keys()
        # what a killed replica had charged a moment before is still in what is owed of its blocks
        assert sum(self.unposted[key] for key in missing) <= sum(out.get(key, 0) for key in owed)
        if not self.killed:
            assert out == self.unposted
            assert await fleet.count("key:k:spend:t") == self.posted + sum(out.values())
        await fleet.close()


@pytest.mark.parametrize("seed", range(2))
async def test_far_from_every_limit(valkey: Path, seed: int) -> None:
    world = await World.open(valkey, seed, Limits(), (0.2, 2.0))
    for n in range(STEPS // 4):
        await world.step(ASKS)
        await world.trouble(n)
    assert world.refused == []
    assert world.local > len(world.requests) / 4
    await world.finish()


@pytest.mark.parametrize(
    "limits",
    [
        Limits(rpm=2000),
        Limits(itpm=40_000),
        Limits(at_once=800),
        Limits(model=800),
        Limits(platform=800),
        Limits(credit=2_000_000),
        Limits(budget=2_000_000),
    ],
    ids=["rpm", "itpm", "at once", "model", "platform", "credit", "budget"],
)
async def test_up_to_a_limit(valkey: Path, limits: Limits) -> None:
    """Blocks are used below half of it, and the script goes on from there to the limit itself."""
    world = await World.open(valkey, 1, limits, (4.0, 8.0))
    world.askers = 1
    for _ in range(STEPS):
        await world.step(ASKS)
        if world.refused:
            break
    assert world.refused
    assert world.local
    await world.finish()
