"""Queries of the export of the whole ledger: one snapshot, read row by row."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

ROWS_FETCHED = 2000  # held in memory at a time
TIME_LIMIT = "1h"  # of one export: a reader that dawdles must not keep the database from tidying up


async def freeze(session: AsyncSession) -> None:
    """Look at one instant of the database for the whole transaction; it must be its first statement."""
    await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    await session.execute(text(f"SET LOCAL statement_timeout = '{TIME_LIMIT}'"))
    await session.execute(text(f"SET LOCAL transaction_timeout = '{TIME_LIMIT}'"))


async def accounts(session: AsyncSession, before: datetime) -> Sequence[Row[Any]]:
    """Return every account opened before that instant, with its balance of now: debits less credits."""
    statement = """
        SELECT a.id, a.code, a.currency, a.tenant_id, (a.created_at AT TIME ZONE 'UTC')::date AS opened_on,
               EXISTS (SELECT FROM credit_lot l WHERE l.account_id = a.id) AS lot,
               coalesce(b.debit - b.credit, 0) AS balance
        FROM ledger_account a LEFT JOIN ledger_balance b ON b.account_id = a.id
        WHERE a.created_at < :before ORDER BY a.id
    """
    return (await session.execute(text(statement), {"before": before})).all()


async def transfers(session: AsyncSession, before: datetime) -> AsyncGenerator[Row[Any], None]:
    """Yield every transaction booked before that instant with its transfers, in the order they were booked.

    A transaction that moved nothing is one row without accounts.
    """
    statement = """
        SELECT x.id, x.kind, x.tenant_id, (x.booked_at AT TIME ZONE 'UTC')::date AS booked_on, x.note,
               t.debit_account, t.credit_account, t.currency, t.amount
        FROM ledger_tx x LEFT JOIN ledger_transfer t ON t.tx_id = x.id
        WHERE x.booked_at < :before ORDER BY x.booked_at, x.id, t.seq
    """
    options = {"yield_per": ROWS_FETCHED}
    result = await session.stream(text(statement), {"before": before}, execution_options=options)
    try:
        async for row in result:
            yield row
    finally:
        await result.close()  # the server's cursor, when the reader leaves early
