"""Operators: give credit, reverse transactions, decide on what others asked for, look at lots."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.adjustments import (
    AdjustmentOut,
    AdjustmentPage,
    GrantIn,
    LotsOut,
    ReversalIn,
    lots_of,
    shown,
)
from api.admin.asking import asked_by, follow
from api.admin.credits import IdempotencyKey
from api.deps import (
    AdjustmentId,
    CurrentPaging,
    CurrentServices,
    CurrentWork,
    ReadSession,
    TenantId,
    TransactionId,
    Work,
    responsible_of,
)
from api.guard import GuardedRoute
from api.idempotency import REPLAYED_YES
from api.money import ENTRIES_DEFAULT, From, Offset, PageSize, StatementOut, Until, statement_of
from api.permissions import ADJUSTMENT, ADMIN, TENANT
from api.schemas import problems
from billing import adjustments, terms
from billing.adjustment_kinds import Adjustment
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import tenants
from tenants.types import BillingMode

router = APIRouter(route_class=GuardedRoute, tags=["credit and usage"])

_STATES = {
    **problems(403, 409),
    202: {"model": AdjustmentOut, "description": "A second person has to decide: it is above the limit."},
}


async def _done(work: Work, done: Adjustment, response: Response | None = None) -> AdjustmentOut:
    answer = shown(done)
    work.act.on(
        done.id, tenant_id=done.tenant_id, kind=done.kind, amount=answer.amount, state=done.state, note=done.note
    )
    if response is not None and done.replayed:
        response.headers.update(REPLAYED_YES)
    if response is not None and done.state == "pending":
        response.status_code = 202
    if done.new_terms is not None:
        (holds,) = await terms.history(work.session, done.tenant_id, 1)  # a repeat may come after newer ones
        await tenants.set_billing_mode(work.session, done.tenant_id, BillingMode(holds.mode.value))
    await follow(work, done)
    return answer


@router.post(f"{TENANT}/grants", status_code=201, summary="Give credit", responses=_STATES)
async def give_credit(
    tenant_id: TenantId, body: GrantIn, idempotency_key: IdempotencyKey, work: CurrentWork, response: Response
) -> AdjustmentOut:
    """Give promo or goodwill credit, once per idempotency key; above the limit it waits for a second person."""
    await tenants.get(work.session, tenant_id)
    asked = await asked_by(work, body.note, idempotency_key)
    return await _done(work, await adjustments.give(work.session, tenant_id, body.grant(), asked), response)


@router.post(
    f"{TENANT}/transactions/{{transaction_id}}/reverse",
    status_code=201,
    summary="Reverse a transaction",
    responses=_STATES,
)
async def reverse_transaction(
    *,
    tenant_id: TenantId,
    transaction_id: TransactionId,
    body: ReversalIn,
    idempotency_key: IdempotencyKey,
    work: CurrentWork,
    response: Response,
) -> AdjustmentOut:
    """Post one that moves the same back; above the limit it waits for a second person."""
    await tenants.get(work.session, tenant_id)
    asked = await asked_by(work, body.note, idempotency_key)
    return await _done(work, await adjustments.reverse(work.session, tenant_id, transaction_id, asked), response)


@router.post(f"{ADJUSTMENT}/approve", summary="Approve what another person asked for", responses=problems(403, 409))
async def approve_adjustment(tenant_id: TenantId, adjustment_id: AdjustmentId, work: CurrentWork) -> AdjustmentOut:
    """Post it. Takes a confirmed person, signed in with the own password, who did not ask nor answer for who did."""
    now = work.services.clock.now()
    done = await adjustments.approve(work.session, tenant_id, adjustment_id, by=await responsible_of(work), now=now)
    return await _done(work, done)


@router.post(f"{ADJUSTMENT}/decline", summary="Decline what another person asked for", responses=problems(403, 409))
async def decline_adjustment(tenant_id: TenantId, adjustment_id: AdjustmentId, work: CurrentWork) -> AdjustmentOut:
    now = work.services.clock.now()
    done = await adjustments.decline(work.session, tenant_id, adjustment_id, by=await responsible_of(work), now=now)
    return await _done(work, done)


@router.get(f"{ADMIN}/adjustments", summary="List adjustments of all tenants")
async def list_adjustments(
    session: ReadSession,
    paging: CurrentPaging,
    pending: Annotated[bool, Query(description="Only what waits for a decision.")] = False,
) -> AdjustmentPage:
    found = await adjustments.search(session, None, pending=pending, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda one: one.id)
    after = None if page.next_after is None else format_id(IdKind.ADJUSTMENT, page.next_after)
    return AdjustmentPage(items=[shown(one) for one in page.items], next_after=after)


@router.get(f"{TENANT}/credit-lots", summary="List a tenant's credit lots")
async def list_credit_lots(tenant_id: TenantId, session: ReadSession) -> LotsOut:
    return await lots_of(session, tenant_id)


@router.get(f"{TENANT}/statement", summary="Read a tenant's statement of account", responses=problems(400))
async def get_tenant_statement(
    *,
    tenant_id: TenantId,
    session: ReadSession,
    services: CurrentServices,
    start: From = None,
    end: Until = None,
    offset: Offset = 0,
    limit: PageSize = ENTRIES_DEFAULT,
) -> StatementOut:
    return await statement_of(session, tenant_id, (start, end), (offset, limit), services.clock)
