"""Rules of credit: top-ups, grants, who decides on them, reversals, terms, and time that takes credit back."""

from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import adjustments, lots, periods, seals, terms
from billing.adjustment_kinds import Adjustment
from billing.credits import top_up
from billing.lots import Grant, LotSource
from billing.types import BillingMode
from core import db
from core.errors import PlatformError
from tests.factories import lots as credit
from tests.property.billing.machine import MODELS, NANO, TIERS, BooksBase, Gift, Undo, amounts, gifts, places, tenants
from tests.property.billing.model import ALONE_MAX, FAR, Lot

Edge = tuple[int, int | None]  # which lot; how many minutes before it expires
CLOSE_GRACE = timedelta(hours=1)
OPERATORS = (credit.ASKER, credit.OTHER, credit.person(1, operator=1))
PERSON = (0, 1, 0)  # of each operator
operators = st.integers(0, 2)


class CreditRules(BooksBase):
    """What operators and time do to credit."""

    def put_in(self, paid: int, gifts: list[Gift]) -> None:
        if paid:
            self.do_top_up(0, paid, "first")
        for number, gift in enumerate(gifts):
            self.do_give(0, gift, number % 2)

    def do_top_up(self, who: int, amount: int, key: str) -> None:
        async def work() -> tuple[str | None, UUID | None]:
            try:
                async with db.transaction(self.books.sessions) as session:
                    done = await top_up(session, self.tenants[who], amount, idempotency_key=key, actor="test")
            except PlatformError as error:
                return error.code, None
            await self.refresh([who])
            return None, None if done.replayed else done.transaction_id

        refused, tx = self.run(work())
        known = key in self.accounts[who].keys
        assert refused == self.accounts[who].top_up(key, amount)
        assert (tx is None) == (refused is not None or known)
        self.touched.add(who)
        if tx is not None:
            self.reversible.append(Undo(who, tx, [("cash", "paid", amount)]))

    @rule(who=tenants, amount=st.one_of(st.integers(-1, 0), amounts, amounts), key=st.sampled_from("abcd"))
    def top_up(self, who: int, amount: int, key: str) -> None:
        self.do_top_up(who, amount, key)

    @rule(who=tenants, gift=gifts, by=operators)
    def give(self, who: int, gift: Gift, by: int) -> None:
        """Posted at once, or when the person adjusted much today, when another one agrees; the same again is once."""
        self.do_give(who, gift, by)

    def do_give(self, who: int, gift: Gift, by: int) -> None:
        expires = None if gift.minutes is None else self.now + gift.minutes
        grant = Grant(
            gift.amount,
            LotSource(gift.source),
            None if expires is None else self.instant(expires),
            tuple(MODELS[n] for n in gift.models or ()),
            tuple(TIERS[n] for n in gift.tiers or ()),
        )
        asked = credit.asked(self.clock.now(), by=OPERATORS[by], alone_max_pico=ALONE_MAX)

        async def work() -> Adjustment:
            async with db.transaction(self.books.sessions) as session:
                done = await adjustments.give(session, self.tenants[who], grant, asked)
                assert (await adjustments.give(session, self.tenants[who], grant, asked)).replayed
                await self._learn_lots(session, who)
            await self.refresh([who])
            return done

        done = self.run(work())
        lot = Lot(self._next_lot(done.state), gift.source, len(self.lot_ids), expires, gift.models, gift.tiers)
        alone = self.accounts[who].may_alone(PERSON[by], gift.amount, self.now)
        assert done.state == ("posted" if alone else "pending")
        self.touched.add(who)
        if alone:
            self.accounts[who].alone.append((PERSON[by], self.now, gift.amount))
            self._given(who, done.transaction_id, lot, gift.amount)
        else:
            self.pending.append((who, done.id, by, (lot, gift.amount)))

    def _next_lot(self, state: str) -> str:
        return f"lot{len(self.lot_ids) - (state == 'posted')}"

    def _given(self, who: int, tx: UUID | None, lot: Lot, amount: int) -> None:
        assert tx is not None
        lot.number = len(self.lot_ids)
        self.reversible.append(Undo(who, tx, self.accounts[who].give(lot, amount)))

    async def _learn_lots(self, session: AsyncSession, who: int) -> None:
        """Name a lot that was just opened."""
        statement = "SELECT account_id FROM credit_lot WHERE tenant_id = :t AND source <> 'paid' ORDER BY account_id"
        for lot in await session.scalars(text(statement), {"t": self.tenants[who]}):
            self.lot_ids.setdefault(lot, f"lot{len(self.lot_ids)}")

    @rule(who=tenants, gift=gifts, by=operators)
    def give_to_the_bound(self, who: int, gift: Gift, by: int) -> None:
        """More than the person has left alone today waits for another one, and then counts on nothing that is left."""
        left = ALONE_MAX - self.accounts[who].alone_pico(PERSON[by], self.now)
        self.do_give(who, replace(gift, amount=left + 1), by)
        if left:
            self.do_give(who, replace(gift, amount=min(left, gift.amount)), by)

    @precondition(lambda self: self.pending)
    @rule(pick=places, by=operators, agree=st.sampled_from([True, True, False]))
    def decide(self, pick: int, by: int, agree: bool) -> None:
        """Another person than who asked, once."""
        who, wanted, asker, what = entry = self.pending[pick % len(self.pending)]

        async def work() -> tuple[str | None, UUID | None]:
            do = adjustments.approve if agree else adjustments.decline
            try:
                async with db.transaction(self.books.sessions) as session:
                    done = await do(session, self.tenants[who], wanted, by=OPERATORS[by], now=self.clock.now())
                    await self._learn_lots(session, who)
            except PlatformError as error:
                return error.code, None
            await self.refresh([who])
            return None, done.transaction_id

        said, tx = self.run(work())
        if PERSON[by] == PERSON[asker]:
            assert said == "SECOND_PERSON_NEEDED"
            return
        if not agree:
            assert (said, tx) == (None, None)
        elif isinstance(what, Undo):
            expected = self._undo(what)
            assert said == expected
            if expected is not None:
                return
        elif what[0].expires is not None and what[0].expires <= self.now:
            assert said == "INVALID_GRANT"
            return
        else:
            what[0].name = self._next_lot("posted")
            self._given(who, tx, *what)
        self.pending.remove(entry)
        self.touched.add(who)

    def _undo(self, wanted: Undo) -> str | None:
        """Reverse in the model; return why it is refused."""
        account = self.accounts[wanted.who]
        if wanted not in self.reversible or (isinstance(wanted.tx, int) and account.postings[wanted.tx].rerated):
            return "NOT_REVERSIBLE"
        if not account.reverse(wanted.moves):
            return "CREDIT_SPENT"
        self.reversible.remove(wanted)
        if isinstance(wanted.tx, int):
            account.postings[wanted.tx].reversed = True
        return None

    @precondition(lambda self: self.reversible)
    @rule(pick=places, by=operators)
    def reverse(self, pick: int, by: int) -> None:
        """A top-up, a grant or usage; once, and only where no credit is spent that it takes back."""
        self.do_reverse(self.reversible[pick % len(self.reversible)], by)

    def reverse_usage(self) -> Undo | None:
        """The newest usage that some person may reverse alone; none where there is none."""
        for wanted in reversed(self.reversible):
            account = self.accounts[wanted.who]
            if isinstance(wanted.tx, UUID) or account.postings[wanted.tx].rerated:
                continue
            amount = sum(pico for _, _, pico in wanted.moves)
            for by in range(2):
                if account.may_alone(PERSON[by], amount, self.now):
                    self.do_reverse(wanted, by)
                    return wanted
        return None

    def do_reverse(self, wanted: Undo, by: int) -> None:
        account, tenant_id = self.accounts[wanted.who], self.tenants[wanted.who]
        amount = sum(pico for _, _, pico in wanted.moves)
        alone = account.may_alone(PERSON[by], amount, self.now)

        async def work() -> tuple[str | None, UUID | None]:
            asked = credit.asked(self.clock.now(), by=OPERATORS[by], alone_max_pico=ALONE_MAX)
            try:
                async with db.transaction(self.books.sessions) as session:
                    tx = await self._id_of(session, wanted)
                    done = await adjustments.reverse(session, tenant_id, tx, asked)
            except PlatformError as error:
                return error.code, None
            await self.refresh([wanted.who])
            return None, done.id if done.state == "pending" else None

        said, waits = self.run(work())
        self.touched.add(wanted.who)
        if not alone:
            rerated = isinstance(wanted.tx, int) and account.postings[wanted.tx].rerated
            assert (said, waits is None) == (("NOT_REVERSIBLE", True) if rerated else (None, False))
            if waits is not None:
                self.pending.append((wanted.who, waits, by, wanted))
            return
        assert (said, waits) == (self._undo(wanted), None)
        if said is None:
            account.alone.append((PERSON[by], self.now, amount))
            assert self.run(work())[0] == "NOT_REVERSIBLE"

    async def _id_of(self, session: AsyncSession, wanted: Undo) -> UUID:
        if isinstance(wanted.tx, UUID):
            return wanted.tx
        statement = "SELECT id FROM ledger_tx WHERE tenant_id = :t AND kind = 'usage' ORDER BY id OFFSET :n LIMIT 1"
        values = {"t": self.tenants[wanted.who], "n": wanted.tx}
        found: UUID = (await session.execute(text(statement), values)).scalar_one()
        return found

    @rule(who=tenants, limit=st.one_of(st.none(), st.integers(0, 15)), owed=st.sampled_from([None, None, 0, -1]))
    def change_terms(self, who: int, limit: int | None, owed: int | None) -> None:
        """Prepaid, or postpaid up to a limit, which is often what is unbilled, or a pico less."""
        account = self.accounts[who]
        bound = None if limit is None else limit * NANO
        if bound is not None and owed is not None:
            bound = max(0, account.owed + owed)
        mode = BillingMode.PREPAID if bound is None else BillingMode.POSTPAID
        same = (bound is None and account.prepaid) or (not account.prepaid and bound == account.limit)

        async def work() -> tuple[str | None, bool]:
            try:
                async with db.transaction(self.books.sessions) as session:
                    changed = await terms.change(
                        session, self.tenants[who], mode, bound or 0, by="test", note="why", now=self.clock.now()
                    )
            except PlatformError as error:
                return error.code, False
            await self.refresh([who])
            return None, changed

        said, changed = self.run(work())
        assert said == account.change_terms(bound, self.now)
        assert changed == (said is None and not same)
        self.touched.add(who)

    # time

    def expiring(self, who: int, pick: int) -> int | None:
        """When one of the tenant's lots expires."""
        ends = [lot.expires for lot in self.accounts[who].lots if lot.expires is not None and lot.expires < FAR]
        return ends[pick % len(ends)] if ends else None

    @rule(
        minutes=st.sampled_from([1, 6, 1440, 3000]),
        who=tenants,
        edge=st.tuples(places, st.sampled_from([-10, -9, 0])),
    )
    def wait(self, minutes: int, who: int, edge: Edge) -> None:
        """Time goes on, often to about a lot's expiry; what expired long enough ago is taken back."""
        lot = self.expiring(who, edge[0])
        if lot is not None and edge[1] is not None and lot - edge[1] > self.now:
            minutes = lot - edge[1] - self.now
        self.go_on(minutes)

    def go_on(self, minutes: int) -> None:
        self.now += minutes
        self.clock.advance(60 * minutes)

        async def work() -> None:
            for owner, tenant_id in enumerate(self.tenants):
                if not self.accounts[owner].given:
                    continue
                async with db.transaction(self.books.sessions) as session:
                    taken = await lots.expire(session, tenant_id, self.instant(self.now))
                moves = self.accounts[owner].expire(self.now)
                assert taken == sum(amount for one in moves for _, _, amount in one)
                if moves:
                    self.touched.add(owner)
                    await self.refresh([owner])

        self.run(work())

    @precondition(lambda self: self.moved > self.sealed_at)
    @rule()
    def keep_books(self) -> None:
        """Seal; close the oldest month when it is over. What comes late for it is booked later, as `verify` sees."""
        month, now = self.books.open_month, self.instant(self.now)
        self.sealed_at = self.moved

        async def work() -> str:
            async with db.transaction(self.books.sessions) as session:
                await seals.seal(session)
            if now + timedelta(days=2) < month_end(month):
                return "open"
            try:
                return (await periods.close(self.books.sessions, month.date(), now, grace=CLOSE_GRACE)).state
            except PlatformError as error:
                return error.code

        said = self.run(work())
        if now >= month_end(month) + CLOSE_GRACE:
            assert said == "closed"
            self.books.open_month = month_end(month)
        else:
            assert said in ("open", "PERIOD_NOT_OVER")


def month_end(month: datetime) -> datetime:
    return (month + timedelta(days=32)).replace(day=1)
