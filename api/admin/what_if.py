"""Operators: what other limits would have refused, before they are set; and what was refused in fact."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter

from api.deps import CurrentAct, CurrentServices, ReadSession, Session, TenantId, path_id
from api.guard import GuardedRoute
from api.permissions import PLAN, TENANT
from api.refusals import RefusalList, Since, Until, refusal_list
from api.schemas import problems
from api.what_if import TENANTS_MAX
from api.what_if_answers import WhatIfIn, WhatIfOut, answer, proposals_of
from core.ids import IdKind
from tenants import proposals, tenants

router = APIRouter(route_class=GuardedRoute, tags=["limits"])

PlanId = Annotated[UUID, path_id(IdKind.PLAN, "plan_id")]


@router.post(f"{TENANT}/limits/what-if", summary="Try limits on a tenant's traffic", responses=problems(400))
async def try_limits(
    *, tenant_id: TenantId, body: WhatIfIn, session: Session, act: CurrentAct, services: CurrentServices
) -> WhatIfOut:
    """Replay recorded traffic under limits that are not set: what would have been refused, by model, hour and limit."""
    tenant = await tenants.get(session, tenant_id)
    wanted = await proposals_of(session, body, tenant_id=tenant_id)
    act.on(tenant_id)
    return await answer(session, services, act, body, tenants=[tenant], wanted=wanted)


@router.post(f"{PLAN}/limits/what-if", summary="Try a plan's limits on its tenants' traffic", responses=problems(400))
async def try_plan_limits(
    *, plan_id: PlanId, body: WhatIfIn, session: Session, act: CurrentAct, services: CurrentServices
) -> WhatIfOut:
    """Replay the traffic of every tenant of the plan, 200 at most, each with its own limits over the plan's."""
    found = await proposals.tenants_on(session, plan_id, TENANTS_MAX)
    wanted = await proposals_of(session, body, plan_id=plan_id)
    act.on(plan_id)
    return await answer(session, services, act, body, tenants=found, wanted=wanted)


@router.get(f"{TENANT}/refusals", summary="Read what was refused to a tenant", responses=problems(400))
async def list_refusals(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, since: Since = None, until: Until = None
) -> RefusalList:
    """Return sums by hour, model and limit; also the soft and dark limits that were passed."""
    await tenants.get(session, tenant_id)
    return await refusal_list(session, services, tenant_id, since, until)
