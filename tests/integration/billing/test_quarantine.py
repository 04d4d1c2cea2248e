"""Usage kept from billing: billed with corrected counts exactly once, or dismissed, for good."""

import asyncio
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text

from billing import credit_figures, price_book, quarantine, receipts, verify
from billing.quarantine import QuarantineState
from billing.types import PriceItem
from core.clock import SystemClock
from core.db import transaction
from core.errors import PlatformError
from core.money import parse_pico
from core.settings import Database
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.integration.billing.test_verify import owner_of

BY = UUID("01890000-0000-7000-8000-00000000d001")
NEGATIVE = TokenUsage(-16_638, 72_960, 0, 87, 0)  # new-api 5003: the cached part taken off twice
RIGHT = TokenUsage(56_322, 72_960, 0, 87, 0)  # at 2.00, 0.20 and 6.00 per million: 0.112644 + 0.014592 + 0.000522
COST = parse_pico("0.127758")


async def held(world: World, count: int = 1, *, credit: str = "1") -> tuple[UUID, list[UUID]]:
    """A tenant with that many events in quarantine, and one that is posted."""
    tenant_id, s = await world.tenant(credit)
    odd = [make.event(tenant_id, s, NEGATIVE, amount_pico=-1, quarantine="a negative part") for _ in range(count)]
    await write(world.spool_dir / f"q{tenant_id.hex}", [*odd, make.event(tenant_id, s)])
    await world.poster.step()
    return tenant_id, [event.id for event in odd]


async def bill(world: World, tenant_id: UUID, event_id: UUID, usage: TokenUsage = RIGHT) -> quarantine.Item:
    async with transaction(world.sessions) as session:
        now = SystemClock().now()
        return await quarantine.bill(session, tenant_id, event_id, usage, reason="read anew", by=BY, now=now)


async def dismiss(world: World, tenant_id: UUID, event_id: UUID) -> quarantine.Item:
    async with transaction(world.sessions) as session:
        return await quarantine.dismiss(
            session, tenant_id, event_id, reason="nothing came", by=BY, now=SystemClock().now()
        )


async def found(world: World) -> verify.Finding | None:
    async with transaction(world.sessions) as session:
        return await verify.verify(session)


async def test_corrected_counts_are_billed_once_at_the_frozen_price(world: World) -> None:
    tenant_id, (event_id,) = await held(world)
    before = await world.available(tenant_id)
    assert before == parse_pico("1") - parse_pico("0.012258")
    later = make.items({"input": "9.00", "output": "9.00"})
    await publish_again(world, later)
    answers = await asyncio.gather(*(bill(world, tenant_id, event_id) for _ in range(4)), return_exceptions=True)
    done = [one for one in answers if isinstance(one, quarantine.Item)]
    refused = [one.code for one in answers if isinstance(one, PlatformError)]
    assert (len(done), refused) == (1, ["ALREADY_DECIDED"] * 3)
    assert done[0].state is QuarantineState.BILLED
    assert await world.available(tenant_id) == before - COST
    assert await world.rows("SELECT count_source, amount_pico, input_cached FROM usage_event ORDER BY posted_at") == [
        ("engine", parse_pico("0.012258"), 10_240),
        ("operator", COST, 72_960),
    ]
    assert await found(world) is None
    with pytest.raises(PlatformError) as second:
        await dismiss(world, tenant_id, event_id)
    assert second.value.code == "ALREADY_DECIDED"


async def publish_again(world: World, items: list[PriceItem]) -> None:
    """Another version in force now, in the same book."""
    async with transaction(world.sessions) as session:
        book = (await session.scalars(text("SELECT id FROM price_book"))).one()
        draft = await price_book.create_draft(session, book, items)
        await price_book.publish(session, draft, now=SystemClock().now())


async def test_what_is_dismissed_is_never_billed(world: World) -> None:
    tenant_id, (event_id,) = await held(world)
    before = await world.available(tenant_id)
    assert (await dismiss(world, tenant_id, event_id)).state is QuarantineState.DISMISSED
    with pytest.raises(PlatformError) as refused:
        await bill(world, tenant_id, event_id)
    assert refused.value.code == "ALREADY_DECIDED"
    assert await world.available(tenant_id) == before
    assert await found(world) is None
    async with transaction(world.sessions) as session:
        receipt = await receipts.receipt(session, tenant_id, event_id)
    assert receipt is not None
    assert (receipt.state, receipt.amount) == ("dismissed", "0.000000000000")


async def test_the_receipt_shows_what_was_billed_in_the_end(world: World) -> None:
    tenant_id, (event_id,) = await held(world)
    await bill(world, tenant_id, event_id)
    async with transaction(world.sessions) as session:
        receipt = await receipts.receipt(session, tenant_id, event_id)
    assert receipt is not None
    assert (receipt.id, receipt.state, receipt.amount) == (event_id, "posted", "0.127758000000")
    assert "corrected" in receipt.note


async def test_usage_in_quarantine_is_not_posted_when_it_is_offered_again(world: World) -> None:
    """Whatever made it odd is mended and the spool is read anew: only a decision bills it, else it could be twice."""
    tenant_id, s = await world.tenant("1")
    odd = make.event(tenant_id, s, amount_pico=7)
    mended = make.event(tenant_id, s, event_id=odd.id)
    for number, event in enumerate((odd, mended)):
        await write(world.spool_dir / f"r{number}", [event])
        await world.poster.step()
    assert await world.rows("SELECT id FROM usage_event") == []
    await bill(world, tenant_id, odd.id, make.USAGE)
    assert await world.available(tenant_id) == parse_pico("1") - parse_pico("0.012258")


