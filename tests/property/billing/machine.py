"""The ledger on real Postgres and Valkey beside the model: what a run of the machine is made of, and what must hold."""

import asyncio
import json
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import credit_figures, ledger, price_book, queries
from billing.credit_figures import Settlement
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.types import BillingMode, Meter, PriceDiscount, PriceItem, PriceSchedule, PriceStep, UsageEvent
from core import db, keyspace
from core.clock import ManualClock
from core.credit_figure import parse_figure
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier
from scheduler.types import Grant as Admitted
from tests.factories import billing as make
from tests.factories.scheduler import Fleet, served_model
from tests.property.billing.model import FAR, Account, Event, Lot, Move
from tests.property.billing.model_prices import Items, Offer, Prices, Version, discounted

T = TypeVar("T")
START = datetime(2025, 12, 1, 0, 5, tzinfo=UTC)  # most that is late is of the month before
FIRST_MONTH = datetime(2025, 11, 1, tzinfo=UTC)
MODELS = (make.MODEL, UUID("01890000-0000-7000-8000-00000000aaab"))
TIERS = (Tier.STANDARD, Tier.BATCH)
NANO = 1000  # pico
CODES = {
    "liability.credit_paid": "paid",
    "asset.unbilled": "unbilled",
    "revenue.usage": "revenue",
    "revenue.min_charge": "minimum",
    "expense.overrun": "overrun",
    "contra.promo_unearned": "unearned",
    "contra.promo_used": "used",
    "revenue.breakage": "breakage",
}

# Few values, near one another: sums meet bounds exactly, and then miss them by one pico.
units = st.sampled_from([0, 1, 999, 1000, 1000, 1001, 1003, 2000])
amounts = st.builds(lambda whole, odd: whole * NANO + odd, st.integers(1, 12), st.sampled_from([0, 0, 0, 0, 1, -1]))
places = st.integers(0, 10**6)
tenants = st.sampled_from([0, 0, 0, 1, 2])  # most of it happens to one, so that its lots meet
PLAIN: Items = {(0, "input"): 1000, (0, "output"): 2000, (0, "min_charge"): 1001}
STEPPED: Items = {**PLAIN, (0, "cached_input"): 1, (4, "input"): 2000, (4, "output"): 1000, (4, "cached_input"): 3}
DISCOUNTS = (500_000, 500_000, 125_000, 333_333)  # millionths; half off 1 and 1001 pico is rounded to even
FREE: Items = {(0, "input"): 0, (0, "output"): 0, (0, "min_charge"): 5000}  # but for the minimum


@st.composite
def listed(draw: st.DrawFn) -> Items:
    """Prices of one model and tier: input and output, some other meters, up to two steps."""
    named = ["input", "output", *draw(st.sets(st.sampled_from(["cached_input", "cache_write", "reasoning"])))]
    found = {
        (above, m): draw(units) for above in (0, *draw(st.sampled_from([(), (4,), (2, 4)]))) for m in sorted(named)
    }
    for meter, values in (("request", [0, 1000, 1003]), ("min_charge", [0, 5000, 5001])):
        price = draw(st.sampled_from([None, *values]))
        if price is not None:
            found[0, meter] = price
    return found


@dataclass(frozen=True)
class Gift:
    """Credit to give: pico, promo or goodwill, for how many minutes, models and tiers (None: all)."""

    amount: int
    source: str
    minutes: int | None
    models: frozenset[int] | None
    tiers: frozenset[int] | None


scopes = st.sampled_from([*[None] * 6, frozenset({0}), frozenset({1})])
lasting = st.sampled_from([None, 5, 6, 30, 2 * FAR])
gifts = st.builds(Gift, amounts, st.sampled_from(["promo", "promo", "goodwill"]), lasting, scopes, scopes)


@dataclass
class Books:
    """What the machine drives: one database and one Valkey for all runs; each run has tenants of its own."""

    runner: asyncio.Runner
    sessions: db.Sessions
    book: UUID
    valkey: Path
    open_month: datetime = FIRST_MONTH


@dataclass
class Call:
    """A call that was admitted, with its hold."""

    who: int
    hold: int
    admitted: Admitted


@dataclass
class Undo:
    """A transaction that may be reversed: its id (of usage, its number), and what it moved."""

    who: int
    tx: UUID | int
    moves: list[Move]


Made = tuple[int, UsageEvent, Event]


