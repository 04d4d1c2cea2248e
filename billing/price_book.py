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
from billing.price_checks import PriceChange, PriceWarning, changes, check_given, warnings
from billing.price_table import (
    EMPTY_TABLE,
    PriceTable,
    PublishedVersion,
    VersionPrices,
    content_sha256,
    instant_us,
    off_ppm,
    percent_text,
    price_text,
    resolve,
    unit_price_pico,
)
from billing.tables import PriceVersionRow
from billing.types import PriceBook, PriceDiscount, PriceItem, PriceVersion
from catalog import models
from core.db import record_config_change
from core.errors import PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.money import Currency
from core.unreadable import Report, log_unreadable

__all__ = [
    "EMPTY_TABLE",
    "DraftChange",
    "PriceTable",
    "Review",
    "book_of",
    "change_draft",
    "check_for_plan",
    "check_names",
    "create_book",
    "create_draft",
    "delete_draft",
    "list_books",
    "list_discounts",
    "list_items",
    "list_versions",
    "load_table",
    "load_version",
    "off_ppm",
    "percent_text",
    "price_text",
    "publish",
    "review",
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
    await book_of(session, version_id)
    return await queries.items(session, version_id)


async def list_discounts(session: AsyncSession, version_id: UUID) -> list[PriceDiscount]:
    return await queries.discounts(session, version_id)


class DraftChange(msgspec.Struct, frozen=True):
    """What to do to a draft, in this order: take prices and discounts away, set discounts, set prices.

    What is taken away is named by an item whatever its price, and by a discount whatever its percentage. A discount
    takes the place of the tenant's own prices of its model and tier.
    """

    items: Sequence[PriceItem] = ()
    discounts: Sequence[PriceDiscount] = ()
    remove: Sequence[PriceItem] = ()
    remove_discounts: Sequence[PriceDiscount] = ()


async def create_draft(
    session: AsyncSession,
    book_id: UUID,
    items: Sequence[PriceItem],
    *,
    discounts: Sequence[PriceDiscount] = (),
    complete: bool = False,
    note: str = "",
) -> UUID:
    """Create a draft: the last published list with these on top, or these alone when they are `complete`.

    Contract prices that discounts made of an older list are copied as they are; the discounts are not.

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
    await change_draft(session, version_id, DraftChange(items, discounts))
    return version_id


async def change_draft(session: AsyncSession, version_id: UUID, change: DraftChange) -> None:
    """Change prices of a draft; each is set instead of one for the same model, tier, meter, tenant and step.

    Raises:
        PlatformError: NOT_FOUND, PRICE_VERSION_PUBLISHED, INVALID_PRICE.
    """
    version = await _draft(session, version_id)
    if max(map(len, (change.items, change.discounts, change.remove, change.remove_discounts))) > ITEMS_MAX:
        raise errors.invalid_price(f"A call sets at most {ITEMS_MAX:,} prices.")
    book = await queries.book(session, version.book_id)
    if book is None:
        raise errors.no_book(version.book_id)
    own: list[PriceItem | PriceDiscount] = [*change.items, *change.discounts]
    if book.for_plan and any(price.tenant_id is not None for price in own):
        raise errors.invalid_price("A tenant's own price stands in the list, where it goes before its plan's.")
    check_given(change.items, change.discounts, book.currency)
    await queries.remove_items(session, version_id, change.remove)
    await queries.remove_discounts(session, version_id, change.remove_discounts)
    await queries.put_discounts(session, version_id, change.discounts)
    await queries.put_items(session, version_id, change.items)


async def check_names(session: AsyncSession, book_id: UUID, change: DraftChange) -> None:
    """Refuse prices of models that do not exist, or for tenants that this book's currency does not bill.

    Raises:
        PlatformError: NOT_FOUND, INVALID_PRICE.
    """
    book = await queries.book(session, book_id)
    if book is None:
        raise errors.no_book(book_id)
    priced: list[PriceItem | PriceDiscount] = [*change.items, *change.discounts]
    unknown = await models.unknown(session, {price.model_id for price in priced})
    if unknown:
        raise errors.invalid_price(f"There is no model {format_id(IdKind.MODEL, min(unknown))}.")
    tenants = {price.tenant_id for price in priced if price.tenant_id is not None}
    currencies = await queries.currencies(session, tenants)
    for tenant_id in sorted(tenants):
        billed_in = currencies.get(tenant_id)
        if billed_in != book.currency:
            name = format_id(IdKind.TENANT, tenant_id)
            why = "does not exist" if billed_in is None else f"is billed in {billed_in}, not in {book.currency}"
            raise errors.invalid_price(f"The tenant {name} {why}.")


async def book_of(session: AsyncSession, version_id: UUID) -> UUID:
    """Return the book of a version.

    Raises:
        PlatformError: NOT_FOUND.
    """
    version = await queries.version(session, version_id)
    if version is None:
        raise errors.no_version(version_id)
    return version.book_id


async def delete_draft(session: AsyncSession, version_id: UUID) -> None:
    """Delete a draft with its prices.

    Raises:
        PlatformError: NOT_FOUND, PRICE_VERSION_PUBLISHED.
    """
    await _draft(session, version_id)
    await queries.delete_version(session, version_id)


async def _draft(session: AsyncSession, version_id: UUID) -> PriceVersionRow:
    version = await queries.lock_version(session, version_id)
    if version is None:
        raise errors.no_version(version_id)
    if version.state != "draft":
        raise errors.already_published(version_id)
    return version


class Review(msgspec.Struct, frozen=True):
    """A version beside the one that is or was in force before it (None: none was), contract prices worked out.

    `problem` is why a draft cannot be published as it is; empty when it can.
    """

    against: UUID | None
    changes: Sequence[PriceChange]
    warnings: Sequence[PriceWarning]
    problem: str = ""


async def review(session: AsyncSession, version_id: UUID, now: datetime) -> Review:
    """Compare a draft with what is in force at `now`, or a published version with the one before it.

    Raises:
        PlatformError: NOT_FOUND.
    """
    version = await queries.version(session, version_id)
    book = None if version is None else await queries.book(session, version.book_id)
    if version is None or book is None:
        raise errors.no_version(version_id)
    against = await queries.in_force_before(session, book.id, version.effective_at or now, version_id)
    before = [] if against is None else await queries.items(session, against)
    items = await queries.items(session, version_id)
    discounts = [] if version.state == "published" else await queries.discounts(session, version_id)
    try:
        after, prices = _priced(version_id, Currency(book.currency), items, discounts)
    except PlatformError as error:
        return Review(against, changes(before, items), (), error.message)
    odd = [
        *await _order_warnings(session, version, now),
        *warnings(before, after, prices, for_plan=book.for_plan),
    ]
    return Review(against, changes(before, after), odd)


async def _order_warnings(session: AsyncSession, version: PriceVersionRow, now: datetime) -> list[PriceWarning]:
    """A list is whole: what was published since a draft began is not in it, and what is published ahead ends it."""
    found = []
    since = await queries.published_between(session, version.book_id, version.created_at, version.published_at or now)
    if since is not None:
        name = format_id(IdKind.PRICE_VERSION, since)
        message = f"{name} was published after this draft was begun: what it changed is not in here. See the changes."
        found.append(PriceWarning("BEGUN_BEFORE", message))
    ahead = await queries.next_in_force(session, version.book_id, version.effective_at or now)
    if ahead is not None and ahead.effective_at is not None:
        name, at = format_id(IdKind.PRICE_VERSION, ahead.id), ahead.effective_at.isoformat()
        found.append(PriceWarning("PUBLISHED_AHEAD", f"{name} is published already and takes effect at {at}, whole."))
    return found


def _priced(
    version_id: UUID, currency: Currency, listed: Sequence[PriceItem], discounts: Sequence[PriceDiscount]
) -> tuple[list[PriceItem], VersionPrices]:
    """Return all prices of a version, the contract prices of its discounts last.

    Raises:
        PlatformError: INVALID_PRICE, no prices, too many, or an incomplete one.
    """
    if not listed:
        raise errors.invalid_price("The draft has no prices.")
    items = resolve(listed, discounts)
    if len(items) > VERSION_ITEMS_MAX:
        raise errors.invalid_price(f"A version has at most {VERSION_ITEMS_MAX:,} prices.")
    return items, VersionPrices(version_id, currency, items)


async def publish(
    session: AsyncSession, version_id: UUID, *, now: datetime, effective_at: datetime | None = None
) -> PriceVersion:
    """Publish a draft for good, in force from `effective_at` (now when None) on; gateways are told.

    Discounts become contract prices here, and are never computed again.

    Raises:
        PlatformError: NOT_FOUND, PRICE_VERSION_PUBLISHED, INVALID_PRICE (empty, or an incomplete price),
            INVALID_EFFECTIVE_AT (in the past, or taken by another version).
    """
    version = await _draft(session, version_id)
    if effective_at is not None and (effective_at.tzinfo is None or effective_at < now):
        raise errors.invalid_instant("Prices take effect now or later, at an instant with a time zone.")
    instant = effective_at or now
    book = await queries.book(session, version.book_id)
    if book is None:
        raise errors.no_book(version.book_id)
    listed, discounts = await queries.items(session, version_id), await queries.discounts(session, version_id)
    items, _ = _priced(version_id, Currency(book.currency), listed, discounts)
    await queries.put_items(session, version_id, items[len(listed) :])
    facts = PublishedVersion(version_id, book.id, Currency(book.currency), instant, tuple(items), tuple(discounts))
    try:
        await queries.publish_version(session, version_id, instant, now, content_sha256(facts))
    except IntegrityError as error:
        if queries.is_unique_violation(error):
            raise errors.invalid_instant("Another version of this book takes effect at that instant.") from error
        raise
    await record_config_change(session, CONFIG_KIND, version_id)
    await session.refresh(version)
    return msgspec.convert(version, PriceVersion, from_attributes=True)


async def load_table(session: AsyncSession, now: datetime, report: Report = log_unreadable) -> PriceTable:
    """Return the prices in force at `now` and those to come; a model with a price that cannot be read has none."""
    versions = []
    for row in await queries.versions_in_force(session, now):
        items, closed = await queries.readable_items(session, row.id, report)
        prices = VersionPrices(row.id, Currency(row.currency), items, plan_book=row.plan_book, closed=closed)
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
