"""API keys: make, find, change, suspend, revoke. Their secrets are `key_secrets`'; shown once, kept nowhere."""

import ipaddress
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from core.tiers import Tier
from tenants import key_queries as queries
from tenants import key_secrets, members, projects, roles
from tenants.errors import invalid, not_found
from tenants.key_secrets import digest, mint, well_formed
from tenants.key_types import BulkRevocation, KeyFilter, KeyPolicy
from tenants.roles import Rights
from tenants.tables import ApiKeyRow, ApiKeySecretRow
from tenants.types import NO_OWNER, ApiKey, KeyLimits, KeyOwner, KeySecret, Role, Scope, Status

__all__ = ["digest", "mint", "well_formed"]

PATTERNS_MAX = 64
NETWORKS_MAX = 64
BULK_MAX = 1000
USE_NOTED_EVERY = timedelta(minutes=1)
EVERYTHING = KeyFilter()


def _checked(limits: KeyLimits) -> KeyLimits:
    if limits.tier_default > limits.tier_max:
        raise invalid("tier_default", "The default tier is above the highest tier of the key.")
    if not limits.scopes:
        raise invalid("scopes", "A key without a scope can do nothing. Name at least one.")
    if Scope.MANAGE in limits.scopes and limits.scopes & {Scope.INFERENCE, Scope.BATCH}:
        raise invalid("scopes", "A key that manages cannot call models: make one key for each.")
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


def latest_expiry(policy: KeyPolicy) -> datetime | None:
    """Return how long a key made or changed now may live at most; None for ever."""
    return policy.now + timedelta(days=policy.max_days) if policy.max_days else None


def allowed(limits: KeyLimits, policy: KeyPolicy, before: KeyLimits | None = None) -> KeyLimits:
    """Return the limits as the policy lets them be; an end that was not asked for now moves to the latest allowed.

    Args:
        limits: what is wanted.
        policy: what the one who asks may give.
        before: what the key has, when it is changed.

    Raises:
        PlatformError: forbidden for a scope they may not give; invalid for an end in the past or too far ahead.
    """
    if policy.scopes is not None and not limits.scopes <= policy.scopes:
        missing = ", ".join(sorted(limits.scopes - policy.scopes))
        raise PlatformError(
            "SCOPE_NOT_ALLOWED", ErrorKind.FORBIDDEN, f"Your role does not let you give {missing}.", param="scopes"
        )
    asked = limits.expires_at if before is None or limits.expires_at != before.expires_at else None
    if asked is not None and asked <= policy.now:
        raise invalid("expires_at", "The key would have expired already.")
    latest = latest_expiry(policy)
    if latest is None:
        return limits
    if asked is not None and asked > latest:
        raise invalid(
            "expires_at", f"Keys live for {policy.max_days} days at most here: until {latest:%Y-%m-%d %H:%M} UTC."
        )
    return replace(limits, expires_at=min(limits.expires_at or latest, latest))


