"""Operators: price books. A draft is made, priced and published; what is published never changes."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from api.deps import (
    BookId,
    CurrentAct,
    CurrentPaging,
    CurrentServices,
    PriceVersionId,
    ReadSession,
    Session,
    differences,
)
from api.guard import GuardedRoute
from api.permissions import ADMIN
from api.schemas import CurrencyCode, Input, Instant, Name, Output, TierName, problems
from billing import price_book
from billing.types import Meter, PriceBook, PriceItem, PriceVersion
from core.ids import IdKind, format_id, parse_id
from core.money import Currency
from core.pagination import page_in_memory
from core.tiers import Tier

router = APIRouter(route_class=GuardedRoute, tags=["prices"])

ITEMS_MAX = 2000

MeterName = Annotated[Meter, Field(strict=False)]
Price = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,12})?$"),
    Field(description="Per million tokens with at most 6 decimals; per request for `request`.", examples=["0.20"]),
]
Id = Annotated[str, Field(max_length=64)]


class BookIn(Input):
    """A new book: the list of a currency, which has one, or one for plans, with what differs from the list."""

    name: Name
    currency: CurrencyCode
    for_plan: bool = False


class BookOut(Output):
    """A price book."""

    id: str
    name: str
    currency: str
    for_plan: bool
    created_at: datetime


class BookPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[BookOut]
    next_after: str | None


class ItemIn(Input):
    """One unit price. With `tenant_id` it is that tenant's own price instead of the list's."""

    model_id: Id
    tier: TierName
    meter: MeterName
    unit_price: Price
    tenant_id: Id | None = None


class ItemOut(Output):
    """One unit price."""

    model_id: str
    tier: str
    meter: str
    unit_price: str
    tenant_id: str | None


Items = Annotated[list[ItemIn], Field(max_length=ITEMS_MAX)]


class DraftIn(Input):
    """A new draft: the list in force with these prices on top, or these alone when `complete`."""

    items: Items
    complete: bool = False
    note: str = Field("", max_length=500, pattern=r"^[^\x00]*$")


class ItemsIn(Input):
    """Prices of a draft, each instead of one for the same model, tier, meter and tenant."""

    items: Annotated[list[ItemIn], Field(min_length=1, max_length=ITEMS_MAX)]


class PublishIn(Input):
    """When the prices take effect; at once when left out."""

    effective_at: Instant | None = None


class PriceVersionOut(Output):
    """A version; `content_sha256` is over every fact of a published one."""

    id: str
    book_id: str
    state: str
    note: str
    created_at: datetime
    effective_at: datetime | None
    published_at: datetime | None
    content_sha256: str | None


class PriceVersionPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[PriceVersionOut]
    next_after: str | None


class PriceList(Output):
    """The prices of a version."""

    id: str
    items: list[ItemOut]


def _book(row: PriceBook) -> BookOut:
    return BookOut(
        id=format_id(IdKind.PRICE_BOOK, row.id),
        name=row.name,
        currency=row.currency,
        for_plan=row.for_plan,
        created_at=row.created_at,
    )


def _version(row: PriceVersion) -> PriceVersionOut:
    return PriceVersionOut(
        id=format_id(IdKind.PRICE_VERSION, row.id),
        book_id=format_id(IdKind.PRICE_BOOK, row.book_id),
        state=row.state,
        note=row.note,
        created_at=row.created_at,
        effective_at=row.effective_at,
        published_at=row.published_at,
        content_sha256=None if row.content_sha256 is None else row.content_sha256.hex(),
    )


def _items(items: list[ItemIn]) -> list[PriceItem]:
    return [
        PriceItem(
            model_id=parse_id(IdKind.MODEL, item.model_id),
            tier=Tier[item.tier.upper()],
            meter=item.meter,
            unit_price_pico=price_book.unit_price_pico(item.meter, item.unit_price),
            tenant_id=None if item.tenant_id is None else parse_id(IdKind.TENANT, item.tenant_id),
        )
        for item in items
    ]


def _item(item: PriceItem) -> ItemOut:
    return ItemOut(
        model_id=format_id(IdKind.MODEL, item.model_id),
        tier=Tier(item.tier).label,
        meter=Meter(item.meter).value,
        unit_price=price_book.price_text(item.meter, item.unit_price_pico),
        tenant_id=item.tenant_id and format_id(IdKind.TENANT, item.tenant_id),
    )


@router.post(f"{ADMIN}/price-books", status_code=201, summary="Create a price book", responses=problems(409))
async def create_price_book(body: BookIn, session: Session, act: CurrentAct) -> BookOut:
    book_id = await price_book.create_book(session, body.name, Currency(body.currency), for_plan=body.for_plan)
    act.on(book_id, name=body.name, currency=body.currency)
    (row,) = [row for row in await price_book.list_books(session) if row.id == book_id]
    return _book(row)


@router.get(f"{ADMIN}/price-books", summary="List price books")
async def list_price_books(session: ReadSession, paging: CurrentPaging) -> BookPage:
    page = page_in_memory(await price_book.list_books(session), paging.after, paging.limit, lambda row: row.id)
    return BookPage(
        items=[_book(row) for row in page.items],
        next_after=page.next_after and format_id(IdKind.PRICE_BOOK, page.next_after),
    )


@router.post(f"{ADMIN}/price-books/{{book_id}}/versions", status_code=201, summary="Draft prices")
async def create_price_draft(book_id: BookId, body: DraftIn, session: Session, act: CurrentAct) -> PriceVersionOut:
    """Begin from the last published list, so that publishing one new price drops no other."""
    version_id = await price_book.create_draft(
        session, book_id, _items(body.items), complete=body.complete, note=body.note
    )
    act.on(version_id, items=len(body.items))
    (row,) = [row for row in await price_book.list_versions(session, book_id) if row.id == version_id]
    return _version(row)


@router.get(f"{ADMIN}/price-books/{{book_id}}/versions", summary="List a book's versions")
async def list_price_versions(book_id: BookId, session: ReadSession, paging: CurrentPaging) -> PriceVersionPage:
    found = await price_book.list_versions(session, book_id)
    page = page_in_memory(found, paging.after, paging.limit, lambda row: row.id)
    return PriceVersionPage(
        items=[_version(row) for row in page.items],
        next_after=page.next_after and format_id(IdKind.PRICE_VERSION, page.next_after),
    )


@router.get(f"{ADMIN}/price-versions/{{price_version_id}}", summary="Read the prices of a version")
async def get_price_version(price_version_id: PriceVersionId, session: ReadSession) -> PriceList:
    items = await price_book.list_items(session, price_version_id)
    return PriceList(id=format_id(IdKind.PRICE_VERSION, price_version_id), items=[_item(item) for item in items])


@router.patch(
    f"{ADMIN}/price-versions/{{price_version_id}}", summary="Change prices of a draft", responses=problems(409)
)
async def change_price_draft(
    price_version_id: PriceVersionId, body: ItemsIn, session: Session, act: CurrentAct
) -> PriceList:
    before = [_item(item) for item in await price_book.list_items(session, price_version_id)]
    await price_book.put_items(session, price_version_id, _items(body.items))
    after = [_item(item) for item in await price_book.list_items(session, price_version_id)]
    act.on(price_version_id, items=len(body.items), prices=differences(_by_name(before), _by_name(after)))
    return PriceList(id=format_id(IdKind.PRICE_VERSION, price_version_id), items=after)


def _by_name(items: list[ItemOut]) -> dict[str, str]:
    """Unit prices by what they are the price of, for the audit trail."""
    return {" ".join(filter(None, (i.model_id, i.tier, i.meter, i.tenant_id))): i.unit_price for i in items}


@router.post(
    f"{ADMIN}/price-versions/{{price_version_id}}/publish", summary="Publish a draft for good", responses=problems(409)
)
async def publish_prices(
    *,
    price_version_id: PriceVersionId,
    body: PublishIn,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
) -> PriceVersionOut:
    """Put prices in force, now or later. Gateways follow within a second; calls admitted before keep their prices."""
    row = await price_book.publish(session, price_version_id, now=services.clock.now(), effective_at=body.effective_at)
    found = _version(row)
    act.on(price_version_id, content_sha256=found.content_sha256)
    return found
