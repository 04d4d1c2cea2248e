"""The exported ledger before hledger and beancount: random books pass, an error of one pico does not."""

import random
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import msgspec
import psycopg
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import adjustments, books_export
from billing.books_text import BooksAccount, BooksFormat, account_name
from billing.credits import top_up
from billing.lots import LotSource
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.types import Outcome, UsageEvent
from core import db
from core.clock import SystemClock
from core.money import PICO_PER_UNIT, Currency
from core.settings import Database
from core.usage import TokenUsage
from tests.factories import auditors
from tests.factories import billing as make
from tests.factories import lots as credit

USD, CNY = Currency.USD, Currency.CNY
NOW = datetime.now(UTC).replace(second=0, microsecond=0)
SOON = NOW + timedelta(days=1)
# What operators may write in a note, and what either language would take it for.
NOTES = (
    "payment 4711; date:2020-01-01",
    'a "quoted" \\ note\n2020-01-01 * injected',
    "[2020-01-01] 余额 | x  y = 1 USD",
    "",
)


async def random_books(sessions: db.Sessions, seed: int) -> None:
    """Prepaid and postpaid tenants in both currencies; some run out of what they may spend."""
    chance = random.Random(seed)
    posting = Posting(sessions, SystemClock(), poster_metrics(CollectorRegistry()))
    prices = {USD: await make.publish_prices(sessions), CNY: await make.publish_prices(sessions, currency=CNY)}
    tenants = [
        *[(await make.tenant(sessions, currency=currency), currency) for currency in (USD, CNY, USD)],
        *[(await make.tenant(sessions, limit="0.05", currency=currency), currency) for currency in (USD, CNY)],
    ]
    for round_number in range(chance.randint(4, 8)):
        tenant_id, _ = chance.choice(tenants[:3])
        amount = chance.randint(1, PICO_PER_UNIT // 5)
        async with db.transaction(sessions) as session:
            await top_up(
                session,
                tenant_id,
                amount,
                idempotency_key=f"k{round_number}",
                actor="test",
                note=chance.choice(NOTES),
            )
        if chance.random() < 0.7:
            given = f"0.{chance.randint(1, 10**12 // 20):012d}"
            source = chance.choice([LotSource.PROMO, LotSource.GOODWILL])
            await credit.give(sessions, tenant_id, given, NOW, source=source, expires_at=chance.choice([None, SOON]))
        await posting.post(_events(chance, tenants, prices))
    await _undo(sessions, [tenant_id for tenant_id, _ in tenants[:3]])


async def _undo(sessions: db.Sessions, tenant_ids: Sequence[UUID]) -> None:
    """A grant and a top-up that expire, and a grant that is reversed."""
    for tenant_id in tenant_ids:
        await credit.give(sessions, tenant_id, "0.000000000001", NOW, expires_at=SOON)
        await credit.buy(sessions, tenant_id, "0.000000000003", NOW, SOON)
        assert await credit.expire(sessions, tenant_id, SOON + timedelta(days=1)) > 0
        given = await credit.give(sessions, tenant_id, "0.123456789012", NOW)
        assert given.transaction_id is not None
        async with db.transaction(sessions) as session:
            await adjustments.reverse(session, tenant_id, given.transaction_id, credit.asked(NOW))


def _events(
    chance: random.Random, tenants: Sequence[tuple[UUID, Currency]], prices: dict[Currency, VersionPrices]
) -> list[UsageEvent]:
    made = []
    for _ in range(chance.randint(1, 12)):
        tenant_id, currency = chance.choice(tenants)
        usage = TokenUsage(*(chance.randint(0, 3000) for _ in range(5)))
        outcome = chance.choice([Outcome.COMPLETED, Outcome.COMPLETED, Outcome.CLIENT_ABORT, Outcome.TIMEOUT])
        made.append(make.event(tenant_id, make.schedule(prices[currency], tenant_id), usage, outcome=outcome))
    return made


async def spread_over_months(settings: Database, first: str) -> None:
    """Move the bookings, which are all of now, over the months from that day on; their order stays."""
    owner = settings.owner_url
    assert owner is not None
    async with await psycopg.AsyncConnection.connect(owner.get_secret_value(), autocommit=True) as connection:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(
            """
            WITH placed AS (SELECT id, row_number() OVER (ORDER BY booked_at, id) AS n FROM ledger_tx)
            UPDATE ledger_tx x SET booked_at = %s::timestamptz + n * interval '17 hours 3 minutes'
            FROM placed WHERE placed.id = x.id
            """,
            [first],
        )
        await connection.execute("UPDATE ledger_account SET created_at = %s::timestamptz", [first])


async def written(sessions: db.Sessions, kind: BooksFormat, folder: Path, until: date | None = None) -> Path:
    path = folder / f"books.{kind.value}"
    path.write_bytes(b"".join([piece async for piece in books_export.export(sessions, kind, until)]))
    return path


def objections(path: Path) -> str:
    hledger = path.suffix == ".hledger"
    return auditors.hledger_objects(path) if hledger else auditors.beancount_objects(path)


async def trial_balance(sessions: db.Sessions) -> dict[str, Decimal]:
    """Debits less credits of every account, from the ledger's own balances."""
    async with db.transaction(sessions) as session:
        rows = await session.execute(
            text(
                "SELECT a.id, a.code, a.currency, a.tenant_id, b.debit - b.credit AS balance, l.account_id AS lot"
                " FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id"
                " LEFT JOIN credit_lot l ON l.account_id = a.id"
            )
        )
        return {
            account_name(
                BooksAccount(row.id, row.code, row.currency, row.tenant_id, date.min, row.lot is not None)
            ): row.balance.scaleb(-12)
            for row in rows
        }


@pytest.mark.parametrize("seed", range(4))
async def test_random_books_are_found_right_by_both(
    sessions: db.Sessions, database_settings: Database, tmp_path: Path, seed: int
) -> None:
    await random_books(sessions, seed)
    await spread_over_months(database_settings, "2026-01-29T22:00:00Z")
    for kind in BooksFormat:
        path = await written(sessions, kind, tmp_path)
        assert objections(path) == "", path.read_text("utf-8")
        kinds = set(re.findall(r"^2026-\S+ \* \W*(?:txn_\w+\) )?(\w+) ten_", path.read_text("utf-8"), re.MULTILINE))
        assert kinds == {"top_up", "usage", "grant", "expiry", "reversal"}
        again = path.read_bytes()
        assert (await written(sessions, kind, tmp_path)).read_bytes() == again
    ours = await trial_balance(sessions)
    theirs = auditors.hledger_balances(tmp_path / "books.hledger")
    assert {name: amount for name, amount in ours.items() if amount} == {
        name: amount for name, amount in theirs.items() if amount
    }
    assert sum(ours.values()) == 0


@pytest.fixture
async def files(sessions: db.Sessions, database_settings: Database, tmp_path: Path) -> list[Path]:
    """Books over several months, right in both languages."""
    await random_books(sessions, 99)
    await spread_over_months(database_settings, "2026-01-29T22:00:00Z")
    made = [await written(sessions, kind, tmp_path) for kind in BooksFormat]
    assert [objections(path) for path in made] == ["", ""]
    return made


def altered(path: Path, pattern: str, times: int = 1) -> Path:
    """A copy whose first amount after a match of the pattern is one pico more."""

    def more(match: "re.Match[str]") -> str:
        return f"{match[1]}{Decimal(match[2]) + Decimal('0.000000000001'):f}{match[3]}"

    text = path.read_text("utf-8")
    changed, count = re.subn(rf"({pattern})(-?[0-9]+\.[0-9]{{12}})( )", more, text, count=times)
    assert count == times
    copy = path.with_stem("altered")
    copy.write_text(changed, "utf-8")
    return copy


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\n    Income:Usage\S*  ", ("could not balance", "does not balance")),
        (r"\n    Assets:Cash\S*  (?=-?[0-9.]+ USD\n)", ("could not balance", "does not balance")),
    ],
    ids=["of a posting of usage", "of a posting of cash"],
)
def test_an_error_of_one_pico_is_found_by_both(files: list[Path], pattern: str, words: tuple[str, str]) -> None:
    for path, word in zip(files, words, strict=True):
        assert word in objections(altered(path, pattern)).lower()


