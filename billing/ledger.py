"""The ledger: transfers between accounts, and the balances they add up to.

A transfer debits one account and credits another by the same amount, so every row balances by itself. The database
keeps transfers append-only and bounded balances within their limit; this module decides which transfers to make.
"""

from collections.abc import Iterable, Sequence
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors, posting_queries, queries
from billing.types import BillingMode, Transaction, Transfer
from core.ids import new_uuid
from core.money import Currency

# Codes of accounts. Those with a tenant are one per tenant; cash is one per currency.
CASH = "asset.cash"
UNBILLED = "asset.unbilled"
CREDIT_PAID = "liability.credit_paid"
REVENUE = "revenue.usage"
OVERRUN = "expense.overrun"

LIMIT_MAX_PICO = 10**21


class Source(msgspec.Struct, frozen=True):
    """An account that usage may take from, and how much is left in it."""

    account: UUID
    available: int


def usage_transfers(
    amount: int, sources: Iterable[Source], *, revenue: UUID, overrun: UUID
) -> tuple[tuple[Transfer, ...], int]:
    """Take `amount` from the sources in order; what exceeds them is the platform's expense. Pure.

    Returns:
        the transfers, and the part that went to the overrun account.
    """
    transfers, left = [], amount
    for source in sources:
        part = min(left, max(0, source.available))
        if part > 0:
            transfers.append(Transfer(source.account, revenue, part))
            left -= part
    if left > 0:
        transfers.append(Transfer(overrun, revenue, left))
    return tuple(transfers), left


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
    for column, code, normal in (("revenue_account", REVENUE, "credit"), ("overrun_account", OVERRUN, "debit")):
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
    await posting_queries.raise_versions(session, {transaction.tenant_id for transaction in transactions})
