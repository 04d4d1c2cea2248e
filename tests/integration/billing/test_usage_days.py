"""Days of usage events are dropped by policy, and what stays of the books is proven all the same."""

from datetime import UTC, date, datetime
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from billing import periods, posting, quarantine, receipts, reconcile, seals, usage_day_queries, usage_days, verify
from billing.posting import Posting
from billing.seals import SealHead
from billing.types import PriceSchedule, UsageEvent
from billing.usage_days import Day, Dropped
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.errors import ErrorKind, PlatformError
from core.money import parse_pico
from core.settings import Database
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.integration.billing.test_lots import opened
from tests.integration.billing.test_verify import owner_of

FIRST, SECOND = date(2025, 10, 5), date(2025, 10, 6)
LATER = datetime(2025, 11, 20, tzinfo=UTC)
BY = UUID("01890000-0000-7000-8000-00000000d001")


def at(day: date, hour: int = 12, minute: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)


async def found(sessions: Sessions) -> verify.Finding | None:
    async with transaction(sessions) as session:
        return await verify.verify(session)


async def seal_all(sessions: Sessions) -> None:
    async with transaction(sessions) as session:
        while await seals.seal(session):
            pass


async def books(sessions: Sessions) -> tuple[UUID, PriceSchedule, Posting, list[UsageEvent]]:
    """Usage of two days of October and one of November; one batch has events of both days of October."""
    tenant_id, s, poster = await opened(sessions, "10.00")
    events = [
        credit.event_at(tenant_id, s, at(FIRST), "1.00"),
        credit.event_at(tenant_id, s, at(FIRST, 23, 59), "0.50"),
        credit.event_at(tenant_id, s, at(SECOND, 0, 1), "0.25"),
        credit.event_at(tenant_id, s, at(SECOND), "0.125"),
    ]
    await poster.post(events[:3])
    await poster.post(events[3:])
    await poster.post([credit.event_at(tenant_id, s, LATER, "2.00")])
    return tenant_id, s, poster, events


async def closed(sessions: Sessions) -> None:
    await periods.close(sessions, date(2025, 10, 1), LATER)
    await seal_all(sessions)


async def drop(sessions: Sessions, keep_days: int = 30) -> tuple[list[Dropped], list[Day], verify.Finding | None]:
    return await usage_days.drop_due(sessions, LATER, keep_days, "test", anchor=SealHead())


async def days(sessions: Sessions) -> list[tuple[date, str]]:
    async with transaction(sessions) as session:
        rows = await session.execute(text("SELECT day, state FROM usage_day ORDER BY day"))
        return [(row.day, row.state) for row in rows]


async def test_a_day_stays_until_its_month_is_closed_and_sealed(sessions: Sessions) -> None:
    await books(sessions)
    open_month = "transactions are in a month that is not closed"
    assert await drop(sessions) == ([], [Day(FIRST, f"1 {open_month}"), Day(SECOND, f"2 {open_month}")], None)
    await periods.close(sessions, date(2025, 10, 1), LATER)
    assert [one.hindrance for one in (await drop(sessions))[1]] == [
        "1 transactions are not sealed",
        "2 transactions are not sealed",
    ]
    assert await days(sessions) == []


async def test_dropped_days_leave_proven_books(sessions: Sessions) -> None:
    await books(sessions)
    await closed(sessions)
    dropped, staying, wrong = await drop(sessions)
    assert ([(one.day, one.events) for one in dropped], staying, wrong) == ([(FIRST, 2), (SECOND, 2)], [], None)
    async with transaction(sessions) as session:
        left = await session.scalars(text("SELECT amount_pico FROM usage_event"))
        assert [int(one) for one in left] == [parse_pico("2.00")]
        minutes = await session.scalars(text("SELECT amount_pico FROM usage_rollup ORDER BY minute"))
        assert [int(one) for one in minutes] == [
            parse_pico(amount) for amount in ("1.00", "0.50", "0.25", "0.125", "2.00")
        ]
        trail = await session.scalars(text("SELECT details FROM audit_record WHERE action = 'usage_day.drop'"))
        assert [(one["day"], one["hash"]) for one in trail] == [(f"{one.day}", one.hash.hex()) for one in dropped]
    assert await found(sessions) is None
    assert await reconcile.books(sessions) == (1, [])
    assert await drop(sessions) == ([], [], None)


