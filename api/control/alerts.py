"""Members: budgets as they stand, crossings of their thresholds, alerts on credit, and what is told."""

from fastapi import APIRouter

from api.alerts import (
    BUDGETS_DEFAULT,
    AlertSettingsIn,
    AlertSettingsOut,
    BudgetsMax,
    BudgetsOut,
    CreditAlertPage,
    CrossingPage,
    budgets_of,
    credit_alerts_of,
    crossings_of,
    put_settings,
    settings_of,
)
from api.deps import (
    CurrentAct,
    CurrentCaller,
    CurrentPaging,
    CurrentServices,
    ReadSession,
    Session,
    TenantId,
    changed,
)
from api.guard import GuardedRoute
from api.permissions import MY_TENANT
from api.schemas import problems
from tenants.roles import Permission

router = APIRouter(route_class=GuardedRoute, tags=["your limits"])


@router.get(f"{MY_TENANT}/budgets", summary="Read what is spent of your budgets")
async def list_my_budgets(
    tenant_id: TenantId,
    session: ReadSession,
    caller: CurrentCaller,
    services: CurrentServices,
    limit: BudgetsMax = BUDGETS_DEFAULT,
) -> BudgetsOut:
    """Return the budgets in use; to whoever sees only some projects, theirs and their keys'."""
    visible = caller.rights.projects_with(Permission.LIMIT_READ)
    return await budgets_of(session, tenant_id, visible, limit, services.clock.now())


@router.get(f"{MY_TENANT}/budget-crossings", summary="List thresholds that your budgets reached")
async def list_my_crossings(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging
) -> CrossingPage:
    """Return crossings; to whoever sees only some projects, those of their budgets and their keys'."""
    return await crossings_of(session, tenant_id, caller.rights.projects_with(Permission.LIMIT_READ), paging)


@router.get(f"{MY_TENANT}/credit-alerts", summary="List alerts on your credit")
async def list_my_credit_alerts(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> CreditAlertPage:
    return await credit_alerts_of(session, tenant_id, paging)


@router.get(f"{MY_TENANT}/alert-settings", summary="Read what your people are told about")
async def get_my_alert_settings(tenant_id: TenantId, session: ReadSession) -> AlertSettingsOut:
    return await settings_of(session, tenant_id)


@router.put(f"{MY_TENANT}/alert-settings", summary="Say what your people are told about", responses=problems(400))
async def put_my_alert_settings(
    tenant_id: TenantId, body: AlertSettingsIn, session: Session, act: CurrentAct
) -> AlertSettingsOut:
    """Owners, admins and finance are told by mail; of a project's budgets, those of the project, if it has any."""
    before, after = await put_settings(session, tenant_id, body)
    act.on(tenant_id, **changed(before, after))
    return after
