"""What a draft would have done to recorded usage: worked by hand, with and without the events."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from billing import price_book, price_preview, quarantine
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_preview import Impact
from billing.price_table import VersionPrices
from billing.types import Outcome, PriceItem, UsageEvent
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import parse_pico
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.integration.billing.test_verify import owner_of

DAY = date(2025, 11, 5)
NOON = datetime(2025, 11, 5, 12, 0, tzinfo=UTC)


def at(made: UsageEvent, when: datetime) -> UsageEvent:
    """The same event, admitted then."""
    us = int(when.timestamp()) * 1_000_000
    return msgspec.structs.replace(
        made,
        id=make.uuid7_at(us // 1_000_000, new_uuid().int & 0xFFFF_FFFF),
        admitted_at_us=us,
        ended_at_us=us + 1_000_000,
    )


async def post(sessions: Sessions, *events: UsageEvent) -> None:
    clock = ManualClock(NOON + timedelta(days=20))
    (posted,) = await Posting(sessions, clock, poster_metrics(CollectorRegistry())).post(events)
    assert posted.new == len(events)


async def draft_of(sessions: Sessions, prices: VersionPrices, *items: PriceItem, complete: bool = True) -> UUID:
    async with transaction(sessions) as session:
        version = (await price_book.list_books(session))[0]
        return await price_book.create_draft(session, version.id, items, complete=complete)


async def preview(sessions: Sessions, draft: UUID, start: date = DAY, end: date = DAY) -> Impact:
    return await price_preview.preview(sessions, draft, start, end)


async def test_the_wrong_price_of_the_brief_by_hand(sessions: Sessions) -> None:
    """12,345 prompt tokens of which 10,240 cached and 1,000 out: 0.014363 at 3.00, 0.012258 at 2.00."""
    prices = await make.publish_prices(sessions, make.items({**make.PRICES, "input": "3.00"}))
    a, b = await make.tenant(sessions, "5"), await make.tenant(sessions, "5")
    one = make.event(a, make.schedule(prices, a))
    assert one.amount_pico == parse_pico("0.014363")
    await post(sessions, *(at(make.event(tenant, make.schedule(prices, tenant)), NOON) for tenant in (a, b, b)))
    draft = await draft_of(sessions, prices, *make.items(make.PRICES))
    days: list[tuple[int, int]] = []
    found = await price_preview.preview(
        sessions, draft, DAY - timedelta(days=1), DAY, on_day=lambda *done: days.append(done)
    )
    assert days == [(1, 2), (2, 2)]
    assert [
        (one.tenant_id, one.total.paid_pico, one.total.would_pico, one.total.difference_pico) for one in found.tenants
    ] == [
        (b, parse_pico("0.028726"), parse_pico("0.024516"), -parse_pico("0.00421")),
        (a, parse_pico("0.014363"), parse_pico("0.012258"), -parse_pico("0.002105")),
    ]
    assert (found.total.requests, found.total.by_event, found.total.by_minute) == (3, 3, 0)
    assert found.by_model[make.MODEL] == found.by_tier[Tier.STANDARD] == found.total
    assert [row[:3] for row in price_preview.rows(found)] == [(x, make.MODEL, Tier.STANDARD) for x in (b, a)]
    assert (await preview(sessions, draft, DAY + timedelta(days=1), DAY + timedelta(days=1))).tenants == []


async def test_minimum_and_step_need_the_events_and_say_so(sessions: Sessions, database_settings: Database) -> None:
    """W10: 3 in and 1 out at 0.05/0.20 is 0.00000035, with a minimum 0.0001. Then the events are gone."""
    prices = await make.publish_prices(sessions, make.items({"input": "0.05", "output": "0.20"}))
    tenant_id = await make.tenant(sessions, "5")
    s = make.schedule(prices, tenant_id)
    small, large = TokenUsage(3, 0, 0, 1, 0), TokenUsage(200_001, 0, 0, 0, 0)
    await post(
        sessions,
        *(at(make.event(tenant_id, s, small), NOON) for _ in range(2)),
        at(make.event(tenant_id, s, large), NOON + timedelta(minutes=1)),
    )
    step = msgspec.structs.replace(make.items({"input": "0.10"})[0], above_tokens=200_000)
    out = msgspec.structs.replace(make.items({"output": "0.40"})[0], above_tokens=200_000)
    draft = await draft_of(
        sessions,
        prices,
        *make.items({"input": "0.05", "output": "0.20", "min_charge": "0.0001"}),
        *(step, out),
    )
    flat = await draft_of(sessions, prices, *make.items({"input": "0.06", "output": "0.20"}))
    whole = await preview(sessions, draft)
    assert whole.total.by_event == 3
    assert whole.total.paid_pico == 2 * 350_000 + 200_001 * 50_000
    assert whole.total.would_pico == 2 * parse_pico("0.0001") + 200_001 * 100_000
    with owner_of(database_settings) as owner:
        owner.execute("TRUNCATE usage_event")
    gone = await preview(sessions, draft)  # a minute with one request is as good as its event
    assert (gone.total.by_event, gone.total.by_minute, gone.total.left_out) == (0, 1, 2)
    assert (gone.total.would_pico, gone.total.left_out_paid_pico) == (200_001 * 100_000, 700_000)
    sums = await preview(sessions, flat)
    assert (sums.total.by_minute, sums.total.left_out) == (3, 0)
    assert sums.total.difference_pico == 200_007 * 10_000


async def test_usage_that_an_operator_billed_later_is_among_the_events_of_its_day(sessions: Sessions) -> None:
    """Two calls on the day, one billed out of quarantine today, at 3.00 and a step: both known by their events."""
    prices = await make.publish_prices(sessions, make.items({**make.PRICES, "input": "3.00", "request": "0.001"}))
    tenant_id = await make.tenant(sessions, "5")
    s = make.schedule(prices, tenant_id)
    odd = at(make.event(tenant_id, s, quarantine="looked odd"), NOON)
    posting = Posting(sessions, ManualClock(NOON), poster_metrics(CollectorRegistry()))
    await posting.post([odd, at(make.event(tenant_id, s), NOON)])
    async with transaction(sessions) as session:
        await quarantine.bill(
            session, tenant_id, odd.id, make.USAGE, reason="it is right", by=new_uuid(), now=datetime.now(UTC)
        )
    draft = await draft_of(sessions, prices, *make.items({**make.PRICES, "request": "0.001"}))
    found = (await preview(sessions, draft)).total
    assert (found.by_event, found.by_minute, found.left_out) == (2, 0, 0)
    assert (found.paid_pico, found.would_pico) == (2 * parse_pico("0.015363"), 2 * parse_pico("0.013258"))
    before = DAY - timedelta(days=1)
    assert (await preview(sessions, draft, before, before)).tenants == []


async def test_endings_that_cost_nothing_still_do_and_aborts_need_the_events(
    sessions: Sessions, database_settings: Database
) -> None:
    prices = await make.publish_prices(sessions, make.items({"input": "3.00", "output": "6.00"}))
    tenant_id = await make.tenant(sessions, "5")
    s = make.schedule(prices, tenant_id)
    early, late = TokenUsage(10, 0, 0, 0, 0), TokenUsage(10, 0, 0, 5, 0)
    await post(
        sessions,
        *(
            at(make.event(tenant_id, s, usage, outcome=outcome), NOON)
            for usage, outcome in (
                (late, Outcome.UPSTREAM_ERROR),
                (late, Outcome.TIMEOUT),
                (early, Outcome.CLIENT_ABORT),
                (late, Outcome.CLIENT_ABORT),
            )
        ),
    )
    draft = await draft_of(sessions, prices, *make.items({"input": "2.00", "output": "6.00"}))
    found = (await preview(sessions, draft)).total
    assert (found.paid_pico, found.would_pico) == (60_000_000, 50_000_000)
    with owner_of(database_settings) as owner:
        owner.execute("TRUNCATE usage_event")
    found = (await preview(sessions, draft)).total
    assert (found.paid_pico, found.would_pico, found.by_minute) == (0, 0, 2)
    assert (found.left_out, found.left_out_paid_pico) == (2, 60_000_000)


async def test_a_tenants_own_price_and_a_missing_one(sessions: Sessions) -> None:
    prices = await make.publish_prices(sessions)
    own, other = await make.tenant(sessions, "5"), await make.tenant(sessions, "5")
    await post(sessions, *(at(make.event(one, make.schedule(prices, one)), NOON) for one in (own, other)))
    contract = make.items({"input": "1.00", "cached_input": "0.20", "output": "6.00"}, tenant_id=own)
    both = await preview(sessions, await draft_of(sessions, prices, *make.items(make.PRICES), *contract))
    assert [(one.tenant_id, one.total.difference_pico) for one in both.tenants] == [
        (own, -2105 * 1_000_000),
        (other, 0),
    ]
    alone = await preview(sessions, await draft_of(sessions, prices, *contract))
    assert [(one.tenant_id, one.total.unpriced) for one in alone.tenants] == [(own, 0), (other, 1)]
    assert alone.total.unpriced_paid_pico == parse_pico("0.012258")


async def test_what_cannot_be_tried_is_refused(sessions: Sessions) -> None:
    prices = await make.publish_prices(sessions)
    for draft, start, end, code in (
        (new_uuid(), DAY, DAY, "NOT_FOUND"),
        (prices.version_id, DAY, DAY - timedelta(days=1), "INVALID_RANGE"),
        (prices.version_id, DAY, DAY + timedelta(days=400), "INVALID_RANGE"),
    ):
        with pytest.raises(PlatformError) as refused:
            await price_preview.preview(sessions, draft, start, end)
        assert refused.value.code == code
