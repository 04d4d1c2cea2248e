"""Members: their tenant."""

from datetime import datetime

from fastapi import APIRouter

from api.deps import ReadSession, TenantId
from api.guard import GuardedRoute
from api.permissions import MY_TENANT
from api.schemas import BillingModeName, CurrencyCode, Output, StatusName
from core.ids import IdKind, format_id
from tenants import tenants
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
