"""Budgets in Valkey, made of what is posted in Postgres and kept in the interval that is certain."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest

from billing import budgets, credit_figures, ledger
from billing.credits import top_up
from core import keyspace
from core.clock import ManualClock, SystemClock
from core.db import Sessions, transaction
from core.demand import Demand, DemandKind
from core.money import Currency, parse_pico
from scheduler import commands
from scheduler.admission import Admission
from scheduler.types import Grant
from tenants import tenants
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.factories.credit_figures import set_figure
from tests.factories.scheduler import ask, money, outcomes, served_model
from tests.factories.spending import used

UNIT = 10**9  # nano
OTHER = uuid4()


async def tenant_in(sessions: Sessions, tz: str = "UTC", credit: str = "1000") -> UUID:
    async with transaction(sessions) as session:
        made = await tenants.create(session, name=f"tenant {uuid4().hex}", currency=Currency.USD, tz=tz)
        await ledger.open_tenant(session, made.id, Currency.USD)
        await top_up(session, made.id, parse_pico(credit), idempotency_key="first", actor="test")
    return made.id


def spend(counter: str, limit: int = 100 * UNIT, until_us: int = 0) -> Demand:
    return Demand(DemandKind.SPEND, counter, 0, limit, "BUDGET_EXCEEDED", until_us=until_us)


async def load(world: World, tenant_id: UUID, *counters: str) -> list[int]:
    await budgets.make_loader(world.sessions, world.client)(tenant_id, tuple(map(spend, counters)))
    return await values(world, counters)


async def values(world: World, counters: Sequence[str]) -> list[int]:
    return [int(nano) for nano in await world.client.call("MGET", *map(keyspace.counter, counters))]


async def door(world: World, replica: str = "r") -> Admission:
    """An admission that loads its figures as the gateway's does."""
    admission = Admission(
        world.client,
        replica=replica,
        clock=ManualClock(),
        global_inflight_max=1000,
        credit_loader=credit_figures.make_loader(world.sessions, world.client),
        budget_loader=budgets.make_loader(world.sessions, world.client),
        background=False,
    )
    await admission.start()
    return admission


@pytest.mark.parametrize(
    ("day", "first", "last", "next_"),
    [
        ("2026-03-29", "2026-03-28T23:00Z", "2026-03-29T21:59Z", "2026-03-29T22:00Z"),
        ("2026-10-25", "2026-10-24T22:00Z", "2026-10-25T22:59Z", "2026-10-25T23:00Z"),
    ],
)
async def test_a_day_is_the_tenants_also_when_clocks_change(
    world: World, day: str, first: str, last: str, next_: str
) -> None:
    tenant_id = await tenant_in(world.sessions, "Europe/Berlin")
    before = (datetime.fromisoformat(first) - timedelta(minutes=1)).isoformat()
    for minute, amount in ((before, "1"), (first, "10"), (last, "100"), (next_, "1000")):
        await used(world.sessions, tenant_id, minute, amount)
    spent = await load(world, tenant_id, f"tenant:{tenant_id.hex}:spend:d:{day}", f"tenant:{tenant_id.hex}:spend:t")
    assert spent == [110 * UNIT, 1111 * UNIT]


async def test_a_budget_counts_its_own_project_key_and_model(world: World) -> None:
    tenant_id, neighbour = await tenant_in(world.sessions), await tenant_in(world.sessions)
    await used(world.sessions, tenant_id, "2026-11-30T10:00Z", "1")
    await used(world.sessions, tenant_id, "2026-11-30T11:00Z", "2", project=OTHER)
    await used(world.sessions, tenant_id, "2026-11-30T12:00Z", "4", key=OTHER)
    await used(world.sessions, tenant_id, "2026-11-29T13:00Z", "8", model=OTHER)
    await used(world.sessions, neighbour, "2026-11-30T13:00Z", "16")
    tenant, project, key = f"tenant:{tenant_id.hex}", f"project:{make.PROJECT.hex}", f"key:{make.KEY.hex}"
    counters = {
        f"{tenant}:spend:m:2026-11": 15,
        f"{tenant}:spend:d:2026-11-30": 7,
        f"{tenant}:m:{OTHER.hex}:spend:t": 8,
        f"{project}:spend:m:2026-11": 13,
        f"{key}:spend:d:2026-11-30": 3,
        f"{key}:m:{make.MODEL.hex}:spend:m:2026-11:soft": 3,
        f"{tenant}:spend:m:2026-12": 0,
    }
    assert await load(world, tenant_id, *counters) == [units * UNIT for units in counters.values()]