def test_a_balance_wrong_by_one_pico_is_found_by_both(files: list[Path]) -> None:
    hledger, beancount = files
    assert "balance assertion" in objections(altered(hledger, r"\n    Assets:Cash\S*  0.000000000000 USD = ")).lower()
    assert "balance failed" in objections(altered(beancount, r"\n\S+ balance Assets:Cash\S*  ")).lower()


@pytest.mark.parametrize("kind", list(BooksFormat))
async def test_a_transfer_altered_in_the_database_is_found(
    sessions: db.Sessions, database_settings: Database, tmp_path: Path, kind: BooksFormat
) -> None:
    """A transfer balances by itself whatever its amount; the closing balances are the ledger's own and give it away."""
    await random_books(sessions, 7)
    owner = database_settings.owner_url
    assert owner is not None
    async with await psycopg.AsyncConnection.connect(owner.get_secret_value(), autocommit=True) as connection:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(
            "UPDATE ledger_transfer SET amount = amount + 1 WHERE (tx_id, seq) IN"
            " (SELECT tx_id, seq FROM ledger_transfer ORDER BY tx_id DESC LIMIT 1)"
        )
    assert "balance" in objections(await written(sessions, kind, tmp_path)).lower()


async def test_until_a_day_has_all_before_it_and_nothing_else(
    sessions: db.Sessions, database_settings: Database, tmp_path: Path
) -> None:
    await random_books(sessions, 3)
    await spread_over_months(database_settings, "2026-01-30T00:00:00Z")
    for kind in BooksFormat:
        path = await written(sessions, kind, tmp_path, date(2026, 2, 1))
        assert objections(path) == ""
        # 17 h 3 min apart from 30 January on: one that day, one on the 31st at 10:06, the next on 1 February at 03:09
        assert re.findall(r"^2026-\d\d-\d\d(?= \* .*txn_)", path.read_text("utf-8"), re.MULTILINE) == [
            "2026-01-30",
            "2026-01-31",
        ]
        assert path.read_text("utf-8").splitlines()[-1].startswith("; the end: 2 entries, ")


async def test_books_without_entries_are_right_too(sessions: db.Sessions, tmp_path: Path) -> None:
    for kind in BooksFormat:
        assert objections(await written(sessions, kind, tmp_path)) == ""
    await make.tenant(sessions)
    for kind in BooksFormat:
        assert objections(await written(sessions, kind, tmp_path)) == ""


async def test_a_transaction_that_moves_nothing_is_an_entry(sessions: db.Sessions, tmp_path: Path) -> None:
    prices = await make.publish_prices(sessions)
    tenant_id = await make.tenant(sessions, "1")
    posting = Posting(sessions, SystemClock(), poster_metrics(CollectorRegistry()))
    free = make.event(tenant_id, make.schedule(prices, tenant_id), outcome=Outcome.TIMEOUT)
    assert msgspec.structs.asdict((await posting.post([free]))[0])["new"] == 1
    for kind in BooksFormat:
        path = await written(sessions, kind, tmp_path)
        assert objections(path) == ""
        assert "; the end: 2 entries, 5 accounts" in path.read_text("utf-8")
