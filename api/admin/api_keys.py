"""Operators: API keys of any tenant. A secret is in the answer of its making and nowhere else."""

from uuid import UUID

from fastapi import APIRouter

from api import keys
from api.deps import (
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
from api.permissions import TENANT
from api.schemas import (
    NO_REASON,
    SuspendIn,
    problems,
)
from tenants import api_keys, tenants
from tenants.types import Status

router = APIRouter(route_class=GuardedRoute, tags=["API keys"])

KEY = f"{TENANT}/keys/{{key_id}}"


def _hand(caller: Caller, tenant_id: UUID) -> Hand:
    return Hand(tenant_id, caller.operator.id if caller.operator is not None else None)


@router.post(
    f"{TENANT}/projects/{{project_id}}/keys", status_code=201, summary="Create an API key", responses=problems(400)
)
async def create_api_key(
    tenant_id: TenantId,
    project_id: ProjectId,
    body: ApiKeyIn,
    work: CurrentWork,
) -> ApiKeyCreated:
    """Make a key in a project. The secret is shown here once; gateways know it within a second."""
    return await keys.make(work, _hand(work.caller, tenant_id), project_id, body, body.owner())


@router.get(f"{TENANT}/keys", summary="List and search a tenant's API keys")
async def list_api_keys(
    tenant_id: TenantId, wanted: CurrentFilter, session: ReadSession, paging: CurrentPaging
) -> ApiKeyPage:
    await tenants.get(session, tenant_id)
    return await keys.page(session, Hand(tenant_id, None), wanted, paging)


@router.post(f"{TENANT}/keys/revoke", summary="Revoke every API key that matches", responses=problems(400, 409))
async def revoke_api_keys(
    tenant_id: TenantId,
    body: BulkRevokeIn,
    work: CurrentWork,
) -> BulkRevoked:
    """Say which keys match, or with the count that was seen revoke them: at most 1,000, in one audit record."""
    await tenants.get(work.session, tenant_id)
    return await keys.revoke_many(work, _hand(work.caller, tenant_id), body)


@router.get(KEY, summary="Read an API key")
async def get_api_key(tenant_id: TenantId, key_id: KeyId, session: ReadSession) -> ApiKeyOut:
    return keys.shown(await api_keys.get(session, tenant_id, key_id))


@router.patch(KEY, summary="Change an API key", responses=problems(400, 409))
async def update_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    body: ApiKeyChange,
    work: CurrentWork,
) -> ApiKeyOut:
    """Change what is named; gateways follow within a second. A key's project never changes."""
    hand = _hand(work.caller, tenant_id)
    return await keys.change(work, hand, await keys.taken(work.session, hand, key_id), body)


@router.post(f"{KEY}/rotate", summary="Give an API key a new secret", responses=problems(400, 409))
async def rotate_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    body: RotateIn,
    work: CurrentWork,
) -> ApiKeyCreated:
    """The secret before works for the overlap, any older one ends now. Limits and usage stay the key's."""
    hand = _hand(work.caller, tenant_id)
    return await keys.rotate(work, hand, await keys.taken(work.session, hand, key_id), body)


@router.post(f"{KEY}/suspend", summary="Suspend an API key", responses=problems(409))
async def suspend_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
    body: SuspendIn = NO_REASON,
) -> ApiKeyOut:
    """Refuse the key within a second, until it is resumed. Repeating is harmless."""
    hand = _hand(work.caller, tenant_id)
    key = await keys.taken(work.session, hand, key_id)
    return await keys.set_status(work, hand, key, Status.SUSPENDED, body.reason)


@router.post(f"{KEY}/resume", summary="Resume an API key", responses=problems(409))
async def resume_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
) -> ApiKeyOut:
    hand = _hand(work.caller, tenant_id)
    key = await keys.taken(work.session, hand, key_id)
    return await keys.set_status(work, hand, key, Status.ACTIVE)


@router.post(f"{KEY}/revoke", summary="Revoke an API key")
async def revoke_api_key(
    tenant_id: TenantId,
    key_id: KeyId,
    work: CurrentWork,
    body: RevokeIn | None = None,
) -> ApiKeyOut:
    """End a key for good. Gateways refuse it within a second; streams that run end normally, unless `hard`."""
    hand = _hand(work.caller, tenant_id)
    return await keys.revoke(work, hand, await keys.taken(work.session, hand, key_id), body)
