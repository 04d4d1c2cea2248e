"""Members: limits of their organisation, its projects and keys, and requests for higher ones."""

from dataclasses import replace
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import (
    CurrentCaller,
    CurrentPaging,
    CurrentServices,
    KeyId,
    ProjectId,
    ReadSession,
    TenantId,
)
from api.guard import Caller, GuardedRoute
from api.limits import (
    Amount,
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
    LimitRequestId,
    LimitRequestOut,
    LimitRequestPage,
    MetricName,
    ModelName,
    RemovalReason,
    RevertIn,
    change_page,
    effective_of,
    limit_list,
    put,
    request_out,
    request_page,
    slot_of,
    take_away,
    undo,
)
from api.permissions import MY_TENANT
from api.schemas import (
    Input,
    Reason,
    because,
    problems,
)
from catalog import models
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, parse_id
from core.pagination import page_of
from tenants import api_keys, limit_requests, limits, own_limits, projects
from tenants.errors import not_found
from tenants.roles import Permission
from tenants.types import ApiKey, LimitAuthor, LimitLevel, LimitSlot

router = APIRouter(route_class=GuardedRoute, tags=["your limits"])

LIMITS = f"{MY_TENANT}/limits"
OF_PROJECT = f"{MY_TENANT}/projects/{{project_id}}/limits"
OF_KEY = f"{MY_TENANT}/projects/{{project_id}}/keys/{{key_id}}/limits"
REQUESTS = f"{MY_TENANT}/limit-requests"


class LimitRequestIn(Input):
    """A higher hard limit for a key, a project, or with neither for the whole organisation."""

    metric: MetricName
    amount: Amount
    model: ModelName = ""
    project_id: Annotated[str | None, Field(max_length=64)] = None
    key_id: Annotated[str | None, Field(max_length=64)] = None
    reason: Reason


async def _key(session: AsyncSession, tenant_id: UUID, project_id: UUID, key_id: UUID) -> ApiKey:
    """Return the key when it is of the project: the caller's rights are those of the project in the path."""
    key = await api_keys.get(session, tenant_id, key_id)
    if key.project_id != project_id:
        raise not_found(IdKind.API_KEY)
    return key


@router.get(LIMITS, summary="List your organisation's limits")
async def list_my_limits(tenant_id: TenantId, session: ReadSession) -> LimitList:
    """Return its own limits and those for each of its projects or keys; those of its plan are in the effective view."""
    return limit_list(await limits.list_at(session, tenant_id=tenant_id))


@router.put(LIMITS, summary="Set a limit of your own", responses=problems(400, 409))
async def set_my_limit(tenant_id: TenantId, body: LevelLimitIn, work: CurrentLimitWork) -> LimitOut:
    """Set a stricter limit for the organisation, or with a level for each of its projects or keys."""
    slot = replace(await slot_of(work.session, body, body.level), tenant_id=tenant_id)
    return await put(work, own_limits, slot, body)


@router.delete(f"{LIMITS}/{{limit_id}}", summary="Remove a limit of your own")
async def remove_my_limit(
    *,
    tenant_id: TenantId,
    limit_id: LimitId,
    reason: RemovalReason,
    work: CurrentLimitWork,
) -> LimitOut:
    return await take_away(work, own_limits, await limits.get(work.session, tenant_id, limit_id), reason)


@router.get(OF_PROJECT, summary="List a project's own limits")
async def list_my_project_limits(tenant_id: TenantId, project_id: ProjectId, session: ReadSession) -> LimitList:
    return limit_list(await limits.list_at(session, tenant_id=tenant_id, project_id=project_id))


@router.put(OF_PROJECT, summary="Set a limit of a project", responses=problems(400, 409))
async def set_my_project_limit(
    *, tenant_id: TenantId, project_id: ProjectId, body: LimitIn, work: CurrentLimitWork
) -> LimitOut:
    """Set a stricter limit for the project than it has."""
    slot = replace(await slot_of(work.session, body, LimitLevel.PROJECT), tenant_id=tenant_id, project_id=project_id)
    return await put(work, own_limits, slot, body)


@router.delete(f"{OF_PROJECT}/{{limit_id}}", summary="Remove a limit of a project or of one of its keys")
async def remove_my_project_limit(
    *,
    tenant_id: TenantId,
    project_id: ProjectId,
    limit_id: LimitId,
    reason: RemovalReason,
    work: CurrentLimitWork,
) -> LimitOut:
    rule = await limits.get(work.session, tenant_id, limit_id)
    if rule.slot.key_id is not None:
        await _key(work.session, tenant_id, project_id, rule.slot.key_id)
    elif rule.slot.project_id != project_id:
        raise not_found(IdKind.LIMIT)
    return await take_away(work, own_limits, rule, reason)


@router.get(f"{OF_PROJECT}/effective", summary="Read what limits hold for a project")
async def get_my_effective_project_limits(
    tenant_id: TenantId, project_id: ProjectId, session: ReadSession, services: CurrentServices
) -> EffectiveList:
    """Return what holds for a key of the project that has no limits of its own, and where each limit comes from."""
    project = await projects.get(session, tenant_id, project_id)
    return await effective_of(session, tenant_id, project.id, None, services.clock)


