"""Operators: a tenant's credit, balance and usage."""

from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import Field

from api.admin.asking import asked_by, follow
from api.deps import CurrentServices, CurrentWork, ReadSession, TenantId
from api.guard import GuardedRoute
from api.idempotency import REPLAYED_YES
from api.money import Day, balance_of, usage_of
from api.permissions import TENANT
from api.schemas import BalanceOut, Input, Instant, Output, PositiveAmount, UsageOut, problems
from billing import adjustments
from billing import credits as billing_credits
from core.idempotency import HEADER, KEY_MAX_CHARS
from core.ids import IdKind, format_id
from core.money import format_pico, parse_pico
from tenants import tenants

router = APIRouter(route_class=GuardedRoute, tags=["credit and usage"])

IdempotencyKey = Annotated[
    str,
    Header(
        alias=HEADER,
        min_length=1,
        max_length=KEY_MAX_CHARS,
        pattern=r"^[ -~]+$",
        description=(
            "Chosen by the caller, one per payment or adjustment of a tenant, for ever: the same key never moves money "
            "twice, whoever sends it. Within 24 hours the same caller gets the first answer word for word."
        ),
    ),
]


class TopUpIn(Input):
    """Credit that was paid for."""

    amount: PositiveAmount
    note: str = Field("", max_length=500, pattern=r"^[^\x00]*$", description="E.g. the payment's reference.")
    expires_at: Instant | None = Field(
        None,
        description=(
            "A whole minute in the future, after which what is left is the platform's; without it, never. Only where "
            "the installation's terms allow it (`TIDEGATE_BOOKS__PAID_CREDIT_MAY_EXPIRE`)."
        ),
    )


class TopUpOut(Output):
    """A top-up, and the balance now: `pending` until a second person decides, then it has a transaction."""

    adjustment_id: str
    state: str
    transaction_id: str | None
    amount: str
    balance: str


@router.post(
    f"{TENANT}/credits",
    status_code=201,
    summary="Top up a prepaid tenant",
    responses={
        **problems(403, 409),
        202: {"model": TopUpOut, "description": "A second person has to decide: it is above the limit."},
    },
)
async def top_up(
    tenant_id: TenantId, body: TopUpIn, idempotency_key: IdempotencyKey, work: CurrentWork, response: Response
) -> TopUpOut:
    """Add credit once per idempotency key; the same key with other values is a conflict."""
    await tenants.get(work.session, tenant_id)
    asked = await asked_by(work, body.note, idempotency_key)
    done = await adjustments.top_up(
        work.session,
        tenant_id,
        parse_pico(body.amount),
        asked,
        expires_at=body.expires_at,
        may_expire=work.services.settings.books.paid_credit_may_expire,
    )
    amount = format_pico(done.amount_pico)
    adjustment_id = format_id(IdKind.ADJUSTMENT, done.id)
    work.act.target_id = done.transaction_id
    work.act.details.update(amount=amount, state=done.state, adjustment=adjustment_id, replayed=done.replayed)
    if done.expires_at is not None:
        work.act.details["expires_at"] = done.expires_at.isoformat()
    if done.replayed:
        response.headers.update(REPLAYED_YES)
    if done.state == "pending":
        response.status_code = 202
    await follow(work, done)
    return TopUpOut(
        adjustment_id=adjustment_id,
        state=done.state,
        transaction_id=None if done.transaction_id is None else format_id(IdKind.TRANSACTION, done.transaction_id),
        amount=amount,
        balance=format_pico((await billing_credits.balance(work.session, tenant_id)).available_pico),
    )


@router.get(f"{TENANT}/balance", summary="Read a tenant's balance")
async def get_tenant_balance(tenant_id: TenantId, session: ReadSession) -> BalanceOut:
    return await balance_of(session, tenant_id)


@router.get(f"{TENANT}/usage", summary="Read a tenant's usage by day and model", responses=problems(400))
async def get_tenant_usage(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, start: Day = None, end: Day = None
) -> UsageOut:
    return await usage_of(session, tenant_id, start, end, services.clock)
