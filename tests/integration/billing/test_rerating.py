"""Re-rating on a real Postgres, with amounts worked by hand: 12,345 prompt tokens, 10,240 of them cached, 1,000 out.

At 3.00 in place of 2.00 (0.20 cached, 6.00 out) that is 0.014363, and right is 0.012258: 0.002105 too much.
"""

import asyncio
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    adjustments,
    periods,
    price_preview,
    quarantine,
    receipts,
    reconcile,
    rerating,
    rerating_post,
    usage,
    verify,
)
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.statements import statement
from billing.types import Meter, Outcome, PriceSchedule
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.money import parse_pico
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories import rerating as again
from tests.integration.billing.test_lots import balances, units
from tests.integration.billing.test_price_preview import NOON, at, post
from tests.integration.billing.test_verify import owner_of

DELTA = parse_pico("0.002105")


async def two(sessions: Sessions) -> tuple[VersionPrices, VersionPrices]:
    """The wrong prices and the right ones."""
    wrong = await make.publish_prices(sessions, make.items({**make.PRICES, "input": "3.00"}))
    return wrong, await again.version(sessions, make.items(make.PRICES))


async def is_right(sessions: Sessions) -> None:
    async with transaction(sessions) as session:
        assert await verify.verify(session) is None
    assert (await reconcile.books(sessions))[1] == []


async def use(sessions: Sessions, s: PriceSchedule, tenant_id: UUID, when: datetime = NOON, count: int = 1) -> None:
    await post(sessions, *(at(make.event(tenant_id, s), when) for _ in range(count)))


async def test_paid_credit_comes_back_first(sessions: Sessions) -> None:
    """0.010 of promo and 0.004363 of paid credit had paid; right were 0.010 and 0.002258."""
    wrong, right = await two(sessions)
    tenant_id, other = await make.tenant(sessions, "1"), await make.tenant(sessions, "1")
    await credit.give(sessions, tenant_id, "0.010", NOON - timedelta(days=1))
    await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    await use(sessions, make.schedule(right, other), other)
    assert await credit.left(sessions, tenant_id) == units("0", "0.995637")
    run = await again.ask(sessions, again.wanted(wrong, right))
    run = await again.drive(sessions, run.id)
    assert (run.state, run.tenants, run.requests, run.events) == ("counted", 1, 1, 1)
    assert (run.credit_pico, run.charge_pico, run.done_events) == (DELTA, 0, 0)
    assert await credit.left(sessions, tenant_id) == units("0", "0.995637")
    await again.execute(sessions, run.id)
    run = await again.drive(sessions, run.id)
    assert (run.state, run.done_events, run.credited_pico, run.given_pico) == ("done", 1, DELTA, DELTA)
    assert await credit.left(sessions, tenant_id) == units("0", "0.997742")
    assert await balances(sessions, tenant_id) == {
        "liability.credit_paid": parse_pico("0.997742"),
        "revenue.usage": parse_pico("0.012258"),
        "contra.promo_used": -parse_pico("0.010"),
    }
    assert await credit.left(sessions, other) == units("0.987742")
    await is_right(sessions)


@pytest.mark.parametrize("expired", [False, True])
async def test_given_credit_comes_back_last_and_expired_credit_not_at_all(sessions: Sessions, *, expired: bool) -> None:
    """0.014 of promo and 0.000363 of paid credit had paid; right were 0.012258 of promo alone."""
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    expires_at = NOON + timedelta(days=1) if expired else None
    await credit.give(sessions, tenant_id, "0.014", NOON - timedelta(days=1), expires_at=expires_at)
    await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    run = await again.rerate(sessions, again.wanted(wrong, right))
    back = parse_pico("0.001742")
    assert await credit.left(sessions, tenant_id) == [0 if expired else back, parse_pico("1")]
    assert (run.credited_pico, run.given_pico) == (DELTA, DELTA - back if expired else DELTA)
    found = await balances(sessions, tenant_id)
    assert (found["revenue.usage"], found["contra.promo_used"]) == (parse_pico("0.012258"), -parse_pico("0.012258"))
    await is_right(sessions)