def _api_key(row: ApiKeyRow, secrets: Sequence[ApiKeySecretRow]) -> ApiKey:
    limits = KeyLimits(
        scopes=frozenset(Scope(scope) for scope in row.scopes),
        tier_default=Tier(row.tier_default),
        tier_max=Tier(row.tier_max),
        model_patterns=tuple(row.model_patterns),
        allowed_networks=tuple(row.allowed_networks),
        expires_at=row.expires_at,
    )
    known = {
        secret.id: KeySecret(
            secret.id, secret.prefix, secret.last4, secret.created_at, secret.expires_at, secret.revoked_at
        )
        for secret in secrets
    }
    return ApiKey(
        id=row.id,
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        name=row.name,
        owner=KeyOwner(row.owner_person_id, row.owner_service_account_id),
        status=Status(row.status),
        secrets=tuple(known.values())[::-1],
        limits=limits,
        created_at=row.created_at,
        created_by=row.created_by,
        updated_at=row.updated_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


async def _with_secrets(session: AsyncSession, tenant_id: UUID, rows: Sequence[ApiKeyRow]) -> tuple[ApiKey, ...]:
    of_key: dict[UUID, list[ApiKeySecretRow]] = {row.id: [] for row in rows}
    for secret in await queries.secrets(session, tenant_id, of_key):
        of_key[secret.key_id].append(secret)
    return tuple(_api_key(row, of_key[row.id]) for row in rows)


async def _row(session: AsyncSession, tenant_id: UUID, key_id: UUID, *, lock: bool = False) -> ApiKeyRow:
    row = await queries.api_key(session, tenant_id, key_id, lock=lock)
    if row is None:
        raise not_found(IdKind.API_KEY)
    return row


def _refuse_revoked(row: ApiKeyRow) -> None:
    if row.revoked_at is not None:
        raise PlatformError("KEY_REVOKED", ErrorKind.CONFLICT, "This key was revoked, which is for good. Make another.")


async def _check_owner(
    session: AsyncSession, tenant_id: UUID, project_id: UUID, owner: KeyOwner, scopes: frozenset[Scope]
) -> None:
    """A key is never good for more than its owner: gateways would not let it, so nobody makes one."""
    if owner == NO_OWNER:
        return
    if owner.person_id is not None and owner.service_account_id is not None:
        raise invalid("owner_person_id", "A key has one owner: a person or a service account.")
    held = await queries.owner_roles(session, tenant_id, project_id, owner.person_id, owner.service_account_id)
    if not held:
        raise invalid(
            "owner_person_id" if owner.person_id is not None else "owner_service_account_id",
            "The owner must be an active member of the tenant or of the key's project.",
        )
    beyond = scopes - roles.scopes_of(held)
    if beyond:
        message = f"The role of the key's owner does not allow {', '.join(sorted(beyond))}."
        raise PlatformError("SCOPE_NOT_ALLOWED", ErrorKind.FORBIDDEN, message, param="scopes")


async def create(
    session: AsyncSession,
    tenant_id: UUID,
    project_id: UUID,
    *,
    name: str,
    pepper: bytes,
    limits: KeyLimits | None = None,
    secret: str | None = None,
    owner: KeyOwner = NO_OWNER,
    created_by: UUID | None = None,
    policy: KeyPolicy | None = None,
) -> tuple[ApiKey, str]:
    """Make a key in a project of the tenant.

    `secret` is given only by the embedded runtime, which keeps the demo key in a file of mode 600. Without a `policy`
    anything goes, which is for the platform itself.

    Returns:
        The key, and its secret, which nobody can ask for again.

    Raises:
        PlatformError: not_found for a project that is not the tenant's; invalid limits or owner; forbidden by `policy`.
    """
    project = await projects.get(session, tenant_id, project_id)
    wanted = _checked(limits or KeyLimits())
    if policy is not None:
        wanted = allowed(wanted, policy)
    await _check_owner(session, tenant_id, project.id, owner, wanted.scopes)
    row = ApiKeyRow(
        id=new_uuid(),
        tenant_id=tenant_id,
        project_id=project.id,
        name=name,
        owner_person_id=owner.person_id,
        owner_service_account_id=owner.service_account_id,
        created_by=created_by,
    )
    _take(row, wanted)
    session.add(row)
    await session.flush()
    secret = key_secrets.add(session, tenant_id, row.id, pepper=pepper, secret=secret)
    await session.flush()
    await session.refresh(row)
    await record_config_change(session, "api_key", row.id)
    return (await _with_secrets(session, tenant_id, [row]))[0], secret


def _take(row: ApiKeyRow, limits: KeyLimits) -> None:
    row.scopes = sorted(limits.scopes)
    row.tier_default = int(limits.tier_default)
    row.tier_max = int(limits.tier_max)
    row.model_patterns = list(limits.model_patterns)
    row.allowed_networks = list(limits.allowed_networks)
    row.expires_at = limits.expires_at


async def get(session: AsyncSession, tenant_id: UUID, key_id: UUID, *, lock: bool = False) -> ApiKey:
    """Return a key, with `lock` kept from others' changes until the end of the transaction."""
    row = await _row(session, tenant_id, key_id, lock=lock)
    return (await _with_secrets(session, tenant_id, [row]))[0]


async def list_keys(
    session: AsyncSession, tenant_id: UUID, *, after: UUID | None, limit: int, wanted: KeyFilter = EVERYTHING
) -> Sequence[ApiKey]:
    """Return at most `limit` keys of the tenant, newest first, revoked ones too."""
    return await _with_secrets(session, tenant_id, await queries.api_keys(session, tenant_id, wanted, after, limit))


async def update(
    session: AsyncSession,
    tenant_id: UUID,
    key_id: UUID,
    *,
    name: str,
    owner: KeyOwner,
    limits: KeyLimits,
    policy: KeyPolicy,
) -> ApiKey:
    """Make the key so; whoever reads it before to change parts of it does that with `lock`.

    Raises:
        PlatformError: not_found, invalid limits or owner, forbidden by `policy`, conflict for a revoked key.
    """
    row = await _row(session, tenant_id, key_id, lock=True)
    _refuse_revoked(row)
    before = _api_key(row, ())
    wanted = allowed(_checked(limits), policy, before.limits)
    if (owner, wanted.scopes) != (before.owner, before.limits.scopes):
        await _check_owner(session, tenant_id, row.project_id, owner, wanted.scopes)
    row.name = name
    row.owner_person_id, row.owner_service_account_id = owner.person_id, owner.service_account_id
    _take(row, wanted)
    return await _changed(session, row, policy.now)


async def _changed(session: AsyncSession, row: ApiKeyRow, now: datetime) -> ApiKey:
    row.updated_at = now
    await session.flush()
    await record_config_change(session, "api_key", row.id)
    return (await _with_secrets(session, row.tenant_id, [row]))[0]


async def set_status(session: AsyncSession, tenant_id: UUID, key_id: UUID, status: Status, *, clock: Clock) -> ApiKey:
    """Suspend a key until it is resumed, or resume it; again is the same as once.

    Raises:
        PlatformError: not_found, conflict for a revoked key.
    """
    row = await _row(session, tenant_id, key_id, lock=True)
    _refuse_revoked(row)
    if row.status == status:
        return (await _with_secrets(session, tenant_id, [row]))[0]
    row.status = status
    return await _changed(session, row, clock.now())


async def revoke(session: AsyncSession, tenant_id: UUID, key_id: UUID, *, clock: Clock, hard: bool = False) -> ApiKey:
    """End a key for good; gateways refuse it within a second of the commit. Again is the same as once.

    Running answers end by themselves; with `hard` they are cut within that second too.
    """
    row = await _row(session, tenant_id, key_id, lock=True)
    if row.revoked_at is None:
        row.revoked_at = row.updated_at = clock.now()
        await session.flush()
        await record_config_change(session, "api_key", key_id)
    if hard:
        await record_config_change(session, "api_key.end", key_id)
    return (await _with_secrets(session, tenant_id, [row]))[0]


async def rotate(
    session: AsyncSession,
    tenant_id: UUID,
    key_id: UUID,
    *,
    pepper: bytes,
    overlap: timedelta,
    policy: KeyPolicy,
) -> tuple[ApiKey, str]:
    """Give the key a new secret. The one before works for `overlap` longer, any older one ends now.

    The key's end moves to the latest allowed when it lies beyond. Counters, limits and usage stay the key's.

    Raises:
        PlatformError: not_found, conflict for a key that was revoked or has expired, invalid overlap.
    """
    row = await _row(session, tenant_id, key_id, lock=True)
    _refuse_revoked(row)
    if row.expires_at is not None and row.expires_at <= policy.now:
        raise PlatformError("KEY_EXPIRED", ErrorKind.CONFLICT, "This key has expired. Give it a later end first.")
    limits = _api_key(row, ()).limits
    row.expires_at = allowed(limits, replace(policy, scopes=None), limits).expires_at
    secret = await key_secrets.replace(session, tenant_id, key_id, pepper=pepper, overlap=overlap, now=policy.now)
    return await _changed(session, row, policy.now), secret


async def revoke_matching(
    session: AsyncSession,
    tenant_id: UUID,
    wanted: KeyFilter,
    *,
    now: datetime,
    expected: int | None,
    hard: bool = False,
) -> BulkRevocation:
    """Revoke every key that matches and is not revoked yet; with `expected` None only say which these are.

    Raises:
        PlatformError: invalid for a filter that asks for nothing or matches more than `BULK_MAX`; conflict when
            another number of keys matches than `expected`.
    """
    if not wanted.narrows:
        raise invalid("filter", "Say which keys: a filter that asks for nothing would revoke every key.")
    rows = await queries.living_keys(session, tenant_id, wanted, BULK_MAX + 1, lock=expected is not None)
    if len(rows) > BULK_MAX:
        raise invalid("filter", f"More than {BULK_MAX} keys match. Ask for fewer at a time.")
    if expected is not None and expected != len(rows):
        raise PlatformError(
            "COUNT_CHANGED",
            ErrorKind.CONFLICT,
            f"{len(rows)} keys match now, not {expected}. Look again before you revoke.",
            fields={"count": len(rows)},
        )
    if expected is not None:
        for row in rows:
            row.revoked_at = row.updated_at = now
        await session.flush()
        ids = [row.id for row in rows]
        for kind in ("api_key", "api_key.end") if hard else ("api_key",):
            await queries.record_changes(session, tenant_id, ids, kind)
    return BulkRevocation(await _with_secrets(session, tenant_id, rows), done=expected is not None)


async def rights_of(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> Rights:
    """Return what a key with the scope manage may do: what its owner may now, and nothing without an owner."""
    row = await _row(session, tenant_id, key_id)
    if row.owner_person_id is not None:
        return await members.rights_in(session, tenant_id, row.owner_person_id)
    if row.owner_service_account_id is not None:
        account = await queries.service_account_role(session, tenant_id, row.owner_service_account_id)
        return Rights() if account is None else roles.rights_of([account])
    return Rights()


async def rights_to_read(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> Rights:
    """Return what a key with the scope usage.read may see: what its owner may now, and without an owner all of it."""
    row = await _row(session, tenant_id, key_id)
    if row.owner_person_id is None and row.owner_service_account_id is None:
        return Rights(frozenset({Role.FINANCE}))
    return await rights_of(session, tenant_id, key_id)


async def note_use(session: AsyncSession, tenant_id: UUID, key_id: UUID, now: datetime) -> None:
    """Note a use of the control plane, at most once in `USE_NOTED_EVERY`."""
    await queries.note_use(session, tenant_id, key_id, now, now - USE_NOTED_EVERY)


async def mark_used(session: AsyncSession, uses: Sequence[tuple[UUID, UUID, datetime]]) -> None:
    """Note when keys were used last, each as tenant, key and instant; an earlier instant than known changes nothing."""
    if uses:
        await queries.mark_used(session, uses)
