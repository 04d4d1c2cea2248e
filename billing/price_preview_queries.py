"""Queries of what usage would have cost at other prices. Operators look at all tenants at once."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.admitted_queries import admitted_events
from billing.rating_queries import SCHEDULES, amount_of, is_rated_at, schedule_values
from billing.types import PriceSchedule

TIME_LIMIT = "10min"  # of one day's usage
ROWS_FETCHED = 2000

Offer = tuple[UUID, UUID, int, UUID]
"""Tenant, model, tier, price version."""


async def offers(session: AsyncSession, since: datetime, until: datetime) -> Sequence[Row[Any]]:
    """Return what was used in that time, by tenant, model, tier and price version, with the number of requests."""
    statement = """
        SELECT tenant_id, model_id, tier, price_version_id, sum(requests)::bigint AS requests FROM usage_rollup
        WHERE minute >= :since AND minute < :until GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
    """
    await session.execute(text(f"SET LOCAL statement_timeout = '{TIME_LIMIT}'"))
    return (await session.execute(text(statement), {"since": since, "until": until})).all()


# A group is rated event by event when all its events are there. Else minute by minute, which is right for one request,
# for endings that are not billed, and for completed calls at prices that are nothing but so much a token. What was paid
# is with what re-ratings changed; of a group of which something is left out, they count as left out.
_DAY = f"""
    WITH schedule AS (SELECT * FROM {SCHEDULES}), event AS (
        SELECT s.tenant, s.model, s.tier, s.version, e.outcome, count(*) AS requests, sum(e.amount_pico) AS paid,
               sum({amount_of("e")}) AS would
        FROM {admitted_events()} e JOIN schedule s ON {is_rated_at("e")}
        GROUP BY 1, 2, 3, 4, 5
    ), minute AS (
        SELECT s.tenant, s.model, s.tier, s.version, m.outcome, m.requests, m.amount_pico AS paid,
               {amount_of("m")} AS would,
               m.requests = 1 OR m.outcome NOT IN ('completed', 'client_abort')
               OR (s.proportional AND (m.outcome = 'completed' OR m.output + m.reasoning = 0)) AS exact
        FROM usage_rollup m JOIN schedule s ON {is_rated_at("m")}
        WHERE m.tenant_id = ANY(CAST(:tenant AS uuid[])) AND m.minute >= :since AND m.minute < :until
    ), rolled AS (
        SELECT tenant, model, tier, version, outcome, sum(requests) AS requests, sum(paid) AS paid,
               sum(requests) FILTER (WHERE exact) AS exact_requests, sum(paid) FILTER (WHERE exact) AS exact_paid,
               sum(would) FILTER (WHERE exact) AS would
        FROM minute GROUP BY 1, 2, 3, 4, 5
    ), rerated AS (
        SELECT l.tenant_id AS tenant, l.model_id AS model, l.tier, l.price_version_id AS version, l.outcome,
               sum(l.to_pico - l.from_pico) AS changed
        FROM usage_rerating l
        WHERE l.tenant_id = ANY(CAST(:tenant AS uuid[])) AND l.admitted_at >= :since AND l.admitted_at < :until
        GROUP BY 1, 2, 3, 4, 5
    ), known AS (
        SELECT r.*, e.would AS event_would, r.requests = e.requests AND r.paid = e.paid AS whole,
               coalesce(g.changed, 0) AS changed
        FROM rolled r LEFT JOIN event e USING (tenant, model, tier, version, outcome)
        LEFT JOIN rerated g USING (tenant, model, tier, version, outcome)
    )
    SELECT tenant AS tenant_id, model AS model_id, tier,
           coalesce(sum(requests) FILTER (WHERE whole), 0) AS by_event,
           coalesce(sum(exact_requests) FILTER (WHERE whole IS NOT TRUE), 0) AS by_minute,
           coalesce(sum(requests - coalesce(exact_requests, 0)) FILTER (WHERE whole IS NOT TRUE), 0) AS left_out,
           coalesce(sum(CASE WHEN whole THEN paid + changed WHEN exact_requests = requests THEN exact_paid + changed
                             ELSE coalesce(exact_paid, 0) END), 0) AS paid,
           coalesce(sum(CASE WHEN whole THEN event_would ELSE coalesce(would, 0) END), 0) AS would,
           coalesce(sum(paid - coalesce(exact_paid, 0) + changed)
                    FILTER (WHERE whole IS NOT TRUE AND exact_requests IS DISTINCT FROM requests), 0) AS left_out_paid
    FROM known GROUP BY 1, 2, 3
"""  # noqa: S608 - built of constants


async def day(
    session: AsyncSession, since: datetime, until: datetime, rated: Sequence[tuple[Offer, PriceSchedule]]
) -> AsyncGenerator[Row[Any], None]:
    """Yield what a day's usage of these offers came to, and would have at these prices, by tenant, model and tier."""
    await session.execute(text(f"SET LOCAL statement_timeout = '{TIME_LIMIT}'"))
    values = schedule_values([(tenant, model, version, s) for (tenant, model, _, version), s in rated])
    options = {"yield_per": ROWS_FETCHED}
    result = await session.stream(text(_DAY), {**values, "since": since, "until": until}, execution_options=options)
    try:
        async for row in result:
            yield row
    finally:
        await result.close()


async def unpriced(
    session: AsyncSession, since: datetime, until: datetime, offers: Sequence[Offer]
) -> Sequence[Row[Any]]:
    """Return requests and amounts of offers that have no price, by tenant, model and tier."""
    statement = """
        SELECT m.tenant_id, m.model_id, m.tier, sum(m.requests)::bigint AS requests, sum(m.amount_pico) AS paid
        FROM usage_rollup m JOIN unnest(CAST(:tenant AS uuid[]), CAST(:model AS uuid[]), CAST(:tier AS smallint[]),
            CAST(:version AS uuid[])) AS s (tenant, model, tier, version)
            ON s.tenant = m.tenant_id AND s.model = m.model_id AND s.tier = m.tier AND s.version = m.price_version_id
        WHERE m.minute >= :since AND m.minute < :until GROUP BY 1, 2, 3
    """
    names = ("tenant", "model", "tier", "version")
    values: dict[str, Any] = dict(zip(names, map(list, zip(*offers, strict=True)), strict=True))
    return (await session.execute(text(statement), {**values, "since": since, "until": until})).all()
