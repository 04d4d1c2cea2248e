"""What gateways need to know of every key, read whole at start and by change afterwards, in slices.

A key with two secrets is two principals of one id: the same rights and counters, another digest, perhaps another end.
"""

import hmac
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.money import Currency
from core.reader import Reader
from core.tiers import Tier
from core.unreadable import Report, log_unreadable
from tenants import credentials, key_queries, key_secrets, limit_queries, queries
from tenants.credentials import Peppers
from tenants.key_queries import PrincipalRow
from tenants.limit_merge import LimitBook, UnreadableLimitError
from tenants.limit_queries import RuleRow
from tenants.limit_tables import LimitRuleRow
from tenants.limits import take_rules
from tenants.roles import scopes_of
from tenants.types import Principal

KEY_KINDS = key_queries.KINDS
"""Kinds of configuration change that concern what a key is."""

UNREADABLE = "KEY_UNREADABLE"
"""Why a key may not call of which some row cannot be read."""

LIMIT_KINDS = frozenset({"tenant_limits", "plan"})
"""Kinds that concern limits and prices alone: gateways patch the keys that they know."""

_TIERS = {int(tier): tier for tier in Tier}


class Shared:
    """Values that many principals have in common, kept once: half of their memory would be copies."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def one(self, value: Any) -> Any:
        """Return the first value that was equal to this one."""
        return self._known.setdefault(value, value)

    def salt(self, row: PrincipalRow) -> str:
        """Return the tenant's prefix-cache salt, worked out once for all its keys."""
        known = self._known.get(row.cache_seed)
        if known is None:
            known = self._known[row.cache_seed] = credentials.cache_salt(row.cache_seed, row.tenant_id.bytes)
        return str(known)


def _refusal(row: PrincipalRow) -> str:
    """Return why the key may not call, the reason nearest to the key first."""
    reasons = (
        (row.tenant_status == "closed", "TENANT_CLOSED"),  # its keys are revoked too; this is why
        (row.revoked, "KEY_REVOKED"),
        (row.expired, "KEY_EXPIRED"),
        (row.status != "active", "KEY_SUSPENDED"),
        (row.owner_roles == [], "OWNER_SUSPENDED"),
        (row.project_status != "active", "PROJECT_SUSPENDED"),
        (row.tenant_status != "active", "TENANT_SUSPENDED"),
    )
    return next((code for true, code in reasons if true), "")


def _scopes(row: PrincipalRow) -> frozenset[str]:
    """What the key was made for, as far as the present role of its owner lets it be."""
    scopes = frozenset(row.scopes)
    return scopes if row.owner_roles is None else scopes & scopes_of(row.owner_roles)


def _principal(row: PrincipalRow, book: LimitBook, shared: Shared) -> Principal:
    one = shared.one
    return Principal(
        tenant_id=one(row.tenant_id),
        project_id=one(row.project_id),
        key_id=row.id,
        currency=Currency(row.currency),
        scopes=one(_scopes(row)),
        tier_default=_TIERS[row.tier_default],
        tier_max=_TIERS[row.tier_max],
        model_patterns=one(tuple(row.model_patterns)),
        allowed_networks=one(tuple(row.allowed_networks)),
        expires_at_us=0 if row.expires_at is None else int(row.expires_at.timestamp() * 1_000_000),
        limits=one(book.limits(row.plan_id, row.tenant_id, row.project_id, row.id)),
        tz=one(row.tz),
        plan_id=one(row.plan_id),
        price_book_id=one(row.price_book_id),
        cache_salt=shared.salt(row),
        refusal=_refusal(row),
        keep_answers=row.keep_answers,
    )


def _principal_or_refusal(row: PrincipalRow, book: LimitBook, shared: Shared, report: Report) -> Principal:
    """The principal; of a row that cannot be read, one that may do nothing."""
    try:
        return _principal(row, book, shared)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one row is not the others' fault
        report("api_key", row.id, error)
        return Principal(
            tenant_id=row.tenant_id,
            project_id=row.project_id,
            key_id=row.id,
            currency=Currency.USD,
            scopes=frozenset(),
            tier_default=Tier.BATCH,
            tier_max=Tier.BATCH,
            plan_id=row.plan_id,
            refusal=UNREADABLE,
        )


async def load_all(
    session: AsyncSession, pepper_ids: Collection[str] | None = None, report: Report = log_unreadable
) -> dict[bytes, Principal]:
    """Return every principal by the digest of its secret. Dead keys stay for 30 days, to be refused by their reason.

    Digests under other peppers than these, when they are named, are left out: nobody can present them.
    """
    book = await _read(limit_queries.all_rules(session), report)
    shared = Shared()
    found: dict[bytes, Principal] = {}
    async for rows in key_queries.principal_rows(session, pepper_ids):
        found.update((row.digest, _principal_or_refusal(row, book, shared, report)) for row in rows)
    return found


