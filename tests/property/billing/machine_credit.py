"""Rules of credit: top-ups, grants, who decides on them, reversals, and terms."""

from dataclasses import replace
from functools import partial
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import adjustments, terms
from billing.adjustment_kinds import Adjustment
from billing.credits import top_up
from billing.lots import Grant, LotSource
from billing.types import BillingMode
from core import db
from core.errors import PlatformError
from tests.factories import lots as credit
from tests.property.billing.machine import MODELS, NANO, TIERS, BooksBase, Gift, Undo, amounts, gifts, places, tenants
from tests.property.billing.model import ALONE_MAX, FAR, Lot

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

    @rule(who=tenants, amount=amounts, minutes=st.sampled_from([5, 6, 30, 2 * FAR]), by=operators)
    def buy(self, who: int, amount: int, minutes: int, by: int) -> None:
        """A top-up that expires: a lot of its own. Above what the person has left alone today it waits."""
        self.do_buy(who, amount, minutes, by)

    def do_buy(self, who: int, amount: int, minutes: int, by: int) -> None:
        account, expires = self.accounts[who], self.now + minutes
        asked = credit.asked(self.clock.now(), by=OPERATORS[by], alone_max_pico=ALONE_MAX)

        async def work() -> Adjustment | str:
            ask = partial(adjustments.top_up, expires_at=self.instant(expires), may_expire=True)
            try:
                async with db.transaction(self.books.sessions) as session:
                    done = await ask(session, self.tenants[who], amount, asked)
                    assert (await ask(session, self.tenants[who], amount, asked)).replayed
                    await self._learn_lots(session, who)
            except PlatformError as error:
                return error.code
            await self.refresh([who])
            return done

        done = self.run(work())
        if not account.prepaid:
            assert done == "NOT_PREPAID"
            return
        assert isinstance(done, Adjustment)
        lot = Lot(self._next_lot(done.state), "paid", len(self.lot_ids), expires)
        alone = account.may_alone(PERSON[by], amount, self.now)
        assert done.state == ("posted" if alone else "pending")
        self.touched.add(who)
        if alone:
            account.alone.append((PERSON[by], self.now, amount))
            self._given(who, done.transaction_id, lot, amount)
        else:
            self.pending.append((who, done.id, by, (lot, amount)))

    def _next_lot(self, state: str) -> str:
        return f"lot{len(self.lot_ids) - (state == 'posted')}"

    def _given(self, who: int, tx: UUID | None, lot: Lot, amount: int) -> None:
        assert tx is not None
        lot.number = len(self.lot_ids)
        account = self.accounts[who]
        moves = account.buy(lot, amount) if lot.source == "paid" else account.give(lot, amount)
        self.reversible.append(Undo(who, tx, moves))

    async def _learn_lots(self, session: AsyncSession, who: int) -> None:
        """Name a lot that was just opened."""
        statement = """
            SELECT account_id FROM credit_lot
            WHERE tenant_id = :t AND (source <> 'paid' OR expires_at IS NOT NULL) ORDER BY account_id
        """
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
            assert said == ("INVALID_EXPIRY" if what[0].source == "paid" else "INVALID_GRANT")
            return
        elif what[0].source == "paid" and not self.accounts[who].prepaid:
            assert said == "NOT_PREPAID"
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
