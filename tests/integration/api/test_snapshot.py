"""The directory follows Postgres: whole at start, by change afterwards, and it stays when Postgres goes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import pytest

from api.inference.directory import Directory
from api.inference.metrics import Metrics
from api.inference.snapshot import Follower
from billing import price_book
from catalog import deployments, models
from catalog.types import DeploymentChange, DeploymentKind, EngineKind, NewDeployment
from core import db
from core.clock import SystemClock
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from tenants import api_keys, projects, tenants
from tests.conftest import PostgresService
from tests.factories import billing as billing_factory
from tests.factories.gateway_process import ENDPOINTS, SEALING, Seeded, seed
from tests.factories.stack import until
from tests.factories.tenants import customer


@dataclass(frozen=True)
class Following:
    directory: Directory
    metrics: Metrics
    seeded: Seeded
    sessions: db.Sessions


@pytest.fixture
async def following(sessions: db.Sessions, database_settings: Database) -> AsyncIterator[Following]:
    seeded = await seed(sessions, "http://127.0.0.1:9/")
    directory, metrics = Directory(), Metrics()
    follower = Follower(
        directory,
        sessions,
        database_settings.url.get_secret_value(),
        sealing=SEALING,
        clock=SystemClock(),
        metrics=metrics,
    )
    loaded = asyncio.Event()
    task = asyncio.create_task(follower.run(loaded.set))
    try:
        async with asyncio.timeout(20):
            await loaded.wait()
        yield Following(directory, metrics, seeded, sessions)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def price(following: Following) -> int:
    prices = following.directory.prices
    assert prices is not None
    found = prices.schedule(
        following.seeded.model_id,
        Tier.STANDARD,
        Currency.USD,
        following.seeded.customer.tenant.id,
        SystemClock().now_us(),
    )
    assert found is not None
    return found.input


async def test_it_is_whole_at_start_and_follows_every_kind_of_change(following: Following) -> None:
    directory, sessions, seeded = following.directory, following.sessions, following.seeded
    who = seeded.customer
    assert directory.principals[who.digest].key_id == who.key.id
    assert set(directory.models) == {"sim"}
    assert price(following) == 2_000_000
    directory.offers.clear()

    other = await customer(sessions)  # a new key
    await until(lambda: other.digest in directory.principals)
    async with db.transaction(sessions) as session:  # a revoked one
        await api_keys.revoke(session, other.tenant.id, other.key.id, clock=SystemClock())
    await until(lambda: directory.principals[other.digest].refusal == "KEY_REVOKED")
    async with db.transaction(sessions) as session:  # a suspended tenant, then project: what is nearest is told
        await tenants.suspend(session, who.tenant.id)
    await until(lambda: directory.principals[who.digest].refusal == "TENANT_SUSPENDED")
    async with db.transaction(sessions) as session:
        await projects.suspend(session, who.tenant.id, who.project.id)
    await until(lambda: directory.principals[who.digest].refusal == "PROJECT_SUSPENDED")

    now = SystemClock().now()
    async with db.transaction(sessions) as session:  # a second name for the model, and a credential
        version_id = directory.models["sim"].version_id
        await models.set_alias(session, "alias", version_id, now=now)
        await deployments.update(
            session,
            directory.models["sim"].deployment_id,
            DeploymentChange(credential="sk-upstream"),
            sealing_key=SEALING,
            now=now,
        )
    await until(lambda: "alias" in directory.models)
    assert directory.credentials == {directory.models["sim"].deployment_id: "sk-upstream"}

    async with db.transaction(sessions) as session:  # a price from now on, and one that comes by itself
        (book,) = await price_book.list_books(session)
        for cents, delay in (("3.00", timedelta()), ("4.00", timedelta(seconds=0.4))):
            items = billing_factory.items({**billing_factory.PRICES, "input": cents}, seeded.model_id)
            draft = await price_book.create_draft(session, book.id, items)
            await price_book.publish(session, draft, now=now, effective_at=SystemClock().now() + delay)
    await until(lambda: price(following) == 3_000_000)
    table = directory.prices
    await until(lambda: price(following) == 4_000_000)
    assert directory.prices is table


class Watched(Directory):
    """Notes what a caller would have met at the moment its key became known."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "principals" and value:
            assert self.models, "a known key, and no models yet: a wrong 404"
            assert self.prices is not None, "a known key, and no prices yet: a wrong 403"
        super().__setattr__(name, value)


async def test_no_key_is_known_before_models_and_prices_are(sessions: db.Sessions, database_settings: Database) -> None:
    """A gateway that starts under load is asked before it has read everything."""
    await seed(sessions, "http://127.0.0.1:9/")
    url, directory = database_settings.url.get_secret_value(), Watched()
    follower = Follower(directory, sessions, url, sealing=SEALING, clock=SystemClock(), metrics=Metrics())
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await follower.load(connection)
    assert directory.loaded
    assert directory.principals


async def test_a_notice_that_is_lost_costs_a_quarter_of_a_second(
    following: Following, postgres: PostgresService, database: str
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres.url("owner", database), autocommit=True) as connection:
        await connection.execute("INSERT INTO config_change (revision, kind) VALUES (1000, 'catalog')")  # no NOTIFY
    await until(lambda: following.directory.revision == 1000, 5)


async def test_postgres_gone_leaves_the_directory_and_it_catches_up(
    following: Following, postgres: PostgresService, database: str
) -> None:
    directory = following.directory
    url = postgres.url("owner", "postgres")
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database,)
        )
        await until(lambda: following.metrics.counters["config_failures_total"] >= 2)
        assert directory.loaded
        assert directory.principals
        await connection.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
    fresh = directory.fresh_at
    await until(lambda: directory.fresh_at > fresh, 10)
    other = await customer(following.sessions)
    await until(lambda: other.digest in directory.principals)


async def test_a_credential_that_does_not_open_stops_nothing(following: Following) -> None:
    directory, sessions = following.directory, following.sessions
    now = SystemClock().now()
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name="second", now=now)
        version_id = directory.models["sim"].version_id
        assert model_id
        await models.set_alias(session, "third", version_id, now=now)
        await deployments.create(
            session,
            NewDeployment(
                name="other-key",
                version_id=version_id,
                kind=DeploymentKind.EXTERNAL,
                engine=EngineKind.OPENAI,
                upstream_model="x",
                endpoints=ENDPOINTS,
                base_url="http://127.0.0.1:9/",
                credential="sk-x",
            ),
            sealing_key=b"z" * 32,
            now=now,
        )
    await until(lambda: "third" in directory.models)
    assert "sk-x" not in directory.credentials.values()
