"""Any order of top-ups, price changes and deliveries — repeated, reordered, split — gives what a plain model gives."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import ledger, price_book, pricing, verify
from billing.credits import balance, top_up
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.types import BillingMode, Meter, Outcome, PriceItem, UsageEvent
from core import db
from core.clock import SystemClock
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make

T = TypeVar("T")
USD = Currency.USD


@dataclass
class Books:
    """What the machine drives: one database for all runs; each run has tenants of its own."""

    runner: asyncio.Runner
    sessions: db.Sessions
    posting: Posting
    book: UUID

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)


@dataclass
class Account:
    """The model of a tenant: plain integers."""

    tenant_id: UUID
    available: int = 0
    overrun: int = 0
    billed: int = 0
    requests: int = 0
    keys: dict[str, int] = field(default_factory=dict)


counts = st.integers(0, 3000)
usages = st.builds(TokenUsage, counts, counts, counts, counts, counts)
places = st.integers(0, 10**6)


class BooksMachine(RuleBasedStateMachine):
    """Two prepaid tenants and a postpaid one."""

    books: ClassVar[Books]

    def __init__(self) -> None:
        super().__init__()
        self.accounts: list[Account] = []
        self.events: list[UsageEvent] = []
        self.posted: set[UUID] = set()
        self.version: VersionPrices

    @initialize(limit=st.integers(0, 10**11))
    def open(self, limit: int) -> None:
        async def work() -> None:
            async with db.transaction(self.books.sessions) as session:
                for mode, bound in ((BillingMode.PREPAID, 0), (BillingMode.PREPAID, 0), (BillingMode.POSTPAID, limit)):
                    account = Account(new_uuid(), bound)
                    await ledger.open_tenant(session, account.tenant_id, USD, mode, bound)
                    self.accounts.append(account)

        self.books.run(work())
        self.publish(prices=[1_000_000, 100_000, 2_000_000, 5_000_000, 0])

    @rule(prices=st.lists(st.integers(0, 20_000_000), min_size=5, max_size=5))
    def publish(self, prices: list[int]) -> None:
        meters = (Meter.INPUT, Meter.CACHED_INPUT, Meter.OUTPUT, Meter.REASONING, Meter.REQUEST)
        items = [
            PriceItem(make.MODEL, Tier.STANDARD, meter, price) for meter, price in zip(meters, prices, strict=True)
        ]

        async def work() -> VersionPrices | None:
            async with db.transaction(self.books.sessions) as session:
                draft = await price_book.create_draft(session, self.books.book, items)
                await price_book.publish(session, draft, now=datetime.now(UTC))
                return await price_book.load_version(session, draft)

        version = self.books.run(work())
        assert version is not None
        self.version = version

    @rule(who=st.integers(0, 2), amount=st.integers(-1, 10**11), key=st.sampled_from("abcd"))
    def top_up(self, who: int, amount: int, key: str) -> None:
        account = self.accounts[who]

        async def work() -> bool:
            async with db.transaction(self.books.sessions) as session:
                try:
                    await top_up(session, account.tenant_id, amount, idempotency_key=key, actor="test")
                except PlatformError:
                    return False
                return True

        right = who < 2 and amount > 0 and account.keys.get(key, amount) == amount
        assert self.books.run(work()) is right
        if right and key not in account.keys:
            account.keys[key] = amount
            account.available += amount

    @rule(who=st.integers(0, 2), usage=usages, outcome=st.sampled_from(Outcome), count=st.integers(1, 4))
    def use(self, who: int, usage: TokenUsage, outcome: Outcome, count: int) -> None:
        tenant_id = self.accounts[who].tenant_id
        schedule = make.schedule(self.version, tenant_id)
        self.events += [make.event(tenant_id, schedule, usage, outcome=outcome) for _ in range(count)]

    @precondition(lambda self: self.events)
    @rule(picks=st.lists(places, min_size=1, max_size=12), splits=st.lists(places, max_size=2))
    def deliver(self, picks: list[int], splits: list[int]) -> None:
        """Any events made so far, in any order, again and again, in up to three batches."""
        chosen = [self.events[pick % len(self.events)] for pick in picks]
        cuts = sorted({0, len(chosen), *(split % len(chosen) for split in splits)})
        for start, end in pairwise(cuts):
            batch = chosen[start:end]
            self.books.run(self.books.posting.post(batch))
            self._expect(batch)

    @precondition(lambda self: self.events)
    @rule(pick=places, more=st.integers(1, 10**6))
    def deliver_wrong_amount(self, pick: int, more: int) -> None:
        """It goes to quarantine, whatever is known of its id."""
        event = make.event(self.accounts[0].tenant_id, make.schedule(self.version, self.accounts[0].tenant_id))
        wrong = msgspec.structs.replace(event, amount_pico=event.amount_pico + more)
        posted = self.books.run(self.books.posting.post([wrong, self.events[pick % len(self.events)]]))
        assert [one.quarantined for one in posted] == [1]
        self._expect([self.events[pick % len(self.events)]])

    def _expect(self, batch: list[UsageEvent]) -> None:
        for account in self.accounts:
            amount = 0
            for event in batch:
                if event.tenant_id == account.tenant_id and event.id not in self.posted:
                    self.posted.add(event.id)
                    amount += event.amount_pico
                    account.requests += 1
            covered = min(amount, account.available)
            account.available -= covered
            account.overrun += amount - covered
            account.billed += amount

    @invariant()
    def balances_agree(self) -> None:
        async def work() -> list[int]:
            async with db.transaction(self.books.sessions) as session:
                return [(await balance(session, account.tenant_id)).available_pico for account in self.accounts]

        if self.accounts:
            assert self.books.run(work()) == [account.available for account in self.accounts]

    def teardown(self) -> None:
        ids = [account.tenant_id for account in self.accounts]

        async def work() -> tuple[Any, Any, verify.Finding | None]:
            async with db.transaction(self.books.sessions) as session:
                rollup = await session.execute(
                    text(
                        "SELECT tenant_id, sum(requests), sum(amount_pico) FROM usage_rollup"
                        " WHERE tenant_id = ANY(:ids) GROUP BY tenant_id"
                    ),
                    {"ids": ids},
                )
                accounts = await session.execute(
                    text(
                        "SELECT a.tenant_id, a.code, b.debit + b.credit FROM ledger_account a"
                        " JOIN ledger_balance b ON b.account_id = a.id"
                        " WHERE a.tenant_id = ANY(:ids) AND a.code IN ('revenue.usage', 'expense.overrun')"
                    ),
                    {"ids": ids},
                )
                found = rollup.all(), accounts.all()
            async with db.transaction(self.books.sessions) as session:
                return *found, await verify.verify(session)

        if not ids:
            return
        rollup, balances, finding = self.books.run(work())
        assert finding is None
        assert {row[0]: (row[1], row[2]) for row in rollup} == {
            account.tenant_id: (account.requests, account.billed) for account in self.accounts if account.requests
        }
        by_code = {(row[0], row[1]): row[2] for row in balances}
        for account in self.accounts:
            assert by_code[account.tenant_id, "revenue.usage"] == account.billed
            assert by_code[account.tenant_id, "expense.overrun"] == account.overrun


def test_the_books_follow_the_model(database_settings: Database) -> None:
    with asyncio.Runner() as runner:

        async def open_books() -> Books:
            sessions = db.create_sessions(db.create_engine(database_settings))
            async with db.transaction(sessions) as session:
                book = await price_book.create_book(session, "list", USD)
            posting = Posting(sessions, SystemClock(), poster_metrics(CollectorRegistry()))
            return Books(runner, sessions, posting, book)

        BooksMachine.books = runner.run(open_books())
        limits = settings(
            max_examples=25,
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # a failing run of 14 steps is short enough to read; shrinking takes minutes
        )
        run_state_machine_as_test(BooksMachine, settings=limits)
        runner.run(BooksMachine.books.sessions.kw["bind"].dispose())


def test_the_model_knows_prices() -> None:
    """The model takes amounts from the events; these are the code's own, so one is fixed by hand here."""
    version = VersionPrices(new_uuid(), USD, make.items(make.PRICES))
    schedule = make.schedule(version, new_uuid())
    assert pricing.charge(make.USAGE, schedule, Outcome.COMPLETED) == 12_258_000_000
