"""Identity providers: whom we let vouch for people, and what their groups give. A client secret is never read back."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from core.sealing import NONCE_BYTES, seal, unseal
from tenants import identity_queries as queries
from tenants import projects, tenants
from tenants.errors import invalid, not_found
from tenants.identity_tables import GroupMappingRow, IdentityProviderRow
from tenants.oidc.claims import Grant, GroupMapping
from tenants.oidc.fetch import check_url
from tenants.oidc.flow import Registration
from tenants.types import OperatorRole, Role

MAPPINGS_MAX = 1000
DOMAINS_MAX = 100
SHOWN_MAX = 100
DEFAULT_SCOPES = "openid email profile"
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "scopes": DEFAULT_SCOPES,
        "groups_claim": "",
        "email_domains": (),
        "link_by_email": False,
        "default_role": None,
        "gateway_audience": "",
        "enabled": True,
    }
)
_PLAIN = frozenset({"name", "client_id", *_DEFAULTS})  # kept as they are given


@dataclass(frozen=True, slots=True)
class IdentityProvider:
    """A provider as people see it. Without `tenant_id` it is the platform's, else that tenant's own.

    `default_role` is what everybody has in that tenant who signs in by it. `email_domains` empty: all.
    """

    id: UUID
    tenant_id: UUID | None
    name: str
    issuer: str
    client_id: str
    has_secret: bool
    scopes: str
    groups_claim: str
    email_domains: tuple[str, ...]
    link_by_email: bool
    default_role: Role | None
    gateway_audience: str
    enabled: bool
    created_at: datetime

    @property
    def origin(self) -> str:
        """How memberships that this provider gives are marked."""
        return f"oidc:{self.id.hex}"

    @property
    def default_grant(self) -> Grant | None:
        if self.tenant_id is None or self.default_role is None:
            return None
        return Grant(self.tenant_id, None, self.default_role)


def provider_of(row: IdentityProviderRow) -> IdentityProvider:
    return IdentityProvider(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        issuer=row.issuer,
        client_id=row.client_id,
        has_secret=bool(row.client_secret),
        scopes=row.scopes,
        groups_claim=row.groups_claim,
        email_domains=tuple(row.email_domains),
        link_by_email=row.link_by_email,
        default_role=None if row.default_role is None else Role(row.default_role),
        gateway_audience=row.gateway_audience,
        enabled=row.enabled,
        created_at=row.created_at,
    )


def _sealed(sealing_key: bytes, provider_id: UUID, secret: str) -> bytes:
    if not secret:
        return b""
    return seal(sealing_key, secret.encode(), context=provider_id.bytes, nonce=os.urandom(NONCE_BYTES))


def _checked(row: IdentityProviderRow) -> None:
    """Raise invalid for what no provider can be."""
    if "openid" not in row.scopes.split():
        raise invalid("scopes", "The scope openid must be among the scopes.")
    if row.default_role is not None and row.tenant_id is None:
        raise invalid("default_role", "Only a tenant's own provider has a default role: name the tenant.")
    well_formed = all("@" not in domain and domain == domain.lower().strip() and domain for domain in row.email_domains)
    if len(row.email_domains) > DOMAINS_MAX or not well_formed:
        raise invalid("email_domains", f"At most {DOMAINS_MAX} domains in lower case, such as example.com.")
    if row.tenant_id is not None and row.link_by_email and not row.email_domains:
        raise invalid("link_by_email", "A tenant's own provider may link accounts of its own e-mail domains only.")


async def _flush(session: AsyncSession, row: IdentityProviderRow) -> IdentityProvider:
    _checked(row)
    if not await queries.flush_unique(session):
        message = "Another provider has this name, or this issuer with the same client or gateway audience."
        raise PlatformError("PROVIDER_EXISTS", ErrorKind.CONFLICT, message)
    await session.refresh(row)
    await record_config_change(session, "identity_provider", row.id)
    return provider_of(row)


async def create(
    session: AsyncSession,
    settings: Mapping[str, Any],
    *,
    issuer: str,
    client_secret: str,
    sealing_key: bytes,
    loopback: bool,
    tenant_id: UUID | None = None,
) -> IdentityProvider:
    """Make a provider. `settings` has at least its `name` and our `client_id`.

    Nothing is fetched: see `oidc.discovery.discover`.

    Raises:
        PlatformError: invalid settings or issuer; not_found for a tenant; conflict with another provider.
    """
    try:
        check_url(issuer, loopback=loopback)
    except PlatformError:
        raise invalid("issuer", "The issuer must be an https address of another host, without fragment.") from None
    if "?" in issuer:
        raise invalid("issuer", "An issuer has no query.")
    if tenant_id is not None:
        await tenants.get(session, tenant_id)
    provider_id = new_uuid()
    row = IdentityProviderRow(
        id=provider_id,
        tenant_id=tenant_id,
        issuer=issuer,
        client_secret=_sealed(sealing_key, provider_id, client_secret),
        **{**_DEFAULTS, **_plain(settings)},
    )
    session.add(row)
    return await _flush(session, row)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in _PLAIN}


async def update(
    session: AsyncSession, provider_id: UUID, changes: Mapping[str, Any], *, sealing_key: bytes, now: datetime
) -> tuple[IdentityProvider, IdentityProvider]:
    """Change a provider and return it as it was and as it is; disabling one ends the sessions that it opened.

    `changes` may have a `client_secret`, which replaces the one before; issuer and tenant stay for ever.

    Raises:
        PlatformError: not_found, invalid, or conflict with another provider.
    """
    row = await _row(session, provider_id)
    before = provider_of(row)
    for name, value in _plain(changes).items():
        setattr(row, name, value)
    if changes.get("client_secret") is not None:
        row.client_secret = _sealed(sealing_key, provider_id, changes["client_secret"])
    after = await _flush(session, row)
    if before.enabled and not after.enabled:
        await queries.end_sessions_of(session, provider_id, now)
    return before, after


async def delete(session: AsyncSession, provider_id: UUID, *, now: datetime) -> IdentityProvider:
    """Delete a provider with the identities, memberships and operators that come from it; its sessions end.

    The people stay, with what else they have.

    Raises:
        PlatformError: not_found.
    """
    found = provider_of(await _row(session, provider_id))
    await queries.end_sessions_of(session, provider_id, now)
    for person_id in await queries.delete_provider(session, provider_id, found.origin):
        await record_config_change(session, "person", person_id)
    await record_config_change(session, "identity_provider", provider_id)
    return found


async def get(session: AsyncSession, provider_id: UUID) -> IdentityProvider:
    """Return a provider.

    Raises:
        PlatformError: not_found.
    """
    return provider_of(await _row(session, provider_id))


async def list_providers(session: AsyncSession, *, after: UUID | None, limit: int) -> Sequence[IdentityProvider]:
    """Return at most `limit` providers, newest first, disabled ones too."""
    return [provider_of(row) for row in await queries.providers(session, after, limit)]


async def shown(session: AsyncSession, domain: str) -> Sequence[IdentityProvider]:
    """Return what the sign-in page offers: the platform's providers, and those of tenants for this e-mail domain."""
    return [provider_of(row) for row in await queries.providers_shown(session, domain.lower(), SHOWN_MAX)]


