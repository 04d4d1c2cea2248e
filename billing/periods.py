"""Accounting periods: calendar months (UTC), open → closing → closed. A closed one never changes.

What happened in a month that is no longer open is booked in the first open one, with the instant it happened.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import closing_queries as queries
from billing import errors, spools
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


NO_GRACE = timedelta(0)


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


async def close(
    sessions: Sessions, month: date, now: datetime, *, grace: timedelta = NO_GRACE, override_reason: str = ""
) -> Period:
    """Close a month for good; of one that is closed, return what was found then.

    Args:
        sessions: for the transactions.
        month: any day of it.
        now: the instant.
        grace: how long after its end it stays open, for usage on its way.
        override_reason: close it although usage of it may be on a disk, and write down why.

    Raises:
        PlatformError: PERIOD_NOT_OVER, PERIOD_ORDER, SPOOLS_NOT_EMPTY.
    """
    month = month.replace(day=1)
    end = datetime.combine(next_month(month), datetime.min.time(), UTC)
    async with transaction(sessions) as session:
        await queries.lock_periods(session)
        known = {period.month: period for period in await all_of(session)}
        if month in known and known[month].state == "closed":
            return known[month]
        if end + grace > now:
            raise errors.period_not_over(grace)
        blocking = spools.blocking(await spools.all_of(session), end)
        if blocking and not override_reason:
            raise errors.spools_not_empty(blocking)
        if month not in known:
            if known and next_month(max(known)) != month:
                raise errors.period_order(next_month(max(known)))
            await queries.insert_period(session, month, now)
        await queries.note_override(session, month, override_reason if blocking else "")
    async with transaction(sessions) as session:  # nothing is booked in it any more
        await queries.lock_periods(session)
        sha256 = digest(await trial_balance(session, month))
        await queries.close_period(session, month, now, sha256)
    return Period(month, "closed", sha256)


class _Digest:
    """The hash of a trial balance, line by line: the same as `digest` of all lines."""

    def __init__(self) -> None:
        self._hash, self._first = hashlib.sha256(b"["), True

    def add(self, line: BalanceLine) -> None:
        if not self._first:
            self._hash.update(b",")
        self._first = False
        self._hash.update(msgspec.json.encode(line))

    def end(self) -> bytes:
        self._hash.update(b"]")
        return self._hash.digest()


async def first_changed(session: AsyncSession) -> Period | None:
    """Return the first closed month whose trial balance is not what it was when it closed. Memory holds one account."""
    closed = [period for period in await all_of(session) if period.state == "closed"]
    if not closed:
        return None
    digests = [_Digest() for _ in closed]
    account: list[Row[Any]] = []
    async for row in queries.moved_by_period(session, closed[-1].month):
        if account and row.id != account[0].id:
            _add_account(account, closed, digests)
            account = []
        account.append(row)
    if account:
        _add_account(account, closed, digests)
    for period, found in zip(closed, digests, strict=True):
        if found.end() != bytes(period.trial_balance_sha256 or b""):
            return period
    return None


def _add_account(rows: Sequence[Row[Any]], closed: Sequence[Period], digests: Sequence[_Digest]) -> None:
    """Add what one account's months come to up to the end of each closed one to their digests."""
    for period, found in zip(closed, digests, strict=True):
        until = [row for row in rows if row.period <= period.month]
        if until:
            row = until[0]
            debit, credit = sum(int(one.debit) for one in until), sum(int(one.credit) for one in until)
            tenant = row.tenant_id.hex if row.tenant_id else ""
            found.add(BalanceLine(row.id.hex, row.code, row.currency, tenant, debit, credit))
