"""Operators: limits of tenants, projects and keys, their history, and undoing a change of them."""

from dataclasses import replace

from fastapi import APIRouter

from api.deps import CurrentPaging, CurrentServices, KeyId, ProjectId, ReadSession, TenantId
from api.guard import GuardedRoute
from api.limits import (
    CurrentLimitWork,
    EffectiveList,
    LevelLimitIn,
    LimitChangeId,
    LimitChangeOut,
    LimitChangePage,
    LimitId,
    LimitIn,
    LimitList,
    LimitOut,
    RemovalReason,
    RevertIn,
    change_page,
    effective_of,
    limit_list,
    put,
    slot_of,
    take_away,
    undo,
)
from api.permissions import TENANT
from api.schemas import problems
from core.pagination import page_of
from tenants import api_keys, limits, projects, tenants
from tenants.types import LimitLevel

router = APIRouter(route_class=GuardedRoute, tags=["limits"])

OF_PROJECT = f"{TENANT}/projects/{{project_id}}/limits"
OF_KEY = f"{TENANT}/keys/{{key_id}}/limits"


@router.get(f"{TENANT}/limits", summary="List a tenant's limits")
async def list_tenant_limits(tenant_id: TenantId, session: ReadSession) -> LimitList:
    """Return the limits of the tenant itself, and those it has for each of its projects or keys."""
    await tenants.get(session, tenant_id)
    return limit_list(await limits.list_at(session, tenant_id=tenant_id))


@router.put(f"{TENANT}/limits", summary="Set a limit of a tenant", responses=problems(400, 409))
async def set_tenant_limit(tenant_id: TenantId, body: LevelLimitIn, work: CurrentLimitWork) -> LimitOut:
    """Set a limit of the tenant, or with a level that of each of its projects or keys. It holds within a second."""
    slot = replace(await slot_of(work.session, body, body.level), tenant_id=tenant_id)
    return await put(work, limits, slot, body)


@router.delete(f"{TENANT}/limits/{{limit_id}}", summary="Remove a limit of a tenant, project or key")
async def remove_limit(
    *,
    tenant_id: TenantId,
    limit_id: LimitId,
    reason: RemovalReason,
    work: CurrentLimitWork,
) -> LimitOut:
    """Remove a rule; what stood behind it holds again: the tenant's for each project or key, the plan's, or none."""
    return await take_away(work, limits, await limits.get(work.session, tenant_id, limit_id), reason)


@router.get(OF_PROJECT, summary="List a project's own limits")
async def list_project_limits(tenant_id: TenantId, project_id: ProjectId, session: ReadSession) -> LimitList:
    return limit_list(await limits.list_at(session, tenant_id=tenant_id, project_id=project_id))


@router.put(OF_PROJECT, summary="Set a limit of a project", responses=problems(400, 409))
async def set_project_limit(
    *, tenant_id: TenantId, project_id: ProjectId, body: LimitIn, work: CurrentLimitWork
) -> LimitOut:
    slot = replace(await slot_of(work.session, body, LimitLevel.PROJECT), tenant_id=tenant_id, project_id=project_id)
    return await put(work, limits, slot, body)


@router.get(f"{OF_PROJECT}/effective", summary="Read what limits hold for a project")
async def get_effective_project_limits(
    tenant_id: TenantId, project_id: ProjectId, session: ReadSession, services: CurrentServices
) -> EffectiveList:
    """Return what holds for a key of the project that has no limits of its own, and where each limit comes from."""
    project = await projects.get(session, tenant_id, project_id)
    return await effective_of(session, tenant_id, project.id, None, services.clock)


@router.get(OF_KEY, summary="List a key's own limits")
async def list_key_limits(tenant_id: TenantId, key_id: KeyId, session: ReadSession) -> LimitList:
    return limit_list(await limits.list_at(session, tenant_id=tenant_id, key_id=key_id))


@router.put(OF_KEY, summary="Set a limit of a key", responses=problems(400, 409))
async def set_key_limit(*, tenant_id: TenantId, key_id: KeyId, body: LimitIn, work: CurrentLimitWork) -> LimitOut:
    slot = replace(await slot_of(work.session, body, LimitLevel.KEY), tenant_id=tenant_id, key_id=key_id)
    return await put(work, limits, slot, body)


@router.get(f"{OF_KEY}/effective", summary="Read what limits hold for a key")
async def get_effective_key_limits(
    tenant_id: TenantId, key_id: KeyId, session: ReadSession, services: CurrentServices
) -> EffectiveList:
    """Return every limit that a request with this key must pass, and where each comes from."""
    key = await api_keys.get(session, tenant_id, key_id)
    return await effective_of(session, tenant_id, key.project_id, key.id, services.clock)


@router.get(f"{TENANT}/limit-changes", summary="Read the history of a tenant's limits")
async def list_limit_changes(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> LimitChangePage:
    await tenants.get(session, tenant_id)
    found = await limits.list_changes(session, tenant_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda change: change.id)
    return change_page(page.items, page.next_after)


@router.post(
    f"{TENANT}/limit-changes/{{limit_change_id}}/revert", summary="Undo a change of a limit", responses=problems(409)
)
async def revert_limit_change(
    *,
    tenant_id: TenantId,
    limit_change_id: LimitChangeId,
    body: RevertIn,
    work: CurrentLimitWork,
) -> LimitChangeOut:
    """Put back what the change replaced, as a change of its own. A conflict when the limit was changed again since."""
    return await undo(work, limits, await limits.get_change(work.session, tenant_id, limit_change_id), body)
