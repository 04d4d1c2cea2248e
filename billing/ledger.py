"""The ledger: transfers between accounts, and the balances they add up to.

A transfer debits one account and credits another by the same amount, so every row balances by itself. The database
keeps transfers append-only and bounded balances within their limit; this module decides which transfers to make.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors, lot_queries, posting_queries, queries
from billing.types import BillingMode, Transaction, Transfer
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier

# Codes of accounts. Those with a tenant are one per tenant, of credit one per lot; cash is one per currency.
CASH = "asset.cash"
UNBILLED = "asset.unbilled"
CREDIT_PAID = "liability.credit_paid"
CREDIT_PROMO = "liability.credit_promo"
CREDIT_GOODWILL = "liability.credit_goodwill"
PROMO_UNEARNED = "contra.promo_unearned"  # the other side of given credit that is not used yet
PROMO_USED = "contra.promo_used"  # what of revenue was paid with given credit
REVENUE = "revenue.usage"
MIN_CHARGE = "revenue.min_charge"  # what minimum charges add to usage's own price
BREAKAGE = "revenue.breakage"  # paid credit that expired unused
OVERRUN = "expense.overrun"

LIMIT_MAX_PICO = 10**21


class Charge(msgspec.Struct, frozen=True):
    """What usage of one model and tier, admitted in one minute, came to: by its unit prices, and by minimums. Pico."""

    amount: int
    model_id: UUID
    tier: Tier
    minute: datetime
    min_charge: int = 0


class Source(msgspec.Struct):
    """An account that usage may take from, and how much is left in it. What was given has contra accounts."""

    account: UUID
    available: int
    unearned: UUID | None = None
    used: UUID | None = None
    expires_at: datetime | None = None  # takes usage admitted before
    models: frozenset[UUID] | None = None
    tiers: frozenset[Tier] | None = None

    def pays(self, charge: Charge) -> bool:
        """Whether it may pay this at all: in scope, and not expired when it was admitted."""
        return (
            (self.expires_at is None or charge.minute < self.expires_at)
            and (self.models is None or charge.model_id in self.models)
            and (self.tiers is None or charge.tier in self.tiers)
        )


def usage_transfers(
    charges: Iterable[Charge], sources: Sequence[Source], *, revenue: UUID, min_charges: UUID, overrun: UUID
) -> tuple[tuple[Transfer, ...], int]:
    """Take the charges, each from the sources in their order, and lower what is left in these.

    What no source pays is the platform's expense. What given credit pays lowers revenue by contra accounts.

    Returns:
        the transfers, per source and for the overrun at most one to each of the two revenue accounts, and one between
        the contra accounts; and the part that went to the overrun account.
    """
    taken: dict[tuple[UUID, UUID], int] = {}
    for charge in charges:
        for earned, amount in ((revenue, charge.amount), (min_charges, charge.min_charge)):
            left = amount
            for source in sources:
                if left and source.available > 0 and source.pays(charge):
                    part = min(left, source.available)
                    source.available -= part
                    taken[source.account, earned] = taken.get((source.account, earned), 0) + part
                    left -= part
            if left:
                taken[overrun, earned] = taken.get((overrun, earned), 0) + left
    transfers = [
        Transfer(account, earned, taken[account, earned])
        for account in (*(source.account for source in sources), overrun)
        for earned in (revenue, min_charges)
        if (account, earned) in taken
    ]
    for source in sources:
        part = taken.get((source.account, revenue), 0) + taken.get((source.account, min_charges), 0)
        if part and source.used is not None and source.unearned is not None:
            transfers.append(Transfer(source.used, source.unearned, part))
    return tuple(transfers), taken.get((overrun, revenue), 0) + taken.get((overrun, min_charges), 0)


async def open_tenant(
    session: AsyncSession, tenant_id: UUID, currency: Currency, mode: BillingMode = BillingMode.PREPAID, limit: int = 0
) -> None:
    """Open a tenant's accounts; doing it again with the same values changes nothing.

    Args:
        session: the transaction.
        tenant_id: whose accounts.
        currency: the one it is billed in, for ever.
        mode: prepaid, or postpaid up to `limit`.
        limit: pico of unbilled usage a postpaid tenant may have; 0 for prepaid.

    Raises:
        PlatformError: ACCOUNT_EXISTS with other values, INVALID_AMOUNT.
    """
    mode = BillingMode(mode)
    if not 0 <= limit <= LIMIT_MAX_PICO or (mode is BillingMode.PREPAID and limit):
        raise errors.invalid_amount("The limit is for postpaid tenants, from 0 to 1,000,000,000.")
    await queries.lock_tenant(session, tenant_id)
    existing = await queries.profile(session, tenant_id)
    if existing is not None:
        if (existing.currency, existing.mode) != (currency.value, mode.value):
            raise errors.account_differs(tenant_id)
        return
    await cash_account(session, currency)
    accounts: dict[str, UUID | None] = {"unbilled_account": None}
    for column, code, normal in (
        ("revenue_account", REVENUE, "credit"),
        ("min_charge_account", MIN_CHARGE, "credit"),
        ("overrun_account", OVERRUN, "debit"),
    ):
        accounts[column] = await queries.insert_account(
            session, new_uuid(), tenant_id, code=code, currency=currency, normal=normal
        )
    bounded = new_uuid()
    if mode is BillingMode.POSTPAID:
        accounts["unbilled_account"] = bounded
        code, normal = UNBILLED, "debit"
    else:
        code, normal = CREDIT_PAID, "credit"
    await queries.insert_bounded_account(
        session, bounded, tenant_id, code=code, currency=currency, normal=normal, credit_limit=limit
    )
    values = {"currency": currency.value, "mode": mode.value, **accounts}
    await queries.insert_profile(session, tenant_id, values)
    terms = {"id": new_uuid(), "mode": mode.value, "limit": limit, "since": None, "by": "system", "note": "opened"}
    await lot_queries.insert_terms(session, tenant_id, terms)
    if mode is BillingMode.PREPAID:
        await queries.insert_lot(session, tenant_id, bounded, "paid")


async def cash_account(session: AsyncSession, currency: Currency) -> UUID:
    """Return the account of the outside world's money in this currency, made when missing."""
    return await queries.insert_account(session, new_uuid(), None, code=CASH, currency=currency, normal="debit")


async def post(session: AsyncSession, transactions: Sequence[Transaction]) -> None:
    """Write transactions, move balances and raise the tenants' versions, all or nothing.

    The caller holds the tenants' profile locks (`posting_queries.lock_profiles`), so that nothing else moves them.
    """
    for transaction in transactions:
        if any(t.amount <= 0 or t.debit == t.credit for t in transaction.transfers):
            raise ValueError("a transfer moves a positive amount between two accounts")
    await posting_queries.insert_transactions(session, transactions)
    moves: dict[UUID, list[int]] = {}
    for transaction in transactions:
        for transfer in transaction.transfers:
            moves.setdefault(transfer.debit, [0, 0])[0] += transfer.amount
            moves.setdefault(transfer.credit, [0, 0])[1] += transfer.amount
    await posting_queries.move_balances(session, moves)
    await posting_queries.raise_versions(session, [transaction.tenant_id for transaction in transactions])
