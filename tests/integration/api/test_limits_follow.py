"""A changed limit, plan or plan's price is in force in every replica within a second; nobody's key is read again."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from api.inference.access import resolve
from api.inference.directory import Directory, Offer
from api.inference.metrics import Metrics
from api.inference.request import parse
from api.inference.snapshot import SLICE, Follower, change_limits
from billing import price_book
from catalog import models
from core import db
from core.clock import SystemClock
from core.demand import Demand, DemandKind
from core.ids import new_uuid
from core.money import Currency
from core.settings import Database
from scheduler.types import Entitlement
from tenants import entitlements, limits, plans, principals, tenants
from tenants.limit_merge import LimitBook
from tenants.types import DEFAULT_PLAN_ID, Limit, LimitLevel, LimitMetric, LimitRule, LimitSlot
from tests.factories import billing as make
from tests.factories.gateway import FakeAdmission, principal
from tests.factories.gateway_process import SEALING, Seeded, seed
from tests.factories.limits import limited, of_key, of_tenant, why
from tests.factories.stack import until
from tests.factories.tenants import customer

REPLICAS = 4
PROMISE_S = 1.0
RPM = LimitMetric.REQUESTS_PER_MINUTE
CALL = parse("embeddings", b'{"model":"sim","input":"x"}')


def _short(demand: Demand) -> str:
    level, _, counter = demand.counter.split(":", 2)
    return f"{level} {counter}"


@dataclass(frozen=True)
class Replicas:
    """What each of several gateways knows."""

    directories: list[Directory]
    seeded: Seeded
    sessions: db.Sessions

    def offers(self) -> list[Offer]:
        """What the key's next request would get of each."""
        now = SystemClock().now_us()
        digest = self.seeded.customer.digest
        return [resolve(d, FakeAdmission(), d.principals[digest], CALL, now) for d in self.directories]

    def limits(self) -> list[dict[str, int]]:
        """The limits of the key's next request in each, by counter without its id: ``key rpm``."""
        return [{_short(demand): demand.limit for demand in offer.prepared.demands} for offer in self.offers()]

    async def until(self, wanted: dict[str, int]) -> None:
        await until(lambda: all(found == wanted for found in self.limits()), PROMISE_S)


@pytest.fixture
async def replicas(sessions: db.Sessions, database_settings: Database) -> AsyncIterator[Replicas]:
    seeded = await seed(sessions, "http://127.0.0.1:9/")
    directories = [Directory() for _ in range(REPLICAS)]
    url, tasks, loaded = database_settings.url.get_secret_value(), [], asyncio.Semaphore(0)
    for directory in directories:
        follower = Follower(directory, sessions, url, sealing=SEALING, clock=SystemClock(), metrics=Metrics())
        tasks.append(asyncio.create_task(follower.run(loaded.release)))
    try:
        async with asyncio.timeout(20):
            for _ in directories:
                await loaded.acquire()
        yield Replicas(directories, seeded, sessions)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_changed_limit_holds_in_every_replica_within_a_second(replicas: Replicas) -> None:
    who = replicas.seeded.customer
    await replicas.until({"key rpm": 600_000})
    for amount in range(100, 110):
        await limited(replicas.sessions, of_key(who), amount)
        await replicas.until({"key rpm": amount})
    rule = await limited(replicas.sessions, of_tenant(who, metric=LimitMetric.SPEND_PER_MONTH), 5_000_000_000_000)
    await until(lambda: all(5_000_000_000 in found.values() for found in replicas.limits()), PROMISE_S)
    async with db.transaction(replicas.sessions) as session:
        await limits.remove(session, rule, why())
    await replicas.until({"key rpm": 109})


async def test_a_changed_plan_holds_for_every_tenant_on_it_within_a_second(replicas: Replicas) -> None:
    other = await customer(replicas.sessions)
    await until(lambda: all(other.digest in d.principals for d in replicas.directories))
    before = replicas.directories[0].principals[other.digest]
    await limited(replicas.sessions, LimitSlot(LimitLevel.TENANT, RPM, plan_id=DEFAULT_PLAN_ID), 77)
    await replicas.until({"key rpm": 600_000, "tenant rpm": 77})
    after = replicas.directories[0].principals[other.digest]
    assert msgspec.structs.replace(before, limits=after.limits) == after


