"""One bill per idempotency key in the books, whatever ran twice."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import psycopg
import pytest

from billing import idempotency, receipts, verify
from billing.types import Outcome, PriceSchedule, UsageEvent
from core.clock import ManualClock, SystemClock
from core.db import Sessions, transaction
from core.money import parse_pico
from core.resp import RespClient
from core.settings import Database, Settings
from core.tasks import TaskContext
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories.billing_world import World, write

W3 = TokenUsage(1200, 0, 0, 300, 0)  # billing.md §5: 0.40 in, 1.60 out: 0.00096 once, wrong 0.00288
KEY = b"k" * 16


def _event(
    tenant: UUID, s: PriceSchedule, digest: bytes = KEY, usage: TokenUsage = W3, outcome: Outcome = Outcome.COMPLETED
) -> UsageEvent:
    return msgspec.structs.replace(make.event(tenant, s, usage, outcome=outcome), idempotency=digest)


@pytest.fixture
async def at_w3_prices(sessions: Sessions, valkey: Path, tmp_path: Path) -> AsyncIterator[World]:
    client = await RespClient.connect(f"unix://{valkey}")
    prices = await make.publish_prices(sessions, make.items({"input": "0.40", "output": "1.60"}))
    yield World(sessions, client, prices, tmp_path / "spool")
    await client.close()


@pytest.fixture
def settings(database_settings: Database, valkey: Path, tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {
            "home": tmp_path,
            "secrets": {"pepper": "00" * 32, "signing": "11" * 32, "sealing": "22" * 32},
            "database": database_settings,
            "valkey": {"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}?db=1"},
        }
    )


async def test_three_generations_of_one_key_are_one_bill(at_w3_prices: World) -> None:
    """W3, when all that kept them apart was lost: Valkey emptied, gateways killed. Midaz #1974 knew Redis' TTL only."""
    world = at_w3_prices
    tenant, s = await world.tenant("1")
    first, second, third = (_event(tenant, s) for _ in range(3))
    await write(world.spool_dir / "r1", [first, second])  # in one batch
    assert await world.poster.step() == 2
    await world.client.call("FLUSHALL")
    await write(world.spool_dir / "r2", [third, first])  # later, and one that was posted
    assert await world.new_poster().step() >= 2
    assert await world.available(tenant) == parse_pico("0.99904")
    stored = await world.rows("SELECT id, outcome, amount_pico, output FROM usage_event ORDER BY id")
    assert stored == [
        (first.id, "completed", parse_pico("0.00096"), 300),
        (second.id, "repeat", 0, 300),
        (third.id, "repeat", 0, 300),
    ]
    rollup = await world.rows("SELECT outcome, requests, amount_pico FROM usage_rollup ORDER BY outcome")
    assert rollup == [("completed", 1, parse_pico("0.00096")), ("repeat", 2, 0)]
    async with transaction(world.sessions) as session:
        shown = await receipts.receipt(session, tenant, third.id)
        assert shown is not None
        assert (shown.state, shown.outcome, shown.amount) == ("posted", Outcome.REPEAT, "0.000000000000")
        assert f"gen_{first.id.hex}" in shown.note
        assert {line.amount for line in shown.lines} == {"0.000000000000"}
    async with transaction(world.sessions) as session:
        assert await verify.verify(session) is None


async def test_what_ended_without_a_bill_leaves_its_key_free(world: World) -> None:
    tenant, s = await world.tenant("1")
    failed = _event(tenant, s, outcome=Outcome.UPSTREAM_ERROR)
    held = msgspec.structs.replace(_event(tenant, s), quarantine="the engine reported no usage")
    await write(world.spool_dir / "r1", [failed, held, _event(tenant, s)])
    assert await world.poster.step() == 3
    billed = await world.rows("SELECT outcome FROM usage_event WHERE amount_pico > 0")
    assert billed == [("completed",)]


async def test_the_same_key_of_two_tenants_is_two_bills(world: World) -> None:
    one, other = await world.tenant("1"), await world.tenant("1")
    await write(world.spool_dir / "r1", [_event(*one), _event(*other), _event(*one)])
    assert await world.poster.step() == 3
    billed = await world.rows("SELECT count(*), count(DISTINCT tenant_id) FROM usage_event WHERE amount_pico > 0")
    assert billed == [(2, 2)]
    assert await world.available(one[0]) == await world.available(other[0])


async def test_the_database_refuses_a_second_bill(world: World, database_settings: Database) -> None:
    tenant, _ = await world.tenant("1")
    row = "INSERT INTO usage_idempotency VALUES (%s, %s, gen_random_uuid(), %s, NULL)"
    url = database_settings.url.get_secret_value()
    with psycopg.connect(url, autocommit=True) as application:
        application.execute(row, (tenant, KEY, 0))
        application.execute(row, (tenant, KEY, idempotency.WINDOW_US))
        with pytest.raises(psycopg.errors.UniqueViolation):
            application.execute(row, (tenant, KEY, idempotency.WINDOW_US - 1))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            application.execute("UPDATE usage_idempotency SET admitted_us = 1")


async def test_old_keys_are_forgotten(world: World, settings: Settings) -> None:
    tenant, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [_event(tenant, s)])
    await world.poster.step()
    for days, left in ((30, 1), (32, 0)):
        clock = ManualClock(SystemClock().now() + timedelta(days=days))
        await idempotency.forget(TaskContext(settings, world.sessions, clock))
        assert await world.rows("SELECT count(*) FROM usage_idempotency") == [(left,)]
