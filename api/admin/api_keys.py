"""Operators: API keys of a tenant. The secret is in the answer of the creation and nowhere else."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from api.deps import CurrentAct, CurrentPaging, CurrentServices, KeyId, ProjectId, ReadSession, Session, TenantId
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import Input, Instant, Name, Output, ScopeName, TierName
from core.ids import IdKind, format_id
from core.pagination import page_of
from core.tiers import Tier
from tenants import api_keys, tenants
from tenants.errors import invalid
from tenants.types import DEFAULT_SCOPES, ApiKey, KeyLimits

router = APIRouter(route_class=GuardedRoute, tags=["API keys"])

Pattern = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")]
Network = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F:./]{1,64}$")]


class ApiKeyIn(Input):
    """A new key."""

    name: Name
    scopes: list[ScopeName] = Field(default_factory=lambda: sorted(DEFAULT_SCOPES), min_length=1, max_length=8)
    tier_default: TierName = "standard"
    tier_max: TierName = "priority"
    model_patterns: list[Pattern] = Field(
        default_factory=list, max_length=64, description="Shell patterns on model names; none means every model."
    )
    allowed_networks: list[Network] = Field(
        default_factory=list, max_length=64, description="CIDR networks; none means from anywhere."
    )
    expires_at: Instant | None = None


class ApiKeyOut(Output):
    """A key as people recognise it; the secret is not kept."""

    id: str
    tenant_id: str
    project_id: str
    name: str
    prefix: str
    last4: str
    scopes: list[ScopeName]
    tier_default: TierName
    tier_max: TierName
    model_patterns: list[str]
    allowed_networks: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class ApiKeyCreated(Output):
    """The only time the secret is shown."""

    api_key: ApiKeyOut
    secret: str = Field(description="`tg_` and 46 characters. Keep it: it cannot be shown again.")


class ApiKeyPage(Output):
    """Newest first, revoked ones too; `next_after` is null at the end."""

    items: list[ApiKeyOut]
    next_after: str | None


def _tier_name(tier: Tier) -> TierName:
    names: dict[Tier, TierName] = {Tier.BATCH: "batch", Tier.STANDARD: "standard", Tier.PRIORITY: "priority"}
    return names[tier]


def _out(key: ApiKey) -> ApiKeyOut:
    limits = key.limits
    return ApiKeyOut(
        id=format_id(IdKind.API_KEY, key.id),
        tenant_id=format_id(IdKind.TENANT, key.tenant_id),
        project_id=format_id(IdKind.PROJECT, key.project_id),
        name=key.name,
        prefix=key.prefix,
        last4=key.last4,
        scopes=sorted(limits.scopes),
        tier_default=_tier_name(limits.tier_default),
        tier_max=_tier_name(limits.tier_max),
        model_patterns=list(limits.model_patterns),
        allowed_networks=list(limits.allowed_networks),
        created_at=key.created_at,
        expires_at=limits.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )


def _limits(body: ApiKeyIn) -> KeyLimits:
    return KeyLimits(
        scopes=frozenset(body.scopes),
        tier_default=Tier[body.tier_default.upper()],
        tier_max=Tier[body.tier_max.upper()],
        model_patterns=tuple(body.model_patterns),
        allowed_networks=tuple(body.allowed_networks),
        expires_at=body.expires_at,
    )


@router.post(f"{TENANT}/projects/{{project_id}}/keys", status_code=201, summary="Create an API key")
async def create_api_key(
    *,
    tenant_id: TenantId,
    project_id: ProjectId,
    body: ApiKeyIn,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
) -> ApiKeyCreated:
    """Make a key in a project. The secret is shown here once; gateways know it within a second."""
    if body.expires_at is not None and body.expires_at <= services.clock.now():
        raise invalid("expires_at", "The key would have expired already.")
    key, secret = await api_keys.create(
        session, tenant_id, project_id, name=body.name, pepper=services.pepper, limits=_limits(body)
    )
    act.on(key.id, name=key.name, project_id=format_id(IdKind.PROJECT, project_id))
    return ApiKeyCreated(api_key=_out(key), secret=secret)


@router.get(f"{TENANT}/keys", summary="List a tenant's API keys")
async def list_api_keys(tenant_id: TenantId, session: ReadSession, paging: CurrentPaging) -> ApiKeyPage:
    await tenants.get(session, tenant_id)
    found = await api_keys.list_keys(session, tenant_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda key: key.id)
    return ApiKeyPage(
        items=[_out(key) for key in page.items],
        next_after=page.next_after and format_id(IdKind.API_KEY, page.next_after),
    )


@router.get(f"{TENANT}/keys/{{key_id}}", summary="Read an API key")
async def get_api_key(tenant_id: TenantId, key_id: KeyId, session: ReadSession) -> ApiKeyOut:
    return _out(await api_keys.get(session, tenant_id, key_id))


@router.post(f"{TENANT}/keys/{{key_id}}/revoke", summary="Revoke an API key")
async def revoke_api_key(
    tenant_id: TenantId, key_id: KeyId, session: Session, act: CurrentAct, services: CurrentServices
) -> ApiKeyOut:
    """End a key for good. Gateways refuse it within a second; streams that run end normally. Repeating is harmless."""
    key = await api_keys.revoke(session, tenant_id, key_id, clock=services.clock)
    act.on(key.id)
    return _out(key)
