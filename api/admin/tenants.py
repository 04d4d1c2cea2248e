"""Operators: tenants."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from api.admin.asking import asked_by
from api.deps import CurrentAct, CurrentPaging, CurrentWork, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import ADMIN, TENANT
from api.schemas import (
    BillingModeName,
    CurrencyCode,
    Input,
    Name,
    Output,
    PositiveAmount,
    Reason,
    StatusName,
    because,
    problems,
)
from billing import adjustments, ledger
from billing.adjustment_kinds import NewTerms
from billing.types import BillingMode as LedgerMode
from core.ids import IdKind, format_id
from core.money import Currency, parse_pico
from core.pagination import page_of
from tenants import tenants
from tenants.types import BillingMode, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["tenants"])

Zone = Annotated[str, Field(min_length=1, max_length=64, description="IANA time zone; days and budgets follow it.")]


class TenantIn(Input):
    """A new tenant. Currency and billing mode never change afterwards."""

    name: Name
    currency: CurrencyCode
    tz: Zone = "UTC"
    billing_mode: BillingModeName = BillingMode.PREPAID
    credit_limit: PositiveAmount = Field("0", description="How far a postpaid tenant may go; 0 for prepaid.")


class TenantChange(Input):
    """What is left out stays."""

    status: StatusName | None = None
    tz: Zone | None = None
    reason: Reason | None = None


class TenantOut(Output):
    """A tenant."""

    id: str
    name: str
    currency: CurrencyCode
    tz: str
    status: StatusName
    billing_mode: BillingModeName
    plan_id: str
    created_at: datetime


class TenantPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[TenantOut]
    next_after: str | None


def _out(tenant: Tenant) -> TenantOut:
    return TenantOut(
        id=format_id(IdKind.TENANT, tenant.id),
        name=tenant.name,
        currency=tenant.currency.value,
        tz=tenant.tz,
        status=tenant.status,
        billing_mode=tenant.billing_mode,
        plan_id=format_id(IdKind.PLAN, tenant.plan_id),
        created_at=tenant.created_at,
    )


@router.post(f"{ADMIN}/tenants", status_code=201, summary="Create a tenant", responses=problems(403, 409))
async def create_tenant(body: TenantIn, work: CurrentWork) -> TenantOut:
    """Make a tenant and open its accounts. A limit counts to what one person does alone in 24 hours."""
    session, limit_pico = work.session, parse_pico(body.credit_limit, param="credit_limit")
    tenant = await tenants.create(
        session,
        name=body.name,
        currency=Currency(body.currency),
        tz=body.tz,
        billing_mode=body.billing_mode,
    )
    await ledger.open_tenant(
        session,
        tenant.id,
        tenant.currency,
        LedgerMode(tenant.billing_mode.value),
        limit_pico,
    )
    terms = NewTerms(LedgerMode(tenant.billing_mode.value), limit_pico)
    await adjustments.count_opening(session, tenant.id, terms, await asked_by(work, "opened"))
    work.act.on(tenant.id, tenant_id=tenant.id, name=tenant.name)
    return _out(tenant)


@router.get(f"{ADMIN}/tenants", summary="List tenants")
async def list_tenants(session: ReadSession, paging: CurrentPaging) -> TenantPage:
    found = await tenants.list_tenants(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda tenant: tenant.id)
    return TenantPage(
        items=[_out(tenant) for tenant in page.items],
        next_after=page.next_after and format_id(IdKind.TENANT, page.next_after),
    )


@router.get(TENANT, summary="Read a tenant")
async def get_tenant(tenant_id: TenantId, session: ReadSession) -> TenantOut:
    return _out(await tenants.get(session, tenant_id))


@router.patch(TENANT, summary="Change a tenant")
async def update_tenant(tenant_id: TenantId, body: TenantChange, session: Session, act: CurrentAct) -> TenantOut:
    """Suspend or resume a tenant, or change its time zone. Gateways follow within a second."""
    before = _out(await tenants.get(session, tenant_id))
    after = _out(await tenants.update(session, tenant_id, status=body.status, tz=body.tz))
    act.on(tenant_id, **changed(before, after), **because(body.reason))
    return after
