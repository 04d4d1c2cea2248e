"""Queries that add usage up again: by day what is rated, by transaction what was moved, by minute what was rolled up.

Each answers the first row that is wrong, and how, or nothing. A day at a time, so that what is summed stays small. Days
whose events are dropped take part with the sums that are kept of them.
"""

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.posting_queries import DIGEST, KEY, SUMS, TX_DIGEST
from billing.types import PriceSchedule, PriceStep

BIGINT_MAX = 2**63 - 1
_DAY = timedelta(days=1)


async def offers(session: AsyncSession, day: date) -> Sequence[Row[Any]]:
    """Return the distinct price version, model, tier, tenant and UTC day of admission of a day's events."""
    statement = """
        SELECT price_version_id, model_id, tier, tenant_id, (admitted_at AT TIME ZONE 'UTC')::date AS admitted_on
        FROM usage_event WHERE day = :day GROUP BY 1, 2, 3, 4, 5
    """
    return (await session.execute(text(statement), {"day": day})).all()


# A schedule is a row per step: it holds for more than `above` input tokens, up to `up_to`. Small counts are rated in
# 64 bits, which is several times as quick: a unit price is at most 10^12, so that the sum stays below 2^63.
_FIRST_MISRATED = """
    WITH schedule AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:version AS uuid[]), CAST(:model AS uuid[]), CAST(:tier AS smallint[]),
            CAST(:tenant AS uuid[]), CAST(:currency AS text[]), CAST(:above AS bigint[]), CAST(:up_to AS bigint[]),
            CAST(:input AS bigint[]), CAST(:cached AS bigint[]), CAST(:cache_write AS bigint[]),
            CAST(:output AS bigint[]), CAST(:reasoning AS bigint[]), CAST(:request AS bigint[]),
            CAST(:minimum AS bigint[]))
            AS s (version, model, tier, tenant, currency, above, up_to, input, cached, cache_write, output, reasoning,
                  request, minimum)
    ), priced AS (
        SELECT e.id, e.amount_pico, e.min_charge_pico, s.minimum, s.version IS NOT NULL AS priced,
               e.currency = s.currency AND p.currency = e.currency
               AND e.day = (uuid_extract_timestamp(e.id) AT TIME ZONE 'UTC')::date AS fits,
               e.outcome IN ('completed', 'client_abort')
               AND NOT (e.outcome = 'client_abort' AND e.output + e.reasoning = 0)
               AND e.input_uncached + e.input_cached + e.input_cache_write + e.output + e.reasoning <> 0 AS charged,
               CASE WHEN greatest(e.input_uncached, e.input_cached, e.input_cache_write, e.output, e.reasoning)
                         < 1000000
                    THEN e.input_uncached * s.input + e.input_cached * s.cached + e.input_cache_write * s.cache_write
                         + e.output * s.output + e.reasoning * s.reasoning + s.request
                    END AS small_pico,
               e.input_uncached, e.input_cached, e.input_cache_write, e.output, e.reasoning, s.input, s.cached,
               s.cache_write, s.output AS output_price, s.reasoning AS reasoning_price, s.request
        FROM usage_event e
        LEFT JOIN schedule s
          ON s.version = e.price_version_id AND s.model = e.model_id AND s.tier = e.tier AND s.tenant = e.tenant_id
             AND e.input_uncached + e.input_cached + e.input_cache_write > s.above
             AND e.input_uncached + e.input_cached + e.input_cache_write <= s.up_to
        LEFT JOIN billing_profile p ON p.tenant_id = e.tenant_id
        WHERE e.day = :day
        OFFSET 0
    ), rated AS (
        SELECT *, CASE WHEN charged IS NOT TRUE THEN 0 WHEN small_pico IS NOT NULL THEN small_pico
                       ELSE input_uncached::numeric * input + input_cached::numeric * cached
                            + input_cache_write::numeric * cache_write + output::numeric * output_price
                            + reasoning::numeric * reasoning_price + request END AS usage_pico
        FROM priced
        WHERE NOT coalesce(fits AND CASE
            WHEN NOT charged THEN amount_pico = 0 AND min_charge_pico = 0
            WHEN small_pico >= minimum THEN amount_pico = small_pico AND min_charge_pico = 0
            WHEN small_pico < minimum THEN amount_pico = minimum AND min_charge_pico = minimum - small_pico
            END, false)
    ), wrong AS (
        SELECT *, CASE WHEN charged THEN greatest(usage_pico, minimum) ELSE 0 END AS right_pico,
               CASE WHEN charged THEN greatest(minimum - usage_pico, 0) ELSE 0 END AS right_min_pico FROM rated
    )
    SELECT id::text AS row, CASE WHEN NOT priced THEN 'its price version has no price for it'
           WHEN NOT coalesce(fits, false) THEN 'its day, tenant or currency does not fit'
           ELSE 'it is billed ' || amount_pico || ' pico with a minimum charge of ' || min_charge_pico
           || ', its price version gives ' || right_pico || ' with ' || right_min_pico END AS problem
    FROM wrong
    WHERE (amount_pico, min_charge_pico) IS DISTINCT FROM (right_pico, right_min_pico) OR NOT coalesce(fits, false)
    ORDER BY id LIMIT 1
"""


