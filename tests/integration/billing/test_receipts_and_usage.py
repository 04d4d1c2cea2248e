"""Receipts and usage: what tenants read of their own money, and only of theirs."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing import credit_figures, pricing, receipts, usage
from billing.types import Meter, Outcome, PriceSchedule, UsageEvent
from billing.verify import verify
from core import keyspace
from core.db import transaction
from core.errors import PlatformError
from core.ids import new_uuid, uuid7_time
from core.money import Currency, parse_pico
from core.tiers import Tier
from core.usage import TokenUsage
from core.waits import Wait
from tests.factories import billing as make
from tests.factories.billing_world import World, write


async def receipt(world: World, tenant_id: UUID, event_id: UUID) -> receipts.Receipt | None:
    async with transaction(world.sessions) as session:
        return await receipts.receipt(session, tenant_id, event_id)


async def test_what_a_gateway_admitted_by_itself_may_be_pending_for_ten_minutes(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    event, other = make.event(tenant_id, s), (await world.tenant("1"))[0]
    assert not await receipts.is_pending(world.client, tenant_id, event.id)
    made_us = int(uuid7_time(event.id).timestamp()) * 1_000_000
    await world.client.call("SET", keyspace.local(tenant_id), made_us + 599_000_000)
    assert await receipts.is_pending(world.client, tenant_id, event.id)
    assert not await receipts.is_pending(world.client, other, event.id)
    await world.client.call("SET", keyspace.local(tenant_id), made_us + 602_000_000)
    assert not await receipts.is_pending(world.client, tenant_id, event.id)


async def test_a_receipt_shows_parts_prices_and_the_exact_amount(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    event = make.event(tenant_id, s, upstream_id="chatcmpl-9")
    await credit_figures.make_loader(world.sessions, world.client)(tenant_id)
    await credit_figures.register(world.client, [event])
    assert await receipt(world, tenant_id, event.id) is None
    assert await receipts.is_pending(world.client, tenant_id, event.id)
    await write(world.spool_dir / "r1", [event])
    await world.poster.step()
    assert not await receipts.is_pending(world.client, tenant_id, event.id)
    found = await receipt(world, tenant_id, event.id)
    assert found is not None
    assert (found.state, found.amount, found.currency) == ("posted", "0.012258000000", Currency.USD)
    assert (found.price_version_id, found.outcome, found.upstream_id) == (
        s.price_version_id, Outcome.COMPLETED, "chatcmpl-9",
    )  # fmt: skip
    assert [(one.meter, one.quantity, one.unit_price, one.amount) for one in found.lines] == [
        (Meter.INPUT, 2105, "2.000000", "0.004210000000"),
        (Meter.CACHED_INPUT, 10240, "0.200000", "0.002048000000"),
        (Meter.OUTPUT, 360, "6.000000", "0.002160000000"),
        (Meter.REASONING, 640, "6.000000", "0.003840000000"),
    ]
    assert found.transaction_id is not None
    assert found.version_id == event.version_id  # which of the model's versions served


async def test_what_was_preempted_is_billed_once_and_its_waste_is_the_platforms(world: World) -> None:
    """The receipt says how often; the waste stands beside the event and is in no amount."""
    tenant_id, s = await world.tenant("1")
    waste = {"preemptions": 2, "waste_tokens": 24_690, "waste_us": 1_500_000}
    answered = msgspec.structs.replace(make.event(tenant_id, s), **waste)
    given_up = msgspec.structs.replace(make.event(tenant_id, s, TokenUsage(), outcome=Outcome.PREEMPTED), **waste)
    odd = msgspec.structs.replace(make.event(tenant_id, s), preemptions=101)
    plain = make.event(tenant_id, s)
    await write(world.spool_dir / "r1", [answered, given_up, odd, plain])
    await world.poster.step()
    found = [await receipt(world, tenant_id, event.id) for event in (answered, given_up, odd, plain)]
    assert [(one.state, one.amount, one.preemptions) for one in found if one is not None] == [
        ("posted", "0.012258000000", 2),
        ("posted", "0.000000000000", 2),
        ("quarantined", "0.000000000000", 0),
        ("posted", "0.012258000000", 0),
    ]
    rows = await world.rows("SELECT preemptions, waste_tokens, waste_us FROM usage_event ORDER BY id")
    assert rows == [(2, 24_690, 1_500_000), (2, 24_690, 1_500_000), (None, None, None)]
    assert await world.available(tenant_id) == parse_pico("1") - 2 * parse_pico("0.012258")
    async with transaction(world.sessions) as session:
        assert await verify(session) is None


async def test_a_receipt_says_why_it_waited_and_nothing_of_one_that_did_not(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    wait = Wait(4, 64, 2_000_000, 7, 0, 1, 3)
    waited = msgspec.structs.replace(make.event(tenant_id, s), queue_us=1_800_000, wait=wait)
    odd = msgspec.structs.replace(make.event(tenant_id, s), wait=Wait(4, 64, -1, 7))
    plain = make.event(tenant_id, s)
    await write(world.spool_dir / "r1", [waited, odd, plain])
    await world.poster.step()
    found = [await receipt(world, tenant_id, event.id) for event in (waited, odd, plain)]
    assert [(one.state, one.wait) for one in found if one is not None] == [
        ("posted", wait),
        ("quarantined", Wait(4, 64, -1, 7)),
        ("posted", None),
    ]
    async with transaction(world.sessions) as session:
        assert await verify(session) is None


async def test_a_receipt_is_for_its_tenant_only(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    other, _ = await world.tenant("1")
    event, odd = make.event(tenant_id, s), make.event(tenant_id, s, amount_pico=7)
    await write(world.spool_dir / "r1", [event, odd])
    await world.poster.step()
    for one in (event.id, odd.id):
        assert await receipt(world, other, one) is None
        assert await receipt(world, tenant_id, one) is not None
    assert await receipt(world, tenant_id, new_uuid()) is None
    assert await receipt(world, tenant_id, UUID(int=7)) is None


async def test_what_failed_or_is_in_doubt_shows_zero(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    failed = make.event(tenant_id, s, outcome=Outcome.UPSTREAM_ERROR)
    doubtful = make.event(tenant_id, s, quarantine="a negative part")
    await write(world.spool_dir / "r1", [failed, doubtful])
    await world.poster.step()
    shown = await receipt(world, tenant_id, failed.id)
    assert shown is not None
    assert (shown.state, shown.amount, {line.amount for line in shown.lines}) == (
        "posted",
        "0.000000000000",
        {shown.amount},
    )
    shown = await receipt(world, tenant_id, doubtful.id)
    assert shown is not None
    assert (shown.state, shown.amount, shown.lines) == ("quarantined", "0.000000000000", ())


counts, prices = st.integers(0, 10**7), st.integers(0, 5 * 10**8)


@given(
    st.builds(TokenUsage, counts, counts, counts, counts, counts),
    st.builds(PriceSchedule, st.just(UUID(int=1)), st.just(Currency.USD), st.just(Tier.BATCH), *[prices] * 6),
    st.sampled_from(Outcome),
)
def test_the_lines_add_up_to_the_amount(used: TokenUsage, s: PriceSchedule, outcome: Outcome) -> None:
    amount = pricing.charge(used, s, outcome)
    shown = receipts.lines(used, s, amount)
    assert sum(parse_pico(line.amount) for line in shown) == amount


async def test_usage_by_day_is_in_the_tenants_time_zone(world: World) -> None:
    """23:30 in London on the 16th is 07:30 on the 17th in Shanghai."""
    tenant_id, s = await world.tenant("1")
    other, _ = await world.tenant("1")
    late = datetime(2026, 11, 16, 23, 30, tzinfo=UTC)
    events: list[UsageEvent] = []
    for minutes in (0, 0, 45):  # the last one is 00:15 on the 17th in London
        at = late + timedelta(minutes=minutes)
        event = make.event(tenant_id, s, event_id=make.uuid7_at(int(at.timestamp()), minutes + len(events)))
        at_us = int(at.timestamp()) * 1_000_000
        events.append(msgspec.structs.replace(event, admitted_at_us=at_us, ended_at_us=at_us + 5))
    failed = msgspec.structs.replace(
        make.event(tenant_id, s, outcome=Outcome.TIMEOUT, event_id=make.uuid7_at(int(late.timestamp()), 99)),
        admitted_at_us=events[0].admitted_at_us,
    )
    await write(world.spool_dir / "r1", [*events, failed, make.event(other, s)])
    await world.poster.step()

    async def days(zone: str, start: date, end: date) -> dict[date, tuple[int, int, int]]:
        async with transaction(world.sessions) as session:
            rows = await usage.by_day_and_model(session, tenant_id, start, end, time_zone=zone)
        return {row.day: (row.requests, row.completed, row.amount_pico) for row in rows}

    first, second = date(2026, 11, 16), date(2026, 11, 17)
    cost = parse_pico("0.012258")
    assert await days("Europe/London", first, second) == {first: (3, 2, 2 * cost), second: (1, 1, cost)}
    assert await days("Europe/London", second, second) == {second: (1, 1, cost)}
    assert await days("Asia/Shanghai", first, second) == {second: (4, 3, 3 * cost)}
    assert await days("Asia/Shanghai", first, first) == {}
    for zone, start, end in (("Mars/Olympus", first, first), ("UTC", second, first), ("UTC", date(2025, 1, 1), first)):
        with pytest.raises(PlatformError) as refused:
            await days(zone, start, end)
        assert refused.value.code == "INVALID_RANGE"
