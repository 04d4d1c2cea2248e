"""Operators: a tenant's credit, balance and usage."""

from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import Field

from api.deps import CurrentAct, CurrentCaller, CurrentServices, ReadSession, Session, TenantId
from api.guard import GuardedRoute
from api.idempotency import REPLAYED_YES
from api.money import Day, balance_of, usage_of
from api.permissions import TENANT
from api.schemas import BalanceOut, Input, Output, PositiveAmount, UsageOut, problems
from billing import credit_figures
from billing import credits as billing_credits
from billing.tasks import ask_refresh
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


class TopUpOut(Output):
    """The transaction as posted, and the balance now."""

    transaction_id: str
    amount: str
    balance: str


@router.post(
    f"{TENANT}/credits",
    status_code=201,
    summary="Top up a prepaid tenant",
    responses=problems(409),
)
async def top_up(
    *,
    tenant_id: TenantId,
    body: TopUpIn,
    idempotency_key: IdempotencyKey,
    session: Session,
    act: CurrentAct,
    caller: CurrentCaller,
    services: CurrentServices,
    response: Response,
) -> TopUpOut:
    """Add credit once per idempotency key; the same key with other values is a conflict."""
    await tenants.get(session, tenant_id)
    operator = caller.actor("").id
    done = await billing_credits.top_up(
        session,
        tenant_id,
        parse_pico(body.amount),
        idempotency_key=idempotency_key,
        actor=f"operator:{format_id(IdKind.OPERATOR, operator)}" if operator else "system",
        note=body.note,
    )
    act.on(done.transaction_id, amount=format_pico(done.amount_pico), replayed=done.replayed)
    if done.replayed:
        response.headers.update(REPLAYED_YES)
    await ask_refresh(session, tenant_id)

    async def refresh() -> None:  # at once, so that the next call is admitted; the worker does it where this fails
        await credit_figures.refresh(services.valkey, services.sessions, tenant_id)

    act.after_commit.append(refresh)
    return TopUpOut(
        transaction_id=format_id(IdKind.TRANSACTION, done.transaction_id),
        amount=format_pico(done.amount_pico),
        balance=format_pico(done.balance.available_pico),
    )


@router.get(f"{TENANT}/balance", summary="Read a tenant's balance")
async def get_tenant_balance(tenant_id: TenantId, session: ReadSession) -> BalanceOut:
    return await balance_of(session, tenant_id)


@router.get(f"{TENANT}/usage", summary="Read a tenant's usage by day and model", responses=problems(400))
async def get_tenant_usage(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, start: Day = None, end: Day = None
) -> UsageOut:
    return await usage_of(session, tenant_id, start, end, services.clock)
