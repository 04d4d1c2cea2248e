"""Operators: requests of tenants for higher limits."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.deps import CurrentPaging, ReadSession, TenantId
from api.guard import GuardedRoute
from api.limits import (
    Amount,
    CurrentLimitWork,
    LimitRequestId,
    LimitRequestOut,
    LimitRequestPage,
    StateName,
    request_out,
    request_page,
)
from api.permissions import ADMIN, TENANT
from api.schemas import (
    Input,
    Reason,
    problems,
)
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from tenants import limit_requests, limits

router = APIRouter(route_class=GuardedRoute, tags=["limits"])

REQUEST = f"{TENANT}/limit-requests/{{limit_request_id}}"


class ApprovalIn(Input):
    """The note that the tenant reads, and how much is granted: what was asked for when left out."""

    note: Reason
    amount: Amount | None = None


class RefusalIn(Input):
    """The note that the tenant reads."""

    note: Reason


@router.get(f"{ADMIN}/limit-requests", summary="List requests for higher limits")
async def list_limit_requests(
    session: ReadSession,
    paging: CurrentPaging,
    state: Annotated[StateName | None, Query(description="Only those in this state.")] = None,
    tenant_id: Annotated[str | None, Query(max_length=64, description="Only this tenant's.")] = None,
) -> LimitRequestPage:
    tenant = None if tenant_id is None else parse_id(IdKind.TENANT, tenant_id)
    found = await limit_requests.list_requests(
        session, tenant, state=state, after=paging.after, limit=paging.limit_probe
    )
    page = page_of(found, paging.limit, lambda request: request.id)
    return request_page(page.items, page.next_after)


@router.get(REQUEST, summary="Read a request for a higher limit")
async def get_limit_request(
    tenant_id: TenantId, limit_request_id: LimitRequestId, session: ReadSession
) -> LimitRequestOut:
    return request_out(await limit_requests.get(session, tenant_id, limit_request_id))


@router.post(f"{REQUEST}/approve", summary="Grant a higher limit", responses=problems(400, 409))
async def approve_limit_request(
    *,
    tenant_id: TenantId,
    limit_request_id: LimitRequestId,
    body: ApprovalIn,
    work: CurrentLimitWork,
) -> LimitRequestOut:
    """Set the limit and answer the request. It holds within a second, and the history has the note as its reason."""
    asked = await limit_requests.get(work.session, tenant_id, limit_request_id)
    metric = asked.slot.metric
    amount = None if body.amount is None else limits.parse_amount(metric, body.amount)
    done, rule, before = await limit_requests.approve(
        work.session, tenant_id, limit_request_id, amount, work.why(body.note)
    )
    work.act.on(
        limit_request_id,
        limit_id=format_id(IdKind.LIMIT, rule.id),
        metric=metric.value,
        before=None if before is None else limits.amount_out(metric, before),
        after=limits.amount_out(metric, rule.amount),
        note=body.note,
    )
    return request_out(done)


@router.post(f"{REQUEST}/decline", summary="Decline a request for a higher limit", responses=problems(409))
async def decline_limit_request(
    *,
    tenant_id: TenantId,
    limit_request_id: LimitRequestId,
    body: RefusalIn,
    work: CurrentLimitWork,
) -> LimitRequestOut:
    done = await limit_requests.decline(work.session, tenant_id, limit_request_id, work.why(body.note))
    work.act.on(limit_request_id, note=body.note)
    return request_out(done)
