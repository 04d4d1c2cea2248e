"""Credit lots: what was paid for, and what was given and for what, in the order in which usage takes from them.

Usage takes from given credit first (promo, then goodwill, then paid), of these from what expires first, of these from
the oldest. A lot pays what is in its scope and was admitted before it expired. Paid credit of a tenant is one lot that
never expires and, where the terms allow it, one for each top-up that does (ADR 0039).
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors, ledger, lot_queries, posting_queries, queries, spools
from billing.ledger import Source
from billing.types import Transaction, Transfer
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier

# The remainder of a lot is taken back so long after it expired: until then, usage admitted before may still arrive.
EXPIRY_GRACE = timedelta(minutes=10)
FIGURES_AHEAD = timedelta(minutes=3)  # more than queries.EXPIRY_LEAD and a round of the worker
MODELS_MAX = 100
NOTE_MAX_CHARS = 500


class LotSource(StrEnum):
    """Where a lot's credit comes from."""

    PAID = "paid"
    PROMO = "promo"  # given to win or keep a customer
    GOODWILL = "goodwill"  # given to make good for something


PRIORITY = {LotSource.PROMO: 10, LotSource.GOODWILL: 20, LotSource.PAID: 100}
_CODES = {LotSource.PROMO: ledger.CREDIT_PROMO, LotSource.GOODWILL: ledger.CREDIT_GOODWILL}


class Grant(msgspec.Struct, frozen=True):
    """Credit that nobody pays for. Without models or tiers it pays for all; without `expires_at`, for ever."""

    amount_pico: int
    source: LotSource
    expires_at: datetime | None = None  # a whole minute
    models: tuple[UUID, ...] = ()
    tiers: tuple[Tier, ...] = ()


class Lot(msgspec.Struct, frozen=True):
    """A lot as it stands."""

    id: UUID
    source: LotSource
    granted_pico: int
    available_pico: int
    created_at: datetime
    expires_at: datetime | None = None
    models: tuple[UUID, ...] = ()
    tiers: tuple[Tier, ...] = ()


def check(grant: Grant, now: datetime) -> None:
    """Refuse a grant that cannot be.

    Raises:
        PlatformError: INVALID_AMOUNT, INVALID_GRANT.
    """
    if not 0 < grant.amount_pico <= ledger.LIMIT_MAX_PICO:
        raise errors.invalid_amount("A grant is more than 0 and at most 1,000,000,000.")
    if grant.source is LotSource.PAID:
        raise errors.invalid_grant("Paid credit comes by a top-up; a grant is promo or goodwill.", "source")
    if grant.expires_at is not None and not _may_be_expiry(grant.expires_at, now):
        raise errors.invalid_grant("A grant expires at a whole minute in the future.", "expires_at")
    if len(grant.models) > MODELS_MAX:
        raise errors.invalid_grant(f"At most {MODELS_MAX} models; without any, credit is for all.", "models")


def check_paid_expiry(expires_at: datetime, now: datetime) -> None:
    """Refuse an expiry of paid credit that cannot be.

    Raises:
        PlatformError: INVALID_EXPIRY.
    """
    if not _may_be_expiry(expires_at, now):
        raise errors.invalid_expiry("Paid credit expires at a whole minute in the future.")


def _may_be_expiry(at: datetime, now: datetime) -> bool:
    return at > now and not at.second and not at.microsecond


async def open_paid(session: AsyncSession, tenant_id: UUID, currency: Currency, expires_at: datetime) -> UUID:
    """Open an empty lot for a top-up that expires; returns its account. The caller holds the tenant's lock."""
    lot = new_uuid()
    await queries.insert_bounded_account(
        session, lot, tenant_id, code=ledger.CREDIT_PAID, currency=currency, normal="credit", credit_limit=0
    )
    nothing = dict.fromkeys(("models", "tiers", "unearned", "used"))
    source = LotSource.PAID
    values = {"account": lot, "source": source.value, "priority": PRIORITY[source], "expires_at": expires_at}
    await lot_queries.insert_lot(session, tenant_id, {**nothing, **values})
    return lot


