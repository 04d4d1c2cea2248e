"""The price book: exact, immutable once published, in force from its instant on."""

from datetime import UTC, datetime, timedelta
from itertools import product
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from billing import price_book, price_table, pricing
from billing.price_table import (
    PriceTable,
    PublishedVersion,
    VersionPrices,
    content_sha256,
    instant_us,
    price_text,
    unit_price_pico,
)
from billing.types import Meter, PriceItem
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make

NOW = datetime(2026, 11, 16, tzinfo=UTC)
TENANT, OTHER = UUID(int=1), UUID(int=2)


@pytest.mark.parametrize(
    ("meter", "price", "pico"),
    [
        (Meter.INPUT, "1", 1_000_000),
        (Meter.CACHED_INPUT, "0.0375", 37_500),
        (Meter.OUTPUT, "0.000001", 1),
        (Meter.INPUT, "0", 0),
        (Meter.REQUEST, "0.0001", 100_000_000),
        (Meter.REQUEST, "0.000000000001", 1),
    ],
)
def test_prices_are_whole_pico(meter: Meter, price: str, pico: int) -> None:
    assert unit_price_pico(meter, price) == pico
    assert unit_price_pico(meter, price_text(meter, pico)) == pico


@pytest.mark.parametrize(
    ("price", "says"),
    [("0.0000001", "more than 6 decimals"), ("-1", "negative"), ("x", "not an amount"), ("1000001", "too large")],
)
def test_prices_that_cannot_be_exact_are_refused_clearly(price: str, says: str) -> None:
    with pytest.raises(PlatformError, match=says):
        unit_price_pico(Meter.INPUT, price)


async def new_book(sessions: Sessions) -> UUID:
    async with transaction(sessions) as session:
        return await price_book.create_book(session, "list", Currency.USD)


async def published(
    sessions: Sessions,
    book: UUID,
    items: list[PriceItem],
    effective_at: datetime | None = None,
    *,
    complete: bool = False,
) -> UUID:
    async with transaction(sessions) as session:
        version = await price_book.create_draft(session, book, items, complete=complete)
        await price_book.publish(session, version, now=NOW, effective_at=effective_at)
    return version


async def load(sessions: Sessions, now: datetime) -> PriceTable:
    async with transaction(sessions) as session:
        return await price_book.load_table(session, now)


def input_price(table: PriceTable, at: datetime, tenant_id: UUID = TENANT, tier: Tier = Tier.STANDARD) -> int | None:
    found = table.schedule(make.MODEL, tier, Currency.USD, tenant_id, instant_us(at))
    return found.input if found else None


async def test_a_version_holds_from_exactly_its_instant_on(sessions: Sessions) -> None:
    """The loaded table knows what is to come, so that a change needs no reload at its instant."""
    book = await new_book(sessions)
    await published(sessions, book, make.items({"input": "2.00", "output": "6"}))
    change = NOW + timedelta(days=14)
    second = await published(sessions, book, make.items({"input": "1.60"}), change)
    table = await load(sessions, NOW)
    just_before = change - timedelta(microseconds=1)
    assert [input_price(table, at) for at in (NOW - timedelta(1), NOW, just_before, change)] == [
        None, 2_000_000, 2_000_000, 1_600_000,
    ]  # fmt: skip
    later = table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, TENANT, instant_us(change))
    assert later is not None
    assert (later.price_version_id, later.output) == (second, 6_000_000)  # the draft began as a copy
    assert input_price(await load(sessions, change + timedelta(1)), change) == 1_600_000
    assert table.schedule(make.MODEL, Tier.STANDARD, Currency.CNY, TENANT, instant_us(change)) is None
    assert table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, TENANT) is not None  # as of the load


async def test_a_tenants_own_price_goes_before_the_list(sessions: Sessions) -> None:
    book = await new_book(sessions)
    own = make.items({"input": "1.50"}, tenant_id=TENANT)
    await published(sessions, book, [*make.items({"input": "2", "output": "6"}), *own])
    table = await load(sessions, NOW)
    assert (input_price(table, NOW, TENANT), input_price(table, NOW, OTHER)) == (1_500_000, 2_000_000)
    mine = table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, TENANT)
    assert mine is not None
    assert (mine.output, mine.reasoning, mine.cached_input, mine.cache_write) == (
        6_000_000,
        6_000_000,
        1_500_000,
        1_500_000,
    )
    assert input_price(table, NOW, tier=Tier.PRIORITY) is None  # a tier without a price is not sold