async def test_what_is_billed_by_invoice_and_what_the_platform_bore(sessions: Sessions) -> None:
    """Invoiced: 0.002105 less. With a credit of 0.013, 0.001363 was the overrun: 0.000742 comes back."""
    wrong, right = await two(sessions)
    invoiced, short = await make.tenant(sessions, limit="10"), await make.tenant(sessions, "0.013")
    for tenant_id in (invoiced, short):
        await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    assert (await balances(sessions, short))["expense.overrun"] == -parse_pico("0.001363")
    run = await again.rerate(sessions, again.wanted(wrong, right))
    assert (await balances(sessions, invoiced)) == {
        "asset.unbilled": -parse_pico("0.012258"),
        "revenue.usage": parse_pico("0.012258"),
    }
    assert (await balances(sessions, short)) == {
        "liability.credit_paid": parse_pico("0.000742"),
        "revenue.usage": parse_pico("0.012258"),
    }
    assert (run.credited_pico, run.given_pico) == (2 * DELTA, DELTA + parse_pico("0.000742"))
    await is_right(sessions)


async def test_more_is_charged_only_when_asked_for_and_never_below_zero(sessions: Sessions) -> None:
    """The prices were too low: 2.00 in place of 3.00. One tenant has 0.001 left, so 0.001105 is the platform's."""
    wrong, right = reversed(await two(sessions))
    rich, poor = await make.tenant(sessions, "1"), await make.tenant(sessions, "0.013258")
    for tenant_id in (rich, poor):
        await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    left_alone = await again.rerate(sessions, again.wanted(wrong, right))
    assert (left_alone.done_events, left_alone.uncharged, left_alone.uncharged_pico) == (0, 2, 2 * DELTA)
    assert await credit.left(sessions, rich) == units("0.987742")
    run = await again.rerate(sessions, again.wanted(wrong, right, charge_more=True))
    assert (run.charged_pico, run.overrun_pico, run.credited_pico) == (2 * DELTA, parse_pico("0.001105"), 0)
    assert await credit.left(sessions, rich) == units("0.985637")
    assert (await balances(sessions, poor)) == {
        "revenue.usage": parse_pico("0.014363"),
        "expense.overrun": -parse_pico("0.001105"),
    }
    await is_right(sessions)


async def test_minimum_charges_move_between_their_accounts(sessions: Sessions) -> None:
    """3 in and 1 out: 0.00000035 at 0.05/0.20. At 50.00/200.00 it was 0.00035; right is a minimum of 0.0001."""
    wrong = await make.publish_prices(sessions, make.items({"input": "50.00", "output": "200.00"}))
    prices = {"input": "0.05", "output": "0.20", "min_charge": "0.0001"}
    right = await again.version(sessions, make.items(prices))
    tenant_id = await make.tenant(sessions, "1")
    s = make.schedule(wrong, tenant_id)
    await post(sessions, at(make.event(tenant_id, s, TokenUsage(3, 0, 0, 1, 0)), NOON))
    await again.rerate(sessions, again.wanted(wrong, right))
    assert await balances(sessions, tenant_id) == {
        "liability.credit_paid": parse_pico("0.9999"),
        "revenue.usage": 350_000,
        "revenue.min_charge": parse_pico("0.0001") - 350_000,
    }
    await is_right(sessions)
    await again.rerate(sessions, again.wanted(right, wrong, charge_more=True))
    assert await balances(sessions, tenant_id) == {
        "liability.credit_paid": parse_pico("0.99965"),
        "revenue.usage": parse_pico("0.00035"),
    }
    await is_right(sessions)