async def registration(session: AsyncSession, provider_id: UUID, *, sealing_key: bytes) -> Registration | None:
    """Return us as this provider knows us, with the secret; None when it is disabled or gone."""
    row = await queries.provider(session, provider_id)
    if row is None or not row.enabled:
        return None
    sealed = row.client_secret
    secret = unseal(sealing_key, sealed, context=row.id.bytes).decode() if sealed else ""
    return Registration(row.issuer, row.client_id, secret, row.scopes)


async def mappings(session: AsyncSession, provider_id: UUID) -> tuple[GroupMapping, ...]:
    """Return what the groups of a provider give."""
    return tuple(mapping_of(row) for row in await queries.mappings(session, [provider_id]))


def mapping_of(row: GroupMappingRow) -> GroupMapping:
    if row.tenant_id is None or row.role is None:
        return GroupMapping(row.group_name, operator_role=OperatorRole(row.operator_role or ""))
    return GroupMapping(row.group_name, grant=Grant(row.tenant_id, row.project_id, Role(row.role)))


async def set_mappings(session: AsyncSession, provider_id: UUID, wanted: Sequence[GroupMapping]) -> IdentityProvider:
    """Replace what the groups of a provider give; it counts at each person's next sign-in or refresh.

    Raises:
        PlatformError: not_found for the provider, a tenant or a project; invalid for too many, for the same twice, and
            when a tenant's own provider would give anything but roles in that tenant.
    """
    found = await get(session, provider_id)
    if len(wanted) > MAPPINGS_MAX or len(set(wanted)) < len(wanted):
        raise invalid("mappings", f"At most {MAPPINGS_MAX} mappings, each once.")
    await queries.delete_mappings(session, provider_id)
    for mapping in wanted:
        grant = mapping.grant
        if found.tenant_id is not None and (grant is None or grant.tenant_id != found.tenant_id):
            raise invalid("mappings", "A tenant's own provider gives roles in that tenant only.")
        if grant is not None:
            await tenants.get(session, grant.tenant_id)
            if grant.project_id is not None:
                await projects.get(session, grant.tenant_id, grant.project_id)
        session.add(
            GroupMappingRow(
                id=new_uuid(),
                provider_id=provider_id,
                group_name=mapping.group,
                operator_role=mapping.operator_role,
                tenant_id=grant and grant.tenant_id,
                project_id=grant and grant.project_id,
                role=grant and grant.role,
            )
        )
    await session.flush()
    await record_config_change(session, "identity_provider", provider_id)
    return found


async def _row(session: AsyncSession, provider_id: UUID) -> IdentityProviderRow:
    row = await queries.provider(session, provider_id)
    if row is None:
        raise not_found(IdKind.IDENTITY_PROVIDER)
    return row
