"""What gateways need to know of every key, read whole at start and by change afterwards."""

import sys
from collections.abc import Sequence
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.money import Currency
from core.tiers import Tier
from tenants import credentials, limit_queries, queries
from tenants.limit_merge import LimitBook
from tenants.limits import rule_of
from tenants.queries import PrincipalRow
from tenants.types import Principal, Status

KEY_KINDS = frozenset({"api_key", "project", "tenant"})
"""Kinds of configuration change that concern what a key is."""

LIMIT_KINDS = frozenset({"tenant_limits", "plan"})
"""Kinds that concern limits and prices alone: gateways patch the keys that they know."""


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


def _principal(row: PrincipalRow, book: LimitBook) -> Principal:
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
        limits=book.limits(row.plan_id, row.tenant_id, row.project_id, row.id),
        tz=sys.intern(row.tz),
        plan_id=row.plan_id,
        price_book_id=row.price_book_id,
        cache_salt=credentials.cache_salt(row.cache_seed, row.tenant_id.bytes),
        refusal=_refusal(row),
    )


async def load_all(session: AsyncSession) -> dict[bytes, Principal]:
    """Return every principal by the digest of its key. Dead keys stay for 30 days, to be refused by their reason."""
    book = LimitBook(rule_of(row) for row in await limit_queries.all_rules(session))
    return {row.digest: _principal(row, book) for row in await queries.principal_rows(session)}


async def load_changed(session: AsyncSession, kind: str, entity_id: UUID | None) -> dict[bytes, Principal | None]:
    """Return the principals that a configuration change touches; None means forget that key.

    Args:
        session: reads.
        kind: a kind of `core.db.record_config_change`; one that concerns no key gives nothing.
        entity_id: which key, project or tenant; None means all keys.
    """
    if kind not in KEY_KINDS:
        return {}
    if entity_id is None:
        return dict(await load_all(session))
    rows = await queries.principal_rows_of(session, kind, entity_id)
    book = await _book_of(session, rows)
    return {row.digest: None if row.forgotten else _principal(row, book) for row in rows}


async def find(session: AsyncSession, digest: bytes) -> Principal | None:
    """Return the principal of one key, fresh, for the control plane."""
    row = await queries.principal_row_by_digest(session, digest)
    return None if row is None else _principal(row, await _book_of(session, [row]))


async def _book_of(session: AsyncSession, rows: Sequence[PrincipalRow]) -> LimitBook:
    tenant_ids, plan_ids = {row.tenant_id for row in rows}, {row.plan_id for row in rows}
    return LimitBook(rule_of(row) for row in await limit_queries.rules_for(session, tenant_ids, plan_ids))


class LimitPatch(msgspec.Struct, frozen=True):
    """New limits for the keys of one tenant, or of every tenant on one plan.

    A plan may have many thousand keys: what a gateway knows of each of them is kept but for the limits, so that nothing
    but rules is read.
    """

    book: LimitBook
    tenant_id: UUID | None = None
    plan_id: UUID | None = None
    price_book_id: UUID | None = None

    def apply(self, principal: Principal) -> Principal:
        """Return the principal as it is now; the same one when nothing changes for it."""
        plan_id = principal.plan_id
        if plan_id is None or (principal.tenant_id != self.tenant_id and plan_id != self.plan_id):
            return principal
        limits = self.book.limits(plan_id, principal.tenant_id, principal.project_id, principal.key_id)
        price_book_id = self.price_book_id if plan_id == self.plan_id else principal.price_book_id
        if limits == principal.limits and price_book_id == principal.price_book_id:
            return principal
        return msgspec.structs.replace(principal, limits=limits, price_book_id=price_book_id)


async def load_limits(session: AsyncSession, kind: str, entity_id: UUID) -> LimitPatch:
    """Return what a change of a tenant's or a plan's limits makes of the principals that are known."""
    if kind == "plan":
        plan = await limit_queries.plan(session, entity_id)
        book = LimitBook(rule_of(row) for row in await limit_queries.rules_on_plan(session, entity_id))
        return LimitPatch(book, plan_id=entity_id, price_book_id=None if plan is None else plan.price_book_id)
    tenant = await queries.tenant(session, entity_id)
    plan_ids = [] if tenant is None else [tenant.plan_id]
    rows = await limit_queries.rules_for(session, [entity_id], plan_ids)
    return LimitPatch(LimitBook(rule_of(row) for row in rows), tenant_id=entity_id)
