"""API keys: mint, list, revoke. The secret is returned once, by `create`, and kept nowhere."""

import ipaddress
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import record_config_change
from core.ids import IdKind, new_uuid
from core.tiers import Tier
from tenants import credentials, projects, queries
from tenants.credentials import API_KEY_PREFIX
from tenants.errors import invalid, not_found
from tenants.roles import Rights
from tenants.tables import ApiKeyRow
from tenants.types import ApiKey, KeyLimits, Scope

VISIBLE_PREFIX = len(API_KEY_PREFIX) + 4
PATTERNS_MAX = 64
NETWORKS_MAX = 64

digest = credentials.digest


def mint() -> str:
    """Return a fresh key: ``tg_``, 40 random base62 characters, 6 of their CRC-32."""
    return credentials.mint(API_KEY_PREFIX)


def well_formed(text: str) -> bool:
    """Say offline whether `text` can be a key of ours; a typo is not."""
    return credentials.well_formed(API_KEY_PREFIX, text)


def _checked(limits: KeyLimits) -> KeyLimits:
    if limits.tier_default > limits.tier_max:
        raise invalid("tier_default", "The default tier is above the highest tier of the key.")
    if not limits.scopes:
        raise invalid("scopes", "A key without a scope can do nothing. Name at least one.")
    if len(limits.model_patterns) > PATTERNS_MAX or not all(0 < len(p) <= 128 for p in limits.model_patterns):
        raise invalid("model_patterns", f"At most {PATTERNS_MAX} patterns of 1 to 128 characters.")
    if len(limits.allowed_networks) > NETWORKS_MAX:
        raise invalid("allowed_networks", f"At most {NETWORKS_MAX} networks.")
    for network in limits.allowed_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError:
            raise invalid("allowed_networks", f"{network[:64]!r} is not a network such as 10.0.0.0/8.") from None
    return limits


def _api_key(row: ApiKeyRow) -> ApiKey:
    limits = KeyLimits(
        scopes=frozenset(Scope(scope) for scope in row.scopes),
        tier_default=Tier(row.tier_default),
        tier_max=Tier(row.tier_max),
        model_patterns=tuple(row.model_patterns),
        allowed_networks=tuple(row.allowed_networks),
        expires_at=row.expires_at,
    )
    return ApiKey(
        id=row.id,
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        name=row.name,
        prefix=row.prefix,
        last4=row.last4,
        limits=limits,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


async def create(
    session: AsyncSession,
    tenant_id: UUID,
    project_id: UUID,
    *,
    name: str,
    pepper: bytes,
    limits: KeyLimits | None = None,
    secret: str | None = None,
) -> tuple[ApiKey, str]:
    """Make a key in a project of the tenant.

    `secret` is given only by the embedded runtime, which keeps the demo key in a file of mode 600.

    Returns:
        The key, and its secret, which nobody can ask for again.

    Raises:
        PlatformError: not_found for a project that is not the tenant's; invalid limits.
    """
    project = await projects.get(session, tenant_id, project_id)
    wanted = _checked(limits or KeyLimits())
    secret = mint() if secret is None else secret
    if not well_formed(secret):
        raise ValueError("an API key is made by mint()")
    row = ApiKeyRow(
        id=new_uuid(),
        tenant_id=tenant_id,
        project_id=project.id,
        name=name,
        prefix=secret[:VISIBLE_PREFIX],
        last4=secret[-4:],
        digest=digest(pepper, secret),
        scopes=sorted(wanted.scopes),
        tier_default=int(wanted.tier_default),
        tier_max=int(wanted.tier_max),
        model_patterns=list(wanted.model_patterns),
        allowed_networks=list(wanted.allowed_networks),
        expires_at=wanted.expires_at,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    await record_config_change(session, "api_key", row.id)
    return _api_key(row), secret


async def get(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKey:
    row = await queries.api_key(session, tenant_id, key_id)
    if row is None:
        raise not_found(IdKind.API_KEY)
    return _api_key(row)


async def list_keys(session: AsyncSession, tenant_id: UUID, *, after: UUID | None, limit: int) -> Sequence[ApiKey]:
    """Return at most `limit` keys of the tenant, newest first, revoked ones too."""
    return [_api_key(row) for row in await queries.api_keys(session, tenant_id, after, limit)]


async def revoke(session: AsyncSession, tenant_id: UUID, key_id: UUID, *, clock: Clock) -> ApiKey:
    """End a key for good; gateways refuse it within a second of the commit. Again is the same as once."""
    row = await queries.api_key(session, tenant_id, key_id)
    if row is None:
        raise not_found(IdKind.API_KEY)
    if row.revoked_at is None:
        row.revoked_at = clock.now()
        await session.flush()
        await record_config_change(session, "api_key", key_id)
    return _api_key(row)


async def rights_of(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> Rights:
    """Return what a key with the scope manage may do: what its owner may, and nothing without an owner."""
    await get(session, tenant_id, key_id)
    return Rights()


async def mark_used(session: AsyncSession, uses: Sequence[tuple[UUID, UUID, datetime]]) -> None:
    """Note when keys were used last, each as tenant, key and instant; an earlier instant than known changes nothing."""
    if uses:
        await queries.mark_used(session, uses)