async def load_changed(
    session: AsyncSession,
    kind: str,
    entity_ids: Collection[UUID],
    pepper_ids: Collection[str] | None = None,
    report: Report = log_unreadable,
) -> AsyncIterator[dict[bytes, Principal | None]]:
    """Yield the principals that configuration changes touch, some hundred at a time; None means forget that digest.

    Args:
        session: reads.
        kind: one of `KEY_KINDS`.
        entity_ids: which keys, projects, tenants, people or service accounts.
        pepper_ids: as in `load_all`.
        report: told of each row that cannot be read.
    """
    shared, books = Shared(), _Books(session, report)
    async for rows in key_queries.principal_rows_of(session, kind, entity_ids, pepper_ids):
        book = await books.of(rows)
        yield {row.digest: None if row.forgotten else _principal_or_refusal(row, book, shared, report) for row in rows}


async def look_up(reader: Reader, digests: Sequence[bytes]) -> tuple[bytes, Principal] | None:
    """Return the first of these digests that a key has, and its principal as it is now, for a request that waits."""
    return _first(await key_queries.read_by_digest(reader, digests), digests)


def _first(
    found: Sequence[tuple[PrincipalRow, LimitRuleRow | None]], digests: Sequence[bytes]
) -> tuple[bytes, Principal] | None:
    for digest in digests:
        rows = [(row, rule) for row, rule in found if hmac.compare_digest(row.digest, digest)]
        if rows:
            book = take_rules(LimitBook(), (rule for _, rule in rows if rule is not None), log_unreadable)
            return digest, _principal_or_refusal(rows[0][0], book, Shared(), log_unreadable)
    return None


async def find(session: AsyncSession, peppers: Peppers, key: str) -> Principal | None:
    """Return the principal of one key, fresh, for the control plane; one met under an old pepper is stored anew."""
    current, *_ = digests = peppers.digests(key)
    found = _first(await key_queries.principal_rows_by_digest(session, digests), digests)
    if found is None:
        return None
    digest, principal = found
    if digest != current:
        await key_secrets.rehash(session, {digest: current}, peppers.ids[0])
    return principal


class _Books:
    """The rules that slices of keys need; slices of one tenant share a book."""

    def __init__(self, session: AsyncSession, report: Report) -> None:
        self._session = session
        self._report = report
        self._of: tuple[set[UUID], set[UUID]] = set(), set()
        self._book = LimitBook(())

    async def of(self, rows: Sequence[PrincipalRow]) -> LimitBook:
        tenant_ids, plan_ids = {row.tenant_id for row in rows}, {row.plan_id for row in rows}
        if (tenant_ids, plan_ids) != self._of:
            rules = await limit_queries.rules_for(self._session, tenant_ids, plan_ids)
            self._of, self._book = (tenant_ids, plan_ids), take_rules(LimitBook(), rules, self._report)
        return self._book


async def _read(slices: AsyncIterator[Sequence[RuleRow]], report: Report) -> LimitBook:
    book = LimitBook()
    async for rows in slices:
        take_rules(book, rows, report)
    return book


class LimitPatch(msgspec.Struct, frozen=True):
    """New limits for the keys of one tenant, or of every tenant on one plan.

    A plan may have many thousand keys: what a gateway knows of each of them is kept but for the limits, so that nothing
    but rules is read.
    """

    book: LimitBook
    tenant_id: UUID | None = None
    plan_id: UUID | None = None
    price_book_id: UUID | None = None

    def concerns(self, principal: Principal) -> bool:
        return (self.tenant_id is not None and principal.tenant_id.int == self.tenant_id.int) or self._on_plan(
            principal
        )

    def _on_plan(self, principal: Principal) -> bool:
        plan_id = principal.plan_id
        return self.plan_id is not None and plan_id is not None and plan_id.int == self.plan_id.int

    def apply(self, principal: Principal) -> Principal:
        """Return the principal as it is now; the same one when nothing changes for it.

        One that could not be read stays refused: it must be read again, as a whole.
        """
        plan_id = principal.plan_id
        if plan_id is None or principal.refusal == UNREADABLE or not self.concerns(principal):
            return principal
        try:
            limits = self.book.limits(plan_id, principal.tenant_id, principal.project_id, principal.key_id)
        except UnreadableLimitError:
            return msgspec.structs.replace(principal, refusal=UNREADABLE)
        price_book_id = self.price_book_id if self._on_plan(principal) else principal.price_book_id
        if limits == principal.limits and price_book_id == principal.price_book_id:
            return principal
        return msgspec.structs.replace(principal, limits=limits, price_book_id=price_book_id)


async def load_limits(session: AsyncSession, kind: str, entity_id: UUID, report: Report = log_unreadable) -> LimitPatch:
    """Return what a change of a tenant's or a plan's limits makes of the principals that are known."""
    if kind == "plan":
        plan = await limit_queries.plan(session, entity_id)
        book = await _read(limit_queries.rules_on_plan(session, entity_id), report)
        return LimitPatch(book, plan_id=entity_id, price_book_id=None if plan is None else plan.price_book_id)
    tenant = await queries.tenant(session, entity_id)
    plan_ids = [] if tenant is None else [tenant.plan_id]
    rows = await limit_queries.rules_for(session, [entity_id], plan_ids)
    return LimitPatch(take_rules(LimitBook(), rows, report), tenant_id=entity_id)
