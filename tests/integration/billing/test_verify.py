"""`tidegate ledger verify` finds any figure that was altered, whoever altered it."""

import asyncio
from uuid import UUID

import psycopg

from billing import verify
from billing.types import Outcome
from core.db import transaction
from core.settings import Database, Secrets, Settings, Valkey
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories.billing_world import World, write


async def books(world: World) -> tuple[UUID, UUID]:
    """Two tenants, three batches, an overrun, a quarantined event; right in every row."""
    prepaid, s = await world.tenant("0.05")
    postpaid = await make.tenant(world.sessions, limit="1")
    await make.add_credit(world.sessions, prepaid, "0.01", "second")
    for batch in range(3):
        events = [
            *(make.event(prepaid, s) for _ in range(2)),
            make.event(postpaid, make.schedule(world.prices, postpaid), TokenUsage(1, 2, 3, 4, 5)),
            make.event(prepaid, s, outcome=Outcome.TIMEOUT),
            make.event(prepaid, s, amount_pico=1),
        ]
        await write(world.spool_dir / f"r{batch}", events)
        await world.poster.step()
    return prepaid, postpaid


async def find(world: World) -> verify.Finding | None:
    async with transaction(world.sessions) as session:
        return await verify.verify(session)


USAGE_SETS = ("input_uncached", "input_cached", "input_cache_write", "output", "reasoning", "requests", "amount_pico")
# table, what is set (None: the row is deleted), which row, where it shows first
ALTERATIONS: list[tuple[str, str | None, str, str]] = [
    ("price_item", "unit_price_pico = unit_price_pico + 1", "meter = 'output'", "price_version"),
    ("price_item", None, "meter = 'cached_input'", "price_version"),
    ("price_version", "effective_at = effective_at - interval '1 second'", "true", "price_version"),
    ("ledger_transfer", "amount = amount + 1", "{top_up}", "ledger_tx"),
    ("ledger_transfer", "amount = amount - 1", "{usage}", "ledger_balance"),
    ("ledger_transfer", "amount = -amount", "{usage}", "ledger_transfer"),
    ("ledger_transfer", "credit_account = debit_account, debit_account = credit_account", "{usage}", "ledger_transfer"),
    ("ledger_transfer", "currency = 'CNY'", "{usage}", "ledger_transfer"),
    ("ledger_transfer", None, "{usage}", "ledger_balance"),
    ("ledger_balance", "debit = debit + 1", "{lot}", "ledger_balance"),
    ("ledger_balance", "credit = credit + 1", "{lot}", "ledger_balance"),
    ("ledger_balance", "debit = debit + 1, credit = credit + 1", "NOT bounded", "ledger_balance"),
    ("ledger_balance", "credit_limit = 1", "{lot}", "ledger_balance bound"),
    ("ledger_balance", "bounded = false", "{lot}", "ledger_balance bound"),
    ("ledger_balance", None, "{lot}", "ledger_balance"),
    ("usage_event", "amount_pico = amount_pico + 1", "{event}", "usage_event"),
    ("usage_event", "amount_pico = 0", "{event}", "usage_event"),
    ("usage_event", "input_uncached = input_uncached - 1, output = output + 1", "{event}", "usage_event"),
    ("usage_event", "output = output + 1, reasoning = reasoning - 1", "{event}", "usage_rollup"),
    ("usage_event", "outcome = 'timeout'", "{event}", "usage_event"),
    ("usage_event", "tier = 2", "{event}", "usage_event"),
    ("usage_event", "price_version_id = tenant_id", "{event}", "usage_event"),
    ("usage_event", "tenant_id = '{other}'", "{event}", "usage_event"),
    ("usage_event", "currency = 'CNY'", "{event}", "usage_event"),
    ("usage_event", "tx_id = ({last_tx})", "{event}", "usage_event and ledger_transfer"),
    ("usage_event", None, "{event}", "usage_event and ledger_transfer"),
    ("usage_event", None, "outcome = 'timeout'", "usage_rollup"),
    *(("usage_rollup", f"{part} = {part} + 1", "true", "usage_rollup") for part in USAGE_SETS),
    ("usage_rollup", None, "outcome = 'timeout'", "usage_rollup"),
    ("usage_quarantine", "amount_pico = 5", "true", "usage_quarantine"),
    ("usage_quarantine", "payload = '\\x00'", "true", "usage_quarantine"),
    ("billing_profile", "version = version + 1", "true", "billing_profile"),
    ("ledger_tx", "note = 'x'", "kind = 'top_up'", "ledger_tx"),
    ("ledger_tx", None, "kind = 'top_up'", "ledger_transfer"),
]
TABLES = sorted({table for table, *_ in ALTERATIONS})