async def first_misrated(
    session: AsyncSession, day: date, schedules: Sequence[tuple[UUID, UUID, PriceSchedule]]
) -> Row[Any] | None:
    """Rate the day's events again at `schedules` (tenant, model, prices); return the first whose amount differs."""
    bands = [(tenant, model, s, *band) for tenant, model, s in schedules for band in _bands(s)]
    values = {
        "day": day,
        "tenant": [tenant for tenant, *_ in bands],
        "model": [model for _, model, *_ in bands],
        "version": [s.price_version_id for _, _, s, *_ in bands],
        "tier": [int(s.tier) for _, _, s, *_ in bands],
        "currency": [s.currency.value for _, _, s, *_ in bands],
        "above": [above for *_, above, _, _ in bands],
        "up_to": [up_to for *_, up_to, _ in bands],
        "input": [unit.input for *_, unit in bands],
        "cached": [unit.cached_input for *_, unit in bands],
        "cache_write": [unit.cache_write for *_, unit in bands],
        "output": [unit.output for *_, unit in bands],
        "reasoning": [unit.reasoning for *_, unit in bands],
        "request": [s.request for _, _, s, *_ in bands],
        "minimum": [s.minimum for _, _, s, *_ in bands],
    }
    return (await session.execute(text(_FIRST_MISRATED), values)).first()


_FIRST_EDITED = f"""
    WITH fresh AS (
        SELECT tx_id, id, digest AS posted, {DIGEST} AS digest FROM usage_event WHERE day = :day
    ), whole AS (
        SELECT tx_id, min(id::text) FILTER (WHERE posted <> digest) AS edited,
               min(id::text) FILTER (WHERE posted IS NULL) AS without, {TX_DIGEST} AS sha256
        FROM fresh GROUP BY 1
    )
    SELECT coalesce(edited, without, tx_id::text) AS row,
           CASE WHEN edited IS NOT NULL THEN 'it is not as it was posted'
                WHEN without IS NOT NULL THEN 'it has no digest, its transaction has'
                ELSE 'the usage events it has on ' || :day || ' are not those it posted' END AS problem
    FROM whole LEFT JOIN ledger_tx x ON x.id = tx_id
    WHERE edited IS NOT NULL OR (x.usage_sha256 IS NOT NULL AND (without IS NOT NULL OR x.usage_sha256 <> sha256))
    ORDER BY 1 LIMIT 1
"""  # noqa: S608 - built of constants


async def first_edited(session: AsyncSession, day: date) -> Row[Any] | None:
    """Return the first of the day's events that is not what was posted, in any of its columns.

    Where an event came, went, or was changed together with its digest, it is their transaction. Events that were posted
    before there were digests have none, nor have their transactions.
    """
    return (await session.execute(text(_FIRST_EDITED), {"day": day})).first()


def _bands(s: PriceSchedule) -> list[tuple[int, int, PriceSchedule | PriceStep]]:
    """Return for each set of unit prices more than how many input tokens, and up to how many, it is for."""
    starts = [-1, *(step.above for step in s.steps)]
    return list(zip(starts, [*starts[1:], BIGINT_MAX], (s, *s.steps), strict=True))


