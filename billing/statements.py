"""Statement of account: what a tenant's credit was, what moved it, and what it is then; it always adds up."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import closing_queries as queries
from billing import errors

SPAN_MAX = timedelta(days=366)


class StatementEntry(msgspec.Struct, frozen=True):
    """A transaction, or all usage or one re-rating of a day (UTC), at its last. `balance_pico` is that after it."""

    at: datetime
    kind: str
    transaction_id: UUID | None
    note: str
    transactions: int
    change_pico: int
    balance_pico: int


class Statement(msgspec.Struct, frozen=True):
    """Opening balance + all entries = closing balance. A balance below 0 is usage that is not invoiced yet."""

    opening_pico: int
    closing_pico: int
    entries: Sequence[StatementEntry]
    next_offset: int | None


async def statement(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, offset: int, limit: int
) -> Statement:
    """Return entries booked from `since` (included) to `until` (not included), from the `offset`-th on.

    Raises:
        PlatformError: INVALID_RANGE.
    """
    if not timedelta(0) < until - since <= SPAN_MAX:
        raise errors.invalid_range(f"A statement covers up to {SPAN_MAX.days} days, and ends after it begins.")
    opening = await queries.balance_before(session, tenant_id, since)
    closing = await queries.balance_before(session, tenant_id, until)
    rows = await queries.statement_rows(session, tenant_id, since, until, offset=offset, limit=limit + 1)
    entries = [
        StatementEntry(
            row.at, row.kind, row.tx_id, row.note, row.transactions, int(row.change), opening + int(row.total)
        )
        for row in rows[:limit]
    ]
    return Statement(opening, closing, entries, offset + limit if len(rows) > limit else None)
