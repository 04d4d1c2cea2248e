"""Drives the ledger on real Postgres and Valkey beside the model: one rule per thing that can happen to money."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import adjustments, credit_figures, ledger, lots, periods, price_book, reconcile, seals, verify
from billing.credits import balance, top_up
from billing.lots import Grant, LotSource
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.types import BillingMode, Meter, Outcome, PriceItem, UsageEvent
from core import db, keyspace
from core.clock import ManualClock
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency, nano_up
from core.tiers import Tier
from core.usage import TokenUsage
from scheduler.types import Grant as Admitted
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.scheduler import Fleet, ask, money, served_model
from tests.property.billing.model import Account, Event, Lot, Move, Prices, Usage

T = TypeVar("T")
Scope = frozenset[int] | None
Edge = tuple[int, int | None]  # which lot; how many minutes before it expires
START = datetime(2025, 11, 30, 23, 0, tzinfo=UTC)
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
}

counts = st.integers(0, 3000)
edges = st.sampled_from([Usage(4000, 0, 0, 1, 0), Usage(1, 3999, 1, 0, 7), Usage(9, 0, 0, 0, 0), Usage(0, 0, 0, 0, 0)])
usages = st.one_of(st.builds(Usage, counts, counts, counts, counts, counts), edges)
places = st.integers(0, 10**6)
amounts = st.integers(1, 3 * 10**10)
whole = st.integers(0, 20_000_000)
prices = st.builds(
    Prices, whole, whole, whole, st.integers(0, 10**9), st.integers(0, 10**10), st.just(4000), st.just(2)
)
scopes = st.sampled_from([None, None, frozenset({0}), frozenset({1})])
tenants = st.sampled_from([0, 0, 0, 1, 2])  # most of it happens to one, so that its lots meet


@dataclass
class Books:
    """What the machine drives: one database and one Valkey for all runs; each run has tenants of its own."""

    runner: asyncio.Runner
    sessions: db.Sessions
    book: UUID
    valkey: Path
    open_month: datetime = field(default_factory=lambda: START.replace(day=1, hour=0))


@dataclass
class Call:
    """A call that was admitted: its hold, and after it ended its usage event."""

    who: int
    hold: int
    admitted: Admitted
    event: tuple[UsageEvent, Event] | None = None


class BooksMachine(RuleBasedStateMachine):
    """Two prepaid tenants and a postpaid one."""

    books: ClassVar[Books]

    def __init__(self) -> None:
        super().__init__()
        self.accounts: list[Account] = []
        self.tenants: list[UUID] = []
        self.lot_ids: dict[UUID, str] = {}
        self.made: list[tuple[int, UsageEvent, Event]] = []
        self.calls: list[Call] = []
        self.reversible: list[tuple[int, UUID, list[Move]]] = []
        self.known: set[UUID] = set()
        self.now = 0
        self.marks: list[str] = []
        self.touched: set[int] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.books.runner.run(work)

    def instant(self, minute: int) -> datetime:
        return START + timedelta(minutes=minute)

    def new_id(self, minute: int) -> UUID:
        """An id as a gateway would mint it then."""
        return make.uuid7_at(int(self.instant(minute).timestamp()), new_uuid().int & 0xFFFF_FFFF_FFFF)

    # prices

    @initialize(limit=st.integers(0, 10**11))
    def open(self, limit: int) -> None:
        async def work() -> None:
            self.clock = ManualClock(START)
            self.posting = Posting(self.books.sessions, self.clock, poster_metrics(CollectorRegistry()))
            self.fleet = await Fleet.open(self.books.valkey)
            await self.fleet.client.call("FLUSHALL")
            self.door = await self.fleet.replica()
            self.model = served_model()
            async with db.transaction(self.books.sessions) as session:
                for mode, bound in ((BillingMode.PREPAID, 0), (BillingMode.PREPAID, 0), (BillingMode.POSTPAID, limit)):
                    self.tenants.append(new_uuid())
                    self.accounts.append(Account(bound if mode is BillingMode.POSTPAID else None))
                    await ledger.open_tenant(session, self.tenants[-1], Currency.USD, mode, bound)
            for who in range(2):
                self.accounts[who].lots.append(Lot("paid", "paid", -1))
            for tenant_id in self.tenants:
                await credit_figures.refresh(self.fleet.client, self.books.sessions, tenant_id)

        self.run(work())
        first = Prices(1_000_000, 100_000, 5_000_000, 0, 0, 4000, 2)
        self.price_of: dict[tuple[int | None, int, int], Prices] = {}
        self.publish(dict.fromkeys(((None, 0, 0), (None, 1, 0), (None, 0, 1), (None, 1, 1)), first))

    def publish(self, changed: dict[tuple[int | None, int, int], Prices]) -> None:
        items = []
        for (who, model, tier), p in changed.items():
            self.price_of[who, model, tier] = p
            tenant = None if who is None else self.tenants[who]
            for meter, price in (
                (Meter.INPUT, p.fresh),
                (Meter.CACHED_INPUT, p.cached),
                (Meter.OUTPUT, p.output),
                (Meter.REQUEST, p.request),
                (Meter.MIN_CHARGE, p.minimum),
            ):
                items.append(PriceItem(MODELS[model], TIERS[tier], meter, price, tenant))
                if meter in (Meter.INPUT, Meter.CACHED_INPUT, Meter.OUTPUT):
                    items.append(PriceItem(MODELS[model], TIERS[tier], meter, p.times * price, tenant, p.above))

        async def work() -> VersionPrices | None:
            async with db.transaction(self.books.sessions) as session:
                draft = await price_book.create_draft(session, self.books.book, items)
                await price_book.publish(session, draft, now=datetime.now(UTC))
                return await price_book.load_version(session, draft)

        version = self.run(work())
        assert version is not None
        self.version = version

    @rule(who=st.sampled_from([None, 0, 1, 2]), model=st.integers(0, 1), tier=st.integers(0, 1), p=prices)
    def publish_price(self, who: int | None, model: int, tier: int, p: Prices) -> None:
        """A price of the list, or one of a tenant's own; what was admitted before keeps its price."""
        self.publish({(who, model, tier): p})

    # credit

    @rule(who=tenants, amount=st.integers(-1, 3 * 10**10), key=st.sampled_from("abcd"))
    def top_up(self, who: int, amount: int, key: str) -> None:
        tenant_id, account = self.tenants[who], self.accounts[who]

        async def work() -> tuple[str | None, UUID | None]:
            try:
                async with db.transaction(self.books.sessions) as session:
                    done = await top_up(session, tenant_id, amount, idempotency_key=key, actor="test")
            except PlatformError as error:
                return error.code, None
            await credit_figures.refresh(self.fleet.client, self.books.sessions, tenant_id, correct=True)
            return None, None if done.replayed else done.transaction_id

        refused, tx = self.run(work())
        assert refused == account.top_up(key, amount)
        self.touched.add(who)
        if tx is not None:
            self.reversible.append((who, tx, [("cash", "paid", amount)]))

    @rule(
        who=tenants,
        amount=amounts,
        source=st.sampled_from([LotSource.PROMO, LotSource.GOODWILL]),
        minutes=st.sampled_from([None, 5, 5, 30]),
        scope=st.tuples(scopes, scopes),
    )
    def give(self, who: int, amount: int, source: LotSource, minutes: int | None, scope: tuple[Scope, Scope]) -> None:
        models, tiers = scope
        expires = None if minutes is None else self.now + minutes
        grant = Grant(
            amount,
            source,
            None if expires is None else self.instant(expires),
            tuple(MODELS[n] for n in models or ()),
            tuple(TIERS[n] for n in tiers or ()),
        )

        async def work() -> tuple[UUID | None, UUID]:
            async with db.transaction(self.books.sessions) as session:
                done = await adjustments.give(session, self.tenants[who], grant, credit.asked(self.clock.now()))
                known = {lot.id for lot in await lots.all_of(session, self.tenants[who])}
            await credit_figures.refresh(self.fleet.client, self.books.sessions, self.tenants[who], correct=True)
            (new,) = known - self.lot_ids.keys() - await self.paid_lots(who)
            return done.transaction_id, new

        tx, lot_id = self.run(work())
        assert tx is not None
        lot = Lot(f"lot{len(self.lot_ids)}", source.value, len(self.lot_ids), expires, models, tiers)
        self.lot_ids[lot_id] = lot.name
        self.reversible.append((who, tx, self.accounts[who].give(lot, amount)))
        self.touched.add(who)

    async def paid_lots(self, who: int) -> set[UUID]:
        async with db.transaction(self.books.sessions) as session:
            return {lot.id for lot in await lots.all_of(session, self.tenants[who]) if lot.source is LotSource.PAID}

    @precondition(lambda self: self.reversible)
    @rule(pick=places)
    def reverse(self, pick: int) -> None:
        """A top-up, a grant or usage; once, and only where no credit is spent that it takes back."""
        who, tx, moves = self.reversible[pick % len(self.reversible)]

        async def work() -> str | None:
            try:
                async with db.transaction(self.books.sessions) as session:
                    await adjustments.reverse(session, self.tenants[who], tx, credit.asked(self.clock.now()))
            except PlatformError as error:
                return error.code
            await credit_figures.refresh(self.fleet.client, self.books.sessions, self.tenants[who], correct=True)
            return None

        done, again = self.run(work()), self.run(work())
        assert done == (None if self.accounts[who].reverse(moves) else "CREDIT_SPENT")
        assert again == (done or "NOT_REVERSIBLE")
        self.touched.add(who)
        if done is None:
            self.reversible.remove((who, tx, moves))

    # calls

    def event(self, who: int, call: tuple[int, int], usage: Usage, outcome: str, ago: int) -> tuple[UsageEvent, Event]:
        """A call as the gateway writes it, priced by the model and by hand there."""
        model, tier = call
        minute = self.now - ago
        price = self.price_of.get((who, model, tier)) or self.price_of[None, model, tier]
        schedule = self.version.schedule(MODELS[model], TIERS[tier], self.tenants[who])
        assert schedule is not None
        cost = price.cost(usage, outcome)
        us = int(self.instant(minute).timestamp()) * 1_000_000
        made = make.event(
            self.tenants[who],
            schedule,
            TokenUsage(usage.fresh, usage.cached, usage.written, usage.output, usage.reasoning),
            outcome=Outcome(outcome),
            event_id=self.new_id(minute),
            amount_pico=sum(cost),
        )
        made = msgspec.structs.replace(made, admitted_at_us=us, ended_at_us=us + 7, model_id=MODELS[model])
        return made, Event(made.id.hex, minute, model, tier, cost)

    @rule(
        who=tenants,
        call=st.tuples(st.integers(0, 1), st.integers(0, 1)),
        usage=usages,
        outcome=st.sampled_from(["completed", *(outcome.value for outcome in Outcome)]),
        ago=st.sampled_from([0, 0, 1, 7, 3000]),
        edge=st.tuples(places, st.sampled_from([None, 0, 0, 1])),
        posted=st.booleans(),
    )
    def use(
        self, who: int, call: tuple[int, int], usage: Usage, outcome: str, *, ago: int, edge: Edge, posted: bool
    ) -> None:
        """Calls that some gateway served, now or a while ago, some right at a lot's expiry; they wait in its spool."""
        lot, before = self.expiring(who, edge[0]), edge[1]
        if lot is not None and before is not None:
            ago = max(0, self.now - lot + before)
        self.made += [(who, *self.event(who, call, usage, outcome, ago)) for _ in range(2)]
        if posted:
            self.post(self.made[-2:])

    def expiring(self, who: int, pick: int) -> int | None:
        """When one of the tenant's lots expires."""
        ends = [lot.expires for lot in self.accounts[who].lots if lot.expires is not None]
        return ends[pick % len(ends)] if ends else None

    @precondition(lambda self: self.made)
    @rule(
        picks=st.lists(places, min_size=1, max_size=12), splits=st.lists(places, max_size=2), crashes=st.integers(0, 1)
    )
    def deliver(self, picks: list[int], splits: list[int], crashes: int) -> None:
        """Any events made so far, in any order, again and again, in up to three batches.

        A poster that crashes has committed and told Valkey nothing; the next one gets the same batch.
        """
        chosen = [self.made[pick % len(self.made)] for pick in picks]
        cuts = sorted({0, len(chosen), *(split % len(chosen) for split in splits)})
        for start, end in pairwise(cuts):
            self.post(chosen[start:end], crashes)

    def post(self, batch: list[tuple[int, UsageEvent, Event]], crashes: int = 0) -> None:
        events = [event for _, event, _ in batch]
        for _ in range(crashes):
            self.run(self.posting.post(events))
        self.run(self.settle(events))
        months = {event.minute: self.instant(event.minute).month for _, _, event in batch}
        for who, account in enumerate(self.accounts):
            mine = [event for owner, _, event in batch if owner == who]
            new = [event for event in mine if event.key not in account.posted]
            if new:
                self.touched.add(who)
                self.run(self.remember(who, account.use(new, months)))
            for event in mine:
                account.out.pop(event.key, None)

    async def settle(self, events: list[UsageEvent]) -> None:
        for posted in await self.posting.post(events):
            await credit_figures.settle_all(self.fleet.client, posted.settlements)

    async def remember(self, who: int, booked: dict[int, list[Move]]) -> None:
        """Learn the ids of the transactions that were just booked, one per month."""
        async with db.transaction(self.books.sessions) as session:
            rows = await session.execute(
                text(
                    "SELECT id, effective_at FROM ledger_tx"
                    " WHERE tenant_id = :t AND kind = 'usage' AND NOT id = ANY(CAST(:known AS uuid[]))"
                ),
                {"t": self.tenants[who], "known": list(self.known)},
            )
            found = {at.month: tx for tx, at in rows}
        assert found.keys() == booked.keys()
        self.known |= set(found.values())
        self.reversible += [(who, found[month], moves) for month, moves in booked.items() if moves]

    @precondition(lambda self: self.made)
    @rule(who=st.integers(0, 2), pick=places, more=st.integers(1, 10**6))
    def deliver_wrong_amount(self, who: int, pick: int, more: int) -> None:
        """It goes to quarantine, and holds up nothing beside it."""
        event, _ = self.event(who, (0, 0), Usage(1, 2, 3, 4, 5), "completed", 0)
        wrong = msgspec.structs.replace(event, amount_pico=event.amount_pico + more)
        posted = self.run(self.posting.post([wrong]))
        assert [one.quarantined for one in posted] == [1]
        self.touched.add(who)
        self.post([self.made[pick % len(self.made)]])

    # holds

    @rule(who=st.integers(0, 2), hold=st.integers(0, 3 * 10**7))
    def admit(self, who: int, hold: int) -> None:
        """A hold is taken when the credit that nothing else claims covers it."""
        tenant_id, account = self.tenants[who], self.accounts[who]

        async def work() -> Admitted | str:
            try:
                return await ask(self.door, self.model, money=money(tenant_id, hold), request_id=self.new_id(self.now))
            except PlatformError as error:
                return error.code

        said = self.run(work())
        fits = account.figure // NANO - sum(account.out.values()) >= hold
        if not fits:
            assert said == "INSUFFICIENT_CREDIT"
            return
        assert isinstance(said, Admitted)
        account.out[said.request_id.hex] = hold
        self.calls.append(Call(who, hold, said))

    def running(self, pick: int) -> Call:
        return self.calls.pop(pick % len(self.calls))

    @precondition(lambda self: self.calls)
    @rule(pick=places, usage=usages, outcome=st.sampled_from(["completed", "client_abort", "timeout"]))
    def settle_call(self, pick: int, usage: Usage, outcome: str) -> None:
        """The hold sinks to the charge; what is not spent of it is free at once, twice settled is settled once."""
        call = self.running(pick)
        made, event = self.event(call.who, (0, 0), usage, outcome, 0)
        request = call.admitted.request_id
        made = msgspec.structs.replace(made, id=request)
        event = Event(request.hex, event.minute, event.model, event.tier, event.cost)
        charge = min(call.hold, nano_up(made.amount_pico))
        self.door.release(call.admitted, charge)
        self.door.release(call.admitted, 0)
        self.run(self.door.heartbeat())
        self.accounts[call.who].out[request.hex] = charge
        self.made.append((call.who, made, event))

    @precondition(lambda self: self.calls)
    @rule(pick=places)
    def abort_call(self, pick: int) -> None:
        """A call that never got to an engine leaves no hold and no event."""
        call = self.running(pick)
        self.door.release(call.admitted, None)
        self.run(self.door.heartbeat())
        self.accounts[call.who].out.pop(call.admitted.request_id.hex)

    @precondition(lambda self: self.calls)
    @rule(pick=places)
    def write_off(self, pick: int) -> None:
        """What a lost replica held is given back."""
        call = self.running(pick)
        request, tenant_id = call.admitted.request_id, self.tenants[call.who]

        async def work() -> None:
            await self.fleet.client.call("HSET", keyspace.owed("gone"), request.hex, tenant_id.hex)
            assert await reconcile.write_off(self.fleet.client, "gone") == {tenant_id: [request]}
            assert await reconcile.write_off(self.fleet.client, "gone") == {}
            self.door.release(call.admitted, None)  # it was not lost after all
            await self.door.heartbeat()

        self.run(work())
        self.accounts[call.who].out.pop(request.hex)

    # time

    @rule(
        minutes=st.sampled_from([1, 6, 3000]),
        who=st.integers(0, 2),
        edge=st.tuples(places, st.sampled_from([-10, -9, 0])),
    )
    def wait(self, minutes: int, who: int, edge: Edge) -> None:
        """Time goes on, often to about a lot's expiry; what expired long enough ago is taken back."""
        lot = self.expiring(who, edge[0])
        if lot is not None and edge[1] is not None and lot - edge[1] > self.now:
            minutes = lot - edge[1] - self.now
        self.now += minutes
        self.clock.advance(60 * minutes)

        async def work() -> None:
            for owner, tenant_id in enumerate(self.tenants):
                async with db.transaction(self.books.sessions) as session:
                    taken = await lots.expire(session, tenant_id, self.instant(self.now))
                moves = self.accounts[owner].expire(self.now)
                assert taken == sum(amount for one in moves for _, _, amount in one)
                if moves:
                    self.touched.add(owner)
                    await credit_figures.refresh(self.fleet.client, self.books.sessions, tenant_id, correct=True)

        self.run(work())

    @rule()
    def keep_books(self) -> None:
        """Seal; close the oldest month when it is over. What comes late for it is booked later, as `verify` sees."""

        async def work() -> None:
            async with db.transaction(self.books.sessions) as session:
                await seals.seal(session)
            if self.instant(self.now) >= periods_end(self.books.open_month):
                month = self.books.open_month
                done = await periods.close(self.books.sessions, month.date(), self.instant(self.now))
                assert done.state == "closed"
                self.books.open_month = periods_end(month)

        self.run(work())

    @rule()
    def lose_valkey(self) -> None:
        """All its data is gone: figures come from the ledger, charges from the spools, holds from the replica."""
        self.run(self._lose_valkey())

    async def _lose_valkey(self) -> None:
        await self.fleet.client.call("FLUSHALL")
        for tenant_id in self.tenants:
            await credit_figures.refresh(self.fleet.client, self.books.sessions, tenant_id)
        unposted = {event.key: made for who, made, event in self.made if event.key in self.accounts[who].out}
        charges = [
            msgspec.structs.replace(made, amount_pico=self.accounts[self.tenants.index(made.tenant_id)].out[key] * NANO)
            for key, made in unposted.items()
        ]
        await credit_figures.register(self.fleet.client, charges)
        await self.door.resync()
        await self.fleet.advance(5.1)
        await self.door.heartbeat()
        await self.door.tick()

    # what must hold

    @invariant()
    def the_books_are_the_models(self) -> None:
        if self.accounts:
            self.run(self._compare())

    async def _compare(self) -> None:
        async with db.transaction(self.books.sessions) as session:
            rows = await session.execute(
                text(
                    "SELECT a.id, a.tenant_id, a.code, b.debit, b.credit FROM ledger_account a"
                    " JOIN ledger_balance b ON b.account_id = a.id WHERE a.tenant_id = ANY(:t)"
                ),
                {"t": self.tenants},
            )
            found = {
                (self.tenants.index(tenant), CODES.get(code) or self.lot_ids[account]): (int(debit), int(credit))
                for account, tenant, code, debit, credit in rows
                if debit or credit
            }
            marks = [str(mark) for mark in await session.scalars(text(MARKS), {"t": self.tenants})]
            available = [(await balance(session, tenant)).available_pico for tenant in self.tenants]
            versions = [(await balance(session, tenant)).version for tenant in self.tenants]
        assert found == {
            (who, name): (account.debit[name], account.credit[name])
            for who, account in enumerate(self.accounts)
            for name in account.debit.keys() | account.credit.keys()
            if name != "cash" and (account.debit[name] or account.credit[name])
        }
        assert available == [account.figure for account in self.accounts]
        assert versions == [account.version for account in self.accounts]
        for who, account in enumerate(self.accounts):
            assert who in self.touched or not self.marks or marks[who] == self.marks[who]
            assert await self.fleet.outstanding(self.tenants[who]) == account.out
            a, o = await self.fleet.client.call("HMGET", keyspace.credit(self.tenants[who]), "a", "o")
            assert (int(a), int(o or 0)) == (account.figure // NANO, sum(account.out.values()))
        self.marks = marks
        self.touched.clear()

    def teardown(self) -> None:
        if self.accounts:
            for start in range(0, len(self.made), 7):
                self.post(self.made[start : start + 7])
            self.run(self._finish())

    async def _finish(self) -> None:
        """All is posted: what is outstanding is of calls that still run, and all sums are one."""
        running = {call.admitted.request_id.hex for call in self.calls}
        for who, account in enumerate(self.accounts):
            assert account.out.keys() <= running
            assert await self.fleet.outstanding(self.tenants[who]) == account.out
        async with db.transaction(self.books.sessions) as session:
            rows = await session.execute(
                text(
                    "SELECT tenant_id, sum(requests), sum(amount_pico) FROM usage_rollup"
                    " WHERE tenant_id = ANY(:t) GROUP BY tenant_id"
                ),
                {"t": self.tenants},
            )
            assert {self.tenants.index(row[0]): (row[1], row[2]) for row in rows} == {
                who: (account.requests, account.billed) for who, account in enumerate(self.accounts) if account.requests
            }
        assert (await reconcile.books(self.books.sessions))[1] == []
        assert (await reconcile.figures(self.books.sessions, self.fleet.client))[1] == []
        async with db.transaction(self.books.sessions) as session:
            assert await verify.verify(session) is None
        await self.fleet.close()


def periods_end(month: datetime) -> datetime:
    return (month + timedelta(days=32)).replace(day=1)


# One hash per tenant over all of its rows.
MARKS = """
    SELECT md5(concat(
        (SELECT string_agg(x::text || (SELECT string_agg(t::text, ',' ORDER BY t.seq)
                                       FROM ledger_transfer t WHERE t.tx_id = x.id), ',' ORDER BY x.id)
         FROM ledger_tx x WHERE x.tenant_id = p.tenant_id),
        (SELECT string_agg(l::text, ',' ORDER BY l.account_id) FROM credit_lot l WHERE l.tenant_id = p.tenant_id),
        (SELECT string_agg(e::text, ',' ORDER BY e.id) FROM usage_event e WHERE e.tenant_id = p.tenant_id),
        (SELECT string_agg(r::text, ',' ORDER BY r::text) FROM usage_rollup r WHERE r.tenant_id = p.tenant_id),
        p::text))
    FROM billing_profile p WHERE p.tenant_id = ANY(:t) ORDER BY array_position(CAST(:t AS uuid[]), p.tenant_id)
"""
