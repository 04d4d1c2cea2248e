"""Operators: what a draft of prices would have done to recorded usage."""

from datetime import UTC, date, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import StreamingResponse

from api.deps import CurrentServices, PriceVersionId
from api.guard import GuardedRoute
from api.money import DAYS_DEFAULT, FIRST_DAY, LAST_DAY
from api.permissions import PRICE_VERSION
from api.schemas import CurrencyCode, Output, TierName, problems
from billing import price_preview
from billing.price_impact_text import csv_lines, document
from core.errors import ErrorKind, PlatformError

router = APIRouter(route_class=GuardedRoute, tags=["prices"])

DAYS_MAX = 92
REQUESTS_MAX = 5_000_000  # of one call; the command has no bound
TENANTS_DEFAULT = 50
TENANTS_MAX = 200

Day = Annotated[
    date | None,
    Query(ge=FIRST_DAY, le=LAST_DAY, description="A day (UTC), as 2026-11-30; by default the last 30."),
]


class ImpactFigures(Output):
    """Of some usage, as decimal strings. What is left out or unpriced is in no other sum of money."""

    requests: int
    paid: str
    would_pay: str
    difference: str
    by_event: int = Field(description="Requests rated one by one.")
    by_minute: int = Field(description="Requests rated by the sums of their minutes, exactly: the events are gone.")
    left_out: int = Field(description="Requests whose events are gone and needed: minimum charges, steps, aborts.")
    left_out_paid: str
    unpriced: int = Field(description="Requests for which the draft has no price: they would have been refused.")
    unpriced_paid: str


class ImpactOfModel(ImpactFigures):
    """Of one model."""

    model_id: str


class ImpactOfTier(ImpactFigures):
    """Of one tier."""

    tier: TierName


class ImpactLine(ImpactFigures):
    """Of one tenant, model and tier."""

    model_id: str
    tier: TierName


class ImpactOfTenant(ImpactFigures):
    """Of one tenant."""

    tenant_id: str
    lines: list[ImpactLine]


class ImpactOut(Output):
    """Totals of all, and a page of tenants: the largest difference first. `next_offset` is null at the end."""

    price_version_id: str
    currency: CurrencyCode
    start: str
    end: str
    total: ImpactFigures
    by_model: list[ImpactOfModel]
    by_tier: list[ImpactOfTier]
    tenants: list[ImpactOfTenant]
    next_offset: int | None


@router.get(
    f"{PRICE_VERSION}/impact",
    summary="Preview what prices would have done to recorded usage",
    response_model=ImpactOut,
    responses={200: {"content": {"text/csv": {}}}, **problems(400, 409)},
)
async def preview_price_impact(
    *,
    price_version_id: PriceVersionId,
    services: CurrentServices,
    start: Day = None,
    end: Day = None,
    kind: Annotated[Literal["json", "csv"], Query(alias="format", description="CSV has all tenants.")] = "json",
    offset: Annotated[int, Query(ge=0, le=1_000_000, description="`next_offset` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=TENANTS_MAX)] = TENANTS_DEFAULT,
) -> ImpactOut | StreamingResponse:
    """Rate the usage of past days at a draft's prices, per tenant: what it paid, and what it would have paid.

    At most 92 days and 5,000,000 requests; `tidegate prices impact` has no such bound.
    """
    last = end or services.clock.now().astimezone(UTC).date()
    first = start or last - timedelta(days=DAYS_DEFAULT - 1)
    if not 0 <= (last - first).days < DAYS_MAX:
        message = f"The days go from one to the same or a later one, {DAYS_MAX} at most."
        raise PlatformError("INVALID_RANGE", ErrorKind.INVALID, message, param="start")
    requests = await price_preview.requests_in(services.sessions, first, last)
    if requests > REQUESTS_MAX:
        message = f"These days have {requests:,} requests. Take fewer days, or `tidegate prices impact`."
        raise PlatformError("PREVIEW_TOO_LARGE", ErrorKind.CONFLICT, message, param="start")
    found = await price_preview.preview(services.sessions, price_version_id, first, last)
    if kind == "json":
        return ImpactOut.model_validate(document(found, offset, limit))
    name = f"price-impact-{first}-{last}.csv"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(csv_lines(found), media_type="text/csv; charset=utf-8", headers=headers)
