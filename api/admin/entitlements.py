"""Operators: what tenants weigh in turns and what they are promised of a model, and undoing a change of that."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.plans import PlanId
from api.deps import CurrentPaging, ReadSession, TenantId, path_id
from api.guard import GuardedRoute
from api.limits import CurrentLimitWork, LimitWork, ModelName, RemovalReason, RevertIn
from api.permissions import PLAN, TENANT
from api.schemas import Input, Output, Reason, because, problems
from catalog import models
from core.ids import IdKind, format_id
from core.pagination import page_of
from tenants import entitlements, plans, tenants
from tenants.entitlements import Entitlement, EntitlementChange, Figures, Owner

router = APIRouter(route_class=GuardedRoute, tags=["entitlements"])

EntitlementId = Annotated[UUID, path_id(IdKind.ENTITLEMENT, "entitlement_id")]
ChangeId = Annotated[UUID, path_id(IdKind.ENTITLEMENT_CHANGE, "entitlement_change_id")]
Weight = Annotated[
    int | None,
    Field(
        ge=1,
        le=entitlements.WEIGHT_MAX,
        description="Of two tenants that wait, one with twice the weight is served twice as much. 100 is usual.",
    ),
]
InFlight = Annotated[int | None, Field(ge=0, le=entitlements.IN_FLIGHT_MAX)]


class WeightIn(Input):
    """What each tenant on a plan weighs."""

    weight: Weight
    model: ModelName = ""
    reason: Reason


class EntitlementIn(Input):
    """All that a tenant is entitled to; what is left out is not said any more."""

    model: ModelName = ""
    weight: Weight = None
    guarantee: InFlight = Field(None, description="Requests in flight that are kept free for the tenant.")
    deserved: InFlight = Field(
        None, description="Its own when it wants them, lent while it does not; the guarantee if nothing is said."
    )
    capability: InFlight = Field(None, description="Never more requests in flight than this; further ones wait.")
    reason: Reason


class EntitlementOut(Output):
    """What a tenant or a plan is entitled to; null: nothing is said."""

    id: str
    tenant_id: str | None
    plan_id: str | None
    model: str
    weight: int | None
    guarantee: int | None
    deserved: int | None
    capability: int | None
    updated_at: datetime


class EntitlementList(Output):
    """All of one tenant or plan, by model."""

    items: list[EntitlementOut]


class FiguresOut(Output):
    """What was said; null: nothing."""

    weight: int | None
    guarantee: int | None
    deserved: int | None
    capability: int | None


class EntitlementChangeOut(Output):
    """What an entitlement was, and became; null where there was none."""

    id: str
    changed_at: datetime
    actor_kind: str
    actor_id: str | None
    reason: str
    tenant_id: str | None
    plan_id: str | None
    model: str
    before: FiguresOut | None
    after: FiguresOut | None
    reverts: str | None


class EntitlementChangePage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[EntitlementChangeOut]
    next_after: str | None


def _id(kind: IdKind, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)


def _out(found: Entitlement) -> EntitlementOut:
    figures = found.figures
    return EntitlementOut(
        id=format_id(IdKind.ENTITLEMENT, found.id),
        tenant_id=_id(IdKind.TENANT, found.owner.tenant_id),
        plan_id=_id(IdKind.PLAN, found.owner.plan_id),
        model=found.model,
        weight=figures.weight,
        guarantee=figures.guarantee,
        deserved=figures.deserved,
        capability=figures.capability,
        updated_at=found.updated_at,
    )


def _figures(figures: Figures | None) -> FiguresOut | None:
    if figures is None:
        return None
    return FiguresOut(
        weight=figures.weight,
        guarantee=figures.guarantee,
        deserved=figures.deserved,
        capability=figures.capability,
    )


def _change(change: EntitlementChange) -> EntitlementChangeOut:
    return EntitlementChangeOut(
        id=format_id(IdKind.ENTITLEMENT_CHANGE, change.id),
        changed_at=change.changed_at,
        actor_kind=change.actor_kind,
        actor_id=_id(IdKind.OPERATOR, change.actor_id),
        reason=change.reason,
        tenant_id=_id(IdKind.TENANT, change.owner.tenant_id),
        plan_id=_id(IdKind.PLAN, change.owner.plan_id),
        model=change.model,
        before=_figures(change.before),
        after=_figures(change.after),
        reverts=_id(IdKind.ENTITLEMENT_CHANGE, change.reverts),
    )


async def _put(work: LimitWork, owner: Owner, name: str, figures: Figures, reason: str) -> EntitlementOut:
    model = await models.own_name(work.session, name) if name else ""
    after, before = await entitlements.put(work.session, owner, model, figures, work.why(reason))
    said = _figures(before)
    now = _figures(figures)
    work.act.on(
        after.id,
        model=model,
        before=None if said is None else said.model_dump(),
        after=None if now is None else now.model_dump(),
        reason=reason,
    )
    return _out(after)


async def _remove(work: LimitWork, owner: Owner, entitlement_id: UUID, reason: str) -> EntitlementOut:
    gone = await entitlements.remove(work.session, owner, entitlement_id, work.why(reason))
    said = _figures(gone.figures)
    work.act.on(gone.id, model=gone.model, before=said and said.model_dump(), after=None, reason=reason)
    return _out(gone)


async def _revert(work: LimitWork, owner: Owner, change_id: UUID, body: RevertIn) -> EntitlementChangeOut:
    done = await entitlements.revert(work.session, owner, change_id, work.why(body.reason), force=body.force)
    work.act.on(done.id, reverts=format_id(IdKind.ENTITLEMENT_CHANGE, change_id), **because(body.reason))
    return _change(done)


async def _changes(session: AsyncSession, owner: Owner, paging: CurrentPaging) -> EntitlementChangePage:
    found = await entitlements.list_changes(session, owner, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda change: change.id)
    return EntitlementChangePage(
        items=[_change(change) for change in page.items], next_after=_id(IdKind.ENTITLEMENT_CHANGE, page.next_after)
    )


@router.get(f"{TENANT}/entitlements", summary="List what a tenant is entitled to")
async def list_tenant_entitlements(tenant_id: TenantId, session: ReadSession) -> EntitlementList:
    await tenants.get(session, tenant_id)
    return EntitlementList(items=[_out(one) for one in await entitlements.list_of(session, Owner(tenant_id))])


@router.put(f"{TENANT}/entitlements", summary="Say what a tenant is entitled to", responses=problems(400, 409))
async def put_tenant_entitlement(tenant_id: TenantId, body: EntitlementIn, work: CurrentLimitWork) -> EntitlementOut:
    """Say what the tenant weighs in turns, of all models or of one, and what it is promised of one model.

    Gateways follow within a second; a promise counts the requests that come after it.
    """
    figures = Figures(body.weight, body.guarantee, body.deserved, body.capability)
    return await _put(work, Owner(tenant_id), body.model, figures, body.reason)


@router.delete(f"{TENANT}/entitlements/{{entitlement_id}}", summary="Remove an entitlement of a tenant")
async def remove_tenant_entitlement(
    *, tenant_id: TenantId, entitlement_id: EntitlementId, reason: RemovalReason, work: CurrentLimitWork
) -> EntitlementOut:
    return await _remove(work, Owner(tenant_id), entitlement_id, reason)


@router.get(f"{TENANT}/entitlement-changes", summary="Read the history of a tenant's entitlements")
async def list_tenant_entitlement_changes(
    tenant_id: TenantId, session: ReadSession, paging: CurrentPaging
) -> EntitlementChangePage:
    await tenants.get(session, tenant_id)
    return await _changes(session, Owner(tenant_id), paging)


@router.post(
    f"{TENANT}/entitlement-changes/{{entitlement_change_id}}/revert",
    summary="Undo a change of a tenant's entitlement",
    responses=problems(409),
)
async def revert_tenant_entitlement_change(
    *, tenant_id: TenantId, entitlement_change_id: ChangeId, body: RevertIn, work: CurrentLimitWork
) -> EntitlementChangeOut:
    """Put back what the change replaced, as a change of its own. A conflict when it was changed again since."""
    return await _revert(work, Owner(tenant_id), entitlement_change_id, body)


@router.get(f"{PLAN}/entitlements", summary="List what tenants on a plan weigh")
async def list_plan_entitlements(plan_id: PlanId, session: ReadSession) -> EntitlementList:
    await plans.get(session, plan_id)
    return EntitlementList(items=[_out(one) for one in await entitlements.list_of(session, Owner(plan_id=plan_id))])


@router.put(f"{PLAN}/entitlements", summary="Say what tenants on a plan weigh", responses=problems(400, 409))
async def put_plan_entitlement(plan_id: PlanId, body: WeightIn, work: CurrentLimitWork) -> EntitlementOut:
    """Say what each tenant on the plan weighs that has no weight of its own. Gateways follow within a second."""
    return await _put(work, Owner(plan_id=plan_id), body.model, Figures(body.weight), body.reason)


@router.delete(f"{PLAN}/entitlements/{{entitlement_id}}", summary="Remove a weight of a plan")
async def remove_plan_entitlement(
    *, plan_id: PlanId, entitlement_id: EntitlementId, reason: RemovalReason, work: CurrentLimitWork
) -> EntitlementOut:
    return await _remove(work, Owner(plan_id=plan_id), entitlement_id, reason)


@router.get(f"{PLAN}/entitlement-changes", summary="Read the history of a plan's weights")
async def list_plan_entitlement_changes(
    plan_id: PlanId, session: ReadSession, paging: CurrentPaging
) -> EntitlementChangePage:
    await plans.get(session, plan_id)
    return await _changes(session, Owner(plan_id=plan_id), paging)


@router.post(
    f"{PLAN}/entitlement-changes/{{entitlement_change_id}}/revert",
    summary="Undo a change of a plan's weight",
    responses=problems(409),
)
async def revert_plan_entitlement_change(
    *, plan_id: PlanId, entitlement_change_id: ChangeId, body: RevertIn, work: CurrentLimitWork
) -> EntitlementChangeOut:
    """Put back what the change replaced, as a change of its own. A conflict when it was changed again since."""
    return await _revert(work, Owner(plan_id=plan_id), entitlement_change_id, body)