class BooksBase(RuleBasedStateMachine):
    """Two tenants that begin prepaid and one that begins postpaid."""

    books: ClassVar[Books]

    def __init__(self) -> None:
        super().__init__()
        self.accounts: list[Account] = []
        self.tenants: list[UUID] = []
        self.lot_ids: dict[UUID, str] = {}
        self.made: list[Made] = []
        self.calls: list[Call] = []
        self.held: list[Made] = []  # in quarantine, with what a right count makes of it
        self.late: list[tuple[list[Settlement], list[Made]]] = []  # posted, and Valkey not told yet
        self.reversible: list[Undo] = []
        self.pending: list[tuple[int, UUID, int, Undo | tuple[Lot, int]]] = []
        self.versions: list[Version] = []
        self.published: list[VersionPrices] = []
        self.now = 0
        self.on_disk: int | None = None  # the minute of the oldest usage that a spool may have
        self.sealed_at = 0
        self.looked_at = 0
        self.lost: list[dict[str, int]] = []
        self.marks: list[str] = []
        self.touched: set[int] = set()

    @property
    def moved(self) -> int:
        """How many transactions there were."""
        return sum(account.version for account in self.accounts)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.books.runner.run(work)

    def instant(self, minute: int) -> datetime:
        return START + timedelta(minutes=minute)

    def new_id(self, minute: int) -> UUID:
        """An id as a gateway would mint it then."""
        return make.uuid7_at(int(self.instant(minute).timestamp()), new_uuid().int & 0xFFFF_FFFF_FFFF)

    @initialize(
        limit=st.integers(0, 15),
        paid=st.integers(0, 20),
        first=listed(),
        gifts=st.lists(gifts, max_size=3),
        off=st.sampled_from(DISCOUNTS),
    )
    def open(self, limit: int, paid: int, first: Items, gifts: list[Gift], *, off: int) -> None:
        self.run(self._open(limit * NANO))
        offers: dict[Offer, Items] = {
            (None, 0, 0): first,
            (None, 0, 1): STEPPED,
            (None, 1, 0): PLAIN,
            (None, 1, 1): FREE,
        }
        self.publish(offers, {(1, 0, 1): off})
        self.put_in(paid * NANO, gifts)

    async def _open(self, limit: int) -> None:
        self.clock = ManualClock(START)
        self.posting = Posting(self.books.sessions, self.clock, poster_metrics(CollectorRegistry()))
        self.fleet = await Fleet.open(self.books.valkey)
        await self.fleet.client.call("FLUSHALL")
        self.door = await self.fleet.replica()
        self.model = served_model()
        async with db.transaction(self.books.sessions) as session:
            await session.execute(text("UPDATE spool_report SET events = 0"))  # of the run before
            for mode, bound in (("prepaid", 0), ("prepaid", 0), ("postpaid", limit)):
                self.tenants.append(new_uuid())
                self.accounts.append(Account(bound if mode == "postpaid" else None, mode == "prepaid"))
                await ledger.open_tenant(session, self.tenants[-1], Currency.USD, BillingMode(mode), bound)
        for who in range(2):
            self.accounts[who].lots.append(Lot("paid", "paid", -1))
        await self.refresh(range(3))

    def put_in(self, paid: int, gifts: list[Gift]) -> None:
        """Begin with credit of the first tenant."""

    async def refresh(self, whose: Iterable[int]) -> None:
        for who in whose:
            await credit_figures.refresh(self.fleet.client, self.books.sessions, self.tenants[who], correct=True)

    def publish(self, offers: dict[Offer, Items], discounts: dict[Offer, int]) -> None:
        """Publish a whole list; discounts (millionths off) become prices of the tenants' own."""
        items = [
            PriceItem(MODELS[model], TIERS[tier], Meter(meter), pico, None if who is None else self.tenants[who], above)
            for (who, model, tier), given in offers.items()
            for (above, meter), pico in given.items()
        ]
        off = [
            PriceDiscount(self.tenants[who], MODELS[model], TIERS[tier], millionths)
            for (who, model, tier), millionths in discounts.items()
            if who is not None
        ]

        async def work() -> VersionPrices | None:
            async with db.transaction(self.books.sessions) as session:
                draft = await price_book.create_draft(session, self.books.book, items, discounts=off, complete=True)
                await price_book.publish(session, draft, now=datetime.now(UTC))
                return await price_book.load_version(session, draft)

        version = self.run(work())
        assert version is not None
        for place, millionths in discounts.items():
            offers[place] = {**discounted(offers[None, place[1], place[2]], millionths), **offers.get(place, {})}
        self.versions.append(Version(offers))
        self.published.append(version)
        self._compare_prices(version, self.versions[-1])

    def _compare_prices(self, published: VersionPrices, version: Version) -> None:
        """What each tenant pays for each model and tier, meter by meter and step by step."""
        for who, model, tier in product(range(len(self.tenants)), range(len(MODELS)), range(len(TIERS))):
            found = published.schedule(MODELS[model], TIERS[tier], self.tenants[who])
            assert found is not None
            parts: list[tuple[int, PriceSchedule | PriceStep]] = [
                (-1, found),
                *((one.above, one) for one in found.steps),
            ]
            steps = tuple(
                (above, (one.input, one.cached_input, one.cache_write, one.output, one.reasoning))
                for above, one in parts
            )
            assert Prices(steps, found.request, found.minimum) == version.prices(who, model, tier)

    # what must hold

    @invariant()
    def the_books_are_the_models(self) -> None:
        if self.accounts:
            self.run(self._compare())

    async def _compare(self) -> None:
        async with db.transaction(self.books.sessions) as session:
            rows = (await session.execute(text(STATE), {"t": self.tenants})).all()
            balances = {one.tenant_id: one for one in await queries.balances(session, self.tenants)}
        self._compare_accounts([json.loads(row.accounts) for row in rows])
        marks = [row.mark for row in rows]
        out = await self._outstanding()
        for who, account in enumerate(self.accounts):
            tenant = self.tenants[who]
            assert (balances[tenant].available_pico, balances[tenant].version) == (account.figure, account.version)
            assert balances[tenant].mode == ("prepaid" if account.prepaid else "postpaid")
            assert who in self.touched or not self.marks or marks[who] == self.marks[who], "rows changed"
            figure, summed, entries = out[who]
            assert entries == account.out
            assert summed == sum(account.out.values())
            if not self.late:
                assert figure == account.figure // NANO
        self.marks = marks
        self.touched.clear()

    def _compare_accounts(self, rows: list[list[list[str]]]) -> None:
        found = {
            (who, self.lot_ids.get(UUID(account)) or CODES[code]): (int(debit), int(credit))
            for who, moved in enumerate(rows)
            for account, code, debit, credit in moved
        }
        assert found == {
            (who, name): (account.debit[name], account.credit[name])
            for who, account in enumerate(self.accounts)
            for name in account.debit.keys() | account.credit.keys()
            if name != "cash" and (account.debit[name] or account.credit[name])
        }

    async def _outstanding(self) -> list[tuple[int, int, dict[str, int]]]:
        """Per tenant the figure, what is outstanding, and of which requests, once all that replicas sent is done."""
        for client in self.fleet.clients:
            await client.call("PING")
        asked = [
            call
            for tenant in self.tenants
            for call in (
                self.fleet.client.call("GET", keyspace.credit(tenant)),
                self.fleet.client.call("HGETALL", keyspace.outstanding(tenant)),
            )
        ]
        said = await asyncio.gather(*asked)
        return [
            (
                figure.available,
                figure.outstanding,
                {k.decode(): int(v) for k, v in zip(flat[::2], flat[1::2], strict=True)},
            )
            for figure, flat in zip(map(parse_figure, said[::2]), said[1::2], strict=True)
            if figure is not None
        ]

    def teardown(self) -> None:
        if self.accounts:
            self.end()
            self.run(self._finish())

    def end(self) -> None:
        """Post what is left."""

    async def _finish(self) -> None:
        """All is posted: what is outstanding is of calls that still run, and rollups are what was billed at first."""
        running = {call.admitted.request_id.hex for call in self.calls}
        assert all(account.out.keys() <= running for account in self.accounts)
        await self._compare()
        async with db.transaction(self.books.sessions) as session:
            rows = (await session.execute(text(ROLLUPS), {"t": self.tenants})).all()
        assert {
            (self.tenants.index(row[0]), row[1], MODELS.index(row[2]), TIERS.index(Tier(row[3]))): tuple(
                int(one) for one in row[4:]
            )
            for row in rows
        } == {
            (who, self.instant(minute), model, tier): tuple(sums)
            for who, account in enumerate(self.accounts)
            for (minute, model, tier), sums in account.billed.items()
        }
        await self.fleet.close()