def places(tenant: UUID, other: UUID) -> dict[str, str]:
    """Conditions that name one row."""
    first = "(SELECT id FROM ledger_tx WHERE kind = '{kind}' AND tenant_id = '{tenant}' ORDER BY id LIMIT 1)"
    return {
        "top_up": "tx_id = " + first.format(kind="top_up", tenant=tenant),
        "usage": "tx_id = " + first.format(kind="usage", tenant=tenant),
        "event": "id = (SELECT id FROM usage_event"
        f" WHERE tenant_id = '{tenant}' AND amount_pico > 0 ORDER BY id LIMIT 1)",
        "lot": f"account_id = (SELECT account_id FROM credit_lot WHERE tenant_id = '{tenant}')",
        "last_tx": f"SELECT id FROM ledger_tx WHERE tenant_id = '{tenant}' AND kind = 'usage' ORDER BY id DESC LIMIT 1",
        "other": str(other),
    }


async def test_every_altered_figure_is_found(world: World, database_settings: Database) -> None:
    """As the owner, with all triggers off: one alteration at a time, each taken back.

    The books are as they were before events had digests, which would find any change of an event first.
    """
    where = places(*await books(world))
    with owner_of(database_settings) as owner:
        owner.execute("UPDATE usage_event SET digest = NULL")
        owner.execute("UPDATE ledger_tx SET usage_sha256 = NULL")
        assert await find(world) is None
        owner.execute("ALTER TABLE ledger_transfer DROP CONSTRAINT ledger_transfer_amount_check")
        owner.execute("ALTER TABLE ledger_balance DROP CONSTRAINT ledger_balance_limit_check")
        for table in TABLES:
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for table, change, row, shows in ALTERATIONS:
            verb = f"DELETE FROM {table}" if change is None else f"UPDATE {table} SET {change}"
            statement = f"{verb} WHERE {row}".format(**where)
            assert owner.execute(statement).rowcount > 0, statement
            finding = await find(world)
            assert finding is not None, statement
            assert finding.table == shows, f"{statement}: {finding}"
            assert finding.row
            assert finding.problem
            for one in TABLES:
                owner.execute(f"DELETE FROM {one}")
                owner.execute(f"INSERT INTO {one} TABLE kept_{one}")
        assert await find(world) is None


def owner_of(database_settings: Database) -> psycopg.Connection:
    """A connection for which triggers do not fire."""
    assert database_settings.owner_url is not None
    owner = psycopg.connect(database_settings.owner_url.get_secret_value(), autocommit=True)
    owner.execute("SET session_replication_role = replica")
    return owner


async def test_the_command_says_what_is_wrong_and_fails(world: World, database_settings: Database) -> None:
    where = places(*await books(world))
    settings = Settings(
        secrets=Secrets.model_validate(dict.fromkeys(("pepper", "signing", "sealing"), "00")),
        database=database_settings,
        valkey=Valkey.model_validate({"url": "unix:///nowhere", "broker_url": "unix:///nowhere"}),
    )
    said: list[str] = []
    assert await asyncio.to_thread(verify.main, settings, said.append) == 0
    assert said[-1].startswith("the books are right: 1 price_version rows")
    with owner_of(database_settings) as owner:
        owner.execute(f"UPDATE ledger_balance SET credit = credit + 1 WHERE {where['lot']}")
    assert await asyncio.to_thread(verify.main, settings, said.append) == 1
    assert said[-1].startswith("wrong: ledger_balance: ")
    assert "liability.credit_paid" in said[-1]


async def test_new_books_are_right(world: World) -> None:
    assert await find(world) is None
    await world.tenant("1")
    assert await find(world) is None
