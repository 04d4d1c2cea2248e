"""The whole ledger as text for hledger or beancount, read in one snapshot and streamed.

Memory holds the accounts and their balances, never the entries. The closing balances are the ledger's own
(`ledger_balance`), so the foreign program checks them against the entries; with `until` they are sums of the entries.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, date, datetime, time
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import books_queries
from billing.books_text import BooksAccount, BooksFormat, BooksText, Entry, Leg
from core.db import Sessions, transaction

PIECE_CHARACTERS = 64 * 1024
_FOR_EVER = datetime.max.replace(tzinfo=UTC)


async def export(sessions: Sessions, kind: BooksFormat, until: date | None = None) -> AsyncGenerator[bytes, None]:
    """Yield the ledger as text: the same bytes for the same books.

    Args:
        sessions: where the books are.
        kind: in whose language.
        until: only what was booked before this day (UTC) begins; None takes all.
    """
    before = _FOR_EVER if until is None else datetime.combine(until, time(), UTC)
    async with transaction(sessions) as session:
        await books_queries.freeze(session)
        rows = await books_queries.accounts(session, before)
        text = BooksText(kind, [_account(row) for row in rows])
        closing = {row.id: int(row.balance) for row in rows} if until is None else None
        async with aclosing(_lines(session, text, before)) as lines:
            kept: list[str] = []
            size = 0
            async for line in lines:
                kept.append(line)
                size += len(line)
                if size >= PIECE_CHARACTERS:
                    yield "".join(kept).encode()
                    kept, size = [], 0
        for line in text.end(closing):
            kept.append(line)
        yield "".join(kept).encode()


async def _lines(session: AsyncSession, text: BooksText, before: datetime) -> AsyncGenerator[str, None]:
    for line in text.head():
        yield line
    async with aclosing(_entries(session, before)) as entries:
        async for entry in entries:
            for line in text.entry(entry):
                yield line


async def _entries(session: AsyncSession, before: datetime) -> AsyncGenerator[Entry, None]:
    first: Row[Any] | None = None
    legs: list[Leg] = []
    async with aclosing(books_queries.transfers(session, before)) as rows:
        async for row in rows:
            if first is not None and row.id != first.id:
                yield _entry(first, legs)
                legs = []
            first = row
            if row.amount is not None:
                legs.append(Leg(row.debit_account, row.credit_account, row.currency, int(row.amount)))
    if first is not None:
        yield _entry(first, legs)


def _entry(row: Row[Any], legs: list[Leg]) -> Entry:
    return Entry(row.id, row.kind, row.tenant_id, row.booked_on, row.note, tuple(legs))


def _account(row: Row[Any]) -> BooksAccount:
    return BooksAccount(row.id, row.code, row.currency, row.tenant_id, row.opened_on, row.lot)