ROLLUPS = """
    SELECT tenant_id, minute, model_id, tier, sum(requests), sum(amount_pico), sum(min_charge_pico)
    FROM usage_rollup WHERE tenant_id = ANY(:t) GROUP BY 1, 2, 3, 4
"""
# A row per tenant: its accounts that moved, and one hash over all of its rows.
STATE = """
    SELECT coalesce((SELECT json_agg(json_build_array(a.id, a.code, b.debit::text, b.credit::text))
                     FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id
                     WHERE a.tenant_id = p.tenant_id AND (b.debit <> 0 OR b.credit <> 0)), '[]')::text AS accounts,
        md5(concat(
        (SELECT string_agg(x::text || (SELECT string_agg(t::text, ',' ORDER BY t.seq)
                                       FROM ledger_transfer t WHERE t.tx_id = x.id), ',' ORDER BY x.id)
         FROM ledger_tx x WHERE x.tenant_id = p.tenant_id),
        (SELECT string_agg(l::text, ',' ORDER BY l.account_id) FROM credit_lot l WHERE l.tenant_id = p.tenant_id),
        (SELECT string_agg(e::text, ',' ORDER BY e.id) FROM usage_event e WHERE e.tenant_id = p.tenant_id),
        (SELECT string_agg(r::text, ',' ORDER BY r::text) FROM usage_rollup r WHERE r.tenant_id = p.tenant_id),
        (SELECT string_agg(i::text, ',' ORDER BY i::text) FROM usage_idempotency i WHERE i.tenant_id = p.tenant_id),
        (SELECT string_agg(i::text, ',' ORDER BY i::text) FROM usage_rerating i WHERE i.tenant_id = p.tenant_id),
        p::text)) AS mark
    FROM billing_profile p WHERE p.tenant_id = ANY(:t) ORDER BY array_position(CAST(:t AS uuid[]), p.tenant_id)
"""