async def first_unmoved(session: AsyncSession) -> Row[Any] | None:
    """Return the first transaction of usage that moved something else than its events come to; also which table."""
    statement = """
        WITH event AS MATERIALIZED (
            SELECT tx_id, tenant_id, sum(amount_pico) AS amount, sum(min_charge_pico) AS min_charge FROM (
                SELECT tx_id, tenant_id, amount_pico, min_charge_pico FROM usage_event
                UNION ALL
                SELECT k.tx_id, k.tenant_id, k.amount_pico, k.min_charge_pico
                FROM usage_day_tx k JOIN usage_day d ON d.day = k.day AND d.state = 'dropped') all_of
            GROUP BY 1, 2
        ), moved AS MATERIALIZED (
            SELECT t.tx_id, sum(t.amount) AS amount,
                   coalesce(sum(t.amount) FILTER (WHERE a.code = 'revenue.min_charge'), 0) AS min_charge
            FROM ledger_transfer t
            JOIN ledger_account a ON a.id = t.credit_account AND a.code IN ('revenue.usage', 'revenue.min_charge')
            GROUP BY 1
        )
        SELECT coalesce(x.id, e.tx_id)::text AS row,
               CASE WHEN x.id IS NULL THEN 'usage_event' ELSE 'usage_event and ledger_transfer' END AS table,
               CASE WHEN x.id IS NULL THEN 'its events, of ' || e.amount || ', have no such transaction of their tenant'
               ELSE 'its events come to ' || coalesce(e.amount, 0) || ' with ' || coalesce(e.min_charge, 0)
                    || ' of minimum charges, its transfers to ' || coalesce(m.amount, 0) || ' with '
                    || coalesce(m.min_charge, 0) END AS problem
        FROM (SELECT id, tenant_id, usage_sha256 FROM ledger_tx WHERE kind = 'usage') x
        FULL JOIN event e ON e.tx_id = x.id AND e.tenant_id = x.tenant_id
        LEFT JOIN moved m ON m.tx_id = x.id
        WHERE x.id IS NULL OR (e.tx_id IS NULL AND x.usage_sha256 IS NOT NULL)
              OR (coalesce(e.amount, 0), coalesce(e.min_charge, 0))
                 <> (coalesce(m.amount, 0), coalesce(m.min_charge, 0))
        ORDER BY 2, 1 LIMIT 1
    """
    return (await session.execute(text(statement))).first()


async def rollup_dates(session: AsyncSession) -> set[date]:
    """Return the UTC days of which there is a rollup."""
    statement = "SELECT (minute AT TIME ZONE 'UTC')::date FROM usage_rollup GROUP BY 1"
    return set((await session.scalars(text(statement))).all())


async def kept_dates(session: AsyncSession) -> set[date]:
    """Return the UTC days of admission of whose events some are dropped."""
    statement = """
        SELECT (k.minute AT TIME ZONE 'UTC')::date FROM usage_day_rollup k
        JOIN usage_day d ON d.day = k.day AND d.state = 'dropped' GROUP BY 1
    """
    return set((await session.scalars(text(statement))).all())


_LIVE = f"""
    SELECT {KEY.replace("minute,", "date_trunc('minute', admitted_at, 'UTC') AS minute,")}, min(currency) AS currency,
           count(*)::numeric AS requests, {", ".join(f"sum({c}) AS {c}" for c in SUMS[1:])}
    FROM usage_event WHERE day = ANY(:days) AND admitted_at >= :since AND admitted_at < :until
    GROUP BY {KEY.replace("minute,", "date_trunc('minute', admitted_at, 'UTC'),")}
"""  # noqa: S608 - built of constants
_KEPT = f"""
    SELECT {KEY}, currency, {", ".join(SUMS)}
    FROM usage_day_rollup k JOIN usage_day d ON d.day = k.day AND d.state = 'dropped'
    WHERE minute >= :since AND minute < :until
"""  # noqa: S608 - built of constants
_LIVE_AND_KEPT = f"""
    SELECT {KEY}, min(currency) AS currency, {", ".join(f"sum({c}) AS {c}" for c in SUMS)}
    FROM ({_LIVE} UNION ALL {_KEPT}) s GROUP BY {KEY}
"""  # noqa: S608 - built of constants
_FIRST_UNROLLED = f"""
    SELECT 'tenant ' || tenant_id || ' minute ' || minute || ' model ' || model AS row,
           'it says ' || coalesce(r.amount_pico::text, 'nothing') || ' for ' || coalesce(r.requests, 0)
           || ' requests, the events come to ' || coalesce(e.amount_pico::text, 'nothing') || ' for '
           || coalesce(e.requests, 0) || ', or tokens differ' AS problem
    FROM (SELECT * FROM usage_rollup WHERE minute >= :since AND minute < :until) r
    FULL JOIN ({{events}}) e USING ({KEY})
    WHERE (r.currency, {", ".join(f"r.{c}" for c in SUMS)}) IS DISTINCT FROM
          (e.currency, {", ".join(f"e.{c}" for c in SUMS)})
    ORDER BY tenant_id, minute LIMIT 1
"""  # noqa: S608 - built of constants


async def first_unrolled(session: AsyncSession, on: date, days: Sequence[date], *, with_kept: bool) -> Row[Any] | None:
    """Return the first rollup of a UTC day that is not the sum of its events.

    Args:
        session: the transaction.
        on: the day of admission.
        days: the days of which there are events that were admitted on it.
        with_kept: some of its events are dropped; add what is kept of them.
    """
    statement = _FIRST_UNROLLED.format(events=_LIVE_AND_KEPT if with_kept else _LIVE)
    since, until = (datetime.combine(day, time(), UTC) for day in (on, on + _DAY))
    return (await session.execute(text(statement), {"since": since, "until": until, "days": list(days)})).first()
