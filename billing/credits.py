"""Prepaid credit: top up, and what is left."""

from datetime import UTC, datetime
from hashlib import sha256
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credit_alerts, errors, ledger, lots, posting_queries, queries
from billing.types import Balance, BillingMode, Transaction, Transfer
from core.idempotency import KEY_MAX_CHARS, key_reused
from core.ids import new_uuid
from core.money import Currency

TOP_UP_MAX_PICO = 10**21  # a thousand million units
NOTE_MAX_CHARS = 500
KIND = "top_up"


class TopUp(msgspec.Struct, frozen=True):
    """A top-up as posted; `replayed` when the same call was posted before."""

    transaction_id: UUID
    amount_pico: int
    balance: Balance
    replayed: bool


async def top_up(
    session: AsyncSession,
    tenant_id: UUID,
    amount_pico: int,
    *,
    idempotency_key: str,
    actor: str,
    note: str = "",
    expires_at: datetime | None = None,
) -> TopUp:
    """Add paid credit, once per idempotency key. After the commit, call `credit_figures.refresh`.

    With `expires_at`, which `lots.check_paid_expiry` allowed, it is a lot of its own; without, it never expires.

    Raises:
        PlatformError: NOT_FOUND, NOT_PREPAID, INVALID_AMOUNT, IDEMPOTENCY_KEY_REUSED.
    """
    note = note[:NOTE_MAX_CHARS]
    body = body_digest(amount_pico, note, expires_at)
    currency, before = await check(session, tenant_id, amount_pico, idempotency_key, body)
    if before is not None:
        return TopUp(before, amount_pico, await balance(session, tenant_id), replayed=True)
    cash = await ledger.cash_account(session, currency)
    if expires_at is None:
        lot = await queries.paid_lot(session, tenant_id)
    else:
        lot = await lots.open_paid(session, tenant_id, currency, expires_at)
    transaction = Transaction(
        new_uuid(),
        tenant_id,
        KIND,
        currency,
        (Transfer(cash, lot, amount_pico),),
        idempotency_key,
        body,
        actor[:120],
        note,
    )
    await ledger.post(session, [transaction])
    await credit_alerts.end_risen(session, tenant_id)
    return TopUp(transaction.id, amount_pico, await balance(session, tenant_id), replayed=False)


def body_digest(amount_pico: int, note: str, expires_at: datetime | None) -> bytes:
    """Return the hash of what a top-up asks for; `verify` makes it again of transfer, note and lot."""
    until = "" if expires_at is None else f" until {expires_at.astimezone(UTC).isoformat()}"
    return sha256(f"{amount_pico}{until}|{note}".encode()).digest()


async def check(
    session: AsyncSession, tenant_id: UUID, amount_pico: int, idempotency_key: str, body: bytes
) -> tuple[Currency, UUID | None]:
    """Lock the tenant's money; return its currency, and the top-up that was posted with this key.

    Raises:
        PlatformError: as `top_up`.
    """
    if not 0 < amount_pico <= TOP_UP_MAX_PICO:
        raise errors.invalid_amount("A top-up is more than 0 and at most 1,000,000,000.")
    if not 0 < len(idempotency_key) <= KEY_MAX_CHARS:
        raise errors.invalid_amount(f"An idempotency key has 1 to {KEY_MAX_CHARS} characters.")
    profiles = await posting_queries.lock_profiles(session, [tenant_id])
    if not profiles:
        raise errors.no_account(tenant_id)
    if profiles[0].mode != BillingMode.PREPAID:
        raise errors.not_prepaid()
    before = await queries.transaction_of_key(session, tenant_id, KIND, idempotency_key)
    if before is not None and before.body_sha256 != body:
        raise key_reused()
    return Currency(profiles[0].currency), None if before is None else before.id


async def balance(session: AsyncSession, tenant_id: UUID) -> Balance:
    """Return what the tenant may still spend by the ledger; usage not posted yet is not taken off.

    Raises:
        PlatformError: NOT_FOUND.
    """
    found = await queries.balances(session, [tenant_id])
    if not found:
        raise errors.no_account(tenant_id)
    return found[0]
