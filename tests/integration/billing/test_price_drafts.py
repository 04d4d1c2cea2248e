"""Drafts of prices: edited, compared, deleted, and published with contract prices that stay."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import psycopg
import pytest

from billing import price_book
from billing.price_book import DraftChange, Review
from billing.price_table import PublishedVersion, content_sha256
from billing.types import Meter, PriceDiscount, PriceItem, PriceVersion
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from tests.factories import billing as make

NOW = datetime(2026, 11, 16, tzinfo=UTC)
TENANT, OTHER = UUID(int=1), UUID(int=2)
LIST = {"input": "0.0375", "output": "0.15"}
OFF = PriceDiscount(TENANT, make.MODEL, Tier.STANDARD, 125_000)  # 12.5 percent


async def new_book(sessions: Sessions, currency: Currency = Currency.USD) -> UUID:
    async with transaction(sessions) as session:
        return await price_book.create_book(session, "list", currency)


async def draft(
    sessions: Sessions, book: UUID, items: Sequence[PriceItem] = (), discounts: Sequence[PriceDiscount] = ()
) -> UUID:
    async with transaction(sessions) as session:
        return await price_book.create_draft(session, book, items, discounts=discounts)


async def change(sessions: Sessions, version: UUID, **members: Sequence[object]) -> None:
    async with transaction(sessions) as session:
        await price_book.change_draft(session, version, DraftChange(**members))  # type: ignore[arg-type]


async def publish(sessions: Sessions, version: UUID, at: datetime = NOW) -> PriceVersion:
    async with transaction(sessions) as session:
        return await price_book.publish(session, version, now=NOW, effective_at=at)


async def items_of(sessions: Sessions, version: UUID) -> dict[tuple[Meter, UUID | None, int], int]:
    async with transaction(sessions) as session:
        items = await price_book.list_items(session, version)
    return {(item.meter, item.tenant_id, item.above_tokens): item.unit_price_pico for item in items}


async def review(sessions: Sessions, version: UUID, now: datetime = NOW) -> Review:
    async with transaction(sessions) as session:
        return await price_book.review(session, version, now)


async def test_a_discount_becomes_a_contract_price_that_is_never_computed_again(sessions: Sessions) -> None:
    """0.0375 per million less 12.5 % is 32,812.5 pico per token: 0.032812 per million, half to even."""
    book = await new_book(sessions)
    first = await draft(sessions, book, make.items(LIST), [OFF])
    assert len(await items_of(sessions, first)) == 2  # a draft has the discount, not yet its prices
    await publish(sessions, first)
    assert await items_of(sessions, first) == {
        (Meter.INPUT, None, 0): 37_500,
        (Meter.OUTPUT, None, 0): 150_000,
        (Meter.INPUT, TENANT, 0): 32_812,
        (Meter.OUTPUT, TENANT, 0): 131_250,
    }
    later = await draft(sessions, book, make.items({"input": "0.02"}))
    await publish(sessions, later, NOW + timedelta(days=1))
    found = await items_of(sessions, later)
    assert (found[Meter.INPUT, None, 0], found[Meter.INPUT, TENANT, 0]) == (20_000, 32_812)
    ((code, message),) = [(one.code, one.message) for one in (await review(sessions, later)).warnings]
    assert code == "OWN_ABOVE_LIST"
    assert "input, cached_input, cache_write is dearer than the list" in message
    anew = await draft(sessions, book, (), [OFF])  # asked for again: of the list as it is now
    await publish(sessions, anew, NOW + timedelta(days=2))
    assert (await items_of(sessions, anew))[Meter.INPUT, TENANT, 0] == 17_500


async def test_the_hash_covers_steps_and_discounts(sessions: Sessions) -> None:
    book = await new_book(sessions)
    step = [msgspec.structs.replace(item, above_tokens=1000) for item in make.items(LIST)]
    version = await publish(sessions, await draft(sessions, book, [*make.items(LIST), *step], [OFF]))
    async with transaction(sessions) as session:
        items = await price_book.list_items(session, version.id)
        assert await price_book.list_discounts(session, version.id) == [OFF]
    facts = PublishedVersion(version.id, book, Currency.USD, NOW, tuple(items), (OFF,))
    assert version.content_sha256 == content_sha256(facts)
    others = [
        msgspec.structs.replace(facts, discounts=()),
        msgspec.structs.replace(facts, discounts=(msgspec.structs.replace(OFF, off_ppm=125_001),)),
        msgspec.structs.replace(facts, discounts=(msgspec.structs.replace(OFF, tenant_id=OTHER),)),
        *(
            msgspec.structs.replace(
                facts, items=(*items[:at], msgspec.structs.replace(one, above_tokens=7), *items[at + 1 :])
            )
            for at, one in enumerate(items)
        ),
    ]
    assert version.content_sha256 not in {content_sha256(other) for other in others}


async def test_a_draft_is_edited_and_deleted_until_it_is_published(sessions: Sessions) -> None:
    book = await new_book(sessions)
    version = await draft(sessions, book, make.items(LIST), [OFF])
    own = make.items({"input": "0.03"}, tenant_id=TENANT)
    step = [msgspec.structs.replace(item, above_tokens=1000) for item in make.items(LIST)]
    await change(sessions, version, items=[*make.items({"output": "0.2", "request": "1"}), *own, *step])
    await change(sessions, version, remove=[*make.items({"request": "0"}), *step], remove_discounts=[OFF])
    assert await items_of(sessions, version) == {
        (Meter.INPUT, None, 0): 37_500,
        (Meter.OUTPUT, None, 0): 200_000,
        (Meter.INPUT, TENANT, 0): 30_000,
    }
    await change(sessions, version, discounts=[OFF])  # instead of the tenant's own prices
    assert (Meter.INPUT, TENANT, 0) not in await items_of(sessions, version)
    async with transaction(sessions) as session:
        await price_book.delete_draft(session, version)
        assert await price_book.list_versions(session, book) == []

    kept = await draft(sessions, book, make.items(LIST))
    await publish(sessions, kept)
    for work in (
        change(sessions, kept, items=make.items(LIST)),
        change(sessions, kept, remove=make.items(LIST)),
        change(sessions, kept, discounts=[OFF]),
    ):
        with pytest.raises(PlatformError) as refused:
            await work
        assert refused.value.code == "PRICE_VERSION_PUBLISHED"
    with pytest.raises(PlatformError) as refused:
        async with transaction(sessions) as session:
            await price_book.delete_draft(session, kept)
    assert refused.value.code == "PRICE_VERSION_PUBLISHED"


async def test_the_database_itself_keeps_published_discounts(sessions: Sessions, database_settings: Database) -> None:
    version = (await publish(sessions, await draft(sessions, await new_book(sessions), make.items(LIST), [OFF]))).id
    assert database_settings.owner_url is not None
    for url in (database_settings.url.get_secret_value(), database_settings.owner_url.get_secret_value()):
        for statement in (
            "UPDATE price_discount SET off_ppm = 1",
            "DELETE FROM price_discount",
            "TRUNCATE price_discount",
            f"INSERT INTO price_discount VALUES ('{version}', '{OTHER}', '{new_uuid()}', 1, 5)",
            "UPDATE price_item SET above_tokens = 5",
        ):
            with (
                psycopg.connect(url) as connection,
                pytest.raises((psycopg.errors.RestrictViolation, psycopg.errors.InsufficientPrivilege)),
            ):
                connection.execute(statement)


async def test_a_draft_is_compared_with_what_is_in_force_now(sessions: Sessions) -> None:
    book = await new_book(sessions)
    first = await draft(sessions, book, make.items(LIST))
    fresh = await review(sessions, first)
    assert (fresh.against, len(fresh.changes), fresh.problem) == (None, 2, "")
    await publish(sessions, first)
    ahead = await draft(sessions, book, make.items({"output": "0.3"}))
    await publish(sessions, ahead, NOW + timedelta(days=30))
    version = await draft(sessions, book, make.items({"input": "0.04"}), [OFF])
    found = await review(sessions, version)
    assert found.against == first
    assert [(one.meter, one.tenant_id, one.before, one.after) for one in found.changes] == [
        (Meter.INPUT, None, 37_500, 40_000),
        (Meter.OUTPUT, None, 150_000, 300_000),  # of the list that was published ahead
        (Meter.INPUT, TENANT, None, 35_000),
        (Meter.OUTPUT, TENANT, None, 262_500),
    ]
    assert (await review(sessions, version, NOW + timedelta(days=30))).against == ahead
    assert (await review(sessions, first)).against is None
    assert (await review(sessions, ahead)).against == first


async def test_a_draft_that_was_begun_before_another_was_published_is_warned_of(sessions: Sessions) -> None:
    """A list is whole: published now, the first draft would take back what the second one changed."""
    book = await new_book(sessions)
    await publish(sessions, await draft(sessions, book, make.items(LIST)))
    first, second = [await draft(sessions, book, make.items({"input": price})) for price in ("0.04", "0.05")]
    now = datetime.now(UTC)
    async with transaction(sessions) as session:
        await price_book.publish(session, second, now=now)
    found = await review(sessions, first, now + timedelta(seconds=1))
    assert [(one.code, format_id(IdKind.PRICE_VERSION, second) in one.message) for one in found.warnings] == [
        ("BEGUN_BEFORE", True)
    ]
    assert [(one.before, one.after) for one in found.changes] == [(50_000, 40_000)]
    assert (await review(sessions, second, now + timedelta(seconds=1))).warnings == []
    ahead = now + timedelta(days=1)
    async with transaction(sessions) as session:
        third = await price_book.create_draft(session, book, make.items({"input": "0.06"}))
        await price_book.publish(session, third, now=datetime.now(UTC), effective_at=ahead)
        fourth = await price_book.create_draft(session, book, [])
    ((code, message),) = [
        (one.code, one.message) for one in (await review(sessions, fourth, now + timedelta(seconds=2))).warnings
    ]
    assert code == "PUBLISHED_AHEAD"
    assert ahead.isoformat() in message


async def test_why_a_draft_cannot_be_published_is_said_before(sessions: Sessions) -> None:
    book = await new_book(sessions)
    for items, discounts, says in (
        ([], [], "The draft has no prices."),
        (make.items({"input": "1"}), [], "has no output price"),
        (make.items(LIST, model_id=OTHER), [OFF], "which has no price there"),
    ):
        version = await draft(sessions, book, items, discounts)
        assert says in (await review(sessions, version)).problem
        with pytest.raises(PlatformError, match=says):
            await publish(sessions, version)


async def test_each_currency_has_numbers_of_its_own(sessions: Sessions) -> None:
    for currency, price in ((Currency.USD, "2"), (Currency.CNY, "14.5")):
        version = await draft(
            sessions, await new_book(sessions, currency), make.items({"input": price, "output": price})
        )
        await publish(sessions, version)
    async with transaction(sessions) as session:
        table = await price_book.load_table(session, NOW)
    found = {one: table.schedule(make.MODEL, Tier.STANDARD, one, TENANT) for one in Currency}
    assert {one: s and s.input for one, s in found.items()} == {Currency.USD: 2_000_000, Currency.CNY: 14_500_000}
