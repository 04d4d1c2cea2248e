"""Four replicas under load while connections are cut, scripts forgotten and data lost: nothing is left behind."""

import asyncio
import random
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from catalog.types import ServedModel
from core.clock import SystemClock
from core.credit_figure import read_figure
from core.demand import Demand, Unit
from core.errors import PlatformError
from core.ids import new_uuid
from core.tiers import Tier
from tests.factories.credit_figures import figure_of
from tests.factories.scheduler import Fleet, ask, concurrency, money, rate, served_model, spend, tokens

USERS, SECONDS = 120, 20
LARGEST_CHARGE = 10**8


class Load:
    """Callers that come, cancel, wait, run and end; what they were charged at last."""

    def __init__(self, fleet: Fleet, models: list[ServedModel], tenants: list[UUID]) -> None:
        self.fleet, self.models, self.tenants = fleet, models, tenants
        self.stop = False
        self.charged: dict[str, int | None] = {}

    async def user(self, draw: random.Random) -> None:
        while not self.stop:
            replica, tenant, key = draw.choice(self.fleet.replicas), draw.choice(self.tenants), new_uuid()
            task = asyncio.ensure_future(
                ask(
                    replica,
                    draw.choice(self.models),
                    rate(20_000, counter=f"key:{tenant.hex}:rpm"),
                    concurrency(25, counter=f"key:{tenant.hex}:conc"),
                    tokens(10**9, Unit.INPUT_TOKEN, counter=f"key:{tenant.hex}:itpm"),
                    spend(10**15, counter=f"key:{tenant.hex}:spend:t"),
                    money=money(tenant, LARGEST_CHARGE + draw.randrange(10**9)),
                    used=(draw.randrange(300), 0),
                    tier=draw.choice(list(Tier)),
                    wait_s=draw.choice((0.0, 0.05, 2.0)),
                    request_id=key,
                )
            )
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.01)
                task.cancel()
            try:
                grant = await task
            except (PlatformError, asyncio.CancelledError):
                self.charged[key.hex] = None
                await asyncio.sleep(0.002)
                continue
            await asyncio.sleep(draw.random() * 0.02)
            self.charged[key.hex] = charge = draw.choice((None, 0, 5, LARGEST_CHARGE))
            replica.release(grant, charge, draw.randrange(300), 0)

    async def trouble(self, draw: random.Random, *, lose_data: bool) -> None:
        for _ in range(SECONDS * 2):
            await asyncio.sleep(0.5)
            luck = draw.random()
            if luck < 0.4:
                await self.fleet.client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            elif luck < 0.6:
                await self.fleet.client.call("FUNCTION", "FLUSH")
            elif luck < 0.7 and lose_data:
                await self.fleet.client.call("FLUSHALL")
        self.stop = True


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lose_data", [False, True])
async def test_nothing_is_left_behind(valkey: Path, seed: int, *, lose_data: bool) -> None:
    fleet = await Fleet.open(valkey)
    fleet.clock = SystemClock()  # type: ignore[assignment] # real time: nobody advances it here

    async def load_credit(tenant: UUID) -> None:
        await fleet.set_credit(tenant, 10**13)

    async def load_budgets(tenant: UUID, spends: tuple[Demand, ...]) -> None:
        figure = await read_figure(fleet.client, tenant)
        for demand in spends:
            await fleet.client.call("SET", f"{{tg}}:c:{demand.counter}", figure.outstanding if figure else 0, "NX")

    loaders = {"credit_loader": load_credit, "budget_loader": load_budgets}
    for _ in range(4):
        await fleet.replica(background=True, global_inflight_max=20, **loaders)  # type: ignore[arg-type] # both
    load = Load(fleet, [served_model(inflight_max=cap) for cap in (3, 6, 0, 12)], [uuid4() for _ in range(3)])
    users = [load.user(random.Random(seed * 1000 + n)) for n in range(USERS)]
    await asyncio.gather(*users, load.trouble(random.Random(seed), lose_data=lose_data))
    await asyncio.sleep(3)
    for replica in fleet.replicas:
        assert (replica.in_flight, replica.waiting, replica.ready) == (0, 0, True)
        await replica.reconcile()
        await replica.tick()
    for model in load.models:
        assert await fleet.load(model) == (0, 0)
    assert await fleet.count("global") == 0
    for tenant in load.tenants:
        assert await fleet.running(f"key:{tenant.hex}") == 0
        for counter in ("rpm", "itpm"):
            await fleet.rated(f"key:{tenant.hex}:{counter}")  # which checks that it is the sum of its buckets
        outstanding = await fleet.outstanding(tenant)
        assert {key: load.charged[key] for key in outstanding} == outstanding
        assert (await figure_of(fleet.client, tenant)).outstanding == sum(outstanding.values())
        if not lose_data:  # a loss between reading and making a budget leaves it to the minute's repair
            assert await fleet.count(f"key:{tenant.hex}:spend:t") == sum(outstanding.values())
    await fleet.close()
