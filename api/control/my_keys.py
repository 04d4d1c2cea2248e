"""Members: API keys, their own or, with the right to, all of a project. A secret is shown once."""

from dataclasses import replace
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession

from api import keys
from api.deps import (
    CurrentCaller,
    CurrentPaging,
    CurrentWork,
    KeyId,
    ProjectId,
    ReadSession,
    TenantId,
)
from api.guard import Caller, GuardedRoute
from api.keys import (
    ApiKeyChange,
    ApiKeyCreated,
    ApiKeyIn,
    ApiKeyOut,
    ApiKeyPage,
    BulkRevoked,
    BulkRevokeIn,
    CurrentFilter,
    Hand,
    RevokeIn,
    RotateIn,
)
from api.permissions import MY_TENANT
from api.schemas import (
    NO_REASON,
    SuspendIn,
    problems,
)
from core.errors import ErrorKind, PlatformError
from tenants import api_keys, projects
from tenants.key_types import KeyReach
from tenants.roles import Permission
from tenants.types import NO_OWNER, ApiKey, KeyOwner, Status

router = APIRouter(route_class=GuardedRoute, tags=["your API keys"])

KEYS = f"{MY_TENANT}/keys"
KEY = f"{KEYS}/{{key_id}}"


async def _owner(session: AsyncSession, caller: Caller) -> KeyOwner:
    """Return whom the caller acts for: the person, or the owner of the key that manages."""
    if caller.principal is None:
        return KeyOwner(person_id=caller.person_id)
    return (await api_keys.get(session, caller.principal.tenant_id, caller.principal.key_id)).owner


async def _hand(session: AsyncSession, caller: Caller, tenant_id: UUID, permission: Permission) -> Hand:
    """Return what the caller reaches: with `KEY_WRITE` all keys of a project, and with less their own."""
    own = await _owner(session, caller) if permission is Permission.KEY_WRITE_OWN else NO_OWNER
    ids = await projects.ids(session, tenant_id)
    reach = KeyReach(own, frozenset(id_ for id_ in ids if caller.rights.allow(Permission.KEY_WRITE, id_)))
    actor = caller.principal.key_id if caller.principal is not None else caller.person_id
    return Hand(tenant_id, actor, reach)


async def _taken(
    session: AsyncSession,
    caller: Caller,
    tenant_id: UUID,
    key_id: UUID,
    permission: Permission = Permission.KEY_WRITE_OWN,
) -> tuple[Hand, ApiKey]:
    """Return the key, with what the caller may give in its project."""
    hand = await _hand(session, caller, tenant_id, permission)
    key = await keys.taken(session, hand, key_id)
    return replace(hand, scopes=caller.rights.scopes(key.project_id)), key


async def _check_owner(session: AsyncSession, caller: Caller, project_id: UUID, owner: KeyOwner) -> None:
    if owner != await _owner(session, caller) and not caller.rights.allow(Permission.KEY_WRITE, project_id):
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "Your role lets you have keys of your own only.")


@router.post(
    f"{MY_TENANT}/projects/{{project_id}}/keys", status_code=201, summary="Create an API key", responses=problems(400)
)
async def create_my_api_key(
    tenant_id: TenantId,
    project_id: ProjectId,
    body: ApiKeyIn,
    work: CurrentWork,
) -> ApiKeyCreated:
    """Make a key in a project, your own unless you name another owner. The secret is shown here once."""
    owner = body.owner()
    if owner == NO_OWNER:
        owner = await _owner(work.session, work.caller)
    await _check_owner(work.session, work.caller, project_id, owner)
    actor = work.caller.principal.key_id if work.caller.principal is not None else work.caller.person_id
    hand = Hand(tenant_id, actor, scopes=work.caller.rights.scopes(project_id))
    return await keys.make(work, hand, project_id, body, owner)


@router.get(KEYS, summary="List and search your API keys, or all that you may change")
async def list_my_api_keys(
    tenant_id: TenantId, wanted: CurrentFilter, session: ReadSession, paging: CurrentPaging, caller: CurrentCaller
) -> ApiKeyPage:
    hand = await _hand(session, caller, tenant_id, Permission.KEY_WRITE_OWN)
    return await keys.page(session, hand, wanted, paging)


@router.post(f"{KEYS}/revoke", summary="Revoke every API key that matches", responses=problems(400, 409))
async def revoke_my_api_keys(
    tenant_id: TenantId,
    body: BulkRevokeIn,
    work: CurrentWork,
) -> BulkRevoked:
    """Say which keys match, or with the count that was seen revoke them: at most 1,000, in one audit record."""
    hand = await _hand(work.session, work.caller, tenant_id, Permission.KEY_WRITE)
    return await keys.revoke_many(work, hand, body)


@router.get(KEY, summary="Read an API key")
async def get_my_api_key(tenant_id: TenantId, key_id: KeyId, session: ReadSession, caller: CurrentCaller) -> ApiKeyOut:
    hand = await _hand(session, caller, tenant_id, Permission.KEY_WRITE_OWN)
    return keys.shown(await keys.reached(session, hand, key_id))


@router.patch(KEY, summary="Change an API key", responses=problems(400, 409))
async def update_my_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    body: ApiKeyChange,
    work: CurrentWork,
) -> ApiKeyOut:
    """Change what is named; gateways follow within a second. A key's project never changes."""
    hand, key = await _taken(work.session, work.caller, tenant_id, key_id)
    await _check_owner(work.session, work.caller, key.project_id, body.owner(key.owner))
    return await keys.change(work, hand, key, body)


@router.post(f"{KEY}/rotate", summary="Give an API key a new secret", responses=problems(400, 409))
async def rotate_my_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    body: RotateIn,
    work: CurrentWork,
) -> ApiKeyCreated:
    """The secret before works for the overlap, any older one ends now. Limits and usage stay the key's."""
    hand, key = await _taken(work.session, work.caller, tenant_id, key_id)
    return await keys.rotate(work, hand, key, body)


@router.post(f"{KEY}/suspend", summary="Suspend an API key", responses=problems(409))
async def suspend_my_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
    body: SuspendIn = NO_REASON,
) -> ApiKeyOut:
    """Refuse the key within a second, until it is resumed. Repeating is harmless."""
    hand, key = await _taken(work.session, work.caller, tenant_id, key_id, Permission.KEY_WRITE)
    return await keys.set_status(work, hand, key, Status.SUSPENDED, body.reason)


@router.post(f"{KEY}/resume", summary="Resume an API key", responses=problems(409))
async def resume_my_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
) -> ApiKeyOut:
    hand, key = await _taken(work.session, work.caller, tenant_id, key_id, Permission.KEY_WRITE)
    return await keys.set_status(work, hand, key, Status.ACTIVE)


@router.post(f"{KEY}/revoke", summary="Revoke an API key")
async def revoke_my_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
    body: RevokeIn | None = None,
) -> ApiKeyOut:
    """End a key for good. Gateways refuse it within a second; streams that run end normally, unless `hard`."""
    hand, key = await _taken(work.session, work.caller, tenant_id, key_id)
    return await keys.revoke(work, hand, key, body)
