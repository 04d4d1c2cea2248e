"""Members: the audit trail of their organisation."""

import msgspec
from fastapi import APIRouter

from api.audit_trail import AuditPage, CurrentFilter, audit_page
from api.deps import CurrentPaging, ReadSession, TenantId
from api.guard import GuardedRoute
from api.permissions import MY_TENANT
from api.schemas import problems
from tenants import audit

router = APIRouter(route_class=GuardedRoute, tags=["your organisation"])


@router.get(f"{MY_TENANT}/audit", summary="Search your audit trail", responses=problems(400))
async def list_my_audit_records(
    tenant_id: TenantId, session: ReadSession, paging: CurrentPaging, wanted: CurrentFilter
) -> AuditPage:
    """Return what was changed in your organisation by members and keys, and that the platform's operators acted."""
    own = msgspec.structs.replace(wanted, tenant_id=tenant_id, to_members=True)
    found = await audit.search(session, own, after=paging.after, limit=paging.limit_probe)
    return audit_page(found, paging, to_members=True)