async def post_grant(session: AsyncSession, tenant_id: UUID, grant: Grant, *, actor: str, note: str) -> Transaction:
    """Open a lot and put the credit into it. The caller holds the tenant's lock."""
    profile = await queries.profile(session, tenant_id)
    if profile is None:
        raise errors.no_account(tenant_id)
    currency = Currency(profile.currency)
    unearned, used = [
        await queries.insert_account(session, new_uuid(), tenant_id, code=code, currency=currency, normal="debit")
        for code in (ledger.PROMO_UNEARNED, ledger.PROMO_USED)
    ]
    lot = new_uuid()
    await queries.insert_bounded_account(
        session, lot, tenant_id, code=_CODES[grant.source], currency=currency, normal="credit", credit_limit=0
    )
    values = {
        "account": lot,
        "source": grant.source.value,
        "priority": PRIORITY[grant.source],
        "expires_at": grant.expires_at,
        "models": list(grant.models) or None,
        "tiers": [int(tier) for tier in grant.tiers] or None,
        "unearned": unearned,
        "used": used,
    }
    await lot_queries.insert_lot(session, tenant_id, values)
    moved = (Transfer(unearned, lot, grant.amount_pico),)
    transaction = Transaction(new_uuid(), tenant_id, "grant", currency, moved, actor=actor, note=note)
    await ledger.post(session, [transaction])
    return transaction


async def all_of(session: AsyncSession, tenant_id: UUID) -> list[Lot]:
    """Return a tenant's lots in the order in which usage takes from them."""
    return [_lot(row) for row in await lot_queries.lots(session, tenant_id)]


def _lot(row: Row[tuple[object, ...]]) -> Lot:
    return Lot(
        row.account_id,
        LotSource(row.source),
        int(row.credit),
        int(row.available),
        row.created_at,
        row.expires_at,
        tuple(row.models or ()),
        tuple(map(Tier, row.tiers or ())),
    )


async def due(session: AsyncSession, now: datetime) -> Sequence[UUID]:
    """Return tenants that have credit to expire now, at most a page."""
    paid = await _all_is_posted(session, now - EXPIRY_GRACE)
    return await lot_queries.tenants_with_expired(session, now - EXPIRY_GRACE, paid=paid)


async def _all_is_posted(session: AsyncSession, until: datetime) -> bool:
    """Whether no spool that a poster reported may have usage of before then, which paid credit would have to pay."""
    return not spools.blocking(await spools.all_of(session), until)


async def expire(session: AsyncSession, tenant_id: UUID, now: datetime) -> int:
    """Take what is left in the tenant's expired lots. Returns pico. Repeating it takes nothing.

    Of given credit that is no revenue. Of paid credit it is, as breakage, and waits while older usage is on a disk.
    """
    profiles = await posting_queries.lock_profiles(session, [tenant_id])
    if not profiles:
        return 0
    before = now - EXPIRY_GRACE
    paid = await _all_is_posted(session, before)
    expired = await lot_queries.expired_lots(session, tenant_id, before, paid=paid)
    currency = Currency(profiles[0].currency)
    transactions = []
    for row in expired:
        to = row.unearned_account or await queries.insert_account(
            session, new_uuid(), tenant_id, code=ledger.BREAKAGE, currency=currency, normal="credit"
        )
        moved = (Transfer(row.account_id, to, int(row.available)),)
        transactions.append(Transaction(new_uuid(), tenant_id, "expiry", currency, moved, effective_at=row.expires_at))
    if transactions:
        await ledger.post(session, transactions)
    return sum(int(row.available) for row in expired)


async def figures_due(session: AsyncSession, now: datetime) -> Sequence[UUID]:
    """Return tenants whose credit for admission sinks about now, because a lot expires."""
    return await lot_queries.tenants_expiring(session, now - FIGURES_AHEAD, now + FIGURES_AHEAD)


async def sources_of(session: AsyncSession, tenant_ids: Iterable[UUID]) -> dict[UUID, list[Source]]:
    """Return what usage of each tenant takes from, in its order. The caller holds the tenants' locks."""
    found: dict[UUID, list[Source]] = {}
    for row in await posting_queries.spendable(session, tenant_ids):
        found.setdefault(row.tenant_id, []).append(
            Source(
                row.account_id,
                int(row.available),
                row.unearned_account,
                row.used_account,
                row.expires_at,
                None if row.models is None else frozenset(row.models),
                None if row.tiers is None else frozenset(map(Tier, row.tiers)),
            )
        )
    return found