async def test_a_closed_month_stays_what_it_was(sessions: Sessions) -> None:
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    october = datetime(2025, 10, 31, 23, 59, 58, tzinfo=UTC)
    s = make.schedule(wrong, tenant_id)
    await use(sessions, s, tenant_id, october)
    await use(sessions, s, tenant_id, NOON, 2)
    closed = await periods.close(sessions, date(2025, 10, 1), NOON)
    await again.rerate(sessions, again.wanted(wrong, right))
    async with transaction(sessions) as session:
        assert periods.digest(await periods.trial_balance(session, closed.month)) == closed.trial_balance_sha256
        rows = await session.execute(
            text(
                "SELECT period, effective_at, amount FROM ledger_tx JOIN ledger_transfer ON tx_id = id"
                " WHERE kind = 'rerating' ORDER BY effective_at"
            )
        )
        assert [tuple(row) for row in rows] == [
            (date(2025, 11, 1), october.replace(second=0), DELTA),
            (date(2025, 11, 1), NOON, 2 * DELTA),
        ]
    await is_right(sessions)


async def test_a_selection_touches_nothing_else(sessions: Sessions) -> None:
    """By instant (the start is in, the end is not), tier, and meter; what is not named stays at the wrong price."""
    wrong = await make.publish_prices(sessions, make.items({**make.PRICES, "input": "3.00", "output": "7.00"}))
    right = await again.version(sessions, make.items(make.PRICES))
    tenant_id = await make.tenant(sessions, "1")
    s = make.schedule(wrong, tenant_id)
    for minutes in (0, 1, 2):
        await use(sessions, s, tenant_id, NOON + timedelta(minutes=minutes))
    since, until = NOON + timedelta(minutes=1), NOON + timedelta(minutes=2)
    minute = again.wanted(wrong, right, meters=(Meter.INPUT,), since=since, until=until)
    assert (await again.rerate(sessions, again.wanted(wrong, right, tiers=(Tier.BATCH,)))).events == 0
    run = await again.rerate(sessions, minute)
    assert (run.done_events, run.credited_pico) == (1, DELTA)
    run = await again.rerate(sessions, minute)
    assert (run.done_events, run.credited_pico) == (1, 0)
    run = await again.rerate(sessions, again.wanted(wrong, right))
    assert (run.done_events, run.credited_pico) == (3, 2 * DELTA + 3 * 1000 * 1_000_000)
    assert (await balances(sessions, tenant_id))["revenue.usage"] == 3 * parse_pico("0.012258")
    await is_right(sessions)


async def test_usage_that_an_operator_billed_later_is_rated_again_with_its_admission(sessions: Sessions) -> None:
    """Two calls at noon, one kept in quarantine and billed today: a run of that noon alone is about both, once each."""
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    s = make.schedule(wrong, tenant_id)
    odd = at(make.event(tenant_id, s, quarantine="looked odd"), NOON)
    posting = Posting(sessions, ManualClock(NOON + timedelta(hours=1)), poster_metrics(CollectorRegistry()))
    await posting.post([odd, at(make.event(tenant_id, s), NOON)])
    async with transaction(sessions) as session:
        await quarantine.bill(
            session,
            tenant_id,
            odd.id,
            make.USAGE,
            reason="it is right",
            by=credit.ASKER.operator_id,
            now=datetime.now(UTC),
        )
    noon = again.wanted(wrong, right, since=NOON, until=NOON + timedelta(minutes=1))
    before = again.wanted(wrong, right, since=NOON - timedelta(days=1), until=NOON)
    assert (await again.rerate(sessions, before)).events == 0
    run = await again.rerate(sessions, noon)
    assert (run.requests, run.events, run.done_events, run.credited_pico) == (2, 2, 2, 2 * DELTA)
    assert (await again.rerate(sessions, noon)).events == 0
    assert await credit.left(sessions, tenant_id) == units("0.975484")  # 1 less twice 0.012258
    await is_right(sessions)


