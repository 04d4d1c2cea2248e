"""Members: their organisation, its money, and its end."""

from datetime import datetime

from fastapi import APIRouter

from api.adjustments import LotsOut, lots_of
from api.billing_profiles import BillingProfileIn, BillingProfileOut, CloseIn, shown
from api.deps import CurrentAct, CurrentServices, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.money import (
    ENTRIES_DEFAULT,
    Day,
    From,
    Offset,
    PageSize,
    StatementOut,
    Until,
    balance_of,
    statement_of,
    usage_of,
)
from api.permissions import MY_TENANT
from api.schemas import BalanceOut, BillingModeName, CurrencyCode, Input, Name, Output, StatusName, UsageOut, problems
from core.ids import IdKind, format_id
from tenants import billing_profiles, closing, tenants
from tenants.types import Tenant

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


class MyTenantOut(Output):
    """The organisation as its members see it."""

    id: str
    name: str
    currency: CurrencyCode
    tz: str
    status: StatusName
    billing_mode: BillingModeName
    created_at: datetime


def _out(tenant: Tenant) -> MyTenantOut:
    return MyTenantOut(
        id=format_id(IdKind.TENANT, tenant.id),
        name=tenant.name,
        currency=tenant.currency.value,
        tz=tenant.tz,
        status=tenant.status,
        billing_mode=tenant.billing_mode,
        created_at=tenant.created_at,
    )


@router.get(MY_TENANT, summary="Read your organisation")
async def get_my_tenant(tenant_id: TenantId, session: ReadSession) -> MyTenantOut:
    return _out(await tenants.get(session, tenant_id))


class MyTenantChange(Input):
    """The new name."""

    name: Name


@router.patch(MY_TENANT, summary="Rename your organisation", responses=problems(409))
async def update_my_tenant(tenant_id: TenantId, body: MyTenantChange, session: Session, act: CurrentAct) -> MyTenantOut:
    before = _out(await tenants.get(session, tenant_id))
    after = _out(await tenants.update(session, tenant_id, name=body.name))
    act.on(tenant_id, **changed(before, after))
    return after


@router.get(f"{MY_TENANT}/balance", summary="Read your organisation's balance")
async def get_my_balance(tenant_id: TenantId, session: ReadSession) -> BalanceOut:
    return await balance_of(session, tenant_id)


@router.get(f"{MY_TENANT}/credit-lots", summary="List your organisation's credit lots")
async def list_my_credit_lots(tenant_id: TenantId, session: ReadSession) -> LotsOut:
    return await lots_of(session, tenant_id)


@router.get(f"{MY_TENANT}/statement", summary="Read your organisation's statement of account", responses=problems(400))
async def get_my_statement(
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


@router.get(f"{MY_TENANT}/usage", summary="Read your organisation's usage by day and model", responses=problems(400))
async def get_my_usage(
    tenant_id: TenantId, session: ReadSession, services: CurrentServices, start: Day = None, end: Day = None
) -> UsageOut:
    return await usage_of(session, tenant_id, start, end, services.clock)


@router.get(f"{MY_TENANT}/billing-profile", summary="Read your billing profile")
async def get_my_billing_profile(tenant_id: TenantId, session: ReadSession) -> BillingProfileOut:
    return shown(await billing_profiles.get(session, tenant_id))


@router.put(f"{MY_TENANT}/billing-profile", summary="Replace your billing profile", responses=problems(400))
async def put_my_billing_profile(
    tenant_id: TenantId, body: BillingProfileIn, session: Session, act: CurrentAct, services: CurrentServices
) -> BillingProfileOut:
    before = shown(await billing_profiles.get(session, tenant_id))
    after = shown(await billing_profiles.put(session, tenant_id, body.profile(), now=services.clock.now()))
    act.on(tenant_id, changed=sorted(changed(before, after)))  # no values: they are forgotten one day, the trail is not
    return after


@router.post(f"{MY_TENANT}/close", status_code=204, summary="Close your organisation for good", responses=problems(400))
async def close_my_tenant(
    tenant_id: TenantId, body: CloseIn, session: Session, act: CurrentAct, services: CurrentServices
) -> None:
    """Revoke all keys. You can still read usage and invoices; nothing can be changed or undone."""
    await closing.close(session, tenant_id, confirm_name=body.confirm_name, now=services.clock.now())
    act.on(tenant_id)
