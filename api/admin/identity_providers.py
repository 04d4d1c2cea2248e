"""Identity providers: whom the platform lets vouch for people, and what their groups give."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, StringConstraints

from api.deps import CurrentAct, CurrentPaging, CurrentServices, IdentityProviderId, ReadSession, Session
from api.guard import GuardedRoute
from api.permissions import ADMIN, IDENTITY_PROVIDER
from api.schemas import Input, Name, Output, problems
from api.services import Services
from core.db import transaction
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from tenants import identity_providers
from tenants.errors import invalid
from tenants.identity_providers import DEFAULT_SCOPES, DOMAINS_MAX, MAPPINGS_MAX, IdentityProvider
from tenants.oidc.claims import Grant, GroupMapping
from tenants.oidc.discovery import discover
from tenants.types import OperatorRole, Role

router = APIRouter(route_class=GuardedRoute, tags=["identity providers"])

RoleName = Literal["owner", "admin", "developer", "finance", "viewer"]
OperatorRoleName = Literal["admin", "finance", "support"]
PrintableText = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
ClientId = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]
Secret = Annotated[str, StringConstraints(max_length=1024), Field(description="Write-only. Empty for a public client.")]
Scopes = Annotated[str, StringConstraints(max_length=512, pattern=r"^[\x21-\x7e]+( [\x21-\x7e]+)*$")]
GroupsClaim = Annotated[
    PrintableText,
    Field(description="Where the groups are: a claim's name, or a dotted path.", examples=["realm_access.roles"]),
]
Domain = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Domains = Annotated[list[Domain], Field(max_length=DOMAINS_MAX, description="Allowed e-mail domains; none: all.")]
Audience = Annotated[
    PrintableText, Field(description="The `aud` of this provider's tokens at the gateway; empty: none is taken.")
]


class ProviderIn(Input):
    """A new provider. Issuer and tenant stay as they are given here."""

    name: Name
    issuer: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    client_id: ClientId
    client_secret: Secret = ""
    tenant_id: str | None = Field(None, description="Whose own provider it is; null: the platform's.")
    scopes: Scopes = DEFAULT_SCOPES
    groups_claim: GroupsClaim = ""
    email_domains: Domains = Field(default_factory=list)
    link_by_email: bool = Field(
        default=False, description="Link a first sign-in to the account that has the address, when it is verified."
    )
    default_role: RoleName | None = Field(None, description="Of everybody who signs in; a tenant's provider only.")
    gateway_audience: Audience = ""
    enabled: bool = True


class ProviderChange(Input):
    """What to change; what is left out stays."""

    name: Name | None = None
    client_id: ClientId | None = None
    client_secret: Secret | None = None
    scopes: Scopes | None = None
    groups_claim: GroupsClaim | None = None
    email_domains: Domains | None = None
    link_by_email: bool | None = None
    default_role: RoleName | None = None
    gateway_audience: Audience | None = None
    enabled: bool | None = None


class ProviderOut(Output):
    """A provider, without its secret. Register `callback_url` there as the redirect address."""

    id: str
    tenant_id: str | None
    name: str
    issuer: str
    client_id: str
    has_secret: bool
    scopes: str
    groups_claim: str
    email_domains: list[str]
    link_by_email: bool
    default_role: RoleName | None
    gateway_audience: str
    enabled: bool
    callback_url: str
    created_at: datetime


class ProviderPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ProviderOut]
    next_after: str | None


class Mapping(Input):
    """What a group gives: `operator_role`, or `tenant_id` with `role` and maybe one `project_id` of it."""

    group: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    operator_role: OperatorRoleName | None = None
    tenant_id: str | None = None
    project_id: str | None = None
    role: RoleName | None = None


class Mappings(Input):
    """All of a provider's mappings."""

    items: Annotated[list[Mapping], Field(max_length=MAPPINGS_MAX)]


class Tested(Output):
    """What the issuer's discovery document says."""

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str
    end_session_endpoint: str


