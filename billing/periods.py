"""Accounting periods: calendar months (UTC), open → closing → closed. A closed one never changes.

What happened in a month that is no longer open is booked in the first open one, with the instant it happened.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import closing_queries as queries
from billing import errors
from core.db import Sessions, transaction


class BalanceLine(msgspec.Struct, frozen=True, order=True):
    """What one account's transfers come to. Pico."""

    account: str
    code: str
    currency: str
    tenant: str
    debit: int
    credit: int


class Period(msgspec.Struct, frozen=True):
    """A month that is being closed or is closed."""

    month: date
    state: str
    trial_balance_sha256: bytes | None


def next_month(month: date) -> date:
    return (month.replace(day=1) + timedelta(days=32)).replace(day=1)


async def trial_balance(session: AsyncSession, until: date | None = None) -> list[BalanceLine]:
    """Return the accounts with their debits and credits, up to the end of that month (its first day) or of all."""
    return [
        BalanceLine(
            row.id.hex,
            row.code,
            row.currency,
            row.tenant_id.hex if row.tenant_id else "",
            int(row.debit),
            int(row.credit),
        )
        for row in await queries.trial_balance(session, until)
    ]


def digest(lines: Sequence[BalanceLine]) -> bytes:
    """Return the hash of a trial balance: over every figure of every account that moved."""
    return hashlib.sha256(msgspec.json.encode(sorted(lines))).digest()


async def all_of(session: AsyncSession) -> list[Period]:
    """Return the months that are not open, oldest first."""
    return [Period(row.month, row.state, row.trial_balance_sha256) for row in await queries.periods(session)]


async def close(sessions: Sessions, month: date, now: datetime) -> Period:
    """Close a month for good; of one that is closed, return what was found then.

    Raises:
        PlatformError: PERIOD_NOT_OVER, PERIOD_ORDER.
    """
    month = month.replace(day=1)
    if datetime.combine(next_month(month), datetime.min.time(), UTC) > now:
        raise errors.period_not_over()
    async with transaction(sessions) as session:
        await queries.lock_periods(session)
        known = {period.month: period for period in await all_of(session)}
        if month in known and known[month].state == "closed":
            return known[month]
        if month not in known:
            if known and next_month(max(known)) != month:
                raise errors.period_order(next_month(max(known)))
            await queries.insert_period(session, month, now)
    async with transaction(sessions) as session:  # nothing is booked in it any more
        await queries.lock_periods(session)
        sha256 = digest(await trial_balance(session, month))
        await queries.close_period(session, month, now, sha256)
    return Period(month, "closed", sha256)


async def first_changed(session: AsyncSession) -> Period | None:
    """Return the first closed month whose trial balance is not what it was when it closed."""
    for period in await all_of(session):
        if period.state == "closed" and digest(await trial_balance(session, period.month)) != bytes(
            period.trial_balance_sha256 or b""
        ):
            return period
    return None
