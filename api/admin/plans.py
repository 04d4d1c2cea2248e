"""Operators: plans, their limits and prices, and which plan a tenant is on."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import CurrentAct, CurrentPaging, ReadSession, Session, TenantId, changed, path_id
from api.guard import GuardedRoute
from api.limits import (
    CurrentLimitWork,
    LevelLimitIn,
    LimitChangeId,
    LimitChangeOut,
    LimitChangePage,
    LimitId,
    LimitList,
    LimitOut,
    RemovalReason,
    RevertIn,
    change_page,
    limit_list,
    put,
    slot_of,
    take_away,
    undo,
)
from api.permissions import ADMIN, PLAN, TENANT
from api.schemas import (
    Input,
    Name,
    Output,
    Reason,
    problems,
)
from billing import price_book
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from tenants import limits, plans
from tenants.plans import Plan

router = APIRouter(route_class=GuardedRoute, tags=["plans"])

PlanId = Annotated[UUID, path_id(IdKind.PLAN, "plan_id")]
Description = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]
BookName = Annotated[
    str | None,
    Field(max_length=64, description="A price book made for plans; for tenants of its currency. Null: the list."),
]


class PlanIn(Input):
    """A new plan, without limits at first."""

    name: Name
    description: Description = ""
    price_book_id: BookName = None


class PlanChange(Input):
    """What is left out stays."""

    name: Name | None = None
    description: Description | None = None
    price_book_id: BookName = None


class PlanOut(Output):
    """A plan."""

    id: str
    name: str
    description: str
    price_book_id: str | None
    created_at: datetime


class PlanPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[PlanOut]
    next_after: str | None


class TenantPlanIn(Input):
    """Which plan, and why."""

    plan_id: Annotated[str, Field(max_length=64)]
    reason: Reason


def _out(plan: Plan) -> PlanOut:
    return PlanOut(
        id=format_id(IdKind.PLAN, plan.id),
        name=plan.name,
        description=plan.description,
        price_book_id=plan.price_book_id and format_id(IdKind.PRICE_BOOK, plan.price_book_id),
        created_at=plan.created_at,
    )


async def _book(session: AsyncSession, text: str | None) -> UUID | None:
    if text is None:
        return None
    book_id = parse_id(IdKind.PRICE_BOOK, text)
    await price_book.check_for_plan(session, book_id)
    return book_id


@router.get(f"{ADMIN}/plans", summary="List plans")
async def list_plans(session: ReadSession, paging: CurrentPaging) -> PlanPage:
    found = await plans.list_plans(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda plan: plan.id)
    return PlanPage(
        items=[_out(plan) for plan in page.items],
        next_after=page.next_after and format_id(IdKind.PLAN, page.next_after),
    )


@router.post(f"{ADMIN}/plans", status_code=201, summary="Create a plan", responses=problems(400, 409))
async def create_plan(body: PlanIn, session: Session, act: CurrentAct) -> PlanOut:
    book_id = await _book(session, body.price_book_id)
    plan = await plans.create(session, name=body.name, description=body.description, price_book_id=book_id)
    act.on(plan.id, name=plan.name)
    return _out(plan)


@router.get(PLAN, summary="Read a plan")
async def get_plan(plan_id: PlanId, session: ReadSession) -> PlanOut:
    return _out(await plans.get(session, plan_id))


@router.patch(PLAN, summary="Change a plan's name, description or prices", responses=problems(400, 409))
async def update_plan(plan_id: PlanId, body: PlanChange, session: Session, act: CurrentAct) -> PlanOut:
    """Change what the plan is called and which prices it has. Gateways follow within a second."""
    before = _out(await plans.get(session, plan_id))
    plan = await plans.update(session, plan_id, name=body.name, description=body.description)
    if "price_book_id" in body.model_fields_set:
        plan = await plans.set_price_book(session, plan_id, await _book(session, body.price_book_id))
    after = _out(plan)
    act.on(plan_id, **changed(before, after))
    return after


@router.delete(PLAN, summary="Delete a plan that no tenant is on", responses=problems(409))
async def delete_plan(plan_id: PlanId, reason: RemovalReason, work: CurrentLimitWork) -> PlanOut:
    """Delete a plan and its limits; their history stays."""
    plan = await plans.get(work.session, plan_id)
    await plans.delete(work.session, plan_id, work.why(reason))
    work.act.on(plan_id, name=plan.name, reason=reason)
    return _out(plan)


@router.put(f"{TENANT}/plan", summary="Put a tenant on a plan")
async def put_tenant_on_plan(tenant_id: TenantId, body: TenantPlanIn, session: Session, act: CurrentAct) -> PlanOut:
    """Put a tenant on a plan; limits of its own stay. Gateways follow within a second."""
    before, after = await plans.put_tenant(session, tenant_id, parse_id(IdKind.PLAN, body.plan_id))
    act.on(
        tenant_id,
        reason=body.reason,
        before=format_id(IdKind.PLAN, before.id),
        after=format_id(IdKind.PLAN, after.id),
    )
    return _out(after)


@router.get(f"{PLAN}/limits", summary="List a plan's limits")
async def list_plan_limits(plan_id: PlanId, session: ReadSession) -> LimitList:
    await plans.get(session, plan_id)
    return limit_list(await limits.list_at(session, plan_id=plan_id))


@router.put(f"{PLAN}/limits", summary="Set a limit of a plan", responses=problems(400, 409))
async def set_plan_limit(plan_id: PlanId, body: LevelLimitIn, work: CurrentLimitWork) -> LimitOut:
    """Set a limit for each tenant on the plan, or for each of their projects or keys. It holds within a second."""
    slot = replace(await slot_of(work.session, body, body.level), plan_id=plan_id)
    return await put(work, limits, slot, body)


@router.delete(f"{PLAN}/limits/{{limit_id}}", summary="Remove a limit of a plan")
async def remove_plan_limit(
    *, plan_id: PlanId, limit_id: LimitId, reason: RemovalReason, work: CurrentLimitWork
) -> LimitOut:
    return await take_away(work, limits, await limits.get_of_plan(work.session, plan_id, limit_id), reason)


@router.get(f"{PLAN}/limit-changes", summary="Read the history of a plan's limits")
async def list_plan_limit_changes(plan_id: PlanId, session: ReadSession, paging: CurrentPaging) -> LimitChangePage:
    await plans.get(session, plan_id)
    found = await limits.list_changes_of_plan(session, plan_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda change: change.id)
    return change_page(page.items, page.next_after)


@router.post(
    f"{PLAN}/limit-changes/{{limit_change_id}}/revert",
    summary="Undo a change of a plan's limit",
    responses=problems(409),
)
async def revert_plan_limit_change(
    *,
    plan_id: PlanId,
    limit_change_id: LimitChangeId,
    body: RevertIn,
    work: CurrentLimitWork,
) -> LimitChangeOut:
    """Put back what the change replaced, as a change of its own. A conflict when the limit was changed again since."""
    return await undo(work, limits, await limits.get_change_of_plan(work.session, plan_id, limit_change_id), body)
