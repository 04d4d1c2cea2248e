"""The shapes of price books, and how they become billing's types and back."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from msgspec.structs import replace
from pydantic import Field, StringConstraints

from api.schemas import CurrencyCode, Input, Instant, Name, Output, TierName
from billing import price_book
from billing.price_book import DraftChange, Review
from billing.price_checks import PriceChange
from billing.types import Meter, PriceBook, PriceDiscount, PriceItem, PriceVersion
from core.ids import IdKind, format_id, parse_id
from core.tiers import Tier

ITEMS_MAX = 2000
CHANGES_MAX = 2000
INPUT_TOKENS_MAX = 10**9

MeterName = Annotated[Meter, Field(strict=False)]
Price = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,12})?$"),
    Field(
        description="Per million tokens with at most 6 decimals; per request for `request` and `min_charge`.",
        examples=["0.20"],
    ),
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


class Priced(Input):
    """What a unit price is of: without `tenant_id` the list's."""

    model_id: Id
    tier: TierName
    meter: MeterName
    tenant_id: Id | None = None
    above_input_tokens: int = Field(
        0,
        ge=0,
        le=INPUT_TOKENS_MAX,
        description="Of a long-context step: it prices the whole of each request with more input tokens than this.",
    )


class ItemIn(Priced):
    """One unit price. With `tenant_id` it is that tenant's own price instead of the list's."""

    unit_price: Price


class Discounted(Input):
    """What a tenant's discount is off."""

    tenant_id: Id
    model_id: Id
    tier: TierName


class DiscountIn(Discounted):
    """A percentage off the list of a model and tier, but for its minimum charge. Publication makes prices of it."""

    percent_off: Annotated[
        str,
        StringConstraints(pattern=r"^[0-9]{1,3}(\.[0-9]{1,4})?$"),
        Field(description="More than 0 and at most 100, with at most 4 decimals.", examples=["12.5"]),
    ]


class ItemOut(Output):
    """One unit price."""

    model_id: str
    tier: str
    meter: str
    unit_price: str
    tenant_id: str | None
    above_input_tokens: int


class DiscountOut(Output):
    """A tenant's percentage off the list; once published, what its own prices were made of."""

    tenant_id: str
    model_id: str
    tier: str
    percent_off: str


class WarningOut(Output):
    """Prices that may be meant, and often are not. Programs switch on `code`."""

    code: str
    message: str
    model_id: str | None = Field(description="Null: it is of the whole list.")
    tier: str | None
    tenant_id: str | None


Items = Annotated[list[ItemIn], Field(max_length=ITEMS_MAX)]
Discounts = Annotated[list[DiscountIn], Field(max_length=ITEMS_MAX)]


class DraftIn(Input):
    """A new draft: the list last published with these prices on top, or these alone when `complete`."""

    items: Items
    discounts: Discounts = Field(default_factory=list)
    complete: bool = False
    note: str = Field("", max_length=500, pattern=r"^[^\x00]*$")


class DraftChangeIn(Input):
    """What to do to a draft: first take away, then set discounts, then prices.

    A price is set instead of one for the same model, tier, meter, tenant and step, a discount instead of the tenant's
    own prices for its model and tier.
    """

    items: Items = Field(default_factory=list)
    discounts: Discounts = Field(default_factory=list)
    remove: Annotated[list[Priced], Field(max_length=ITEMS_MAX)] = Field(default_factory=list)
    remove_discounts: Annotated[list[Discounted], Field(max_length=ITEMS_MAX)] = Field(default_factory=list)


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


class CheckedVersionOut(PriceVersionOut):
    """A version with what is odd about it. `problem`: why a draft cannot be published as it is; empty when it can."""

    warnings: list[WarningOut]
    problem: str


class PriceList(Output):
    """The prices of a version; a draft's discounts are not worked out yet, see its changes."""

    id: str
    items: list[ItemOut]
    discounts: list[DiscountOut]
    warnings: list[WarningOut]
    problem: str = Field(description="Why a draft cannot be published as it is; empty when it can.")


