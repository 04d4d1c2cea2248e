"""Ledger and credit on a real Postgres: exact, once, and not to be altered by the application."""

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from billing import ledger
from billing.credits import TopUp
from billing.credits import top_up as post_top_up
from billing.ledger import Source
from billing.types import BillingMode, Transaction, Transfer
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency, parse_pico
from core.settings import Database
from core.tiers import Tier
from tests.factories import billing as make


async def top_up(sessions: Sessions, tenant_id: UUID, amount: str, key: str, note: str = "") -> TopUp:
    async with transaction(sessions) as session:
        return await post_top_up(
            session, tenant_id, parse_pico(amount), idempotency_key=key, actor="operator", note=note
        )


async def test_a_top_up_counts_once_per_key(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    first = await top_up(sessions, tenant_id, "10.000000000001", "k1")
    again = await top_up(sessions, tenant_id, "10.000000000001", "k1")
    assert (first.replayed, again.replayed) == (False, True)
    assert again.transaction_id == first.transaction_id
    await top_up(sessions, tenant_id, "0.5", "k2")
    assert await make.available(sessions, tenant_id) == 10_500_000_000_001
    with pytest.raises(PlatformError) as refused:
        await top_up(sessions, tenant_id, "11", "k1")
    assert refused.value.code == "IDEMPOTENCY_KEY_REUSED"
    assert await make.available(sessions, tenant_id) == 10_500_000_000_001


async def test_parallel_top_ups_with_one_key_count_once(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    done = await asyncio.gather(*(top_up(sessions, tenant_id, "7", "same") for _ in range(8)))
    assert sorted(one.replayed for one in done) == [False] + [True] * 7
    assert await make.available(sessions, tenant_id) == parse_pico("7")


async def test_amounts_out_of_bounds_are_refused(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    for amount in ("0", "-1", "1000000000.000000000001"):
        with pytest.raises(PlatformError) as refused:
            await top_up(sessions, tenant_id, amount, "k")
        assert refused.value.code == "INVALID_AMOUNT"


async def test_a_tenant_opens_once_in_one_currency(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions, "1")
    async with transaction(sessions) as session:
        await ledger.open_tenant(session, tenant_id, Currency.USD)
    assert await make.available(sessions, tenant_id) == parse_pico("1")
    for currency, mode in ((Currency.CNY, BillingMode.PREPAID), (Currency.USD, BillingMode.POSTPAID)):
        with pytest.raises(PlatformError) as refused:
            async with transaction(sessions) as session:
                await ledger.open_tenant(session, tenant_id, currency, mode)
        assert refused.value.code == "ACCOUNT_EXISTS"
    with pytest.raises(PlatformError) as refused:
        await top_up(sessions, new_uuid(), "1", "k")
    assert refused.value.code == "NOT_FOUND"


async def test_a_postpaid_tenant_has_its_limit_and_no_top_up(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions, limit="25")
    assert await make.available(sessions, tenant_id) == parse_pico("25")
    with pytest.raises(PlatformError) as refused:
        await top_up(sessions, tenant_id, "1", "k")
    assert refused.value.code == "NOT_PREPAID"


async def test_the_database_keeps_bounded_accounts_within_their_bound(sessions: Sessions) -> None:
    """Even a bug in the code that decides on transfers cannot make credit negative."""
    for tenant_id in (await make.tenant(sessions, "5"), await make.tenant(sessions, limit="5")):
        async with transaction(sessions) as session:
            row = (
                await session.execute(
                    text(
                        "SELECT p.revenue_account, coalesce(p.unbilled_account, l.account_id) AS bounded"
                        " FROM billing_profile p LEFT JOIN credit_lot l USING (tenant_id) WHERE p.tenant_id = :t"
                    ),
                    {"t": tenant_id},
                )
            ).one()
        for amount, fits in ((parse_pico("5"), True), (1, False)):
            take = Transaction(
                new_uuid(), tenant_id, "usage", Currency.USD, (Transfer(row.bounded, row.revenue_account, amount),)
            )
            if fits:
                async with transaction(sessions) as session:
                    await ledger.post(session, [take])
            else:
                with pytest.raises(IntegrityError, match="ledger_balance_limit_check"):
                    async with transaction(sessions) as session:
                        await ledger.post(session, [take])
        assert await make.available(sessions, tenant_id) == 0


@pytest.mark.parametrize(
    ("amount", "available", "right", "overrun"),
    [
        (5, [10], [("a0", 5)], 0),
        (10, [10], [("a0", 10)], 0),
        (12, [5, 10], [("a0", 5), ("a1", 7)], 0),
        (12, [0, 10], [("a1", 10), ("over", 2)], 2),
        (3, [], [("over", 3)], 3),
        (0, [10], [], 0),
    ],
)
def test_usage_takes_from_lots_in_order_and_the_rest_is_ours(
    amount: int, available: list[int], right: list[tuple[str, int]], overrun: int
) -> None:
    names = {"rev": UUID(int=99), "over": UUID(int=98)} | {f"a{i}": UUID(int=i + 1) for i in range(3)}
    sources = [Source(names[f"a{i}"], left) for i, left in enumerate(available)]
    charges = [ledger.Charge(amount, make.MODEL, Tier.STANDARD, datetime(2025, 11, 5, tzinfo=UTC))]
    transfers, over = ledger.usage_transfers(
        charges, sources, revenue=names["rev"], min_charges=UUID(int=97), overrun=names["over"]
    )
    assert over == overrun
    assert [(t.debit, t.credit, t.amount) for t in transfers] == [(names[n], names["rev"], part) for n, part in right]


REFUSED = (psycopg.errors.InsufficientPrivilege, psycopg.errors.RestrictViolation)
CHANGES = {
    "ledger_transfer": "amount = amount + 1",
    "ledger_tx": "note = 'x'",
    "ledger_account": "code = 'x'",
    "credit_lot": "priority = 1",
    "usage_event": "amount_pico = 0",
    "usage_quarantine": "reason = 'x'",
    "price_book": "name = 'x'",
}


def test_append_only_for_the_application_and_for_the_owner(database_settings: Database) -> None:
    """The usage events' own rows are tried in test_poster, where there are some."""
    owners_too = CHANGES.keys() - {"price_book", "usage_event"}
    assert database_settings.owner_url is not None
    for table, change in CHANGES.items():
        for url in (database_settings.url, *([database_settings.owner_url] if table in owners_too else [])):
            for statement in (f"UPDATE {table} SET {change}", f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
                with psycopg.connect(url.get_secret_value()) as connection, pytest.raises(REFUSED):
                    connection.execute(statement)


def test_the_application_cannot_lift_a_bound(database_settings: Database) -> None:
    for column in ("bounded", "account_id"):
        with psycopg.connect(database_settings.url.get_secret_value()) as connection, pytest.raises(REFUSED):
            connection.execute(f"UPDATE ledger_balance SET {column} = {column}")


async def test_a_transfer_moves_a_positive_amount_in_one_currency(sessions: Sessions) -> None:
    usd, cny = await make.tenant(sessions, "5"), await make.tenant(sessions, "5", currency=Currency.CNY)
    async with transaction(sessions) as session:
        rows = (await session.execute(text("SELECT tenant_id, account_id FROM credit_lot"))).all()
    lots = {row.tenant_id: row.account_id for row in rows}
    across = Transaction(new_uuid(), usd, "usage", Currency.USD, (Transfer(lots[usd], lots[cny], 1),))
    with pytest.raises(DBAPIError, match="credit_account"):
        async with transaction(sessions) as session:
            await ledger.post(session, [across])
    for transfer in (Transfer(lots[usd], lots[usd], 1), Transfer(lots[usd], lots[cny], 0)):
        wrong = Transaction(new_uuid(), usd, "usage", Currency.USD, (transfer,))
        with pytest.raises(ValueError, match="positive amount"):
            async with transaction(sessions) as session:
                await ledger.post(session, [wrong])