async def test_one_dropped_day_of_a_transaction_that_has_two(sessions: Sessions) -> None:
    """The first batch has events of both days: the rest of it is proven with what is kept of the first day."""
    await books(sessions)
    await closed(sessions)
    keep = (LATER.date() - FIRST).days - 1
    dropped, _, _ = await drop(sessions, keep)
    assert [one.day for one in dropped] == [FIRST]
    assert await found(sessions) is None


async def test_a_chain_that_lost_what_this_home_anchored_keeps_every_day(sessions: Sessions) -> None:
    """Whoever forges the books and takes the seals away must not have the evidence dropped for them."""
    await books(sessions)
    await closed(sessions)
    lost = SealHead(9, b"9" * 32)
    dropped, _, wrong = await usage_days.drop_due(sessions, LATER, 30, "test", anchor=lost)
    assert (dropped, wrong and wrong.row) == ([], "seal 2")  # the first of those that are gone
    assert await days(sessions) == [(FIRST, "closed"), (SECOND, "closed")]


async def test_a_wrong_row_anywhere_keeps_every_day(sessions: Sessions, database_settings: Database) -> None:
    await books(sessions)
    await closed(sessions)
    with owner_of(database_settings) as owner:
        owner.execute("UPDATE usage_rollup SET requests = requests + 1 WHERE minute > '2025-11-01'")
    dropped, _, wrong = await drop(sessions)
    assert (dropped, wrong and wrong.table) == ([], "usage_rollup")
    async with transaction(sessions) as session:
        assert (await session.execute(text("SELECT count(*) FROM usage_event"))).scalar_one() == 5


ALTERED = (
    ("UPDATE usage_day_tx SET amount_pico = amount_pico + 1 WHERE day = '2025-10-05'", "usage_day"),
    ("UPDATE usage_day_rollup SET output = output + 1 WHERE day = '2025-10-05'", "usage_day"),
    ("DELETE FROM usage_day_rollup WHERE day = '2025-10-06'", "usage_day"),
    ("UPDATE usage_day SET events = events + 1 WHERE day = '2025-10-05'", "usage_day"),
    ("DELETE FROM usage_day_tx WHERE day = '2025-10-06'", "usage_day"),
    ("UPDATE usage_rollup SET amount_pico = amount_pico + 1 WHERE minute < '2025-11-01'", "usage_rollup"),
    ("DELETE FROM usage_rollup WHERE minute = '2025-10-05 23:59:00+00'", "usage_rollup"),
)


async def test_what_is_kept_of_a_day_cannot_change_unseen(sessions: Sessions, database_settings: Database) -> None:
    await books(sessions)
    await closed(sessions)
    await drop(sessions)
    with owner_of(database_settings) as owner:
        tables = ("usage_day", "usage_day_tx", "usage_day_rollup", "usage_rollup")
        for table in tables:
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for statement, shows in ALTERED:
            assert owner.execute(statement).rowcount > 0
            wrong = await found(sessions)
            assert wrong is not None, statement
            assert wrong.table == shows, (statement, wrong)
            for table in reversed(tables):
                owner.execute(f"DELETE FROM {table}")
            for table in tables:
                owner.execute(f"INSERT INTO {table} TABLE kept_{table}")
        assert await found(sessions) is None


