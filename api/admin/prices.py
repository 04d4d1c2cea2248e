"""Operators: price books. A draft is made, priced and published; what is published never changes."""

from datetime import datetime
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.price_shapes import (
    CHANGES_MAX,
    BookIn,
    BookOut,
    BookPage,
    CheckedVersionOut,
    DraftChangeIn,
    DraftIn,
    PriceChanges,
    PriceList,
    PriceVersionPage,
    PublishIn,
    book_out,
    change_of,
    change_out,
    discount_out,
    item_out,
    version_out,
    warnings_out,
)
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
from api.schemas import problems
from billing import price_book
from billing.types import PriceVersion
from core.ids import IdKind, format_id
from core.money import Currency
from core.pagination import page_in_memory

router = APIRouter(route_class=GuardedRoute, tags=["prices"])


async def _checked(session: AsyncSession, row: PriceVersion, now: datetime) -> CheckedVersionOut:
    review = await price_book.review(session, row.id, now)
    return CheckedVersionOut(
        **version_out(row).model_dump(), warnings=[w.model_dump() for w in warnings_out(review)], problem=review.problem
    )


async def _list(session: AsyncSession, version_id: UUID, now: datetime) -> PriceList:
    review = await price_book.review(session, version_id, now)
    return PriceList(
        id=format_id(IdKind.PRICE_VERSION, version_id),
        items=[item_out(item) for item in await price_book.list_items(session, version_id)],
        discounts=[discount_out(one) for one in await price_book.list_discounts(session, version_id)],
        warnings=warnings_out(review),
        problem=review.problem,
    )


@router.post(f"{ADMIN}/price-books", status_code=201, summary="Create a price book", responses=problems(409))
async def create_price_book(body: BookIn, session: Session, act: CurrentAct) -> BookOut:
    book_id = await price_book.create_book(session, body.name, Currency(body.currency), for_plan=body.for_plan)
    act.on(book_id, name=body.name, currency=body.currency)
    (row,) = [row for row in await price_book.list_books(session) if row.id == book_id]
    return book_out(row)


@router.get(f"{ADMIN}/price-books", summary="List price books")
async def list_price_books(session: ReadSession, paging: CurrentPaging) -> BookPage:
    page = page_in_memory(await price_book.list_books(session), paging.after, paging.limit, lambda row: row.id)
    return BookPage(
        items=[book_out(row) for row in page.items],
        next_after=page.next_after and format_id(IdKind.PRICE_BOOK, page.next_after),
    )


@router.post(f"{ADMIN}/price-books/{{book_id}}/versions", status_code=201, summary="Draft prices")
async def create_price_draft(
    book_id: BookId, body: DraftIn, session: Session, act: CurrentAct, services: CurrentServices
) -> CheckedVersionOut:
    """Begin from the last published list, so that publishing one new price drops no other."""
    change = change_of(body)
    await price_book.check_names(session, book_id, change)
    version_id = await price_book.create_draft(
        session, book_id, change.items, discounts=change.discounts, complete=body.complete, note=body.note
    )
    act.on(version_id, items=len(body.items), discounts=len(body.discounts))
    (row,) = [row for row in await price_book.list_versions(session, book_id) if row.id == version_id]
    return await _checked(session, row, services.clock.now())


@router.get(f"{ADMIN}/price-books/{{book_id}}/versions", summary="List a book's versions")
async def list_price_versions(book_id: BookId, session: ReadSession, paging: CurrentPaging) -> PriceVersionPage:
    found = await price_book.list_versions(session, book_id)
    page = page_in_memory(found, paging.after, paging.limit, lambda row: row.id)
    return PriceVersionPage(
        items=[version_out(row) for row in page.items],
        next_after=page.next_after and format_id(IdKind.PRICE_VERSION, page.next_after),
    )


@router.get(f"{ADMIN}/price-versions/{{price_version_id}}", summary="Read the prices of a version")
async def get_price_version(
    price_version_id: PriceVersionId, session: ReadSession, services: CurrentServices
) -> PriceList:
    return await _list(session, price_version_id, services.clock.now())


@router.get(f"{ADMIN}/price-versions/{{price_version_id}}/changes", summary="Compare with the prices in force")
async def get_price_changes(
    price_version_id: PriceVersionId, session: ReadSession, services: CurrentServices
) -> PriceChanges:
    """Compare a draft with what is in force now, a published version with what was in force before it."""
    review = await price_book.review(session, price_version_id, services.clock.now())
    return PriceChanges(
        id=format_id(IdKind.PRICE_VERSION, price_version_id),
        against=review.against and format_id(IdKind.PRICE_VERSION, review.against),
        total=len(review.changes),
        changes=[change_out(change) for change in review.changes[:CHANGES_MAX]],
        warnings=warnings_out(review),
        problem=review.problem,
    )


@router.patch(
    f"{ADMIN}/price-versions/{{price_version_id}}", summary="Change prices of a draft", responses=problems(409)
)
async def change_price_draft(
    *,
    price_version_id: PriceVersionId,
    body: DraftChangeIn,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
) -> PriceList:
    change = change_of(body)
    await price_book.check_names(session, await price_book.book_of(session, price_version_id), change)
    before = _by_name(await _list(session, price_version_id, services.clock.now()))
    await price_book.change_draft(session, price_version_id, change)
    after = await _list(session, price_version_id, services.clock.now())
    act.on(price_version_id, prices=differences(before, _by_name(after)))
    return after


def _by_name(prices: PriceList) -> dict[str, str]:
    """Unit prices and discounts by what they are of, for the audit trail."""
    named = {
        " ".join(filter(None, (i.model_id, i.tier, i.meter, i.tenant_id, str(i.above_input_tokens or "")))): (
            i.unit_price
        )
        for i in prices.items
    }
    return named | {
        f"{off.model_id} {off.tier} percent_off {off.tenant_id}": off.percent_off for off in prices.discounts
    }


@router.delete(
    f"{ADMIN}/price-versions/{{price_version_id}}", status_code=204, summary="Delete a draft", responses=problems(409)
)
async def delete_price_draft(price_version_id: PriceVersionId, session: Session, act: CurrentAct) -> None:
    await price_book.delete_draft(session, price_version_id)
    act.on(price_version_id)


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
) -> CheckedVersionOut:
    """Put prices in force, now or later. Gateways follow within a second; calls admitted before keep their prices."""
    now = services.clock.now()
    row = await price_book.publish(session, price_version_id, now=now, effective_at=body.effective_at)
    found = await _checked(session, row, now)
    act.on(price_version_id, content_sha256=found.content_sha256, warnings=len(found.warnings))
    return found