async def test_usage_that_is_posted_does_not_come_into_quarantine(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    event = make.event(tenant_id, s)
    await write(world.spool_dir / "r0", [event])
    await world.poster.step()
    await write(world.spool_dir / "r1", [make.event(tenant_id, s, event_id=event.id, amount_pico=7)])
    await world.poster.step()
    assert await world.rows("SELECT id FROM usage_quarantine") == []


@pytest.mark.parametrize("first", ["the repeat", "the operator"])
async def test_one_bill_per_idempotency_key_also_when_an_operator_bills(world: World, first: str) -> None:
    """The first request's counts were impossible and its caller asked again by the same key: one of both is billed."""
    tenant_id, s = await world.tenant("1")
    keyed = {"idempotency": b"k" * 16}
    odd = msgspec.structs.replace(make.event(tenant_id, s, NEGATIVE, amount_pico=-1, quarantine="odd"), **keyed)
    repeat = msgspec.structs.replace(make.event(tenant_id, s), **keyed)
    await write(world.spool_dir / "r0", [odd])
    await world.poster.step()
    if first == "the operator":
        await bill(world, tenant_id, odd.id)
    await write(world.spool_dir / "r1", [repeat])
    await world.poster.step()
    if first == "the repeat":
        with pytest.raises(PlatformError) as refused:
            await bill(world, tenant_id, odd.id)
        assert refused.value.code == "NOT_BILLABLE"
        assert (await dismiss(world, tenant_id, odd.id)).state is QuarantineState.DISMISSED
    paid = COST if first == "the operator" else parse_pico("0.012258")
    assert await world.available(tenant_id) == parse_pico("1") - paid
    assert await found(world) is None


async def test_what_has_no_price_or_no_account_can_only_be_dismissed(world: World) -> None:
    stranger = await make.tenant(world.sessions, limit="1")
    s = make.schedule(world.prices, stranger)
    unknown = make.event(stranger, msgspec.structs.replace(s, price_version_id=BY))
    nobody = make.event(BY, s)
    await write(world.spool_dir / "r0", [unknown, nobody])
    await world.poster.step()
    for tenant_id, event_id in ((stranger, unknown.id), (BY, nobody.id)):
        with pytest.raises(PlatformError) as refused:
            await bill(world, tenant_id, event_id)
        assert refused.value.code == "NOT_BILLABLE"
        assert (await dismiss(world, tenant_id, event_id)).state is QuarantineState.DISMISSED


async def test_nothing_is_held_for_usage_in_quarantine(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    odd = make.event(tenant_id, s, quarantine="odd")
    await credit_figures.make_loader(world.sessions, world.client)(tenant_id)
    await credit_figures.register(world.client, [odd])
    assert (await world.figures(tenant_id))[1:] == (12_258_000, 1)
    await write(world.spool_dir / "r1", [odd])
    await world.poster.step()
    assert await world.figures(tenant_id) == (10**9, 0, 0)


async def test_the_queue_is_read_by_page_and_filter(world: World) -> None:
    tenant_id, ids = await held(world, 3)
    other, (theirs,) = await held(world)
    await dismiss(world, tenant_id, ids[1])

    async def names(tenant: UUID | None = None, **filters: object) -> list[UUID]:
        async with transaction(world.sessions) as session:
            found = await quarantine.search(session, tenant, limit=10, **filters)  # type: ignore[arg-type]
        return [item.id for item in found]

    assert await names() == [*ids, theirs]
    assert await names(tenant_id, state=QuarantineState.WAITING) == [ids[0], ids[2]]
    assert await names(other) == [theirs]
    assert await names(reason="NEGATIVE") == [*ids, theirs]
    assert await names(reason="100%") == []
    assert await names(model="demo", state=QuarantineState.DISMISSED) == [ids[1]]
    async with transaction(world.sessions) as session:
        first = await quarantine.search(session, None, limit=2)
        rest = await quarantine.search(session, None, after=first[-1].seq, limit=10)
    assert [item.id for item in rest] == [ids[2], theirs]


async def test_the_estimate_says_what_it_would_be_or_why_not(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    low = make.event(tenant_id, s, amount_pico=7)
    await write(world.spool_dir / "r0", [low])
    await world.poster.step()
    _, (negative,) = await held(world)
    async with transaction(world.sessions) as session:
        item = await quarantine.get(session, tenant_id, low.id)
        assert await quarantine.estimate(session, item) == quarantine.Estimate(parse_pico("0.012258"))
        other = (await quarantine.search(session, None, reason="negative", limit=1))[0]
        assert other.id == negative
        assert await quarantine.estimate(session, other) == quarantine.Estimate(None, "a token count is negative")


async def test_a_decision_without_its_event_is_found(world: World, database_settings: Database) -> None:
    tenant_id, (event_id,) = await held(world)
    await bill(world, tenant_id, event_id)
    with owner_of(database_settings) as owner:
        owner.execute("DELETE FROM usage_decision")
    wrong = await found(world)
    assert wrong is not None
    assert wrong.table == "usage_decision"