async def test_usage_of_a_dropped_day_goes_to_quarantine_and_is_billed_by_a_person_only(sessions: Sessions) -> None:
    tenant_id, s, poster, events = await books(sessions)
    await closed(sessions)
    await drop(sessions)
    late = credit.event_at(tenant_id, s, at(FIRST, 13), "1.00")
    (posted,) = await poster.post([events[0], late])
    assert (posted.new, posted.quarantined) == (0, 2)
    assert await make.available(sessions, tenant_id) == parse_pico("6.125")
    async with transaction(sessions) as session:
        item = await quarantine.get(session, tenant_id, late.id)
        assert "can no longer be told" in item.reason
        await quarantine.bill(
            session, tenant_id, late.id, late.usage, reason="was on a lost disk", by=BY, now=SystemClock().now()
        )
    assert await make.available(sessions, tenant_id) == parse_pico("5.125")
    assert await found(sessions) is None


async def test_usage_that_waits_in_quarantine_keeps_its_day(sessions: Sessions) -> None:
    tenant_id, s, poster, _ = await books(sessions)
    odd = credit.event_at(tenant_id, s, at(SECOND), "1.00")
    await poster.post([msgspec.structs.replace(odd, quarantine="odd")])
    await closed(sessions)
    dropped, staying, _ = await drop(sessions)
    assert [one.day for one in dropped] == [FIRST]
    assert staying == [Day(SECOND, "1 usage events wait in quarantine")]


async def test_a_closed_day_takes_nothing_even_from_who_does_not_know(sessions: Sessions) -> None:
    """The database refuses; the event is kept in quarantine, none is lost."""
    tenant_id, s, poster, _ = await books(sessions)
    async with transaction(sessions) as session:
        assert await usage_day_queries.close(session, FIRST)
        assert not await usage_day_queries.close(session, FIRST)
    late = credit.event_at(tenant_id, s, at(FIRST, 13), "1.00")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posting, "_closed", _none)
        (posted,) = await poster.post([late])
    assert (posted.new, posted.quarantined) == (0, 1)
    assert await found(sessions) is None


async def _none(*_: object) -> frozenset[int]:
    return frozenset()


async def test_the_receipt_of_a_dropped_day_is_gone_and_says_so(sessions: Sessions) -> None:
    tenant_id, _, _, events = await books(sessions)
    await closed(sessions)
    await drop(sessions)
    async with transaction(sessions) as session:
        with pytest.raises(PlatformError) as gone:
            await receipts.receipt(session, tenant_id, events[0].id)
    assert (gone.value.code, gone.value.kind) == ("RECEIPT_GONE", ErrorKind.GONE)
    assert "2025-10-05" in gone.value.message


async def test_the_application_cannot_drop_what_is_not_summed_up(sessions: Sessions) -> None:
    await books(sessions)
    await closed(sessions)
    for statement in (
        "SELECT drop_usage_day('2025-10-05')",
        "SELECT close_usage_day((now() AT TIME ZONE 'UTC')::date)",
        "DROP TABLE usage_event_20251005",
        "DELETE FROM usage_day",
    ):
        with pytest.raises(DBAPIError):
            async with transaction(sessions) as session:
                await session.execute(text(statement))
    async with transaction(sessions) as session:
        await usage_day_queries.close(session, FIRST)

    async def claim() -> None:
        async with transaction(sessions) as session:
            await usage_day_queries.mark_dropped(
                session, FIRST, LATER, seq=1, events=2, kept=bytes(32), prev=bytes(32), sha256=bytes(32)
            )
            await usage_day_queries.drop(session, FIRST)

    with pytest.raises(DBAPIError, match="not summed up"):
        await claim()


async def test_a_dropped_day_is_not_made_anew(sessions: Sessions) -> None:
    await books(sessions)
    await closed(sessions)
    await drop(sessions)
    async with transaction(sessions) as session:
        for day in (FIRST, SECOND):
            made = (await session.execute(text("SELECT ensure_usage_partition(:day)"), {"day": day})).scalar_one()
            assert made is False
    assert await days(sessions) == [(FIRST, "dropped"), (SECOND, "dropped")]


async def test_with_no_policy_nothing_is_dropped(sessions: Sessions) -> None:
    await books(sessions)
    await closed(sessions)
    assert await drop(sessions, 0) == ([], [], None)
