"""Operators: a tenant's budgets as they stand, crossings of their thresholds, alerts on credit, and what is told."""

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
from api.deps import CurrentAct, CurrentPaging, CurrentServices, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import problems

router = APIRouter(route_class=GuardedRoute, tags=["limits"])


@router.get(f"{TENANT}/budgets", summary="Read what is spent of a tenant's budgets")
async def list_tenant_budgets(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, limit: BudgetsMax = BUDGETS_DEFAULT
) -> BudgetsOut:
    return await budgets_of(session, tenant_id, None, limit, services.clock.now())


@router.get(f"{TENANT}/budget-crossings", summary="List thresholds that a tenant's budgets reached")
async def list_tenant_crossings(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> CrossingPage:
    return await crossings_of(session, tenant_id, None, paging)


@router.get(f"{TENANT}/credit-alerts", summary="List alerts on a tenant's credit")
async def list_tenant_credit_alerts(
    tenant_id: TenantId, session: ReadSession, paging: CurrentPaging
) -> CreditAlertPage:
    return await credit_alerts_of(session, tenant_id, paging)


@router.get(f"{TENANT}/alert-settings", summary="Read what a tenant's people are told about")
async def get_tenant_alert_settings(tenant_id: TenantId, session: ReadSession) -> AlertSettingsOut:
    return await settings_of(session, tenant_id)


@router.put(f"{TENANT}/alert-settings", summary="Say what a tenant's people are told about", responses=problems(400))
async def put_tenant_alert_settings(
    tenant_id: TenantId, body: AlertSettingsIn, session: Session, act: CurrentAct
) -> AlertSettingsOut:
    before, after = await put_settings(session, tenant_id, body)
    act.on(tenant_id, **changed(before, after))
    return after
