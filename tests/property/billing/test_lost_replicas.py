"""Holds instead of leases (P18's counterpart): whatever replicas die or fall silent, spend never passes the credit.

Spend is what is posted, what waits in a spool, of dead replicas too, and what running calls may yet cost.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest

from billing import credit_figures, reconcile, verify
from billing.types import PriceSchedule, UsageEvent
from core import keyspace
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.money import nano_up, parse_pico
from core.resp import RespClient
from core.usage import TokenUsage
from scheduler.types import Grant
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.factories.scheduler import Fleet, ask, money, served_model

CREDIT = parse_pico("1.00")
HOLD_TOKENS = 60_000  # of input at 2.00 per million: 0.12
STEPS = 70


@dataclass
class Gateway:
    """A replica and its spool. `running`: what it must still bill."""

    n: int
    alive: bool = True
    running: list[Grant] = field(default_factory=list)
    spools: int = 0


class Platform:
    def __init__(self, world: World, fleet: Fleet, tenant: UUID, s: PriceSchedule, chance: random.Random) -> None:
        self.world, self.fleet, self.tenant, self.s, self.chance = world, fleet, tenant, s, chance
        self.model = served_model()
        self.gateways: list[Gateway] = []
        self.unposted = 0
        self.charged = 0
        self.poster = world.poster
        self.admitted = self.refused = 0

    @property
    def alive(self) -> list[Gateway]:
        return [gateway for gateway in self.gateways if gateway.alive]

    async def join(self) -> None:
        loader = credit_figures.make_loader(self.world.sessions, self.world.client)
        await self.fleet.replica(f"g{len(self.gateways)}", credit_loader=loader)
        self.gateways.append(Gateway(len(self.gateways)))

    async def admit(self) -> None:
        gateway = self.chance.choice(self.alive)
        hold = nano_up(HOLD_TOKENS * self.s.input)
        try:
            grant = await ask(self.fleet.replicas[gateway.n], self.model, money=money(self.tenant, hold))
        except PlatformError as error:
            assert error.code == "INSUFFICIENT_CREDIT"  # noqa: PT017 - one of two right endings
            self.refused += 1
            return
        gateway.running.append(grant)
        self.admitted += 1

    async def settle(self) -> None:
        """A call ends: its event is on the replica's disk, and then its hold is lowered to the charge."""
        busy = [gateway for gateway in self.alive if gateway.running]
        if busy:
            gateway = self.chance.choice(busy)
            grant = gateway.running.pop(self.chance.randrange(len(gateway.running)))
            event = await self.bill(gateway, grant)
            self.fleet.replicas[gateway.n].release(grant, nano_up(event.amount_pico))
            await self.fleet.replicas[gateway.n].heartbeat()

    async def bill(self, gateway: Gateway, grant: Grant) -> UsageEvent:
        usage = TokenUsage(self.chance.randint(1, HOLD_TOKENS), 0, 0, 0, 0)
        event = make.event(self.tenant, self.s, usage, event_id=grant.request_id)
        gateway.spools += 1
        await write(self.world.spool_dir / f"g{gateway.n}-{gateway.spools}", [event])
        self.unposted += event.amount_pico
        return event

    async def crash(self) -> None:
        """Some of what it ran had its event on disk and its hold not lowered yet; the rest is lost."""
        gateway = self.chance.choice(self.alive)
        gateway.alive = False
        await self.fleet.clients[gateway.n].close()
        for grant in gateway.running:
            if self.chance.random() < 0.5:
                await self.bill(gateway, grant)
        gateway.running.clear()
        await self.join()

    async def silence(self) -> None:
        """Fourteen seconds: the dead are reaped, and one of the living that sent no heartbeat is taken for dead."""
        silent = self.chance.choice(self.alive)
        for _ in range(14):
            await self.fleet.advance(1)
            for gateway in self.alive:
                if gateway is not silent:
                    await self.fleet.replicas[gateway.n].heartbeat()
        for gateway in self.alive:
            await self.fleet.replicas[gateway.n].heartbeat()
            await self.fleet.replicas[gateway.n].tick()

    async def post(self) -> None:
        while await self.poster.step():
            pass
        self.unposted = 0

    async def lose_valkey(self) -> None:
        await self.fleet.client.call("FLUSHALL")
        for gateway in self.alive:
            await self.fleet.replicas[gateway.n].resync()
        await self.post()
        await self.fleet.advance(5.1)
        for gateway in self.alive:
            await self.fleet.replicas[gateway.n].heartbeat()
            await self.fleet.replicas[gateway.n].tick()

    async def check(self) -> None:
        available = await self.world.available(self.tenant)
        running = sum(len(gateway.running) for gateway in self.alive) * HOLD_TOKENS * self.s.input
        assert self.unposted + running <= available
        assert await self.world.rows(
            "SELECT sum(debit) FROM ledger_balance b JOIN ledger_account a"
            " ON a.id = b.account_id WHERE a.code = 'expense.overrun'"
        ) == [(0,)]


@pytest.fixture
async def world(sessions: Sessions, valkey: Path, tmp_path: Path) -> World:
    client = await RespClient.connect(f"unix://{valkey}")
    return World(sessions, client, await make.publish_prices(sessions), tmp_path / "spool")


@pytest.mark.parametrize("number", [*range(3), *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 60))])
async def test_spend_stays_within_the_credit_and_no_hold_remains(number: int, world: World, valkey: Path) -> None:
    chance = random.Random(number)
    fleet = await Fleet.open(valkey)
    tenant, s = await world.tenant("1.00")
    platform = Platform(world, fleet, tenant, s, chance)
    for _ in range(3):
        await platform.join()
    acts = [platform.admit] * 8 + [platform.settle] * 6 + [platform.post] * 2
    acts += [platform.crash, platform.silence, platform.lose_valkey]
    for _ in range(STEPS):
        await chance.choice(acts)()
        await platform.check()
    assert platform.admitted > 5
    while any(gateway.running for gateway in platform.alive):
        await platform.settle()
    await platform.silence()
    await platform.post()
    for gateway in platform.gateways:
        if not gateway.alive:
            await reconcile.write_off(world.client, f"g{gateway.n}")
    assert await world.client.call("HGETALL", keyspace.outstanding(tenant)) == []
    left = await world.available(tenant)
    assert await fleet.credit_left(tenant) == left // 1000
    async with transaction(world.sessions) as session:
        assert await verify.verify(session) is None
    await fleet.close()
    await world.client.close()