async def test_a_rerated_event_is_rerated_from_what_it_comes_to(sessions: Sessions) -> None:
    wrong, right = await two(sessions)
    third = await again.version(sessions, make.items({**make.PRICES, "input": "1.00"}))
    tenant_id = await make.tenant(sessions, "1")
    await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    await again.rerate(sessions, again.wanted(wrong, right))
    assert (await again.rerate(sessions, again.wanted(wrong, right))).events == 0
    run = await again.rerate(sessions, again.wanted(right, third))
    assert (run.events, run.credited_pico) == (1, DELTA)
    back = await again.rerate(sessions, again.wanted(third, wrong, charge_more=True))
    assert (back.charged_pico, back.overrun_pico) == (2 * DELTA, 0)
    assert await credit.left(sessions, tenant_id) == units("0.985637")
    await is_right(sessions)


async def test_what_costs_nothing_or_has_no_price_is_left(sessions: Sessions) -> None:
    wrong = await make.publish_prices(sessions, [*make.items(make.PRICES), *make.items(make.PRICES, tier=Tier.BATCH)])
    right = await again.version(sessions, make.items({**make.PRICES, "input": "1.00"}))
    tenant_id = await make.tenant(sessions, "1")
    batch = make.schedule(wrong, tenant_id, Tier.BATCH)
    failed = make.event(tenant_id, make.schedule(wrong, tenant_id), outcome=Outcome.TIMEOUT)
    await post(sessions, at(failed, NOON), at(make.event(tenant_id, batch), NOON))
    run = await again.rerate(sessions, again.wanted(wrong, right))
    assert (run.events, run.credited_pico, run.unpriced) == (1, 0, 1)
    await is_right(sessions)


async def test_above_the_limit_another_operator_is_needed(sessions: Sessions) -> None:
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    await use(sessions, make.schedule(wrong, tenant_id), tenant_id, count=2)
    run = await again.ask(sessions, again.wanted(wrong, right))
    with pytest.raises(PlatformError) as refused:
        await again.execute(sessions, run.id)
    assert refused.value.code == "RERATING_NOT_COUNTED"
    run = await again.drive(sessions, run.id, alone_max_pico=2 * DELTA - 1)
    assert run.needs_approval
    with pytest.raises(PlatformError) as refused:
        await again.execute(sessions, run.id, alone_max_pico=2 * DELTA - 1)
    assert refused.value.code == "SECOND_PERSON_NEEDED"
    run = await again.execute(sessions, run.id, by=credit.OTHER, alone_max_pico=2 * DELTA - 1)
    run = await again.drive(sessions, run.id, alone_max_pico=2 * DELTA - 1)
    assert (run.state, run.executed_by, run.credited_pico) == ("done", credit.OTHER.operator_id, 2 * DELTA)
    await is_right(sessions)


async def test_usage_that_came_after_the_count_does_not_pass_the_limit(sessions: Sessions) -> None:
    """Counted at 0.002105, executed by who asked; then another event is there, and the two are above the limit."""
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    s = make.schedule(wrong, tenant_id)
    await use(sessions, s, tenant_id)
    run = await again.ask(sessions, again.wanted(wrong, right))
    await again.drive(sessions, run.id, alone_max_pico=DELTA)
    await again.execute(sessions, run.id, alone_max_pico=DELTA)
    await use(sessions, s, tenant_id, NOON + timedelta(minutes=1))
    run = await again.drive(sessions, run.id, alone_max_pico=DELTA)
    assert (run.state, run.needs_approval, run.done_events) == ("counted", True, 0)
    await again.execute(sessions, run.id, by=credit.OTHER, alone_max_pico=DELTA)
    assert (await again.drive(sessions, run.id, alone_max_pico=DELTA)).credited_pico == 2 * DELTA
    await is_right(sessions)