async def test_after_a_loss_of_data_an_idle_budget_is_what_it_was(world: World) -> None:
    """Ten requests are served and posted; Valkey is emptied; the next request finds the budget as it was left."""
    tenant_id = await tenant_in(world.sessions)
    s = make.schedule(world.prices, tenant_id)
    today = SystemClock().now().date()
    names = (f"tenant:{tenant_id.hex}:spend:d:{today}", f"key:{make.KEY.hex}:spend:m:{today.isoformat()[:7]}")
    limits, model, hold = tuple(spend(name) for name in names), served_model(), money(tenant_id, 20_000_000)
    admission = await door(world)
    events = []
    for _ in range(10):
        grant = await ask(admission, model, *limits, money=hold)
        event = make.event(tenant_id, s, event_id=grant.request_id)
        admission.release(grant, 12_258_000)
        events.append(event)
    await write(world.spool_dir / "r", events)
    await world.poster.step()
    idle = await values(world, names)
    assert idle == [122_580_000, 122_580_000]
    await world.client.call("FLUSHALL")
    await admission.resync()
    await world.client.call("SET", commands.OFFSET, 6_000_000)  # the fence after a loss is over
    grant = await ask(admission, model, *limits, money=hold)
    assert await values(world, names) == [142_580_000, 142_580_000]
    admission.release(grant, None)
    await admission.heartbeat()
    assert await values(world, names) == idle
    await admission.close()


async def test_one_load_for_a_herd_and_exactly_what_fits(world: World) -> None:
    """A budget of 1,000 with nothing posted, 50 requests of 100 at once: ten pass."""
    tenant_id = await tenant_in(world.sessions, credit="1000000")
    name, loads = f"tenant:{tenant_id.hex}:spend:t", []
    loader = budgets.make_loader(world.sessions, world.client)

    async def counted(tenant: UUID, spends: tuple[Demand, ...]) -> None:
        loads.append([demand.counter for demand in spends])
        await loader(tenant, spends)

    admission = await door(world)
    admission._loading._budgets = counted
    model, hold = served_model(), money(tenant_id, 100 * UNIT)
    prepared = admission.prepare((spend(name, 1000 * UNIT),), model, tenant_id.hex)
    got = await outcomes(
        *(asyncio.ensure_future(ask(admission, model, prepared=prepared, money=hold)) for _ in range(50))
    )
    assert sum(isinstance(one, Grant) for one in got) == 10
    assert got.count("BUDGET_EXCEEDED") == 40
    assert loads == [[name]]
    await admission.close()


async def test_what_is_outstanding_counts_until_it_is_posted(world: World) -> None:
    """Made while something runs: the whole of the tenant's holds, which can only err towards refusing."""
    tenant_id = await tenant_in(world.sessions)
    name = f"key:{make.KEY.hex}:spend:t"
    await used(world.sessions, tenant_id, "2026-11-30T10:00Z", "3")
    admission = await door(world)
    grant = await ask(admission, served_model(), money=money(tenant_id, 5 * UNIT))
    assert await load(world, tenant_id, name) == [8 * UNIT]
    admission.release(grant, None)
    await admission.heartbeat()
    await budgets.clamp(world.sessions, world.client, ManualClock())
    assert await values(world, [name]) == [3 * UNIT]
    await admission.close()