class ChangeOut(Output):
    """A unit price that is new (`before` is null), gone (`after` is null) or another."""

    model_id: str
    tier: str
    meter: str
    tenant_id: str | None
    above_input_tokens: int
    before: str | None
    after: str | None


class PriceChanges(Output):
    """A version beside the one that is or was in force before it; contract prices are worked out."""

    id: str
    against: str | None = Field(description="The version compared with; null when none was in force.")
    total: int
    changes: list[ChangeOut] = Field(description="The first 2,000.")
    warnings: list[WarningOut]
    problem: str


def book_out(row: PriceBook) -> BookOut:
    return BookOut(
        id=format_id(IdKind.PRICE_BOOK, row.id),
        name=row.name,
        currency=row.currency,
        for_plan=row.for_plan,
        created_at=row.created_at,
    )


def version_out(row: PriceVersion) -> PriceVersionOut:
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


def _tenant(tenant_id: str | None) -> UUID | None:
    return None if tenant_id is None else parse_id(IdKind.TENANT, tenant_id)


def _place(item: Priced) -> PriceItem:
    return PriceItem(
        parse_id(IdKind.MODEL, item.model_id),
        Tier[item.tier.upper()],
        item.meter,
        0,
        _tenant(item.tenant_id),
        item.above_input_tokens,
    )


def _priced(items: list[ItemIn]) -> list[PriceItem]:
    return [
        replace(_place(item), unit_price_pico=price_book.unit_price_pico(item.meter, item.unit_price)) for item in items
    ]


def _discount(discount: Discounted) -> PriceDiscount:
    return PriceDiscount(
        parse_id(IdKind.TENANT, discount.tenant_id),
        parse_id(IdKind.MODEL, discount.model_id),
        Tier[discount.tier.upper()],
        price_book.off_ppm(discount.percent_off) if isinstance(discount, DiscountIn) else 0,
    )


def change_of(body: DraftIn | DraftChangeIn) -> DraftChange:
    """Return what the call asks for.

    Raises:
        PlatformError: INVALID_PRICE, NOT_FOUND for what is no id.
    """
    items, discounts = _priced(body.items), [_discount(one) for one in body.discounts]
    if isinstance(body, DraftIn):
        return DraftChange(items, discounts)
    return DraftChange(
        items,
        discounts,
        [_place(one) for one in body.remove],
        [_discount(one) for one in body.remove_discounts],
    )


def item_out(item: PriceItem) -> ItemOut:
    return ItemOut(
        model_id=format_id(IdKind.MODEL, item.model_id),
        tier=Tier(item.tier).label,
        meter=Meter(item.meter).value,
        unit_price=price_book.price_text(item.meter, item.unit_price_pico),
        tenant_id=item.tenant_id and format_id(IdKind.TENANT, item.tenant_id),
        above_input_tokens=item.above_tokens,
    )


def discount_out(discount: PriceDiscount) -> DiscountOut:
    return DiscountOut(
        tenant_id=format_id(IdKind.TENANT, discount.tenant_id),
        model_id=format_id(IdKind.MODEL, discount.model_id),
        tier=discount.tier.label,
        percent_off=price_book.percent_text(discount.off_ppm),
    )


def warnings_out(review: Review) -> list[WarningOut]:
    return [
        WarningOut(
            code=one.code,
            message=one.message,
            model_id=one.model_id and format_id(IdKind.MODEL, one.model_id),
            tier=None if one.tier is None else one.tier.label,
            tenant_id=one.tenant_id and format_id(IdKind.TENANT, one.tenant_id),
        )
        for one in review.warnings
    ]


def change_out(change: PriceChange) -> ChangeOut:
    before, after = (
        None if pico is None else price_book.price_text(change.meter, pico) for pico in (change.before, change.after)
    )
    return ChangeOut(
        model_id=format_id(IdKind.MODEL, change.model_id),
        tier=change.tier.label,
        meter=change.meter.value,
        tenant_id=change.tenant_id and format_id(IdKind.TENANT, change.tenant_id),
        above_input_tokens=change.above_tokens,
        before=before,
        after=after,
    )