async def test_tiers_have_their_own_prices(sessions: Sessions) -> None:
    book = await new_book(sessions)
    tiers = {Tier.STANDARD: ("0.40", "1.60"), Tier.PRIORITY: ("0.70", "2.80"), Tier.BATCH: ("0.20", "0.80")}
    rows = [row for tier, (i, o) in tiers.items() for row in make.items({"input": i, "output": o}, tier=tier)]
    await published(sessions, book, rows)
    table = await load(sessions, NOW)
    found = {tier: table.schedule(make.MODEL, tier, Currency.USD, TENANT) for tier in Tier}
    totals = {tier: pricing.rate(TokenUsage(1_250_000, output=310_000), s) for tier, s in found.items() if s}
    assert totals == {Tier.STANDARD: 996 * 10**9, Tier.PRIORITY: 1743 * 10**9, Tier.BATCH: 498 * 10**9}


async def test_a_complete_draft_drops_what_it_does_not_name(sessions: Sessions) -> None:
    book, other = await new_book(sessions), new_uuid()
    await published(sessions, book, make.items({"input": "2", "output": "6"}))
    later = NOW + timedelta(hours=1)
    await published(sessions, book, make.items({"input": "1", "output": "1"}, model_id=other), later, complete=True)
    assert input_price(await load(sessions, later), later) is None


async def test_what_cannot_be_published(sessions: Sessions) -> None:
    book = await new_book(sessions)
    first = await published(sessions, book, make.items({"input": "2", "output": "6"}))

    async def refusal(items: list[PriceItem], at: datetime | None, *, complete: bool = False) -> str:
        with pytest.raises(PlatformError) as refused:
            await published(sessions, book, items, at, complete=complete)
        return refused.value.code

    assert await refusal([], None, complete=True) == "INVALID_PRICE"
    assert await refusal(make.items({"input": "1"}), None, complete=True) == "INVALID_PRICE"
    assert await refusal([], NOW - timedelta(seconds=1)) == "INVALID_EFFECTIVE_AT"
    assert await refusal([], NOW) == "INVALID_EFFECTIVE_AT"  # taken by the first
    with pytest.raises(PlatformError, match="published"):
        async with transaction(sessions) as session:
            await price_book.publish(session, first, now=NOW)
    with pytest.raises(PlatformError, match="published"):
        async with transaction(sessions) as session:
            await price_book.change_draft(session, first, price_book.DraftChange(make.items({"input": "1"})))
    with pytest.raises(PlatformError) as refused:
        await new_book(sessions)
    assert refused.value.code == "BOOK_EXISTS"


async def test_publication_is_told_to_the_gateways(sessions: Sessions) -> None:
    version = await published(sessions, await new_book(sessions), make.items({"input": "2", "output": "6"}))
    async with transaction(sessions) as session:
        rows = (await session.execute(text("SELECT kind, entity_id FROM config_change"))).all()
    assert [tuple(row) for row in rows] == [("prices", version)]


async def test_the_database_itself_keeps_a_published_version(sessions: Sessions, database_settings: Database) -> None:
    version = await published(sessions, await new_book(sessions), make.items({"input": "2", "output": "6"}))
    assert database_settings.owner_url is not None
    urls = (database_settings.url.get_secret_value(), database_settings.owner_url.get_secret_value())
    statements = (
        "UPDATE price_item SET unit_price_pico = 1",
        "DELETE FROM price_item",
        "TRUNCATE price_item",
        f"INSERT INTO price_item SELECT '{version}', '{new_uuid()}', 1, 'input', NULL, 1",
        "UPDATE price_version SET effective_at = effective_at - interval '1 day'",
        "UPDATE price_version SET state = 'draft'",
        "DELETE FROM price_version",
        "TRUNCATE price_version CASCADE",
    )
    for url, statement in product(urls, statements):
        with (
            psycopg.connect(url) as connection,
            pytest.raises((psycopg.errors.RestrictViolation, psycopg.errors.InsufficientPrivilege)),
        ):
            connection.execute(statement)


