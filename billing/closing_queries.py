"""Queries of trial balances, periods and statements. What a tenant owns takes `tenant_id` first."""

from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

_PERIOD_LOCK = 7481206  # as in book_in_open_period


async def lock_periods(session: AsyncSession) -> None:
    """Wait until every transaction that is being booked is in, and let none begin until the end of this one."""
    await session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _PERIOD_LOCK})


async def periods(session: AsyncSession) -> Sequence[Row[Any]]:
    """Return the months that are being closed or are closed, oldest first."""
    return (await session.execute(text("SELECT * FROM ledger_period ORDER BY month"))).all()


async def insert_period(session: AsyncSession, month: date, now: datetime) -> None:
    statement = "INSERT INTO ledger_period (month, begun_at) VALUES (:month, :now)"
    await session.execute(text(statement), {"month": month, "now": now})


async def note_override(session: AsyncSession, month: date, reason: str) -> None:
    """Write down why a month is closed although usage of it may be on a disk; empty: there is none that is known."""
    statement = "UPDATE ledger_period SET override_reason = nullif(:reason, '') WHERE month = :month"
    await session.execute(text(statement), {"month": month, "reason": reason})


async def close_period(session: AsyncSession, month: date, now: datetime, sha256: bytes) -> None:
    statement = """
        UPDATE ledger_period SET state = 'closed', closed_at = :now, trial_balance_sha256 = :sha WHERE month = :month
    """
    await session.execute(text(statement), {"month": month, "now": now, "sha": sha256})


async def trial_balance(session: AsyncSession, until: date | None) -> Sequence[Row[Any]]:
    """Return every account that moved, with its debits and credits up to the end of that month; None: of all."""
    statement = """
        SELECT a.id, a.code, a.currency, a.tenant_id, sum(s.debit) AS debit, sum(s.credit) AS credit FROM (
            SELECT x.period, t.debit_account AS account, t.amount AS debit, 0 AS credit
            FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
            UNION ALL
            SELECT x.period, t.credit_account, 0, t.amount FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
        ) s JOIN ledger_account a ON a.id = s.account
        WHERE CAST(:until AS date) IS NULL OR s.period <= :until GROUP BY a.id ORDER BY a.id
    """
    return (await session.execute(text(statement), {"until": until})).all()


async def moved_by_period(session: AsyncSession, until: date) -> AsyncIterator[Row[Any]]:
    """Yield every account that moved with its debits and credits of each month up to that one, account by account."""
    statement = """
        SELECT a.id, a.code, a.currency, a.tenant_id, s.period, sum(s.debit) AS debit, sum(s.credit) AS credit FROM (
            SELECT x.period, t.debit_account AS account, t.amount AS debit, 0 AS credit
            FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
            UNION ALL
            SELECT x.period, t.credit_account, 0, t.amount FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
        ) s JOIN ledger_account a ON a.id = s.account
        WHERE s.period <= :until GROUP BY a.id, s.period ORDER BY a.id, s.period
    """
    rows = await session.stream(text(statement).execution_options(yield_per=1000), {"until": until})
    async for row in rows:
        yield row


