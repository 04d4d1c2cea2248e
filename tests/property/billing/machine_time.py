"""Rules of time: what expires is taken back though the worker dies, what waits on a disk keeps it, and months close."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import event as sql_events
from sqlalchemy import text

from billing import lots, periods, seals
from core import db
from core.errors import PlatformError
from tests.property.billing.machine import Books, amounts, places, tenants
from tests.property.billing.machine_credit import CreditRules, operators
from tests.property.billing.model import FAR, GRACE

Edge = tuple[int, int | None]  # which lot; how many minutes before it expires
CLOSE_GRACE = timedelta(hours=1)
REPORT = """
    INSERT INTO spool_report VALUES ('host', 'spool', 'spool', false, 1, :events, 1, :oldest, :at)
    ON CONFLICT (host, name) DO UPDATE SET events = excluded.events, oldest_at = excluded.oldest_at
"""


class Died(Exception):  # noqa: N818 - an event
    """The worker is no more; what it had not committed never was."""


@contextmanager
def dying(books: Books, statements: int | None) -> Iterator[None]:
    """Die before the next statement after so many; None: live."""
    left = [statements]

    def count(*_: Any) -> None:
        if left[0] == 0:
            raise Died
        if left[0] is not None:
            left[0] -= 1

    engine = books.sessions.kw["bind"].sync_engine
    sql_events.listen(engine, "before_cursor_execute", count)
    try:
        yield
    finally:
        sql_events.remove(engine, "before_cursor_execute", count)


class TimeRules(CreditRules):
    """What time does to credit and months."""

    def expiring(self, who: int, pick: int) -> int | None:
        """When one of the tenant's lots expires."""
        ends = [lot.expires for lot in self.accounts[who].lots if lot.expires is not None and lot.expires < FAR]
        return ends[pick % len(ends)] if ends else None

    @rule(
        minutes=st.sampled_from([1, 6, 1440, 3000]),
        who=tenants,
        edge=st.tuples(places, st.sampled_from([-10, -9, 0])),
        dies=st.sampled_from([None, None, *range(9)]),
    )
    def wait(self, minutes: int, who: int, edge: Edge, dies: int | None) -> None:
        """Time goes on, often to about a lot's expiry; what expired long enough ago is taken back."""
        lot = self.expiring(who, edge[0])
        if lot is not None and edge[1] is not None and lot - edge[1] > self.now:
            minutes = lot - edge[1] - self.now
        self.go_on(minutes, dies)

    @rule(
        who=st.integers(0, 1),
        amount=amounts,
        by=operators,
        ago=st.sampled_from([None, 9, 10]),
        dies=st.sampled_from([None, *range(9)]),
    )
    def sell_and_let_expire(self, who: int, amount: int, by: int, *, ago: int | None, dies: int | None) -> None:
        """Paid credit is there until ten minutes after its end, and as long as usage of before its end is on a disk."""
        self.do_buy(who, amount, 5, by)
        self.go_on(14)
        self.do_report(ago)
        self.go_on(1, dies)

    @rule(ago=st.sampled_from([None, None, 0, 10, 11, 1440]))
    def report_spool(self, ago: int | None) -> None:
        """A poster tells of when the oldest usage is that it did not post; None: it posted all."""
        self.do_report(ago)

    def do_report(self, ago: int | None) -> None:
        self.on_disk = None if ago is None else self.now - ago

        async def work() -> None:
            async with db.transaction(self.books.sessions) as session:
                oldest = None if self.on_disk is None else self.instant(self.on_disk)
                values = {"events": int(ago is not None), "oldest": oldest, "at": self.clock.now()}
                await session.execute(text(REPORT), values)

        self.run(work())
        self.go_on(0)

    def go_on(self, minutes: int, dies: int | None = None) -> None:
        """Expire what is due. A worker that dies before a statement, or having told nobody, is followed by another."""
        self.now += minutes
        self.clock.advance(60 * minutes)
        with_paid = self.on_disk is None or self.on_disk >= self.now - GRACE

        async def expire(owner: int) -> int:
            async with db.transaction(self.books.sessions) as session:
                return await lots.expire(session, self.tenants[owner], self.instant(self.now))

        async def work() -> None:
            for owner, account in enumerate(self.accounts):
                if all(lot.expires is None for lot in account.lots):
                    continue
                taken = 0
                if dies is not None:
                    try:
                        with dying(self.books, dies):
                            taken = await expire(owner)
                    except Died:
                        pass
                taken += await expire(owner)
                moves = account.expire(self.now, with_paid=with_paid)
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
        if now < month_end(month) + CLOSE_GRACE:
            assert said in ("open", "PERIOD_NOT_OVER")
        elif self.on_disk is not None and self.instant(self.on_disk) < month_end(month):
            assert said == "SPOOLS_NOT_EMPTY"
        else:
            assert said == "closed"
            self.books.open_month = month_end(month)


def month_end(month: datetime) -> datetime:
    return (month + timedelta(days=32)).replace(day=1)