async def test_a_tenant_put_on_another_plan_has_its_limits_and_prices_within_a_second(replicas: Replicas) -> None:
    who, sessions = replicas.seeded.customer, replicas.sessions
    assert {offer.schedule.input for offer in replicas.offers()} == {2_000_000}
    items = make.items({"input": "1.50", "output": "5.00"}, replicas.seeded.model_id)
    async with db.transaction(sessions) as session:
        book = await price_book.create_book(session, "gold", Currency.USD, for_plan=True)
        draft = await price_book.create_draft(session, book, items)
        await price_book.publish(session, draft, now=SystemClock().now())
        gold = await plans.create(session, name="gold", price_book_id=book)
        await limits.set_limit(session, LimitSlot(LimitLevel.KEY, RPM, plan_id=gold.id), 9, why())
    async with db.transaction(sessions) as session:
        await plans.put_tenant(session, who.tenant.id, gold.id)
    await replicas.until({"key rpm": 9})
    assert {(offer.schedule.input, offer.schedule.price_version_id) for offer in replicas.offers()} == {
        (1_500_000, draft)
    }
    async with db.transaction(sessions) as session:
        await plans.set_price_book(session, gold.id, None)
    await until(lambda: {offer.schedule.input for offer in replicas.offers()} == {2_000_000}, PROMISE_S)


async def test_a_day_that_ends_changes_the_counter_of_a_budget(replicas: Replicas) -> None:
    who, directory = replicas.seeded.customer, replicas.directories[0]
    async with db.transaction(replicas.sessions) as session:
        await tenants.update(session, who.tenant.id, tz="Asia/Shanghai")
        slot = of_key(who, LimitMetric.SPEND_PER_DAY)
        await limits.set_limit(session, slot, limits.parse_amount(slot.metric, "5"), why())
    await until(lambda: all(len(d.principals[who.digest].limits) == 2 for d in replicas.directories))
    found = []
    midnight = datetime(2027, 1, 31, 16, tzinfo=UTC)  # in Shanghai
    caller = directory.principals[who.digest]
    for at in (midnight - timedelta(microseconds=1), midnight):
        offer = resolve(directory, FakeAdmission(), caller, CALL, int(at.timestamp()) * 1_000_000 + at.microsecond)
        found.append(next(d.counter[-10:] for d in offer.prepared.demands if d.kind is DemandKind.SPEND))
    assert found == ["2027-01-31", "2027-02-01"]


async def test_other_work_has_its_turn_while_a_plans_keys_get_their_limits() -> None:
    """Ten thousand tenants on one plan: a gateway serves on between the slices."""
    directory = Directory()
    keys = 3 * SLICE
    directory.principals = {number.to_bytes(32): principal(plan_id=DEFAULT_PLAN_ID) for number in range(keys)}
    rule = LimitRule(new_uuid(), LimitSlot(LimitLevel.KEY, RPM, plan_id=DEFAULT_PLAN_ID), 5, SystemClock().now())
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other_work())
    patch = principals.LimitPatch(LimitBook([rule]), plan_id=DEFAULT_PLAN_ID)
    await change_limits(directory, [patch])
    task.cancel()
    assert turns >= keys // SLICE
    assert {found.limits for found in directory.principals.values()} == {(Limit(LimitLevel.KEY, RPM, 5),)}
    assert len({id(found.limits) for found in directory.principals.values()}) == 1


async def test_a_weight_and_a_promise_hold_in_every_replica_within_a_second(replicas: Replicas) -> None:
    who, owner = replicas.seeded.customer, entitlements.Owner(replicas.seeded.customer.tenant.id)
    assert {(offer.prepared.weight, offer.prepared.entitlements) for offer in replicas.offers()} == {(1.0, ())}
    figures = entitlements.Figures(weight=250, deserved=3, capability=8)
    async with db.transaction(replicas.sessions) as session:
        name = await models.name_of(session, replicas.seeded.model_id)
        await entitlements.put(session, owner, name, figures, why())
    promised = Entitlement(who.tenant.id.hex, 0, 3, 8)
    await until(lambda: all(offer.prepared.entitlements == (promised,) for offer in replicas.offers()), PROMISE_S)
    assert {offer.prepared.weight for offer in replicas.offers()} == {2.5}
    assert [cap.limit for cap in replicas.offers()[0].prepared.caps] == [8]
