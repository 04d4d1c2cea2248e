"""The price books: one list per currency, and books of plans beside them, published in versions that never change.

A version is the whole list from its effective instant until the next one's. A draft therefore begins as a copy of the
last published version, so that publishing one new price drops no other.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors
from billing import price_queries as queries
from billing.price_table import (
    EMPTY_TABLE,
    PriceTable,
    PublishedVersion,
    VersionPrices,
    content_sha256,
    instant_us,
    price_text,
    resolve,
    unit_price_pico,
)
from billing.types import PriceBook, PriceItem, PriceVersion
from core.db import record_config_change
from core.ids import new_uuid
from core.money import Currency

__all__ = [
    "EMPTY_TABLE",
    "PriceTable",
    "check_for_plan",
    "create_book",
    "create_draft",
    "list_books",
    "list_items",
    "list_versions",
    "load_table",
    "load_version",
    "price_text",
    "publish",
    "put_items",
    "unit_price_pico",
]

CONFIG_KIND = "prices"
ITEMS_MAX = 20_000  # of one call
VERSION_ITEMS_MAX = 200_000  # every gateway keeps those in force in memory


async def create_book(session: AsyncSession, name: str, currency: Currency, *, for_plan: bool = False) -> UUID:
    """Create the list of a currency, or a book for plans.

    Raises:
        PlatformError: BOOK_EXISTS, the currency has its list.
    """
    book_id = new_uuid()
    if not await queries.insert_book(session, book_id, name, currency, for_plan=for_plan):
        raise errors.book_exists(currency.value)
    return book_id


async def check_for_plan(session: AsyncSession, book_id: UUID) -> None:
    """Refuse a book that a plan cannot have.

    Raises:
        PlatformError: NOT_FOUND, or INVALID_PRICE for the list of a currency.
    """
    book = await queries.book(session, book_id)
    if book is None:
        raise errors.no_book(book_id)
    if not book.for_plan:
        raise errors.invalid_price("This is the list of its currency. A plan needs a book that was made for plans.")


async def list_books(session: AsyncSession) -> list[PriceBook]:
    return [msgspec.convert(row, PriceBook, from_attributes=True) for row in await queries.books(session)]


async def list_versions(session: AsyncSession, book_id: UUID) -> list[PriceVersion]:
    """Return the newest 500 versions of a book, newest first."""
    if await queries.book(session, book_id) is None:
        raise errors.no_book(book_id)
    found = await queries.versions(session, book_id)
    return [msgspec.convert(row, PriceVersion, from_attributes=True) for row in found]


async def list_items(session: AsyncSession, version_id: UUID) -> list[PriceItem]:
    if await queries.version(session, version_id) is None:
        raise errors.no_version(version_id)
    return await queries.items(session, version_id)


async def create_draft(
    session: AsyncSession, book_id: UUID, items: Sequence[PriceItem], *, complete: bool = False, note: str = ""
) -> UUID:
    """Create a draft: the last published list with `items` on top, or `items` alone when they are `complete`.

    Raises:
        PlatformError: NOT_FOUND, INVALID_PRICE.
    """
    if await queries.book(session, book_id) is None:
        raise errors.no_book(book_id)
    version_id = new_uuid()
    last = None if complete else await queries.last_published(session, book_id)
    await queries.insert_version(session, version_id, book_id, note)
    if last is not None:
        await queries.copy_items(session, last, version_id)
    await put_items(session, version_id, items)
    return version_id


async def put_items(session: AsyncSession, version_id: UUID, items: Sequence[PriceItem]) -> None:
    """Set prices of a draft, each instead of one for the same model, tier, meter and tenant.

    Raises:
        PlatformError: NOT_FOUND, PRICE_VERSION_PUBLISHED, INVALID_PRICE.
    """
    version = await queries.lock_version(session, version_id)
    if version is None:
        raise errors.no_version(version_id)
    if version.state != "draft":
        raise errors.already_published(version_id)
    if len(items) > ITEMS_MAX:
        raise errors.invalid_price(f"A call sets at most {ITEMS_MAX} prices.")
    book = await queries.book(session, version.book_id)
    if book is not None and book.for_plan and any(item.tenant_id is not None for item in items):
        raise errors.invalid_price("A tenant's own price stands in the list, where it goes before its plan's.")
    await queries.put_items(session, version_id, items)


async def publish(
    session: AsyncSession, version_id: UUID, *, now: datetime, effective_at: datetime | None = None
) -> PriceVersion:
    """Publish a draft for good, in force from `effective_at` (now when None) on; gateways are told.

    Raises:
        PlatformError: NOT_FOUND, PRICE_VERSION_PUBLISHED, INVALID_PRICE (empty, or an incomplete price),
            INVALID_EFFECTIVE_AT (in the past, or taken by another version).
    """
    version = await queries.lock_version(session, version_id)
    if version is None:
        raise errors.no_version(version_id)
    if version.state != "draft":
        raise errors.already_published(version_id)
    if effective_at is not None and (effective_at.tzinfo is None or effective_at < now):
        raise errors.invalid_instant("Prices take effect now or later, at an instant with a time zone.")
    instant = effective_at or now
    book = await queries.book(session, version.book_id)
    listed, discounts = await queries.items(session, version_id), await queries.discounts(session, version_id)
    if book is None or not listed:
        raise errors.invalid_price("The draft has no prices.")
    items = resolve(listed, discounts)
    if len(items) > VERSION_ITEMS_MAX:
        raise errors.invalid_price(f"A version has at most {VERSION_ITEMS_MAX:,} prices.")
    currency = Currency(book.currency)
    VersionPrices(version_id, currency, items)  # refuses an incomplete price
    await queries.put_items(session, version_id, items[len(listed) :])
    facts = PublishedVersion(version_id, book.id, currency, instant, tuple(items), tuple(discounts))
    try:
        await queries.publish_version(session, version_id, instant, now, content_sha256(facts))
    except IntegrityError as error:
        if queries.is_unique_violation(error):
            raise errors.invalid_instant("Another version of this book takes effect at that instant.") from error
        raise
    await record_config_change(session, CONFIG_KIND, version_id)
    await session.refresh(version)
    return msgspec.convert(version, PriceVersion, from_attributes=True)


async def load_table(session: AsyncSession, now: datetime) -> PriceTable:
    """Return the prices in force at `now` and those to come."""
    versions = []
    for row in await queries.versions_in_force(session, now):
        items = await queries.items(session, row.id)
        prices = VersionPrices(row.id, Currency(row.currency), items, plan_book=row.plan_book)
        versions.append((instant_us(row.effective_at), prices))
    return PriceTable(versions, as_of_us=instant_us(now))


async def load_version(session: AsyncSession, version_id: UUID) -> VersionPrices | None:
    """Return the prices of one published version, for rating again; None when there is none."""
    version = await queries.version(session, version_id)
    if version is None or version.state != "published":
        return None
    book = await queries.book(session, version.book_id)
    if book is None:
        return None
    return VersionPrices(version_id, Currency(book.currency), await queries.items(session, version_id))