@router.get(OF_KEY, summary="List a key's own limits")
async def list_my_key_limits(
    tenant_id: TenantId, project_id: ProjectId, key_id: KeyId, session: ReadSession
) -> LimitList:
    key = await _key(session, tenant_id, project_id, key_id)
    return limit_list(await limits.list_at(session, tenant_id=tenant_id, key_id=key.id))


@router.put(OF_KEY, summary="Set a limit of a key", responses=problems(400, 409))
async def set_my_key_limit(
    *,
    tenant_id: TenantId,
    project_id: ProjectId,
    key_id: KeyId,
    body: LimitIn,
    work: CurrentLimitWork,
) -> LimitOut:
    """Set a stricter limit for the key than it has."""
    key = await _key(work.session, tenant_id, project_id, key_id)
    slot = replace(await slot_of(work.session, body, LimitLevel.KEY), tenant_id=tenant_id, key_id=key.id)
    return await put(work, own_limits, slot, body)


@router.get(f"{OF_KEY}/effective", summary="Read what limits hold for a key")
async def get_my_effective_key_limits(
    tenant_id: TenantId, project_id: ProjectId, key_id: KeyId, session: ReadSession, services: CurrentServices
) -> EffectiveList:
    """Return every limit that a request with this key must pass, and where each comes from."""
    key = await _key(session, tenant_id, project_id, key_id)
    return await effective_of(session, tenant_id, project_id, key.id, services.clock)


@router.get(f"{MY_TENANT}/limit-changes", summary="Read the history of your own limits")
async def list_my_limit_changes(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> LimitChangePage:
    found = await limits.list_changes(
        session, tenant_id, after=paging.after, limit=paging.limit_probe, author=LimitAuthor.TENANT
    )
    page = page_of(found, paging.limit, lambda change: change.id)
    return change_page(page.items, page.next_after)


@router.post(
    f"{MY_TENANT}/limit-changes/{{limit_change_id}}/revert",
    summary="Undo a change of a limit of your own",
    responses=problems(409),
)
async def revert_my_limit_change(
    *,
    tenant_id: TenantId,
    limit_change_id: LimitChangeId,
    body: RevertIn,
    work: CurrentLimitWork,
) -> LimitChangeOut:
    return await undo(work, own_limits, await limits.get_change(work.session, tenant_id, limit_change_id), body)


async def _asked(session: AsyncSession, tenant_id: UUID, body: LimitRequestIn, caller: Caller) -> LimitSlot:
    """Return what is asked for, when the caller may ask for it there."""
    project_id = None if body.project_id is None else parse_id(IdKind.PROJECT, body.project_id)
    key_id = None if body.key_id is None else parse_id(IdKind.API_KEY, body.key_id)
    where = project_id
    if key_id is not None:
        where = (await api_keys.get(session, tenant_id, key_id)).project_id
    if not caller.rights.allow(Permission.LIMIT_REQUEST, where):
        raise PlatformError(
            "FORBIDDEN", ErrorKind.FORBIDDEN, "You may ask for higher limits of your own projects only."
        )
    level = LimitLevel.KEY if key_id else LimitLevel.PROJECT if project_id else LimitLevel.TENANT
    model = await models.own_name(session, body.model) if body.model else ""
    return LimitSlot(
        level,
        body.metric,
        model=model,
        project_id=None if key_id else project_id,
        key_id=key_id,
        tenant_id=tenant_id,
    )


@router.post(REQUESTS, status_code=201, summary="Ask for a higher limit", responses=problems(400, 409))
async def ask_for_limit(
    *,
    tenant_id: TenantId,
    body: LimitRequestIn,
    work: CurrentLimitWork,
    caller: CurrentCaller,
) -> LimitRequestOut:
    """Ask; an operator answers with a note, which stands in the request."""
    slot = await _asked(work.session, tenant_id, body, caller)
    amount = limits.parse_amount(body.metric, body.amount)
    made = await limit_requests.ask(work.session, slot, amount, work.why(body.reason))
    work.act.on(made.id, level=slot.level.value, metric=slot.metric.value, amount=body.amount, **because(body.reason))
    return request_out(made)


@router.get(REQUESTS, summary="List requests for higher limits")
async def list_my_limit_requests(
    tenant_id: TenantId, session: ReadSession, caller: CurrentCaller, paging: CurrentPaging
) -> LimitRequestPage:
    """Return all requests of the organisation; to whoever sees only some of its projects, their own."""
    found = await limit_requests.list_requests(
        session, tenant_id, asked_by=_only(caller), after=paging.after, limit=paging.limit_probe
    )
    page = page_of(found, paging.limit, lambda request: request.id)
    return request_page(page.items, page.next_after)


@router.get(f"{REQUESTS}/{{limit_request_id}}", summary="Read a request for a higher limit")
async def get_my_limit_request(
    tenant_id: TenantId, limit_request_id: LimitRequestId, session: ReadSession, caller: CurrentCaller
) -> LimitRequestOut:
    found = await limit_requests.get(session, tenant_id, limit_request_id)
    only = _only(caller)
    if only is not None and found.asked_by_id != only:
        raise not_found(IdKind.LIMIT_REQUEST)
    return request_out(found)


def _only(caller: Caller) -> UUID | None:
    """Whose requests the caller sees; None: all of the tenant's."""
    return None if caller.rights.allow(Permission.LIMIT_READ) else caller.actor("").id
