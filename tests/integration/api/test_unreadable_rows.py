"""A row that nobody can read is closed to whom it concerns, and a gateway goes on with all the others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import psycopg
import pytest
from psycopg import sql

from api.inference.access import authenticate
from api.inference.directory import Directory
from api.inference.metrics import Metrics
from api.inference.snapshot import Follower
from core import db
from core.clock import SystemClock
from core.errors import ErrorKind, PlatformError
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from tenants import api_keys, principals
from tenants.types import LimitLevel
from tests.factories.gateway_process import SEALING, Seeded, seed
from tests.factories.limits import limited, of_key, of_tenant
from tests.factories.stack import until
from tests.factories.tenants import PEPPERS, Customer, customer

Spoil = Callable[..., Coroutine[Any, Any, None]]
CHECKS = """
    SELECT conname FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c'
"""


@pytest.fixture
def spoil(database_settings: Database) -> Spoil:
    """Runs a statement by a hand that the rules of a table do not bind, and tells gateways that something changed."""

    async def run(table: str, statement: str, *values: Any, kind: str, entity: Any = None) -> None:
        owner = database_settings.owner_url
        assert owner is not None
        async with await psycopg.AsyncConnection.connect(owner.get_secret_value(), autocommit=True) as connection:
            for (name,) in await (await connection.execute(CHECKS, (table,))).fetchall():
                drop = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(sql.Identifier(table), sql.Identifier(name))
                await connection.execute(drop)
            await connection.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(sql.Identifier(table)))
            await connection.execute(statement, values)
            await connection.execute("SELECT record_config_change(%s, %s)", (kind, entity))

    return run


class World:
    """A gateway's directory, two customers with a key each, and a model."""

    def __init__(self, directory: Directory, metrics: Metrics, seeded: Seeded, other: Customer) -> None:
        self.directory, self.metrics, self.seeded, self.other = directory, metrics, seeded, other
        self.one = seeded.customer

    def refusal(self, who: Customer) -> str:
        return self.directory.principals[who.digest].refusal

    @property
    def met(self) -> int:
        return self.metrics.counters["config_unreadable_total"]


@pytest.fixture
async def world(sessions: db.Sessions, database_settings: Database) -> AsyncIterator[World]:
    seeded, other = await seed(sessions, "http://127.0.0.1:9/"), await customer(sessions)
    directory, metrics = Directory(), Metrics()
    url = database_settings.url.get_secret_value()
    follower = Follower(directory, sessions, url, sealing=SEALING, clock=SystemClock(), metrics=metrics)
    loaded = asyncio.Event()
    task = asyncio.create_task(follower.run(loaded.set))
    try:
        async with asyncio.timeout(20):
            await loaded.wait()
        yield World(directory, metrics, seeded, other)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_key_that_cannot_be_read_is_refused_alone_and_the_rest_is_followed(
    world: World, spoil: Spoil, sessions: db.Sessions
) -> None:
    await spoil(
        "api_key",
        "UPDATE api_key SET tier_max = 77 WHERE id = %s",
        world.one.key.id,
        kind="api_key",
        entity=world.one.key.id,
    )
    await until(lambda: world.refusal(world.one) == "KEY_UNREADABLE")
    assert world.met == 1
    with pytest.raises(PlatformError) as caught:
        authenticate(world.directory, world.one.digest, 0, "127.0.0.1")
    assert (caught.value.code, caught.value.kind) == ("KEY_UNREADABLE", ErrorKind.UNAVAILABLE)
    async with db.transaction(sessions) as session:
        found = await principals.find(session, PEPPERS, world.one.secret)
        assert found is not None
        assert found.refusal == "KEY_UNREADABLE"
        await api_keys.revoke(session, world.other.tenant.id, world.other.key.id, clock=SystemClock())
    await until(lambda: world.refusal(world.other) == "KEY_REVOKED")
    assert world.metrics.counters["config_failures_total"] == 0
    await spoil(
        "api_key",
        "UPDATE api_key SET tier_max = 2 WHERE id = %s",
        world.one.key.id,
        kind="api_key",
        entity=world.one.key.id,
    )
    await until(lambda: world.refusal(world.one) == "")


@pytest.mark.parametrize("level", [LimitLevel.KEY, LimitLevel.TENANT])
async def test_a_limit_that_cannot_be_read_refuses_whom_it_may_bind(
    world: World, spoil: Spoil, sessions: db.Sessions, level: LimitLevel
) -> None:
    """Nobody is served without a limit that they have; whoever else it is, is."""
    who = world.one
    async with db.transaction(sessions) as session:
        beside, _ = await api_keys.create(session, who.tenant.id, who.project.id, name="beside", pepper=PEPPERS.current)
    await limited(sessions, of_key(who) if level is LimitLevel.KEY else of_tenant(who), 5)

    def amounts() -> list[int]:
        return [limit.amount for limit in world.directory.principals[who.digest].limits]

    def refusals() -> dict[object, str]:
        return {known.key_id: known.refusal for known in world.directory.principals.values()}

    await until(lambda: beside.id in refusals() and 5 in amounts())
    broken = "UPDATE limit_rule SET metric = %s WHERE tenant_id = %s"
    await spoil("limit_rule", broken, "smiles_per_mile", who.tenant.id, kind="tenant_limits", entity=who.tenant.id)
    await until(lambda: world.refusal(who) == "KEY_UNREADABLE")
    assert refusals()[beside.id] == ("KEY_UNREADABLE" if level is LimitLevel.TENANT else "")
    assert world.refusal(world.other) == ""
    assert world.met >= 1
    mended = "requests_per_minute"
    await spoil("limit_rule", broken, mended, who.tenant.id, kind="tenant_limits", entity=who.tenant.id)
    await until(lambda: world.refusal(who) == "")
    assert 5 in amounts()
    assert refusals()[beside.id] == ""


async def test_a_model_with_a_price_that_cannot_be_read_has_none(world: World, spoil: Spoil) -> None:
    def priced() -> bool:
        prices = world.directory.prices
        assert prices is not None
        tenant_id = world.one.tenant.id
        return prices.schedule(world.seeded.model_id, Tier.STANDARD, Currency.USD, tenant_id) is not None

    assert priced()
    await spoil("price_item", "UPDATE price_item SET meter = 'smiles' WHERE meter = 'output'", kind="prices")
    await until(lambda: not priced())
    assert world.met >= 1
    assert world.refusal(world.one) == ""


async def test_a_deployment_that_cannot_be_read_is_not_served(world: World, spoil: Spoil) -> None:
    assert set(world.directory.models) == {"sim"}
    await spoil("deployment", "UPDATE deployment SET engine = 'steam'", kind="catalog")
    await until(lambda: not world.directory.models)
    assert world.met == 1
    await spoil("deployment", "UPDATE deployment SET engine = 'openai'", kind="catalog")
    await until(lambda: set(world.directory.models) == {"sim"})
