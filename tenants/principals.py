"""What gateways need to know of every key, read whole at start and by change afterwards."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.money import Currency
from core.tiers import Tier
from tenants import credentials, queries
from tenants.queries import PrincipalRow
from tenants.types import Principal, Status

_KINDS = frozenset({"api_key", "project", "tenant"})


def _refusal(row: PrincipalRow) -> str:
    if row.tenant_status == Status.CLOSED:
        return "TENANT_CLOSED"  # its keys are revoked too; this is why
    if row.revoked:
        return "KEY_REVOKED"
    if row.expired:
        return "KEY_EXPIRED"
    if row.tenant_status != Status.ACTIVE:
        return "TENANT_SUSPENDED"
    if row.project_status != Status.ACTIVE:
        return "PROJECT_SUSPENDED"
    return ""


def _principal(row: PrincipalRow) -> Principal:
    return Principal(
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        key_id=row.id,
        currency=Currency(row.currency),
        scopes=frozenset(row.scopes),
        tier_default=Tier(row.tier_default),
        tier_max=Tier(row.tier_max),
        model_patterns=tuple(row.model_patterns),
        allowed_networks=tuple(row.allowed_networks),
        expires_at_us=0 if row.expires_at is None else int(row.expires_at.timestamp() * 1_000_000),
        key_rpm=row.rpm_limit,
        key_concurrency=row.concurrency_limit,
        project_rpm=row.project_rpm,
        project_concurrency=row.project_concurrency,
        tenant_concurrency=row.tenant_concurrency,
        cache_salt=credentials.cache_salt(row.cache_seed, row.tenant_id.bytes),
        refusal=_refusal(row),
    )


async def load_all(session: AsyncSession) -> dict[bytes, Principal]:
    """Return every principal by the digest of its key. Dead keys stay for 30 days, to be refused by their reason."""
    return {row.digest: _principal(row) for row in await queries.principal_rows(session)}


async def load_changed(session: AsyncSession, kind: str, entity_id: UUID | None) -> dict[bytes, Principal | None]:
    """Return the principals that a configuration change touches; None means forget that key.

    Args:
        session: reads.
        kind: a kind of `core.db.record_config_change`; one that concerns no key gives nothing.
        entity_id: which key, project or tenant; None means all keys.
    """
    if kind not in _KINDS:
        return {}
    if entity_id is None:
        return dict(await load_all(session))
    rows = await queries.principal_rows_of(session, kind, entity_id)
    return {row.digest: None if row.forgotten else _principal(row) for row in rows}


async def find(session: AsyncSession, digest: bytes) -> Principal | None:
    """Return the principal of one key, fresh, for the control plane."""
    row = await queries.principal_row_by_digest(session, digest)
    return None if row is None else _principal(row)