def callback_url(services: Services, provider_id: str) -> str:
    return f"{services.settings.base_url}/api/v1/auth/oidc/{provider_id}/callback"


def _out(services: Services, found: IdentityProvider) -> ProviderOut:
    provider_id = format_id(IdKind.IDENTITY_PROVIDER, found.id)
    return ProviderOut(
        id=provider_id,
        tenant_id=found.tenant_id and format_id(IdKind.TENANT, found.tenant_id),
        name=found.name,
        issuer=found.issuer,
        client_id=found.client_id,
        has_secret=found.has_secret,
        scopes=found.scopes,
        groups_claim=found.groups_claim,
        email_domains=list(found.email_domains),
        link_by_email=found.link_by_email,
        default_role=found.default_role and found.default_role.value,
        gateway_audience=found.gateway_audience,
        enabled=found.enabled,
        callback_url=callback_url(services, provider_id),
        created_at=found.created_at,
    )


@router.post(
    f"{ADMIN}/identity-providers", status_code=201, summary="Add an identity provider", responses=problems(404, 409)
)
async def create_identity_provider(
    body: ProviderIn, session: Session, act: CurrentAct, services: CurrentServices
) -> ProviderOut:
    """Add a provider. Nothing of it is fetched yet: see its `test`."""
    tenant_id = parse_id(IdKind.TENANT, body.tenant_id) if body.tenant_id is not None else None
    found = await identity_providers.create(
        session,
        body.model_dump(),
        issuer=body.issuer,
        client_secret=body.client_secret,
        sealing_key=services.sealing_key,
        loopback=services.settings.oidc.allow_loopback,
        tenant_id=tenant_id,
    )
    act.on(found.id, tenant_id=tenant_id, name=found.name, issuer=found.issuer)
    return _out(services, found)


@router.get(f"{ADMIN}/identity-providers", summary="List identity providers")
async def list_identity_providers(
    session: ReadSession, paging: CurrentPaging, services: CurrentServices
) -> ProviderPage:
    found = await identity_providers.list_providers(session, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda provider: provider.id)
    return ProviderPage(
        items=[_out(services, provider) for provider in page.items],
        next_after=page.next_after and format_id(IdKind.IDENTITY_PROVIDER, page.next_after),
    )


@router.get(IDENTITY_PROVIDER, summary="Read an identity provider")
async def get_identity_provider(
    identity_provider_id: IdentityProviderId, session: ReadSession, services: CurrentServices
) -> ProviderOut:
    return _out(services, await identity_providers.get(session, identity_provider_id))


@router.patch(IDENTITY_PROVIDER, summary="Change an identity provider", responses=problems(404, 409))
async def change_identity_provider(
    identity_provider_id: IdentityProviderId,
    body: ProviderChange,
    session: Session,
    act: CurrentAct,
    services: CurrentServices,
) -> ProviderOut:
    """Change a provider. Disabling it ends the sessions that it opened; gateways refuse its tokens within a second."""
    changes = body.model_dump(exclude_unset=True)
    for name, value in changes.items():
        if value is None and name != "default_role":
            raise invalid(name, "This cannot be null: leave it out to keep it.")
    before, after = await identity_providers.update(
        session, identity_provider_id, changes, sealing_key=services.sealing_key, now=services.clock.now()
    )
    act.on(after.id, tenant_id=after.tenant_id, **_changed(before, after, changes))
    return _out(services, after)


def _changed(before: IdentityProvider, after: IdentityProvider, changes: dict[str, Any]) -> dict[str, Any]:
    """Before and after of what changed; of a secret only that it was set."""
    found: dict[str, Any] = {}
    for name in changes:
        if name == "client_secret":
            found["client_secret"] = "set"  # noqa: S105 - a word, no secret
            continue
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            found[name] = [list(old), list(new)] if isinstance(old, tuple) else [old, new]
    return found


