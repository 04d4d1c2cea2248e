"""Credit lots on a real Postgres: the worked example W6 of the study, scopes, expiry; adjustments by two people."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import adjustments, lots, price_book, verify
from billing.adjustment_kinds import Adjustment
from billing.lots import Grant, LotSource
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.types import PriceSchedule
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency, parse_pico
from core.settings import Database
from core.tiers import Tier
from tenants.types import Responsible
from tests.factories import billing as make
from tests.factories import lots as credit

NOVEMBER = datetime(2025, 11, 1, 12, 0, tzinfo=UTC)


def day(number: int, hour: int = 12) -> datetime:
    return NOVEMBER.replace(day=number, hour=hour)


async def opened(sessions: Sessions, paid: str) -> tuple[UUID, PriceSchedule, Posting]:
    """A tenant with paid credit, and a poster."""
    prices = await make.publish_prices(sessions)
    tenant_id = await make.tenant(sessions, paid)
    clock = ManualClock(NOVEMBER + timedelta(days=40))
    posting = Posting(sessions, clock, poster_metrics(CollectorRegistry()))
    return tenant_id, make.schedule(prices, tenant_id), posting


async def is_right(sessions: Sessions) -> None:
    async with transaction(sessions) as session:
        assert await verify.verify(session) is None


async def balances(sessions: Sessions, tenant_id: UUID) -> dict[str, int]:
    """Credit less debit of every account of one code."""
    async with transaction(sessions) as session:
        rows = await session.execute(
            text(
                "SELECT a.code, sum(b.credit - b.debit) FROM ledger_account a JOIN ledger_balance b"
                " ON b.account_id = a.id WHERE a.tenant_id = :t GROUP BY a.code"
            ),
            {"t": tenant_id},
        )
        return {row[0]: int(row[1]) for row in rows if row[1]}


async def w6(sessions: Sessions) -> tuple[UUID, PriceSchedule, Posting]:
    """Promo A 5.00 until 10 November, promo B 8.00 until 31 December, paid 20.00."""
    tenant_id, s, posting = await opened(sessions, "20.00")
    await credit.give(sessions, tenant_id, "8.00", day(1), expires_at=datetime(2025, 12, 31, tzinfo=UTC))
    await credit.give(sessions, tenant_id, "5.00", day(1), expires_at=day(10, 0))
    return tenant_id, s, posting


def units(*amounts: str) -> list[int]:
    return [parse_pico(amount) for amount in amounts]


async def test_w6_burns_promo_by_expiry_then_paid(sessions: Sessions) -> None:
    tenant_id, s, posting = await w6(sessions)
    steps: Sequence[tuple[datetime, str, list[int]]] = (
        (day(5), "3.20", units("1.80", "8.00", "20.00")),
        (day(9), "4.00", units("0", "5.80", "20.00")),
        (day(12), "6.00", units("0", "0", "19.80")),
        (day(20), "15.00", units("0", "0", "4.80")),
    )
    for at, amount, right in steps:
        await credit.expire(sessions, tenant_id, at)
        await posting.post([credit.event_at(tenant_id, s, at, amount)])
        assert await credit.left(sessions, tenant_id) == right, at
    assert await balances(sessions, tenant_id) == {
        "liability.credit_paid": parse_pico("4.80"),
        "revenue.usage": parse_pico("28.20"),
        "contra.promo_used": -parse_pico("13.00"),
    }
    await is_right(sessions)


async def test_w6_without_the_second_usage_lets_promo_expire_without_revenue(sessions: Sessions) -> None:
    tenant_id, s, posting = await w6(sessions)
    await posting.post([credit.event_at(tenant_id, s, day(5), "3.20")])
    assert await credit.expire(sessions, tenant_id, day(9)) == 0
    before = await balances(sessions, tenant_id)
    assert await credit.expire(sessions, tenant_id, day(10, 1)) == parse_pico("1.80")
    assert await credit.expire(sessions, tenant_id, day(11)) == 0
    assert (await balances(sessions, tenant_id))["revenue.usage"] == before["revenue.usage"] == parse_pico("3.20")
    assert await credit.left(sessions, tenant_id) == units("0", "8.00", "20.00")
    await posting.post([credit.event_at(tenant_id, s, day(12), "6.00")])
    assert await credit.left(sessions, tenant_id) == units("0", "2.00", "20.00")
    await posting.post([credit.event_at(tenant_id, s, day(20), "15.00")])
    assert await credit.left(sessions, tenant_id) == units("0", "0", "7.00")
    await is_right(sessions)


async def test_the_order_within_a_batch_is_that_of_admission(sessions: Sessions) -> None:
    """W6 delivered in one batch, newest first, ends as day by day."""
    tenant_id, s, posting = await w6(sessions)
    events = [
        credit.event_at(tenant_id, s, day(number), amount)
        for number, amount in ((20, "15.00"), (9, "4.00"), (12, "6.00"), (5, "3.20"))
    ]
    await posting.post(events)
    await posting.post(events)
    assert await credit.left(sessions, tenant_id) == units("0", "0", "4.80")
    await is_right(sessions)


async def test_credit_pays_only_what_is_in_its_scope(sessions: Sessions) -> None:
    tenant_id, s, posting = await opened(sessions, "10.00")
    await credit.give(sessions, tenant_id, "5.00", day(1), models=(new_uuid(),))
    await credit.give(sessions, tenant_id, "5.00", day(1), tiers=(Tier.BATCH,))
    await credit.give(sessions, tenant_id, "3.00", day(1), source=LotSource.GOODWILL, models=(make.MODEL,))
    await posting.post([credit.event_at(tenant_id, s, day(5), "4.00")])
    assert await credit.left(sessions, tenant_id) == units("5.00", "5.00", "0", "9.00")
    # what is not for every model does not count at the door: nobody knows there which model it will be spent on
    assert await make.available(sessions, tenant_id) == parse_pico("9.00")
    await is_right(sessions)


async def test_late_usage_takes_from_what_was_good_when_it_was_admitted(sessions: Sessions) -> None:
    tenant_id, s, posting = await opened(sessions, "10.00")
    await credit.give(sessions, tenant_id, "5.00", day(1), expires_at=day(10, 0))
    at = day(10, 0)
    await posting.post([credit.event_at(tenant_id, s, at - timedelta(seconds=1), "1.00")])
    assert await credit.left(sessions, tenant_id) == units("4.00", "10.00")
    await posting.post([credit.event_at(tenant_id, s, at, "1.00")])
    assert await credit.left(sessions, tenant_id) == units("4.00", "9.00")
    assert await credit.expire(sessions, tenant_id, at + lots.EXPIRY_GRACE) == parse_pico("4.00")


async def test_an_invoiced_tenant_uses_given_credit_first(sessions: Sessions) -> None:
    _, _, posting = await opened(sessions, "1")
    tenant_id = await make.tenant(sessions, limit="10")
    async with transaction(sessions) as session:
        table = await price_book.load_table(session, datetime.now(UTC))
    s = table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, tenant_id)
    assert s is not None
    await credit.give(sessions, tenant_id, "2.00", day(1))
    assert await make.available(sessions, tenant_id) == parse_pico("12")
    await posting.post([credit.event_at(tenant_id, s, day(5), "5.00")])
    assert await make.available(sessions, tenant_id) == parse_pico("7")
    assert (await balances(sessions, tenant_id))["asset.unbilled"] == -parse_pico("3")
    await is_right(sessions)


ALONE = parse_pico("100")


async def ask(
    sessions: Sessions,
    tenant_id: UUID,
    amount: str,
    key: str = "k",
    *,
    by: Responsible = credit.ASKER,
    now: datetime = NOVEMBER,
) -> Adjustment:
    async with transaction(sessions) as session:
        grant = Grant(parse_pico(amount), LotSource.GOODWILL)
        return await adjustments.give(session, tenant_id, grant, credit.asked(now, key, by=by, alone_max_pico=ALONE))


async def decide(sessions: Sessions, asked: Adjustment, by: Responsible, *, agree: bool = True) -> Adjustment:
    async with transaction(sessions) as session:
        does = adjustments.approve if agree else adjustments.decline
        return await does(session, asked.tenant_id, asked.id, by=by, now=NOVEMBER)


async def test_above_the_limit_a_second_person_decides(sessions: Sessions, database_settings: Database) -> None:
    tenant_id = await make.tenant(sessions)
    assert (await ask(sessions, tenant_id, "100", "small")).state == "posted"
    asked = await ask(sessions, tenant_id, "100.000000000001")
    assert asked.state == "pending"
    assert await make.available(sessions, tenant_id) == ALONE
    for agree in (True, False):
        with pytest.raises(PlatformError) as refused:
            await decide(sessions, asked, credit.ASKER, agree=agree)
        assert refused.value.code == "SECOND_PERSON_NEEDED"
    for wrong in ("decided_by = requested_by", "decided_by = uuidv7(), decided_person = answered_by"):
        with (
            psycopg.connect(database_settings.url.get_secret_value()) as owner,
            pytest.raises(psycopg.errors.CheckViolation),
        ):
            owner.execute(f"UPDATE credit_adjustment SET {wrong}, decided_at = now() WHERE state = 'pending'")
    posted = await decide(sessions, asked, credit.OTHER)
    assert (posted.state, posted.decided_by) == ("posted", credit.OTHER.operator_id)
    assert await decide(sessions, asked, credit.OTHER) == posted
    assert await make.available(sessions, tenant_id) == 2 * ALONE + 1
    with pytest.raises(PlatformError) as refused:
        await decide(sessions, asked, credit.OTHER, agree=False)
    assert refused.value.code == "ADJUSTMENT_DECIDED"
    await is_right(sessions)


async def test_many_small_grants_do_not_pass_the_limit_of_one_large_one(sessions: Sessions) -> None:
    """20 of 10.00 at once, 100.00 is what one person may give in 24 hours: ten are posted, ten wait for a second."""
    tenant_id, neighbour = await make.tenant(sessions), await make.tenant(sessions)
    asked = await asyncio.gather(*(ask(sessions, tenant_id, "10", f"k{number}") for number in range(20)))
    assert sorted(one.state for one in asked) == ["pending"] * 10 + ["posted"] * 10
    assert await make.available(sessions, tenant_id) == ALONE
    soon, later = NOVEMBER + timedelta(hours=23, minutes=59), NOVEMBER + timedelta(hours=24)
    assert (await ask(sessions, tenant_id, "0.000000000001", "pico", now=soon)).state == "pending"
    assert (await ask(sessions, tenant_id, "100", "other", by=credit.OTHER)).state == "posted"
    assert (await ask(sessions, neighbour, "100")).state == "posted"
    assert (await ask(sessions, tenant_id, "100", "next day", now=later)).state == "posted"
    await is_right(sessions)


async def test_what_a_second_person_approved_is_not_counted_against_the_first(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    await decide(sessions, await ask(sessions, tenant_id, "500", "large"), credit.OTHER)
    assert (await ask(sessions, tenant_id, "100", "small")).state == "posted"


async def test_a_reversal_counts_as_what_it_moves(sessions: Sessions) -> None:
    """60.00 given and taken back are 120.00 moved by one person."""
    tenant_id = await make.tenant(sessions)
    given = await ask(sessions, tenant_id, "60")
    assert given.transaction_id is not None
    async with transaction(sessions) as session:
        asked = credit.asked(NOVEMBER, alone_max_pico=ALONE)
        back = await adjustments.reverse(session, tenant_id, given.transaction_id, asked)
    assert back.state == "pending"


async def test_a_declined_adjustment_moves_nothing_for_ever(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    asked = await ask(sessions, tenant_id, "101")
    assert (await decide(sessions, asked, credit.OTHER, agree=False)).state == "declined"
    with pytest.raises(PlatformError) as refused:
        await decide(sessions, asked, credit.OTHER)
    assert refused.value.code == "ADJUSTMENT_DECIDED"
    assert await make.available(sessions, tenant_id) == 0


async def test_the_same_key_gives_once(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    first, again = await ask(sessions, tenant_id, "7"), await ask(sessions, tenant_id, "7")
    assert (first.replayed, again.replayed, again.id) == (False, True, first.id)
    with pytest.raises(PlatformError) as refused:
        await ask(sessions, tenant_id, "8")
    assert refused.value.code == "IDEMPOTENCY_KEY_REUSED"
    assert await make.available(sessions, tenant_id) == parse_pico("7")


async def undo(sessions: Sessions, tenant_id: UUID, tx_id: UUID | None) -> Adjustment:
    assert tx_id is not None
    async with transaction(sessions) as session:
        return await adjustments.reverse(session, tenant_id, tx_id, credit.asked(NOVEMBER))


async def test_a_transaction_is_reversed_once_and_a_reversal_never(sessions: Sessions) -> None:
    tenant_id, s, posting = await opened(sessions, "10.00")
    given = await credit.give(sessions, tenant_id, "4.00", day(1))
    await posting.post([credit.event_at(tenant_id, s, day(5), "5.00")])
    with pytest.raises(PlatformError) as refused:
        await undo(sessions, tenant_id, given.transaction_id)
    assert refused.value.code == "CREDIT_SPENT"
    async with transaction(sessions) as session:
        usage = (await session.scalars(text("SELECT id FROM ledger_tx WHERE kind = 'usage'"))).one()
    back = await undo(sessions, tenant_id, usage)
    assert await credit.left(sessions, tenant_id) == units("4.00", "10.00")
    for tx_id in (usage, back.transaction_id):
        with pytest.raises(PlatformError) as refused:
            await undo(sessions, tenant_id, tx_id)
        assert refused.value.code == "NOT_REVERSIBLE"
    assert (await undo(sessions, tenant_id, given.transaction_id)).state == "posted"
    assert await credit.left(sessions, tenant_id) == units("0", "10.00")
    other = await make.tenant(sessions)
    with pytest.raises(PlatformError) as refused:
        await undo(sessions, other, usage)
    assert refused.value.code == "NOT_FOUND"
    await is_right(sessions)


@pytest.mark.parametrize(
    "grant",
    [
        Grant(0, LotSource.PROMO),
        Grant(1, LotSource.PAID),
        Grant(1, LotSource.PROMO, NOVEMBER),
        Grant(1, LotSource.PROMO, NOVEMBER + timedelta(days=1, seconds=1)),
        Grant(1, LotSource.PROMO, None, (make.MODEL,) * 101),
    ],
)
async def test_grants_that_cannot_be_are_refused(sessions: Sessions, grant: Grant) -> None:
    tenant_id = await make.tenant(sessions)
    with pytest.raises(PlatformError) as refused:
        async with transaction(sessions) as session:
            await adjustments.give(session, tenant_id, grant, credit.asked(NOVEMBER))
    assert refused.value.code in {"INVALID_AMOUNT", "INVALID_GRANT"}