async def test_one_key_is_one_run_and_a_cancelled_one_stays(sessions: Sessions) -> None:
    wrong, right = await two(sessions)
    what = again.wanted(wrong, right)
    first, second = [await again.ask(sessions, what, "key") for _ in range(2)]
    assert (first.id, first.replayed, second.replayed) == (second.id, False, True)
    with pytest.raises(PlatformError) as refused:
        await again.ask(sessions, what, "key", note="other")
    assert refused.value.code == "IDEMPOTENCY_KEY_REUSED"
    async with transaction(sessions) as session:
        assert (await rerating.cancel(session, first.id, now=again.NOW)).state == "cancelled"
        assert (await rerating.cancel(session, first.id, now=again.NOW)).state == "cancelled"
    with pytest.raises(PlatformError) as refused:
        await again.execute(sessions, first.id)
    assert refused.value.code == "RERATING_OVER"
    for bad in (again.wanted(wrong, wrong), again.wanted(wrong, right, until=again.BEGIN)):
        with pytest.raises(PlatformError) as refused:
            await again.ask(sessions, bad)
        assert refused.value.code in {"INVALID_RERATING", "INVALID_RANGE"}


async def test_rerated_usage_is_not_reversed_and_reversed_usage_not_rerated(sessions: Sessions) -> None:
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    s = make.schedule(wrong, tenant_id)
    for _ in range(2):
        await use(sessions, s, tenant_id)
    async with transaction(sessions) as session:
        first, second = (await session.scalars(text("SELECT id FROM ledger_tx WHERE kind = 'usage' ORDER BY id"))).all()
        await adjustments.reverse(session, tenant_id, first, credit.asked(NOON))
    run = await again.rerate(sessions, again.wanted(wrong, right))
    assert (run.events, run.credited_pico) == (1, DELTA)
    assert await credit.left(sessions, tenant_id) == units("0.987742")
    async with transaction(sessions) as session:
        rerated = (await session.scalars(text("SELECT id FROM ledger_tx WHERE kind = 'rerating'"))).one()
    for tx_id in (second, rerated):
        with pytest.raises(PlatformError) as refused:
            async with transaction(sessions) as session:
                await adjustments.reverse(session, tenant_id, tx_id, credit.asked(NOON))
        assert refused.value.code == "NOT_REVERSIBLE"
    await is_right(sessions)


FORGED = (
    ("UPDATE usage_rerating SET to_pico = to_pico + 1", "usage_rerating"),
    ("UPDATE usage_rerating SET from_pico = from_pico + 1", "usage_rerating"),
    ("UPDATE usage_rerating SET version_id = price_version_id", "usage_rerating"),
    ("UPDATE usage_rerating SET model = 'other'", "usage_rerating"),
    ("DELETE FROM usage_rerating", "usage_rerating and ledger_transfer"),
    ("UPDATE rerating_move SET amount = amount - 1", "usage_rerating and ledger_transfer"),
    ("UPDATE rerating_move SET account_id = (SELECT revenue_account FROM billing_profile)", "rerating_move"),
    ("UPDATE rerating_move SET usage_tx = tx_id", "rerating_move"),
    ("UPDATE rerating_tenant SET credited_pico = credited_pico + 1", "rerating_tenant"),
)


async def test_any_forged_row_is_found(sessions: Sessions, database_settings: Database) -> None:
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    await use(sessions, make.schedule(wrong, tenant_id), tenant_id)
    await again.rerate(sessions, again.wanted(wrong, right))
    tables = ("usage_rerating", "rerating_move", "rerating_tenant")
    with owner_of(database_settings) as owner:
        for table in tables:
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for change, table in FORGED:
            assert owner.execute(change).rowcount == 1
            async with transaction(sessions) as session:
                found = await verify.verify(session)
            assert found is not None, change
            assert found.table == table, change
            for name in tables:
                owner.execute(f"DELETE FROM {name}")
                owner.execute(f"INSERT INTO {name} TABLE kept_{name}")
    await is_right(sessions)


@pytest.mark.parametrize("table", ["usage_rerating", "rerating_move", "rerating", "rerating_tenant"])
async def test_the_application_cannot_take_a_re_rating_away(sessions: Sessions, table: str) -> None:
    for change in (f"DELETE FROM {table}", f"TRUNCATE {table}"):
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with transaction(sessions) as session:
                await session.execute(text(change))


