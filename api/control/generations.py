"""Tenants: the receipt of one generation."""

from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field

from api.deps import CurrentCaller, CurrentServices, GenerationId, ReadSession
from api.guard import GuardedRoute
from api.schemas import CurrencyCode, Output, TierName, problems
from billing import receipts
from billing.receipts import Receipt
from core import waits
from core.ids import IdKind, format_id
from tenants.errors import not_found
from tenants.roles import Permission, Rights
from tenants.types import Principal, Scope

router = APIRouter(route_class=GuardedRoute, tags=["your account"])

PENDING_RETRY_S = 1


class ReceiptLineOut(Output):
    """One kind of token: how many, at what price per million (per request for `request`), and what it came to.

    `min_charge` is what was missing to the minimum, which is its unit price.
    """

    meter: str
    quantity: int
    unit_price: str
    amount: str


class ReceiptReratingOut(Output):
    """It was rated again: what it comes to since, and the version whose prices that was for."""

    price_version_id: str
    amount: str
    transaction_id: str
    at: datetime
    note: str


class ReceiptWaitOut(Output):
    """Why it waited for its place. Counts are of requests on the same deployment."""

    text: str = Field(description="The same in words.")
    waits_for: str = Field(
        description="What was full: `model_places`, `model_tokens`, `platform_places`, `capability` (what your"
        " organisation may have on the model), `caller_places`; `turn`: nothing, but others waited before it."
    )
    limit: int = Field(description="How much of that there was for its tier; 0 for `turn`.")
    estimate_us: int = Field(description="How long it would wait, as reckoned when it came; 0 when nothing was known.")
    ahead: int = Field(description="How many waited in its tier or a higher one when it came.")
    passed: dict[TierName, int] = Field(description="How many were granted before it while it waited, by tier.")


class ReceiptOut(Output):
    """What a generation cost, by part; the lines add up to `amount` exactly."""

    id: str
    state: Literal["posted", "quarantined", "dismissed"]
    model: str
    model_version_id: str | None = Field(description="Which version of the model served it.")
    endpoint: str
    tier: TierName
    outcome: str
    http_status: int
    stream: bool
    count_source: str
    currency: CurrencyCode
    price_version_id: str
    above_input_tokens: int = Field(description="Of the long-context step that priced it; 0: none.")
    lines: list[ReceiptLineOut]
    amount: str
    admitted_at: datetime
    ended_at: datetime
    queue_us: int = Field(description="Microseconds in the queue.")
    ttft_us: int = Field(description="Microseconds to the first token.")
    upstream_id: str
    project_id: str
    key_id: str
    transaction_id: str | None
    note: str
    preemptions: int = Field(description="How often its place went to a higher tier; that is not charged.")
    wait: ReceiptWaitOut | None = Field(description="Why it waited for its place; null when it did not.")
    effective_amount: str = Field(description="What it comes to now: `amount`, or what the last re-rating made of it.")
    reratings: list[ReceiptReratingOut] = Field(description="Oldest first; the lines stay what was billed at first.")


class PendingOut(Output):
    """It runs, or its usage is not posted yet."""

    id: str
    state: Literal["pending"] = "pending"


def _wait_of(receipt: Receipt) -> dict[str, Any] | None:
    wait = receipt.wait
    if wait is None:
        return None
    return {
        "text": waits.words(wait, receipt.queue_us, receipt.preemptions),
        "waits_for": wait.label,
        "limit": wait.limit,
        "estimate_us": wait.estimate_us,
        "ahead": wait.ahead,
        "passed": {tier.label: count for tier, count in wait.passed.items()},
    }


def _out(receipt: Receipt) -> ReceiptOut:
    return ReceiptOut.model_validate(
        {
            "id": format_id(IdKind.GENERATION, receipt.id),
            "state": receipt.state,
            "model": receipt.model,
            "model_version_id": receipt.version_id and format_id(IdKind.MODEL_VERSION, receipt.version_id),
            "endpoint": receipt.endpoint,
            "tier": receipt.tier.label,
            "outcome": receipt.outcome.value,
            "http_status": receipt.http_status,
            "stream": receipt.stream,
            "count_source": receipt.count_source,
            "currency": receipt.currency.value,
            "price_version_id": format_id(IdKind.PRICE_VERSION, receipt.price_version_id),
            "above_input_tokens": receipt.above_tokens,
            "lines": [
                {
                    "meter": line.meter.value,
                    "quantity": line.quantity,
                    "unit_price": line.unit_price,
                    "amount": line.amount,
                }
                for line in receipt.lines
            ],
            "amount": receipt.amount,
            "admitted_at": receipt.admitted_at,
            "ended_at": receipt.ended_at,
            "queue_us": receipt.queue_us,
            "ttft_us": receipt.ttft_us,
            "upstream_id": receipt.upstream_id,
            "project_id": format_id(IdKind.PROJECT, receipt.project_id),
            "key_id": format_id(IdKind.API_KEY, receipt.key_id),
            "transaction_id": receipt.transaction_id and format_id(IdKind.TRANSACTION, receipt.transaction_id),
            "note": receipt.note,
            "preemptions": receipt.preemptions,
            "wait": _wait_of(receipt),
            "effective_amount": receipt.effective_amount,
            "reratings": [
                {
                    "price_version_id": format_id(IdKind.PRICE_VERSION, one.price_version_id),
                    "amount": one.amount,
                    "transaction_id": format_id(IdKind.TRANSACTION, one.transaction_id),
                    "at": one.at,
                    "note": one.note,
                }
                for one in receipt.reratings
            ],
        }
    )


def _may_read(principal: Principal, rights: Rights, receipt: Receipt) -> bool:
    if principal.key_id == receipt.key_id:
        return True
    return Scope.USAGE_READ in principal.scopes and rights.allow(Permission.USAGE_READ, receipt.project_id)


@router.get(
    "/v1/generations/{generation_id}",
    summary="Read the receipt of one of your generations",
    response_model=ReceiptOut,
    responses={
        202: {
            "model": PendingOut,
            "description": "It runs, or its usage is not posted yet; ask again.",
            "headers": {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}},
        },
        **problems(410),
    },
)
async def get_generation(
    generation_id: GenerationId, caller: CurrentCaller, session: ReadSession, services: CurrentServices
) -> ReceiptOut | JSONResponse:
    """Answer 200 once it is in the books, 202 while it is on its way there, 410 when its day is no longer kept.

    A key without the scope `usage.read` reads the receipts of its own calls only, and one with it those of the projects
    whose usage its owner may see.
    """
    principal = caller.principal
    tenant_id = caller.tenant_id
    found = await receipts.receipt(session, tenant_id, generation_id)
    if found is None:
        if await receipts.is_pending(services.valkey, tenant_id, generation_id):
            pending = PendingOut(id=format_id(IdKind.GENERATION, generation_id))
            return JSONResponse(pending.model_dump(), 202, {"retry-after": str(PENDING_RETRY_S)})
        found = await receipts.receipt(session, tenant_id, generation_id)  # it may have been posted in between
    if found is None or principal is None or not _may_read(principal, caller.rights, found):
        raise not_found(IdKind.GENERATION)
    return _out(found)