async def test_the_hash_covers_every_fact(sessions: Sessions) -> None:
    book = await new_book(sessions)
    version = await published(sessions, book, make.items({"input": "2", "output": "6"}))
    async with transaction(sessions) as session:
        row = next(one for one in await price_book.list_versions(session, book) if one.id == version)
        items = await price_book.list_items(session, version)
    facts = PublishedVersion(version, book, Currency.USD, NOW, tuple(items))
    assert row.content_sha256 == content_sha256(facts)
    assert (
        content_sha256(PublishedVersion(version, book, Currency.USD, NOW, tuple(reversed(items)))) == row.content_sha256
    )
    one = items[0]
    others = [
        PublishedVersion(version, book, Currency.CNY, NOW, tuple(items)),
        PublishedVersion(version, book, Currency.USD, NOW + timedelta(microseconds=1), tuple(items)),
        PublishedVersion(version, book, Currency.USD, NOW, tuple(items[:1])),
        *(
            PublishedVersion(version, book, Currency.USD, NOW, (changed, *items[1:]))
            for changed in (
                PriceItem(new_uuid(), one.tier, one.meter, one.unit_price_pico),
                PriceItem(one.model_id, Tier.BATCH, one.meter, one.unit_price_pico),
                PriceItem(one.model_id, one.tier, Meter.REQUEST, one.unit_price_pico),
                PriceItem(one.model_id, one.tier, one.meter, one.unit_price_pico + 1),
                PriceItem(one.model_id, one.tier, one.meter, one.unit_price_pico, TENANT),
            )
        ),
    ]
    assert row.content_sha256 not in {content_sha256(other) for other in others}


def test_a_version_without_output_price_is_refused() -> None:
    with pytest.raises(PlatformError, match="no output price"):
        VersionPrices(UUID(int=1), Currency.USD, make.items({"input": "1"}))


async def test_the_tenants_own_price_goes_before_its_plans_and_that_before_the_list(sessions: Sessions) -> None:
    book = await new_book(sessions)
    own = make.items({"input": "1.00"}, tenant_id=TENANT)
    await published(sessions, book, [*make.items({"input": "2", "output": "6"}), *own])
    async with transaction(sessions) as session:
        gold = await price_book.create_book(session, "gold", Currency.USD, for_plan=True)
        yuan = await price_book.create_book(session, "gold in CNY", Currency.CNY, for_plan=True)
    of_gold = await published(sessions, gold, make.items({"input": "1.50", "output": "5"}))
    change = NOW + timedelta(days=1)
    await published(sessions, gold, make.items({"input": "1.40"}), change)
    await published(sessions, yuan, make.items({"input": "9", "output": "9"}))
    table = await load(sessions, NOW)

    def found(tenant: UUID, plan_book: UUID | None, at: datetime = NOW, tier: Tier = Tier.STANDARD) -> int | None:
        at_us = instant_us(at)
        price = table.schedule(make.MODEL, tier, Currency.USD, tenant, at_us, plan_book=plan_book)
        return None if price is None else price.input

    assert (found(TENANT, gold), found(OTHER, gold), found(OTHER, None)) == (1_000_000, 1_500_000, 2_000_000)
    assert (found(OTHER, gold, change), found(OTHER, yuan)) == (1_400_000, 2_000_000)  # yuan are not billed in dollars
    assert found(OTHER, gold, tier=Tier.PRIORITY) is None
    assert table.next_change_us(Currency.USD, instant_us(NOW)) == price_table.NEVER_US
    assert table.next_change_us(Currency.USD, instant_us(NOW), gold) == instant_us(change)
    async with transaction(sessions) as session:  # what the poster rates again with
        version = await price_book.load_version(session, of_gold)
    assert version is not None
    again = version.schedule(make.MODEL, Tier.STANDARD, OTHER)
    assert again == table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, OTHER, instant_us(NOW), plan_book=gold)


async def test_a_currency_has_one_list_and_plans_as_many_books_as_they_like(sessions: Sessions) -> None:
    listed = await new_book(sessions)
    async with transaction(sessions) as session:
        for name in ("gold", "silver"):
            book = await price_book.create_book(session, name, Currency.USD, for_plan=True)
            await price_book.check_for_plan(session, book)
        with pytest.raises(PlatformError) as caught:
            await price_book.create_book(session, "second list", Currency.USD)
        assert caught.value.code == "BOOK_EXISTS"
        with pytest.raises(PlatformError, match="made for plans"):
            await price_book.check_for_plan(session, listed)
        with pytest.raises(PlatformError, match="in the list"):
            await price_book.create_draft(session, book, make.items({"input": "1", "output": "1"}, tenant_id=TENANT))
