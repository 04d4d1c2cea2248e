"""Queries of the days of usage events: which there are, what keeps one from being dropped, and what is kept of it."""

from collections.abc import AsyncIterator, Sequence
from datetime import date, datetime
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.posting_queries import KEY, SUMS

PAGE = 5000


async def days(session: AsyncSession) -> list[date]:
    """Return the days that have a partition, the earliest first.

    Where somebody made a partition that is not of one day, all events are looked through for their days.
    """
    statement = r"""
        WITH part AS (
            SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), '\(''(.{10})''\) TO \(''(.{10})''\)') AS bounds
            FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'usage_event'::regclass)
        SELECT CASE WHEN bounds[2]::date - bounds[1]::date = 1 THEN bounds[1]::date END AS day FROM part ORDER BY 1
    """
    found = list((await session.scalars(text(statement))).all())
    if None in found:
        found += (await session.scalars(text("SELECT DISTINCT day FROM usage_event"))).all()
    return sorted({day for day in found if day is not None})


async def known(session: AsyncSession, among: Sequence[date] | None = None) -> Sequence[Row[Any]]:
    """Return the days that are closed or dropped, in the order in which they were dropped, those to be last."""
    statement = """
        SELECT * FROM usage_day WHERE CAST(:among AS date[]) IS NULL OR day = ANY(CAST(:among AS date[]))
        ORDER BY seq NULLS LAST, day
    """
    return (await session.execute(text(statement), {"among": None if among is None else list(among)})).all()


async def hindrances(session: AsyncSession, day: date) -> Row[Any]:
    """Return of a day's events: transactions in months that are not closed, those not sealed, usage in quarantine."""
    statement = """
        WITH tx AS (SELECT DISTINCT tx_id FROM usage_event WHERE day = :day)
        SELECT (SELECT count(*) FROM tx JOIN ledger_tx x ON x.id = tx.tx_id WHERE x.period > coalesce(
                   (SELECT max(month) FROM ledger_period WHERE state = 'closed'), '-infinity')) AS open,
               (SELECT count(*) FROM tx LEFT JOIN ledger_leaf f ON f.tx_id = tx.tx_id
                WHERE f.tx_id IS NULL) AS unsealed,
               (SELECT count(*) FROM usage_quarantine q
                WHERE (q.admitted_at AT TIME ZONE 'UTC')::date = :day
                  AND NOT EXISTS (SELECT FROM usage_decision d WHERE d.tenant_id = q.tenant_id AND d.id = q.id))
               AS undecided
    """
    return (await session.execute(text(statement), {"day": day})).one()


async def close(session: AsyncSession, day: date) -> bool:
    """Let the day take no more events, once what is being posted to it is in; False when it was closed before."""
    done: bool = (await session.execute(text("SELECT close_usage_day(:day)"), {"day": day})).scalar_one()
    return done


async def keep_sums(session: AsyncSession, day: date) -> int:
    """Keep what the day's events come to; returns how many there are."""
    by_tx = """
        INSERT INTO usage_day_tx (day, tx_id, tenant_id, events, amount_pico, min_charge_pico)
        SELECT day, tx_id, tenant_id, count(*), sum(amount_pico), sum(min_charge_pico)
        FROM usage_event WHERE day = :day GROUP BY day, tx_id, tenant_id
    """
    by_key = f"""
        INSERT INTO usage_day_rollup (day, {KEY}, currency, {", ".join(SUMS)})
        SELECT day, {KEY.replace(" minute,", " date_trunc('minute', admitted_at, 'UTC'),")}, min(currency), count(*),
               {", ".join(f"sum({c})" for c in SUMS[1:])}
        FROM usage_event WHERE day = :day GROUP BY {", ".join(map(str, range(1, 12)))}
    """  # noqa: S608 - built of constants
    await session.execute(text(by_tx), {"day": day})
    await session.execute(text(by_key), {"day": day})
    counted = "SELECT coalesce(sum(events), 0) FROM usage_day_tx WHERE day = :day"
    return int((await session.execute(text(counted), {"day": day})).scalar_one())


async def kept_lines(session: AsyncSession, day: date) -> AsyncIterator[str]:
    """Yield each fact that is kept of a day as text, always in the same order."""
    by_tx = """
        SELECT json_build_array(tx_id, tenant_id, events, amount_pico::text, min_charge_pico::text)::text AS line
        FROM usage_day_tx WHERE day = :day ORDER BY tx_id
    """
    by_key = f"""
        SELECT json_build_array({KEY}, currency, {", ".join(f"{c}::text" for c in SUMS)})::text AS line
        FROM usage_day_rollup WHERE day = :day ORDER BY {KEY}
    """  # noqa: S608 - built of constants
    for statement in (by_tx, by_key):
        rows = await session.stream(text(statement).execution_options(yield_per=PAGE), {"day": day})
        async for row in rows:
            yield row.line


async def mark_dropped(
    session: AsyncSession, day: date, now: datetime, *, seq: int, events: int, kept: bytes, prev: bytes, sha256: bytes
) -> None:
    statement = """
        UPDATE usage_day SET state = 'dropped', dropped_at = :now, seq = :seq, events = :events, kept_sha256 = :kept,
                             prev_hash = :prev, hash = :hash
        WHERE day = :day
    """
    values = {"day": day, "now": now, "seq": seq, "events": events, "kept": kept, "prev": prev, "hash": sha256}
    await session.execute(text(statement), values)


async def drop(session: AsyncSession, day: date) -> None:
    """Drop the day's events; the database refuses unless each is in the sums that are kept."""
    await session.execute(text("SELECT drop_usage_day(:day)"), {"day": day})
