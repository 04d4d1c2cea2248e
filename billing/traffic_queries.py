"""Queries of a tenant's usage as traffic: single events while they are kept, sums by minute for ever."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.admitted_queries import admitted_events


async def requests_by_day(session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime) -> dict[date, int]:
    """Return how many requests were billed on each UTC day."""
    statement = """
        SELECT CAST(minute AT TIME ZONE 'UTC' AS date) AS day, sum(requests)::bigint AS requests FROM usage_rollup
        WHERE tenant_id = :tenant AND minute >= :since AND minute < :until GROUP BY 1
    """
    rows = await session.execute(text(statement), {"tenant": tenant_id, "since": since, "until": until})
    return {row.day: row.requests for row in rows}


async def events(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, limit: int
) -> Sequence[Row[Any]]:
    """Return events admitted in this time, oldest first."""
    statement = f"""
        SELECT admitted_at, ended_at, queue_us, project_id, key_id, model_id, model,
               input_uncached + input_cached + input_cache_write AS input, output + reasoning AS output, amount_pico
        FROM {admitted_events("tenant_id = :tenant")} e ORDER BY admitted_at, id LIMIT :limit
    """  # noqa: S608 - built of constants
    values = {"tenant": tenant_id, "since": since, "until": until, "limit": limit}
    return (await session.execute(text(statement), values)).all()


async def minutes(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, limit: int
) -> Sequence[Row[Any]]:
    """Return the sums of minutes by key and model, newest first."""
    statement = """
        SELECT minute, project_id, key_id, model_id, model, sum(requests)::bigint AS requests,
               sum(input_uncached + input_cached + input_cache_write)::bigint AS input,
               sum(output + reasoning)::bigint AS output, sum(amount_pico) AS amount_pico
        FROM usage_rollup WHERE tenant_id = :tenant AND minute >= :since AND minute < :until
        GROUP BY minute, project_id, key_id, model_id, model
        ORDER BY minute DESC, key_id, model_id, model LIMIT :limit
    """
    values = {"tenant": tenant_id, "since": since, "until": until, "limit": limit}
    return (await session.execute(text(statement), values)).all()


async def spent(session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime) -> Sequence[Row[Any]]:
    """Return what each key spent on each model."""
    statement = """
        SELECT project_id, key_id, model_id, sum(amount_pico) AS amount_pico
        FROM usage_rollup WHERE tenant_id = :tenant AND minute >= :since AND minute < :until
        GROUP BY project_id, key_id, model_id
    """
    values = {"tenant": tenant_id, "since": since, "until": until}
    return (await session.execute(text(statement), values)).all()


async def names_version(session: AsyncSession, version_id: UUID, first: date, last: date) -> bool:
    """Say whether an event of these days names a version, whoever's it is. One in quarantine may: nobody has looked."""
    statement = """
        SELECT EXISTS (SELECT FROM usage_event WHERE version_id = :version AND day BETWEEN :first AND :last)
            OR EXISTS (
                SELECT FROM usage_quarantine WHERE admitted_at >= :first AND admitted_at < CAST(:last AS date) + 1
            )
    """
    found = await session.execute(text(statement), {"version": version_id, "first": first, "last": last})
    return bool(found.scalar_one())
