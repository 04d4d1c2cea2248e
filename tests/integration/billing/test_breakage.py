"""Paid credit that expires: which lot pays, what is left is breakage, and what the books say of it. ADR 0039."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from billing import adjustments, lots, verify
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.money import parse_pico
from core.settings import Database
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.integration.billing.test_lots import NOVEMBER, balances, day, is_right, opened, units

END = day(10, 0)


async def undo(sessions: Sessions, tenant_id: UUID, tx_id: UUID | None) -> None:
    assert tx_id is not None
    async with transaction(sessions) as session:
        await adjustments.reverse(session, tenant_id, tx_id, credit.asked(NOVEMBER))


async def test_what_expires_first_pays_first_and_its_rest_is_breakage(sessions: Sessions) -> None:
    """By hand: 20.00 for ever, 8.00 until 31 December, 5.00 until 10 November, 1.00 of promo for ever.

    3.20 on the 5th: promo 1.00, then 2.20 of the 5.00; 0.10 more before it expires leaves 2.70, and 0.10 at that minute
    is of the 8.00. 8.80 on the 12th: the 7.90 left of these, and 0.90 of what never expires. Cash 33.00 is usage
    of 12.20 less 1.00 by promo + 2.70 of breakage + 19.10 left.
    """
    tenant_id, s, posting = await opened(sessions, "20.00")
    await credit.buy(sessions, tenant_id, "8.00", day(1), datetime(2025, 12, 31, tzinfo=UTC))
    await credit.buy(sessions, tenant_id, "5.00", day(1), END)
    await credit.give(sessions, tenant_id, "1.00", day(1))
    await posting.post([credit.event_at(tenant_id, s, day(5), "3.20")])
    assert await credit.left(sessions, tenant_id) == units("0", "2.80", "8.00", "20.00")

    late = END + lots.EXPIRY_GRACE
    assert await credit.expire(sessions, tenant_id, late - timedelta(seconds=1)) == 0
    await posting.post([credit.event_at(tenant_id, s, END - timedelta(minutes=1), "0.10")])
    assert await credit.left(sessions, tenant_id) == units("0", "2.70", "8.00", "20.00")
    await posting.post([credit.event_at(tenant_id, s, END, "0.10")])  # too late for the lot, although it is still there
    assert await credit.left(sessions, tenant_id) == units("0", "2.70", "7.90", "20.00")
    async with transaction(sessions) as session:
        assert await lots.due(session, late) == [tenant_id]
    assert [await credit.expire(sessions, tenant_id, late) for _ in range(2)] == units("2.70", "0")
    await posting.post([credit.event_at(tenant_id, s, day(12), "8.80")])
    assert await credit.left(sessions, tenant_id) == units("0", "0", "0", "19.10")
    assert await balances(sessions, tenant_id) == {
        "liability.credit_paid": parse_pico("19.10"),
        "revenue.usage": parse_pico("12.20"),
        "revenue.breakage": parse_pico("2.70"),
        "contra.promo_used": -parse_pico("1.00"),
    }
    await is_right(sessions)


async def test_usage_on_a_disk_keeps_paid_credit_from_its_end_and_not_promo(sessions: Sessions) -> None:
    tenant_id, _, _ = await opened(sessions, "1.00")
    await credit.buy(sessions, tenant_id, "5.00", day(1), END)
    await credit.give(sessions, tenant_id, "3.00", day(1), expires_at=END)
    report = "INSERT INTO spool_report VALUES ('h', 'r', 'r', true, 1, :events, 1, :oldest, :at)"
    async with transaction(sessions) as session:
        values = {"events": 1, "oldest": END - timedelta(seconds=1), "at": day(12)}
        await session.execute(text(report), values)
    assert await credit.expire(sessions, tenant_id, day(11)) == parse_pico("3.00")
    async with transaction(sessions) as session:
        assert await lots.due(session, day(11)) == []
        await session.execute(text("UPDATE spool_report SET events = 0, oldest_at = NULL"))
    assert await credit.expire(sessions, tenant_id, day(11)) == parse_pico("5.00")
    await is_right(sessions)


async def test_it_counts_at_the_door_until_shortly_before_it_expires(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions, "1")
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    for minutes in (1, 60):  # what counts is decided by the database's clock, 90 seconds before
        await credit.buy(sessions, tenant_id, "2", now - timedelta(days=1), now + timedelta(minutes=minutes))
    assert await make.available(sessions, tenant_id) == parse_pico("3")


async def test_a_top_up_that_expires_is_reversed_while_it_is_there(sessions: Sessions) -> None:
    tenant_id, s, posting = await opened(sessions, "10.00")
    whole, begun = [await credit.buy(sessions, tenant_id, "5.00", day(1), END) for _ in range(2)]
    await undo(sessions, tenant_id, whole.transaction_id)
    await posting.post([credit.event_at(tenant_id, s, day(5), "1.00")])
    with pytest.raises(PlatformError) as refused:
        await undo(sessions, tenant_id, begun.transaction_id)
    assert refused.value.code == "CREDIT_SPENT"
    assert sorted(await credit.left(sessions, tenant_id)) == units("0", "4.00", "10.00")
    await is_right(sessions)


async def test_when_it_expires_is_part_of_what_is_asked_for(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    first, again = [await credit.buy(sessions, tenant_id, "5", day(1), END, key="k") for _ in range(2)]
    assert (first.replayed, again.replayed, again.id, again.expires_at) == (False, True, first.id, END)
    for expires_at in (None, END + timedelta(minutes=1)):
        with pytest.raises(PlatformError) as refused:
            await credit.buy(sessions, tenant_id, "5", day(1), expires_at, key="k")
        assert refused.value.code == "IDEMPOTENCY_KEY_REUSED"
    assert await credit.left(sessions, tenant_id) == units("5", "0")


async def test_it_is_refused_where_terms_do_not_allow_it_or_it_cannot_be(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    with pytest.raises(PlatformError) as refused:
        await credit.buy(sessions, tenant_id, "5", day(1), END, may_expire=False)
    assert refused.value.code == "PAID_CREDIT_NEVER_EXPIRES"
    assert "TIDEGATE_BOOKS__PAID_CREDIT_MAY_EXPIRE" in refused.value.message
    for wrong in (day(1), END + timedelta(seconds=1), END + timedelta(microseconds=1)):
        with pytest.raises(PlatformError) as refused:
            await credit.buy(sessions, tenant_id, "5", day(1), wrong)
        assert refused.value.code == "INVALID_EXPIRY"
    assert await credit.left(sessions, tenant_id) == units("0")


async def test_a_second_person_agrees_to_the_expiry_too(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    asked, late = [await credit.buy(sessions, tenant_id, "5", day(1), END, alone_max_pico=0) for _ in range(2)]
    assert (asked.state, asked.expires_at) == ("pending", END)
    async with transaction(sessions) as session:
        posted = await adjustments.approve(session, tenant_id, asked.id, by=credit.OTHER, now=day(2))
    assert (posted.state, await credit.left(sessions, tenant_id)) == ("posted", units("5", "0"))
    with pytest.raises(PlatformError) as refused:
        async with transaction(sessions) as session:
            await adjustments.approve(session, tenant_id, late.id, by=credit.OTHER, now=END)
    assert refused.value.code == "INVALID_EXPIRY"
    await is_right(sessions)


@pytest.mark.parametrize(
    ("change", "shows"),
    [
        ("UPDATE credit_lot SET expires_at = expires_at + interval '1 day' WHERE expires_at IS NOT NULL", "ledger_tx"),
        ("UPDATE credit_adjustment SET expires_at = NULL", "credit_lot and ledger_tx"),
        (
            """
            UPDATE ledger_transfer t SET credit_account = a.id FROM ledger_account a, ledger_tx x
            WHERE x.id = t.tx_id AND x.kind = 'expiry' AND a.code = 'revenue.usage'
            """,
            "ledger_transfer",
        ),
    ],
)
async def test_verify_finds_another_expiry_or_another_revenue(
    sessions: Sessions, database_settings: Database, change: str, shows: str
) -> None:
    tenant_id = await make.tenant(sessions, "1")
    await credit.buy(sessions, tenant_id, "5", day(1), END)
    await credit.expire(sessions, tenant_id, day(11))
    await is_right(sessions)
    assert database_settings.owner_url is not None
    with psycopg.connect(database_settings.owner_url.get_secret_value(), autocommit=True) as owner:
        owner.execute("SET session_replication_role = replica")
        assert owner.execute(change).rowcount == 1
    async with transaction(sessions) as session:
        found = await verify.verify(session)
    assert found is not None
    assert found.table == shows
