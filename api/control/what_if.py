"""Members: what limits of their own would have refused; and what was refused in fact."""

from fastapi import APIRouter

from api.deps import CurrentAct, CurrentServices, ReadSession, Session, TenantId
from api.guard import GuardedRoute
from api.permissions import MY_TENANT
from api.refusals import RefusalList, Since, Until, refusal_list
from api.schemas import problems
from api.what_if_answers import WhatIfIn, WhatIfOut, answer, proposals_of
from tenants import tenants
from tenants.types import LimitAuthor

router = APIRouter(route_class=GuardedRoute, tags=["your limits"])


@router.post(f"{MY_TENANT}/limits/what-if", summary="Try limits on your traffic", responses=problems(400))
async def try_my_limits(
    *, tenant_id: TenantId, body: WhatIfIn, session: Session, act: CurrentAct, services: CurrentServices
) -> WhatIfOut:
    """Replay recorded traffic under limits of your own that are not set; those of your plan hold beside them."""
    tenant = await tenants.get(session, tenant_id)
    wanted = await proposals_of(session, body, tenant_id=tenant_id, author=LimitAuthor.TENANT)
    act.on(tenant_id)
    return await answer(session, services, act, body, tenants=[tenant], wanted=wanted)


@router.get(f"{MY_TENANT}/refusals", summary="Read what was refused to you", responses=problems(400))
async def list_my_refusals(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, since: Since = None, until: Until = None
) -> RefusalList:
    """Return sums by hour, model and limit; also the soft and dark limits that were passed."""
    return await refusal_list(session, services, tenant_id, since, until)
