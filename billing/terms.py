"""How a tenant pays: prepaid, or postpaid up to a limit. Changed by operators, both ways; each change is kept.

From prepaid to postpaid, credit there is goes on being used first, then usage goes unbilled up to the limit. From
postpaid to prepaid, what is unbilled stays to be invoiced, nothing is added to it but usage admitted before, and a
tenant without credit is refused. A limit is never below what is unbilled.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credit_alerts, errors, ledger, lot_queries, posting_queries, queries
from billing.types import BillingMode
from core.ids import new_uuid
from core.money import Currency

NOTE_MAX_CHARS = 500


class Terms(msgspec.Struct, frozen=True):
    """How a tenant pays since an instant. The limit is of unbilled usage; prepaid, late usage may still use it."""

    mode: BillingMode
    credit_limit_pico: int
    since: datetime
    changed_by: str
    note: str


async def change(
    session: AsyncSession, tenant_id: UUID, mode: BillingMode, limit_pico: int, *, by: str, note: str, now: datetime
) -> bool:
    """Change how a tenant pays; tells whether anything changed. After the commit, refresh its figure with `correct`.

    Raises:
        PlatformError: NOT_FOUND, INVALID_AMOUNT, CREDIT_LIMIT_TOO_LOW.
    """
    if not 0 < len(note) <= NOTE_MAX_CHARS:
        raise errors.invalid_grant(f"Say why, in 1 to {NOTE_MAX_CHARS} characters.", "note")
    before = await checked(session, tenant_id, mode, limit_pico)
    if before is None:
        return False
    profile = await queries.profile(session, tenant_id)
    if profile is None:
        raise errors.no_account(tenant_id)
    currency, unbilled = Currency(profile.currency), profile.unbilled_account
    if mode is BillingMode.POSTPAID:
        unbilled = await _bounded(session, tenant_id, currency, unbilled, limit_pico)
    else:
        limit_pico = before.credit_limit_pico
        await _open_paid_lot(session, tenant_id, currency)
    values = {
        "mode": mode.value,
        "unbilled": unbilled,
        "prepaid_since": now if mode is BillingMode.PREPAID else None,
    }
    await lot_queries.set_mode(session, tenant_id, values)
    await record(session, tenant_id, Terms(mode, limit_pico, now, by, note))
    await credit_alerts.end_risen(session, tenant_id)
    return True


async def checked(session: AsyncSession, tenant_id: UUID, mode: BillingMode, limit_pico: int) -> Terms | None:
    """Lock the tenant's money; return the terms that hold, or None where they are these already.

    Raises:
        PlatformError: NOT_FOUND, INVALID_AMOUNT.
    """
    if not 0 <= limit_pico <= ledger.LIMIT_MAX_PICO or (mode is BillingMode.PREPAID and limit_pico):
        raise errors.invalid_amount("The limit is for postpaid tenants, from 0 to 1,000,000,000.")
    if not await posting_queries.lock_profiles(session, [tenant_id]):
        raise errors.no_account(tenant_id)
    before = (await history(session, tenant_id, 1))[0]
    same = before.mode is mode and (mode is BillingMode.PREPAID or before.credit_limit_pico == limit_pico)
    return None if same else before


async def record(session: AsyncSession, tenant_id: UUID, terms: Terms) -> None:
    """Keep terms as the tenant's newest."""
    values = {
        "id": new_uuid(),
        "mode": terms.mode.value,
        "limit": terms.credit_limit_pico,
        "since": terms.since,
        "by": terms.changed_by,
        "note": terms.note,
    }
    await lot_queries.insert_terms(session, tenant_id, values)


async def history(session: AsyncSession, tenant_id: UUID, limit: int) -> Sequence[Terms]:
    """Return a tenant's terms, newest first; the first is what holds."""
    rows = await lot_queries.terms(session, tenant_id, limit)
    return [Terms(BillingMode(row.mode), int(row.credit_limit), row.since, row.changed_by, row.note) for row in rows]


async def _bounded(
    session: AsyncSession, tenant_id: UUID, currency: Currency, unbilled: UUID | None, limit_pico: int
) -> UUID:
    if unbilled is None:
        opened = new_uuid()
        await queries.insert_bounded_account(
            session,
            opened,
            tenant_id,
            code=ledger.UNBILLED,
            currency=currency,
            normal="debit",
            credit_limit=limit_pico,
        )
        return opened
    owed = await lot_queries.owed(session, tenant_id, unbilled)
    if limit_pico < owed:
        raise errors.credit_limit_too_low(owed)
    await lot_queries.set_credit_limit(session, tenant_id, unbilled, limit_pico)
    return unbilled


async def _open_paid_lot(session: AsyncSession, tenant_id: UUID, currency: Currency) -> None:
    """Open the lot that top-ups go to; a tenant that was opened postpaid has none."""
    if await lot_queries.has_paid_lot(session, tenant_id):
        return
    lot = new_uuid()
    await queries.insert_bounded_account(
        session, lot, tenant_id, code=ledger.CREDIT_PAID, currency=currency, normal="credit", credit_limit=0
    )
    await queries.insert_lot(session, tenant_id, lot, "paid")