async def sums(session: AsyncSession) -> Sequence[Row[Any]]:
    """Return per tenant what events, rollups and the ledger say was billed, and by how much re-ratings changed that.

    The ledger's figure has the re-ratings in it. Reversed usage counts as billed.
    """
    statement = """
        SELECT p.tenant_id, coalesce(e.amount, 0) AS events, coalesce(r.amount, 0) AS rollups,
               coalesce(g.amount, 0) AS reratings, coalesce(l.amount, 0) + coalesce(m.amount, 0) AS ledger
        FROM billing_profile p
        LEFT JOIN (SELECT tenant_id, sum(amount_pico) AS amount FROM (
                       SELECT tenant_id, amount_pico FROM usage_event
                       UNION ALL SELECT k.tenant_id, k.amount_pico
                       FROM usage_day_tx k JOIN usage_day d ON d.day = k.day AND d.state = 'dropped') a
                   GROUP BY 1) e USING (tenant_id)
        LEFT JOIN (SELECT tenant_id, sum(amount_pico) AS amount FROM usage_rollup GROUP BY 1) r USING (tenant_id)
        LEFT JOIN (SELECT x.tenant_id, sum(t.amount) AS amount FROM ledger_tx x JOIN ledger_transfer t ON t.tx_id = x.id
                   JOIN ledger_account a ON a.id = t.credit_account
                   AND a.code IN ('revenue.usage', 'revenue.min_charge')
                   WHERE x.kind = 'usage' GROUP BY 1) l USING (tenant_id)
        LEFT JOIN (SELECT tenant_id, sum(to_pico - from_pico) AS amount FROM usage_rerating GROUP BY 1) g
                  USING (tenant_id)
        LEFT JOIN (SELECT x.tenant_id, sum(CASE WHEN a.id = t.credit_account THEN t.amount ELSE -t.amount END) AS amount
                   FROM ledger_tx x JOIN ledger_transfer t ON t.tx_id = x.id
                   JOIN ledger_account a ON a.id IN (t.credit_account, t.debit_account)
                   AND a.code IN ('revenue.usage', 'revenue.min_charge')
                   WHERE x.kind = 'rerating' GROUP BY 1) m USING (tenant_id)
        ORDER BY p.tenant_id
    """
    return (await session.execute(text(statement))).all()


# Statements


_OWN = """
    WITH own AS (
        SELECT account_id FROM credit_lot WHERE tenant_id = :tenant
        UNION SELECT unbilled_account FROM billing_profile WHERE tenant_id = :tenant AND unbilled_account IS NOT NULL
    ), moved AS (
        SELECT x.id, x.kind, x.note, x.booked_at, (
            SELECT coalesce(sum(CASE WHEN t.credit_account IN (SELECT account_id FROM own) THEN t.amount ELSE 0 END
                              - CASE WHEN t.debit_account IN (SELECT account_id FROM own) THEN t.amount ELSE 0 END), 0)
            FROM ledger_transfer t WHERE t.tx_id = x.id) AS change
        FROM ledger_tx x WHERE x.tenant_id = :tenant AND x.booked_at < :until
    )
"""


async def balance_before(session: AsyncSession, tenant_id: UUID, until: datetime) -> int:
    """Return credit less what is unbilled, by what was booked before that instant. Pico."""
    statement = f"{_OWN} SELECT coalesce(sum(change), 0) FROM moved"  # noqa: S608 - built of constants
    return int((await session.execute(text(statement), {"tenant": tenant_id, "until": until})).scalar_one())


async def statement_rows(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, offset: int, limit: int
) -> Sequence[Row[Any]]:
    """Return entries with the sum of changes up to and with each: usage and re-ratings by UTC day, all else alone.

    What is summed stands where the day's last was booked, so that no balance is below what there was.
    """
    statement = f"""
        {_OWN}, entry AS (
            SELECT max(booked_at) AS at, kind, CASE WHEN kind IN ('usage', 'rerating') THEN NULL ELSE id END AS tx_id,
                   note, sum(change) AS change, count(*) AS transactions
            FROM moved WHERE booked_at >= :since
            GROUP BY kind, 3, note,
                     CASE WHEN kind IN ('usage', 'rerating') THEN date_trunc('day', booked_at, 'UTC') END
        )
        SELECT *, sum(change) OVER (ORDER BY at, tx_id NULLS FIRST, kind, note) AS total
        FROM entry ORDER BY at, tx_id NULLS FIRST, kind, note OFFSET :offset LIMIT :limit
    """  # noqa: S608 - built of constants
    values = {"tenant": tenant_id, "since": since, "until": until, "offset": offset, "limit": limit}
    return (await session.execute(text(statement), values)).all()
