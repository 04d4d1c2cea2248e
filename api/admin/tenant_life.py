"""Operators: suspend and resume tenants and projects, close a tenant, and what its invoices say."""

from fastapi import APIRouter

from api.billing_profiles import BillingProfileIn, BillingProfileOut, CloseIn, shown
from api.deps import CurrentAct, CurrentServices, ProjectId, ReadSession, Session, TenantId, changed
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import (
    SOFTLY,
    HardSuspendIn,
    because,
    problems,
)
from tenants import billing_profiles, closing, projects, tenants

router = APIRouter(route_class=GuardedRoute, tags=["tenants"])


PROJECT = f"{TENANT}/projects/{{project_id}}"


@router.post(f"{TENANT}/suspend", status_code=204, summary="Suspend a tenant", responses=problems(409))
async def suspend_tenant(tenant_id: TenantId, session: Session, act: CurrentAct, body: HardSuspendIn = SOFTLY) -> None:
    """Refuse all its calls, within a second and until resumed. Running answers end normally, unless `hard`."""
    await tenants.suspend(session, tenant_id, hard=body.hard)
    act.on(tenant_id, hard=body.hard, **because(body.reason))


@router.post(f"{TENANT}/resume", status_code=204, summary="Resume a tenant", responses=problems(409))
async def resume_tenant(tenant_id: TenantId, session: Session, act: CurrentAct) -> None:
    await tenants.resume(session, tenant_id)
    act.on(tenant_id)


@router.post(f"{TENANT}/close", status_code=204, summary="Close a tenant for good", responses=problems(400, 409))
async def close_tenant(
    tenant_id: TenantId, body: CloseIn, session: Session, act: CurrentAct, services: CurrentServices
) -> None:
    """Revoke all its keys. Usage and books stay; what is known of its people goes when the policy says so."""
    await closing.close(session, tenant_id, confirm_name=body.confirm_name, now=services.clock.now())
    act.on(tenant_id)


@router.get(f"{TENANT}/billing-profile", summary="Read a tenant's billing profile")
async def get_billing_profile(tenant_id: TenantId, session: ReadSession) -> BillingProfileOut:
    await tenants.get(session, tenant_id)
    return shown(await billing_profiles.get(session, tenant_id))


@router.put(f"{TENANT}/billing-profile", summary="Replace a tenant's billing profile", responses=problems(400))
async def put_billing_profile(
    tenant_id: TenantId, body: BillingProfileIn, session: Session, act: CurrentAct, services: CurrentServices
) -> BillingProfileOut:
    await tenants.get(session, tenant_id)
    before = shown(await billing_profiles.get(session, tenant_id))
    after = shown(await billing_profiles.put(session, tenant_id, body.profile(), now=services.clock.now()))
    act.on(tenant_id, changed=sorted(changed(before, after)))  # no values: they are forgotten one day, the trail is not
    return after


@router.post(f"{PROJECT}/suspend", status_code=204, summary="Suspend a project")
async def suspend_project(
    tenant_id: TenantId, project_id: ProjectId, session: Session, act: CurrentAct, body: HardSuspendIn = SOFTLY
) -> None:
    """Refuse all calls of its keys, within a second and until resumed. Running answers end normally, unless `hard`."""
    await projects.suspend(session, tenant_id, project_id, hard=body.hard)
    act.on(project_id, hard=body.hard, **because(body.reason))


@router.post(f"{PROJECT}/resume", status_code=204, summary="Resume a project")
async def resume_project(tenant_id: TenantId, project_id: ProjectId, session: Session, act: CurrentAct) -> None:
    await projects.resume(session, tenant_id, project_id)
    act.on(project_id)
