"""Minimum charges and long-context steps in the books: posting, receipts, usage, and what `verify` says of them."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from billing import receipts, reconcile, usage, verify
from billing.types import Meter, Outcome, UsageEvent
from core.db import Sessions, transaction
from core.money import format_pico, parse_pico
from core.resp import RespClient
from core.settings import Database
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories import lots
from tests.factories.billing_world import World, write
from tests.integration.billing.test_verify import owner_of

BASE = {"input": "0.05", "output": "0.20", "min_charge": "0.0001"}
ABOVE = {"input": "0.10", "output": "0.30"}
SMALL, LARGE = TokenUsage(3, output=1), TokenUsage(10_001, output=100)  # 0.00000035; above 10,000: 0.0010301


@pytest.fixture
async def world(sessions: Sessions, valkey: Path, tmp_path: Path) -> AsyncIterator[World]:
    """With a minimum of 0.0001 per request, and dearer tokens above 10,000 of input."""
    client = await RespClient.connect(f"unix://{valkey}")
    steps = [msgspec.structs.replace(item, above_tokens=10_000) for item in make.items(ABOVE)]
    prices = await make.publish_prices(sessions, [*make.items(BASE), *steps])
    yield World(sessions, client, prices, tmp_path / "spool")
    await client.close()


async def post(world: World, *events: UsageEvent) -> None:
    await write(world.spool_dir / "r1", events)
    await world.poster.step()


async def balances(world: World, tenant_id: UUID) -> dict[str, str]:
    rows = await world.rows(
        "SELECT a.code, b.credit - b.debit FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id"
        f" WHERE a.tenant_id = '{tenant_id}' AND b.credit <> b.debit"
    )
    return {str(code): format_pico(int(str(amount))) for code, amount in rows}


async def find(world: World) -> verify.Finding | None:
    async with transaction(world.sessions) as session:
        return await verify.verify(session)


async def test_what_lifts_a_charge_to_the_minimum_is_booked_and_shown_by_itself(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    small, large = make.event(tenant_id, s, SMALL), make.event(tenant_id, s, LARGE)
    free = make.event(tenant_id, s, TokenUsage(3), outcome=Outcome.CLIENT_ABORT)
    await post(world, small, large, free, small)
    assert await balances(world, tenant_id) == {
        "liability.credit_paid": "0.998869900000",
        "revenue.usage": "0.001030450000",  # 0.00000035 and 0.0010301
        "revenue.min_charge": "0.000099650000",
    }
    async with transaction(world.sessions) as session:
        found = [await receipts.receipt(session, tenant_id, event.id) for event in (small, large, free)]
        today = datetime.now(UTC).date()
        (row,) = await usage.by_day_and_model(session, tenant_id, today, today)
    shown = [[(line.meter, line.quantity, line.unit_price, line.amount) for line in one.lines] for one in found if one]
    assert shown == [
        [
            (Meter.INPUT, 3, "0.050000", "0.000000150000"),
            (Meter.OUTPUT, 1, "0.200000", "0.000000200000"),
            (Meter.MIN_CHARGE, 1, "0.000100000000", "0.000099650000"),
        ],
        [(Meter.INPUT, 10_001, "0.100000", "0.001000100000"), (Meter.OUTPUT, 100, "0.300000", "0.000030000000")],
        [(Meter.INPUT, 3, "0.050000", "0.000000000000")],
    ]
    assert [(one.amount, one.above_tokens) for one in found if one] == [
        ("0.000100000000", 0),
        ("0.001030100000", 10_000),
        ("0.000000000000", 0),
    ]
    assert (row.requests, row.amount_pico, row.min_charge_pico) == (
        3,
        parse_pico("0.0011301"),
        parse_pico("0.00009965"),
    )
    assert await find(world) is None
    assert await reconcile.books(world.sessions) == (1, [])


async def test_lots_and_the_overrun_pay_minimums_as_they_pay_usage(world: World) -> None:
    """Five small calls are 0.0005: 0.0002 of promo credit, then 0.00015 paid, and 0.00015 over."""
    tenant_id, s = await world.tenant("0.00015")
    await lots.give(world.sessions, tenant_id, "0.0002", datetime.now(UTC))
    await post(world, *(make.event(tenant_id, s, SMALL) for _ in range(5)))
    found = await balances(world, tenant_id)
    assert found == {
        "revenue.usage": "0.000001750000",
        "revenue.min_charge": "0.000498250000",
        "contra.promo_used": "-0.000200000000",
        "expense.overrun": "-0.000150000000",
    }
    assert await find(world) is None
    assert await reconcile.books(world.sessions) == (1, [])


ALTERED = {
    "UPDATE usage_event SET min_charge_pico = min_charge_pico - 1 WHERE min_charge_pico > 0": "usage_event",
    "UPDATE usage_event SET input_uncached = 10000 WHERE input_uncached = 10001": "usage_event",
    "UPDATE usage_rollup SET min_charge_pico = min_charge_pico - 1": "usage_rollup",
    "UPDATE price_item SET unit_price_pico = unit_price_pico + 1 WHERE above_tokens > 0": "price_version",
    "UPDATE price_item SET above_tokens = 10001 WHERE above_tokens > 0": "price_version",
    "UPDATE price_item SET unit_price_pico = unit_price_pico - 1 WHERE meter = 'min_charge'": "price_version",
    "UPDATE ledger_transfer SET amount = amount + 1 WHERE credit_account IN"
    " (SELECT id FROM ledger_account WHERE code = 'revenue.min_charge')": "ledger_balance",
}


async def test_verify_finds_a_minimum_or_a_step_that_was_altered(world: World, database_settings: Database) -> None:
    tenant_id, s = await world.tenant("1")
    await post(world, make.event(tenant_id, s, SMALL), make.event(tenant_id, s, LARGE))
    tables = {statement.split()[1] for statement in ALTERED}
    with owner_of(database_settings) as owner:
        for table in tables:
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for statement, shows in ALTERED.items():
            assert owner.execute(statement).rowcount > 0, statement
            finding = await find(world)
            assert finding is not None, statement
            assert finding.table == shows, statement
            for table in tables:
                owner.execute(f"DELETE FROM {table}")
                owner.execute(f"INSERT INTO {table} TABLE kept_{table}")
    assert await find(world) is None


async def test_verify_finds_a_minimum_booked_as_usage(world: World, database_settings: Database) -> None:
    """Both accounts and all balances are right by themselves; only the split is not."""
    tenant_id, s = await world.tenant("1")
    await post(world, make.event(tenant_id, s, SMALL))
    code = "SELECT id FROM ledger_account WHERE code = 'revenue.{}'"
    with owner_of(database_settings) as owner:
        for name, one in (("usage", "+ 1"), ("min_charge", "- 1")):
            of = code.format(name)
            owner.execute(f"UPDATE ledger_transfer SET amount = amount {one} WHERE credit_account IN ({of})")
            owner.execute(f"UPDATE ledger_balance SET credit = credit {one} WHERE account_id IN ({of})")
    finding = await find(world)
    assert finding is not None
    assert finding.table == "usage_event and ledger_transfer"


async def test_an_event_that_forgets_the_step_or_the_minimum_is_not_billed(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    short = make.event(tenant_id, s, LARGE, amount_pico=10_001 * 50_000 + 100 * 200_000)
    bare = make.event(tenant_id, s, SMALL, amount_pico=350_000)
    await post(world, short, bare)
    assert sorted(await world.rows("SELECT reason FROM usage_quarantine")) == [
        ("the amount is 0.000000350000, the price version gives 0.000100000000",),
        ("the amount is 0.000520050000, the price version gives 0.001030100000",),
    ]
    assert await balances(world, tenant_id) == {"liability.credit_paid": "1.000000000000"}
