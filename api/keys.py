"""API keys on the wire, the same for operators and for members, who reach fewer of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Depends, Query
from pydantic import Field, StringConstraints
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import Paging, Work, changed
from api.schemas import Input, Instant, Name, Output, ScopeName, TierName, because
from api.services import Services
from core.ids import IdKind, format_id, parse_id
from core.pagination import page_of
from core.tiers import Tier
from tenants import api_keys
from tenants.errors import invalid, not_found
from tenants.key_secrets import OVERLAP_MAX
from tenants.key_types import BulkRevocation, KeyFilter, KeyPolicy, KeyReach, KeyState
from tenants.types import DEFAULT_SCOPES, NO_OWNER, ApiKey, KeyLimits, KeyOwner, Scope, Status

Pattern = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,128}$")]
Network = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F:./]{1,64}$")]
IdText = Annotated[str, StringConstraints(max_length=64)]
StateName = Annotated[KeyState, Field(strict=False)]
Patterns = Annotated[
    list[Pattern], Field(max_length=64, description="Shell patterns on model names; none: every model.")
]
Networks = Annotated[list[Network], Field(max_length=64, description="CIDR networks; none: from anywhere.")]
Scopes = Annotated[
    list[ScopeName],
    Field(min_length=1, max_length=8, description="`manage` stands alone or with `usage.read`: it calls no models."),
]
OWNER_HINT = "Whose key it is; who is suspended or leaves takes the key along."
_TIER_NAMES: Mapping[Tier, TierName] = {Tier.BATCH: "batch", Tier.STANDARD: "standard", Tier.PRIORITY: "priority"}


class ApiKeyIn(Input):
    """A new key."""

    name: Name
    owner_person_id: IdText | None = Field(None, description=OWNER_HINT)
    owner_service_account_id: IdText | None = Field(None, description=OWNER_HINT)
    scopes: Scopes = Field(default_factory=lambda: sorted(DEFAULT_SCOPES))
    tier_default: TierName = "standard"
    tier_max: TierName = "priority"
    model_patterns: Patterns = Field(default_factory=list)
    allowed_networks: Networks = Field(default_factory=list)
    expires_at: Instant | None = Field(None, description="None: for ever, or as long as the platform lets keys live.")

    def limits(self) -> KeyLimits:
        return KeyLimits(
            scopes=frozenset(self.scopes),
            tier_default=Tier[self.tier_default.upper()],
            tier_max=Tier[self.tier_max.upper()],
            model_patterns=tuple(self.model_patterns),
            allowed_networks=tuple(self.allowed_networks),
            expires_at=self.expires_at,
        )

    def owner(self) -> KeyOwner:
        return _owner(self.owner_person_id, self.owner_service_account_id)


class ApiKeyChange(Input):
    """What is left out stays; a null owner or end is taken away."""

    name: Name | None = None
    owner_person_id: IdText | None = None
    owner_service_account_id: IdText | None = None
    scopes: Scopes | None = None
    tier_default: TierName | None = None
    tier_max: TierName | None = None
    model_patterns: Patterns | None = None
    allowed_networks: Networks | None = None
    expires_at: Instant | None = None

    def limits(self, before: KeyLimits) -> KeyLimits:
        after: dict[str, Any] = {}
        if self.scopes is not None:
            after["scopes"] = frozenset(self.scopes)
        for name in ("tier_default", "tier_max"):
            if (tier := getattr(self, name)) is not None:
                after[name] = Tier[tier.upper()]
        for name in ("model_patterns", "allowed_networks"):
            if (values := getattr(self, name)) is not None:
                after[name] = tuple(values)
        if "expires_at" in self.model_fields_set:
            after["expires_at"] = self.expires_at
        return replace(before, **after)

    def owner(self, before: KeyOwner) -> KeyOwner:
        named = self.model_fields_set & {"owner_person_id", "owner_service_account_id"}
        return _owner(self.owner_person_id, self.owner_service_account_id) if named else before


class RotateIn(Input):
    """How long the secret before still works."""

    overlap_s: Annotated[
        int, Field(ge=0, le=int(OVERLAP_MAX.total_seconds()), description="Seconds; 0: it ends at once.")
    ]


class RevokeIn(Input):
    """How to revoke."""

    hard: bool = Field(False, description="Cut running answers too, within a second; they are charged until then.")


class KeyFilterIn(Input):
    """Which keys; what is left out does not matter."""

    project_id: IdText | None = None
    owner_person_id: IdText | None = None
    owner_service_account_id: IdText | None = None
    status: StateName | None = None
    name: Annotated[str, StringConstraints(max_length=120)] = Field("", description="A part of the name.")
    prefix: Annotated[str, StringConstraints(max_length=12)] = Field("", description="How a secret begins.")
    last4: Annotated[str, StringConstraints(max_length=4)] = Field("", description="How a secret ends.")
    expiring_before: Instant | None = None
    unused_since: Instant | None = Field(None, description="A key never used counts from its making.")

    def wanted(self, reach: KeyReach | None) -> KeyFilter:
        return KeyFilter(
            project_id=_id(IdKind.PROJECT, self.project_id),
            owner_person_id=_id(IdKind.PERSON, self.owner_person_id),
            owner_service_account_id=_id(IdKind.SERVICE_ACCOUNT, self.owner_service_account_id),
            state=self.status,
            name=self.name,
            prefix=self.prefix,
            last4=self.last4,
            expiring_before=self.expiring_before,
            unused_since=self.unused_since,
            reach=reach,
        )


class BulkRevokeIn(Input):
    """Look first (`dry_run`), then revoke with the count that was seen."""

    filter: KeyFilterIn
    dry_run: bool = True
    expected_count: Annotated[int, Field(ge=0)] | None = Field(None, description="Needed unless it is a dry run.")
    hard: bool = False


class SecretOut(Output):
    """One secret as people recognise it; the newest first, ended ones too."""

    prefix: str
    last4: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class ApiKeyOut(Output):
    """A key as people recognise it; its secrets are not kept."""

    id: str
    tenant_id: str
    project_id: str
    name: str
    owner_person_id: str | None
    owner_service_account_id: str | None
    status: Literal["active", "suspended"]
    prefix: str
    last4: str
    secrets: list[SecretOut]
    scopes: list[ScopeName]
    tier_default: TierName
    tier_max: TierName
    model_patterns: list[str]
    allowed_networks: list[str]
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(
        description="To some minutes: when it last had an answer that was recorded, or called this API."
    )


class ApiKeyCreated(Output):
    """The only time the secret is shown."""

    api_key: ApiKeyOut
    secret: str = Field(description="`tg_` and 46 characters. Keep it: it cannot be shown again.")


class ApiKeyPage(Output):
    """Newest first, revoked ones too; `next_after` is null at the end."""

    items: list[ApiKeyOut]
    next_after: str | None


class KeyNamed(Output):
    """One key of many."""

    id: str
    name: str
    prefix: str
    last4: str


class BulkRevoked(Output):
    """Which keys were revoked, or would be."""

    done: bool
    count: int
    keys: list[KeyNamed]


def _id(kind: IdKind, text: str | None) -> UUID | None:
    return None if text is None else parse_id(kind, text)


def _owner(person_id: str | None, service_account_id: str | None) -> KeyOwner:
    return KeyOwner(_id(IdKind.PERSON, person_id), _id(IdKind.SERVICE_ACCOUNT, service_account_id))


def _shown_id(kind: IdKind, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)


def get_filter(
    *,
    project_id: IdText | None = None,
    owner_person_id: IdText | None = None,
    owner_service_account_id: IdText | None = None,
    status: KeyState | None = None,
    name: Annotated[str, Query(max_length=120, description="A part of the name.")] = "",
    prefix: Annotated[str, Query(max_length=12)] = "",
    last4: Annotated[str, Query(max_length=4)] = "",
    expiring_before: Instant | None = None,
    unused_since: Instant | None = None,
) -> KeyFilterIn:
    return KeyFilterIn(
        project_id=project_id,
        owner_person_id=owner_person_id,
        owner_service_account_id=owner_service_account_id,
        status=status,
        name=name,
        prefix=prefix,
        last4=last4,
        expiring_before=expiring_before,
        unused_since=unused_since,
    )


CurrentFilter = Annotated[KeyFilterIn, Depends(get_filter)]


def shown(key: ApiKey) -> ApiKeyOut:
    limits = key.limits
    return ApiKeyOut(
        id=format_id(IdKind.API_KEY, key.id),
        tenant_id=format_id(IdKind.TENANT, key.tenant_id),
        project_id=format_id(IdKind.PROJECT, key.project_id),
        name=key.name,
        owner_person_id=_shown_id(IdKind.PERSON, key.owner.person_id),
        owner_service_account_id=_shown_id(IdKind.SERVICE_ACCOUNT, key.owner.service_account_id),
        status="active" if key.status is Status.ACTIVE else "suspended",
        prefix=key.prefix,
        last4=key.last4,
        secrets=[
            SecretOut(
                prefix=secret.prefix,
                last4=secret.last4,
                created_at=secret.created_at,
                expires_at=secret.expires_at,
                revoked_at=secret.revoked_at,
            )
            for secret in key.secrets
        ],
        scopes=sorted(limits.scopes),
        tier_default=_TIER_NAMES[limits.tier_default],
        tier_max=_TIER_NAMES[limits.tier_max],
        model_patterns=list(limits.model_patterns),
        allowed_networks=list(limits.allowed_networks),
        created_at=key.created_at,
        updated_at=key.updated_at,
        expires_at=limits.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )


# ---- what both sorts of routes do


@dataclass(frozen=True, slots=True)
class Hand:
    """Who acts on the keys of a tenant: what they reach, None for every key, and what they may give."""

    tenant_id: UUID
    actor_id: UUID | None
    reach: KeyReach | None = None
    scopes: frozenset[Scope] | None = None

    def policy(self, services: Services) -> KeyPolicy:
        return KeyPolicy(services.clock.now(), services.settings.control.keys_max_days, self.scopes)


async def taken(session: AsyncSession, hand: Hand, key_id: UUID) -> ApiKey:
    """Return the key, kept for this change; otherwise as `reached`."""
    return await reached(session, hand, key_id, lock=True)


async def reached(session: AsyncSession, hand: Hand, key_id: UUID, *, lock: bool = False) -> ApiKey:
    """Return the key.

    Raises:
        PlatformError: not_found for a key that is out of reach.
    """
    key = await api_keys.get(session, hand.tenant_id, key_id, lock=lock)
    if hand.reach is not None and not hand.reach.has(key):
        raise not_found(IdKind.API_KEY)
    return key


async def make(
    work: Work,
    hand: Hand,
    project_id: UUID,
    body: ApiKeyIn,
    owner: KeyOwner = NO_OWNER,
) -> ApiKeyCreated:
    key, secret = await api_keys.create(
        work.session,
        hand.tenant_id,
        project_id,
        name=body.name,
        pepper=work.services.pepper,
        limits=body.limits(),
        owner=owner,
        created_by=hand.actor_id,
        policy=hand.policy(work.services),
    )
    work.act.on(
        key.id, name=key.name, project_id=format_id(IdKind.PROJECT, project_id), scopes=sorted(key.limits.scopes)
    )
    return ApiKeyCreated(api_key=shown(key), secret=secret)


async def change(work: Work, hand: Hand, key: ApiKey, body: ApiKeyChange) -> ApiKeyOut:
    after = shown(
        await api_keys.update(
            work.session,
            hand.tenant_id,
            key.id,
            name=body.name or key.name,
            owner=body.owner(key.owner),
            limits=body.limits(key.limits),
            policy=hand.policy(work.services),
        )
    )
    work.act.on(key.id, **changed(shown(key), after))
    return after


async def rotate(work: Work, hand: Hand, key: ApiKey, body: RotateIn) -> ApiKeyCreated:
    rotated, secret = await api_keys.rotate(
        work.session,
        hand.tenant_id,
        key.id,
        pepper=work.services.pepper,
        overlap=timedelta(seconds=body.overlap_s),
        policy=hand.policy(work.services),
    )
    work.act.on(key.id, overlap_s=body.overlap_s, last4=rotated.last4)
    return ApiKeyCreated(api_key=shown(rotated), secret=secret)


async def set_status(work: Work, hand: Hand, key: ApiKey, status: Status, reason: str | None = None) -> ApiKeyOut:
    after = await api_keys.set_status(work.session, hand.tenant_id, key.id, status, clock=work.services.clock)
    work.act.on(key.id, before=key.status.value, after=status.value, **because(reason))
    return shown(after)


async def revoke(work: Work, hand: Hand, key: ApiKey, body: RevokeIn | None) -> ApiKeyOut:
    hard = body is not None and body.hard
    revoked = await api_keys.revoke(work.session, hand.tenant_id, key.id, clock=work.services.clock, hard=hard)
    work.act.on(key.id, hard=hard)
    return shown(revoked)


async def revoke_many(work: Work, hand: Hand, body: BulkRevokeIn) -> BulkRevoked:
    if not body.dry_run and body.expected_count is None:
        raise invalid("expected_count", "Say how many keys you saw in the dry run.")
    found = await api_keys.revoke_matching(
        work.session,
        hand.tenant_id,
        body.filter.wanted(hand.reach),
        now=work.services.clock.now(),
        expected=None if body.dry_run else body.expected_count,
        hard=body.hard,
    )
    ids = [format_id(IdKind.API_KEY, key.id) for key in found.keys]
    work.act.on(hand.tenant_id, dry_run=not found.done, hard=body.hard, keys=ids)
    return _shown_bulk(found)


def _shown_bulk(found: BulkRevocation) -> BulkRevoked:
    keys = [
        KeyNamed(id=format_id(IdKind.API_KEY, key.id), name=key.name, prefix=key.prefix, last4=key.last4)
        for key in found.keys
    ]
    return BulkRevoked(done=found.done, count=len(keys), keys=keys)


async def page(session: AsyncSession, hand: Hand, wanted: KeyFilterIn, paging: Paging) -> ApiKeyPage:
    found = await api_keys.list_keys(
        session, hand.tenant_id, after=paging.after, limit=paging.limit_probe, wanted=wanted.wanted(hand.reach)
    )
    cut = page_of(found, paging.limit, lambda key: key.id)
    return ApiKeyPage(
        items=[shown(key) for key in cut.items],
        next_after=cut.next_after and format_id(IdKind.API_KEY, cut.next_after),
    )