async def test_what_is_posted_while_the_books_are_read_is_not_missed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and setting 5 units are posted: their entry is gone from Valkey, and the read sum lacks them."""
    tenant_id = await tenant_in(world.sessions)
    name, request = f"tenant:{tenant_id.hex}:spend:t", uuid4()
    admission = await door(world)
    await admission._loading.credit(tenant_id.hex)
    out = keyspace.outstanding(tenant_id)
    await world.client.call("HSET", out, request.hex, 5 * UNIT)
    await set_figure(world.client, tenant_id, outstanding=5 * UNIT)
    read, reads = budgets._posted, []

    async def then_posted(sessions: Sessions, tenant: UUID, counters: Sequence[str]) -> tuple[int, list[int], ZoneInfo]:
        found = await read(sessions, tenant, counters)
        reads.append(found)
        if len(reads) == 1:
            await used(world.sessions, tenant_id, "2026-11-30T10:00Z", "5")
            await world.client.call("HDEL", out, request.hex)
            await set_figure(world.client, tenant_id, outstanding=0, version=found[0] + 1)
            return found
        return found[0] + 1, found[1], found[2]

    monkeypatch.setattr(budgets, "_posted", then_posted)
    assert await load(world, tenant_id, name) == [5 * UNIT]
    assert len(reads) == 2
    await admission.close()


async def test_where_something_is_posted_all_the_time_both_figures_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id = await tenant_in(world.sessions)
    name = f"tenant:{tenant_id.hex}:spend:t"
    await used(world.sessions, tenant_id, "2026-11-30T10:00Z", "3")
    await set_figure(world.client, tenant_id, available=0, version=10**6, outstanding=2 * UNIT)
    assert await load(world, tenant_id, name) == [(3 + 2 + 2) * UNIT]


@pytest.mark.parametrize(
    ("value", "version", "expected"),
    [
        (0, 0, 3),  # less than is posted
        (3, 0, 3),
        (4, 0, 4),  # something of it is outstanding
        (9, 0, 5),  # more than posted and outstanding can be
        (9, 10**6, 9),  # perhaps posted since the books were read
        (1, 10**6, 3),
    ],
)
async def test_the_minutes_repair(world: World, value: int, version: int, expected: int) -> None:
    """3 units are posted, 2 outstanding."""
    tenant_id = await tenant_in(world.sessions)
    name = f"tenant:{tenant_id.hex}:spend:t"
    await load(world, tenant_id, name)
    await used(world.sessions, tenant_id, "2026-11-30T10:00Z", "3")
    await set_figure(world.client, tenant_id, available=0, version=version, outstanding=2 * UNIT)
    await world.client.call("SET", keyspace.counter(name), value * UNIT)
    repair = await budgets.clamp(world.sessions, world.client, ManualClock())
    assert await values(world, [name]) == [expected * UNIT]
    assert (repair.budgets, repair.off, repair.off_nano) == (1, value != expected, abs(value - expected) * UNIT)


async def test_a_budget_goes_three_days_after_its_period(world: World) -> None:
    tenant_id = await tenant_in(world.sessions)
    clock = ManualClock()
    names = [f"tenant:{tenant_id.hex}:spend:d:2025-12-{day}" for day in (28, 29)]
    ends = [datetime.fromisoformat(f"2025-12-{day}T00:00Z") for day in (29, 30)]
    loader = budgets.make_loader(world.sessions, world.client)
    await loader(
        tenant_id, tuple(spend(n, until_us=int(e.timestamp()) * 10**6) for n, e in zip(names, ends, strict=True))
    )
    clock.advance(1)  # it is the second after midnight of 2026-01-01, three days after the first of them
    assert (await budgets.clamp(world.sessions, world.client, clock)).removed == 1
    assert await world.client.call("EXISTS", *map(keyspace.counter, names)) == 1
    assert await world.client.call("HKEYS", budgets.KNOWN) == [names[1].encode()]


async def test_the_next_day_is_made_before_it_begins_so_that_nobody_waits_for_postgres(world: World) -> None:
    """It is 23:50 of 2026-03-28 in Berlin; the next day has 23 hours. Then Postgres is away."""
    tenant_id = await tenant_in(world.sessions, "Europe/Berlin")
    clock, admission = ManualClock(datetime.fromisoformat("2026-03-28T22:50Z")), await door(world)
    await admission._loading.credit(tenant_id.hex)
    today, tomorrow = (f"tenant:{tenant_id.hex}:spend:d:2026-03-{day}" for day in (28, 29))
    month = f"tenant:{tenant_id.hex}:spend:m:2026-03"
    loader = budgets.make_loader(world.sessions, world.client)
    ends = {today: "2026-03-28T23:00Z", month: "2026-03-31T22:00Z"}
    ends_us = {name: int(datetime.fromisoformat(end).timestamp()) * 10**6 for name, end in ends.items()}
    await loader(tenant_id, tuple(spend(name, until_us=end) for name, end in ends_us.items()))
    assert (await budgets.clamp(world.sessions, world.client, clock)).ahead == 1
    assert await values(world, [tomorrow]) == [0]
    until_us = int((await world.client.call("HGET", budgets.KNOWN, tomorrow)).split()[1])
    assert until_us == int(datetime.fromisoformat("2026-03-29T22:00Z").timestamp()) * 10**6
    await world.client.call("INCRBY", keyspace.counter(tomorrow), 5)
    assert (await budgets.clamp(world.sessions, world.client, clock)).ahead == 1
    assert await values(world, [tomorrow]) == [0]  # nothing can be spent of it: the repair sets it right
    admission._loading._budgets = None
    grant = await ask(admission, served_model(), spend(tomorrow), money=money(tenant_id, UNIT))
    assert await values(world, [tomorrow]) == [UNIT]
    admission.release(grant, None)
    await admission.close()


async def test_a_repair_goes_on_where_the_last_one_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant_id = await tenant_in(world.sessions)
    names = [f"key:{uuid4().hex}:spend:t" for _ in range(600)]
    await load(world, tenant_id, *names)
    monkeypatch.setattr(budgets, "PAGES_MAX", 1)
    seen = 0
    for _ in range(600):
        seen += (await budgets.clamp(world.sessions, world.client, ManualClock())).budgets
        if seen >= len(names):
            break
    assert seen >= len(names)