async def test_a_run_that_dies_at_any_batch_goes_on_and_two_workers_are_one(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five events in batches of one, over two tenants: three batches die with all written; then two at once."""
    monkeypatch.setattr(rerating_post, "EVENTS_MAX", 1)
    wrong, right = await two(sessions)
    made = [await make.tenant(sessions, "1") for _ in range(2)]
    for tenant_id, count in zip(made, (3, 2), strict=True):
        await use(sessions, make.schedule(wrong, tenant_id), tenant_id, count=count)
    run = await again.ask(sessions, again.wanted(wrong, right))
    await again.drive(sessions, run.id)
    await again.execute(sessions, run.id)

    async def dies(session: AsyncSession, tenant_id: UUID) -> None:
        await session.execute(text("SELECT count(*) FROM usage_rerating WHERE tenant_id = :t"), {"t": tenant_id})
        raise ConnectionResetError

    async def step(on_moved: rerating_post.OnMoved) -> bool:
        return await rerating_post.step(
            sessions, run.id, {}, alone_max_pico=again.NO_LIMIT, now=again.NOW, on_moved=on_moved
        )

    for number in range(3):
        with pytest.raises(ConnectionResetError):
            await step(dies)
        async with transaction(sessions) as session:
            assert (await rerating.get(session, run.id)).done_events == number
        await step(again.moved)
    await asyncio.gather(*(again.drive(sessions, run.id) for _ in range(2)))
    async with transaction(sessions) as session:
        done = await rerating.get(session, run.id)
        lines = (await session.scalars(text("SELECT count(*) FROM usage_rerating"))).one()
    assert (done.state, done.done_events, done.credited_pico, lines) == ("done", 5, 5 * DELTA, 5)
    assert [await credit.left(sessions, tenant_id) for tenant_id in made] == [units("0.963226"), units("0.975484")]
    await is_right(sessions)


async def test_receipts_usage_statements_and_previews_tell_it(sessions: Sessions) -> None:
    """One event at 3.00, then 2.00, then 1.00: 0.014363, 0.012258, 0.010153; one that was right stays."""
    wrong, right = await two(sessions)
    third = await again.version(sessions, make.items({**make.PRICES, "input": "1.00"}))
    tenant_id = await make.tenant(sessions, "1")
    one, other = (at(make.event(tenant_id, make.schedule(s, tenant_id)), NOON) for s in (wrong, right))
    await post(sessions, one, other)
    await again.rerate(sessions, again.wanted(wrong, right, models=(make.MODEL,)))
    second = again.wanted(right, third, until=NOON + timedelta(seconds=1), meters=(Meter.INPUT,))
    async with transaction(sessions) as session:
        whole = await receipts.receipt(session, tenant_id, one.id)
    assert whole is not None
    assert (whole.amount, whole.effective_amount) == ("0.014363000000", "0.012258000000")
    await again.rerate(sessions, second)
    async with transaction(sessions) as session:
        found = await receipts.receipt(session, tenant_id, one.id)
        (day,) = await usage.by_day_and_model(session, tenant_id, NOON.date(), NOON.date())
        now = datetime.now(UTC)
        told = await statement(session, tenant_id, now - timedelta(days=2), now + timedelta(days=1), offset=0, limit=50)
    assert found is not None
    assert [(line.price_version_id, line.amount) for line in found.reratings] == [
        (right.version_id, "0.012258000000"),
        (third.version_id, "0.010153000000"),
    ]
    assert (found.amount, found.effective_amount) == ("0.014363000000", "0.010153000000")
    assert (day.amount_pico, day.rerated_pico) == (parse_pico("0.026621"), -3 * DELTA)
    assert [(e.kind, e.transactions, e.change_pico) for e in told.entries if e.kind == "rerating"] == [
        ("rerating", 2, 3 * DELTA)
    ]
    assert told.closing_pico == parse_pico("1") - 2 * parse_pico("0.010153")
    impact = await price_preview.preview(sessions, third.version_id, NOON.date(), NOON.date())
    assert (impact.total.by_event, impact.total.paid_pico, impact.total.difference_pico) == (
        2,
        2 * parse_pico("0.010153"),
        0,
    )
    await is_right(sessions)
