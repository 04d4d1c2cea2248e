"""Books in which every kind of row stands at least twice, for two tenants; right in every row."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import msgspec
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from billing import adjustments, ledger, periods, price_book, quarantine, seals, usage_days
from billing.adjustment_kinds import BilledUsage, NewTerms
from billing.credits import top_up
from billing.lots import Grant, LotSource
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.price_table import VersionPrices
from billing.seals import SealHead
from billing.types import BillingMode, Meter, Outcome, PriceItem, PriceSchedule, UsageEvent
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.money import Currency, parse_pico
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories import rerating

SEPTEMBER = (datetime(2025, 9, 20, 12, tzinfo=UTC), datetime(2025, 9, 21, 23, 59, 59, tzinfo=UTC))
OCTOBER = datetime(2025, 10, 5, 12, tzinfo=UTC)
EXPIRY = datetime(2025, 10, 20, tzinfo=UTC)
NOVEMBER = datetime(2025, 11, 3, 12, tzinfo=UTC)


async def write(sessions: Sessions) -> None:
    """Prices, accounts, every posting there is, an October that is closed, dropped days, and seals over all of it."""
    tenants = [new_uuid(), new_uuid()]
    prices = await _prices(sessions, tenants[0])
    async with transaction(sessions) as session:
        await ledger.open_tenant(session, tenants[0], Currency.USD)
        await ledger.open_tenant(session, tenants[1], Currency.USD, BillingMode.POSTPAID, parse_pico("5"))
    posting = Posting(sessions, ManualClock(NOVEMBER), poster_metrics(CollectorRegistry()))
    async with transaction(sessions) as session:
        await top_up(session, tenants[0], parse_pico("3"), idempotency_key="first", actor="operator", note="paid")
    async with transaction(sessions) as session:
        asked = credit.asked(OCTOBER, "second", note="", alone_max_pico=0)
        waits = await adjustments.top_up(session, tenants[0], parse_pico("3"), asked)
        await adjustments.approve(session, tenants[0], waits.id, by=credit.OTHER, now=OCTOBER)
        for tenant_id in tenants:
            new, asked = NewTerms(BillingMode.POSTPAID, parse_pico("9")), credit.asked(OCTOBER, alone_max_pico=0)
            more = await adjustments.change_terms(session, tenant_id, new, asked)
            assert more is not None
            await adjustments.decline(session, tenant_id, more.id, by=credit.OTHER, now=OCTOBER)
    for tenant_id in tenants:
        await posting.post([event for at in SEPTEMBER for event in _usage(tenant_id, prices, at)[:-1]])
        await _given(sessions, tenant_id)
        await posting.post(_usage(tenant_id, prices, OCTOBER))
        if tenant_id == tenants[0]:
            await _bought(sessions, tenant_id)
        await credit.expire(sessions, tenant_id, EXPIRY + timedelta(days=1))
    await _seal(sessions)
    await periods.close(sessions, date(2025, 10, 1), NOVEMBER)
    for tenant_id in tenants:
        await posting.post([*_usage(tenant_id, prices, OCTOBER), *_usage(tenant_id, prices, NOVEMBER)])
        await _decided(sessions, tenant_id)
    await _rerated(sessions, prices)
    await _seal(sessions)
    dropped, _, wrong = await usage_days.drop_due(sessions, NOVEMBER, 40, "test", anchor=SealHead())
    assert ([day.events for day in dropped], wrong) == ([18, 18], None)
    await _seal(sessions)


async def _prices(sessions: Sessions, tenant_id: UUID) -> VersionPrices:
    """The list with a step, a minimum charge, a tenant's own price and discount; a plan's book; a draft."""
    steps = [
        PriceItem(make.MODEL, Tier.STANDARD, meter, 2 * price, above_tokens=200_000)
        for meter, price in ((Meter.INPUT, 2_000_000), (Meter.CACHED_INPUT, 200_000), (Meter.OUTPUT, 6_000_000))
    ]
    listed = [*make.items({**make.PRICES, "min_charge": "0.5"}), *steps]
    own = make.items({"output": "7.00"}, tenant_id=tenant_id)
    batch = make.items({"input": "1.00", "output": "3.00"}, tier=Tier.BATCH)
    async with transaction(sessions) as session:
        book = await price_book.create_book(session, "list", Currency.USD)
        list_draft = await price_book.create_draft(session, book, [*listed, *own, *batch], note="the list")
        await session.execute(
            text("INSERT INTO price_discount VALUES (:version, :tenant, :model, :tier, 125000)"),
            {"version": list_draft, "tenant": tenant_id, "model": make.MODEL, "tier": int(Tier.BATCH)},
        )
        await price_book.publish(session, list_draft, now=OCTOBER)
        plan = await price_book.create_book(session, "plan", Currency.USD, for_plan=True)
        draft = await price_book.create_draft(session, plan, make.items(make.PRICES), note="for the plan")
        await price_book.publish(session, draft, now=OCTOBER)
        await price_book.create_draft(session, plan, make.items({"output": "9.00"}), note="not yet")
    async with transaction(sessions) as session:
        version = await price_book.load_version(session, list_draft)
    assert version is not None
    return version


async def _rerated(sessions: Sessions, prices: VersionPrices) -> None:
    """What was used in November rated again by two runs: input cheaper, then output dearer."""
    cheaper = await rerating.version(sessions, make.items({"input": "1.00", "output": "6.00"}))
    dearer = await rerating.version(sessions, make.items({"input": "1.00", "output": "6.50", "min_charge": "0.1"}))
    since = NOVEMBER - timedelta(days=1)
    await rerating.rerate(sessions, rerating.wanted(prices, cheaper, since=since, meters=("input",), tiers=(1,)))
    await rerating.rerate(sessions, rerating.wanted(prices, dearer, since=since, charge_more=True))


async def _given(sessions: Sessions, tenant_id: UUID) -> None:
    """Promo that expires, goodwill of a scope, a reversal, and adjustments two people decided on or one waits for."""
    await credit.give(sessions, tenant_id, "0.7", OCTOBER, expires_at=EXPIRY)
    tiers = (Tier.STANDARD, Tier.BATCH)
    await credit.give(sessions, tenant_id, "0.2", OCTOBER, source=LotSource.GOODWILL, models=(make.MODEL,), tiers=tiers)
    mistake = await credit.give(sessions, tenant_id, "0.3", OCTOBER)
    assert mistake.transaction_id is not None
    async with transaction(sessions) as session:
        await adjustments.reverse(session, tenant_id, mistake.transaction_id, credit.asked(OCTOBER))
    for decide in (adjustments.approve, adjustments.decline, None):
        async with transaction(sessions) as session:
            grant = Grant(parse_pico("0.1"), LotSource.PROMO)
            asked = await adjustments.give(session, tenant_id, grant, credit.asked(OCTOBER, alone_max_pico=0))
            if decide is not None:
                await decide(session, tenant_id, asked.id, by=credit.OTHER, now=OCTOBER)


async def _bought(sessions: Sessions, tenant_id: UUID) -> None:
    """Paid credit that expires: two lots unused, one used in November; and one that waits for a second person."""
    await credit.buy(sessions, tenant_id, "0.4", OCTOBER, EXPIRY)
    await credit.buy(sessions, tenant_id, "0.3", OCTOBER, EXPIRY)
    await credit.buy(sessions, tenant_id, "0.6", OCTOBER, datetime(2030, 1, 1, tzinfo=UTC))
    await credit.buy(sessions, tenant_id, "0.5", OCTOBER, EXPIRY, alone_max_pico=0)


def _usage(tenant_id: UUID, prices: VersionPrices, at: datetime) -> list[UsageEvent]:
    """Several endings, tiers' own price, more than the credit there is, and one that goes to quarantine."""
    s: PriceSchedule = make.schedule(prices, tenant_id)
    events = [
        make.event(tenant_id, s, usage, outcome=outcome, event_id=_id(at))
        for usage in (make.USAGE, TokenUsage(100_000, 5, 4, 3, 2), TokenUsage(700_000, 0, 0, 50_000, 0))
        for outcome in (Outcome.COMPLETED, Outcome.CLIENT_ABORT, Outcome.TIMEOUT)
    ]
    events.append(make.event(tenant_id, s, amount_pico=1, event_id=_id(at)))
    us = int(at.timestamp()) * 1_000_000
    return [msgspec.structs.replace(event, admitted_at_us=us, ended_at_us=us + 9_000_000) for event in events]


async def _decided(sessions: Sessions, tenant_id: UUID) -> None:
    """Of what is in quarantine one is billed after all, and one dismissed."""
    async with transaction(sessions) as session:
        found = await quarantine.search(session, tenant_id, limit=3)
        asked = credit.asked(NOVEMBER, note="counted", alone_max_pico=0)
        bill = await adjustments.bill(session, tenant_id, BilledUsage(found[0].id, make.USAGE), asked)
        await adjustments.approve(session, tenant_id, bill.id, by=credit.OTHER, now=NOVEMBER)
        await quarantine.dismiss(
            session, tenant_id, found[1].id, reason="a test", by=credit.OTHER.operator_id, now=NOVEMBER
        )


def _id(at: datetime) -> UUID:
    return make.uuid7_at(int(at.timestamp()), new_uuid().int & 0xFFFF_FFFF)


async def _seal(sessions: Sessions) -> None:
    """Seal everything there is."""
    while True:
        async with transaction(sessions) as session:
            if not await seals.seal(session):
                return