@router.delete(IDENTITY_PROVIDER, status_code=204, summary="Delete an identity provider")
async def delete_identity_provider(
    identity_provider_id: IdentityProviderId, session: Session, act: CurrentAct, services: CurrentServices
) -> None:
    """Delete a provider with the roles that it gave; its sessions end. The people stay, with what else they have."""
    found = await identity_providers.delete(session, identity_provider_id, now=services.clock.now())
    act.on(found.id, tenant_id=found.tenant_id, name=found.name, issuer=found.issuer)


@router.post(f"{IDENTITY_PROVIDER}/test", summary="Try an identity provider", responses=problems(404, 502, 503))
async def try_identity_provider(
    identity_provider_id: IdentityProviderId, _: Session, act: CurrentAct, services: CurrentServices
) -> Tested:
    """Fetch the discovery document of the issuer as saved, and nothing else."""
    async with transaction(services.sessions) as reading:  # over before the provider is called
        found = await identity_providers.get(reading, identity_provider_id)
    metadata = await discover(services.identity.fetcher, found.issuer)
    act.on(found.id, tenant_id=found.tenant_id)
    return Tested(
        authorization_endpoint=metadata.authorization_endpoint,
        token_endpoint=metadata.token_endpoint,
        jwks_uri=metadata.jwks_uri,
        userinfo_endpoint=metadata.userinfo_endpoint,
        end_session_endpoint=metadata.end_session_endpoint,
    )


@router.get(f"{IDENTITY_PROVIDER}/mappings", summary="List what a provider's groups give")
async def list_group_mappings(identity_provider_id: IdentityProviderId, session: ReadSession) -> Mappings:
    await identity_providers.get(session, identity_provider_id)
    found = await identity_providers.mappings(session, identity_provider_id)
    return Mappings(items=[_mapping_out(mapping) for mapping in found])


@router.put(f"{IDENTITY_PROVIDER}/mappings", summary="Set what a provider's groups give")
async def set_group_mappings(
    identity_provider_id: IdentityProviderId, body: Mappings, session: Session, act: CurrentAct
) -> Mappings:
    """Replace all mappings. They count at each person's next sign-in, or refresh of a session."""
    before = await identity_providers.mappings(session, identity_provider_id)
    wanted = [_mapping(item) for item in body.items]
    found = await identity_providers.set_mappings(session, identity_provider_id, wanted)
    gone, new = set(before) - set(wanted), set(wanted) - set(before)
    act.on(
        found.id,
        tenant_id=found.tenant_id,
        removed=[_mapping_out(mapping).model_dump(exclude_none=True) for mapping in sorted(gone, key=repr)],
        added=[_mapping_out(mapping).model_dump(exclude_none=True) for mapping in sorted(new, key=repr)],
    )
    return body


def _mapping(item: Mapping) -> GroupMapping:
    if item.operator_role is not None and item.tenant_id is None and item.role is None and item.project_id is None:
        return GroupMapping(item.group, operator_role=OperatorRole(item.operator_role))
    if item.operator_role is None and item.tenant_id is not None and item.role is not None:
        project_id = parse_id(IdKind.PROJECT, item.project_id) if item.project_id is not None else None
        return GroupMapping(
            item.group, grant=Grant(parse_id(IdKind.TENANT, item.tenant_id), project_id, Role(item.role))
        )
    raise invalid("items", "A mapping has either operator_role, or tenant_id and role with or without project_id.")


def _mapping_out(mapping: GroupMapping) -> Mapping:
    grant = mapping.grant
    if grant is None:
        role = mapping.operator_role
        return Mapping(group=mapping.group, operator_role=None if role is None else role.value)
    return Mapping(
        group=mapping.group,
        tenant_id=format_id(IdKind.TENANT, grant.tenant_id),
        project_id=None if grant.project_id is None else format_id(IdKind.PROJECT, grant.project_id),
        role=grant.role.value,
    )
