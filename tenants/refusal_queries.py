"""Queries of refusals."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

RefusalRow = Row[*tuple[Any, ...]]

_TYPES = {
    "id": "uuid",
    "at": "timestamptz",
    "span_s": "smallint",
    "tenant_id": "uuid",
    "project_id": "uuid",
    "key_id": "uuid",
    "model_id": "uuid",
    "model": "text",
    "code": "text",
    "level": "text",
    "metric": "text",
    "limit_model": "text",
    "mode": "text",
    "requests": "bigint",
    "input_tokens": "numeric",
    "output_tokens": "numeric",
    "sample_request_id": "uuid",
}


async def insert(session: AsyncSession, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, each a tuple in the order of the columns; one whose id is there already changes nothing."""
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _TYPES.items())
    statement = f"""
        INSERT INTO refusal ({", ".join(_TYPES)}) SELECT * FROM unnest({arrays}) ON CONFLICT (id, at) DO NOTHING
    """  # noqa: S608 - names are ours, values are bound
    columns = zip(*rows, strict=True)
    await session.execute(text(statement), dict(zip(_TYPES, map(list, columns), strict=True)))


async def ensure_partition(session: AsyncSession, day: date) -> None:
    await session.execute(text("SELECT ensure_refusal_partition(:day)"), {"day": day})


async def drop_partitions(session: AsyncSession, older_than: date) -> int:
    """Drop the days before; returns how many there were."""
    dropped = await session.execute(text("SELECT drop_refusal_partitions(:day)"), {"day": older_than})
    return int(dropped.scalar_one())


async def by_second(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, limit: int
) -> Sequence[RefusalRow]:
    """Return what was refused to the tenant or passed a soft or dark limit, newest first, over all gateways."""
    statement = """
        SELECT at, span_s, project_id, key_id, model_id, model, code, level, metric, limit_model, mode,
               sum(requests)::bigint AS requests, sum(input_tokens)::bigint AS input_tokens,
               sum(output_tokens)::bigint AS output_tokens
        FROM refusal WHERE tenant_id = :tenant_id AND at >= :since AND at < :until
        GROUP BY at, span_s, project_id, key_id, model_id, model, code, level, metric, limit_model, mode
        ORDER BY at DESC, span_s, key_id, model, code, level, metric, limit_model, mode LIMIT :limit
    """
    values = {"tenant_id": tenant_id, "since": since, "until": until, "limit": limit}
    return (await session.execute(text(statement), values)).all()


async def by_limit(
    session: AsyncSession, tenant_id: UUID, since: datetime, project_id: UUID, key_id: UUID | None
) -> Sequence[RefusalRow]:
    """Return how many requests met each limit: of the tenant, the project, and the key or the project's keys."""
    statement = """
        SELECT level, metric, limit_model, mode, sum(requests)::bigint AS requests FROM refusal
        WHERE tenant_id = :tenant_id AND at >= :since AND metric <> ''
            AND (level = 'tenant' OR project_id = :project_id)
            AND (level <> 'key' OR CAST(:key_id AS uuid) IS NULL OR key_id = :key_id)
        GROUP BY level, metric, limit_model, mode
    """
    values = {"tenant_id": tenant_id, "since": since, "project_id": project_id, "key_id": key_id}
    return (await session.execute(text(statement), values)).all()


async def by_hour(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, limit: int
) -> Sequence[RefusalRow]:
    """Return the same by hour, model and limit, newest hour first, with one request as a sample."""
    statement = """
        SELECT date_trunc('hour', at, 'UTC') AS hour, model, code, level, metric, limit_model, mode,
               sum(requests)::bigint AS requests, sum(input_tokens)::bigint AS input_tokens,
               sum(output_tokens)::bigint AS output_tokens, max(sample_request_id::text)::uuid AS sample_request_id
        FROM refusal WHERE tenant_id = :tenant_id AND at >= :since AND at < :until
        GROUP BY hour, model, code, level, metric, limit_model, mode
        ORDER BY hour DESC, requests DESC, model, code, level, metric, limit_model, mode LIMIT :limit
    """
    values = {"tenant_id": tenant_id, "since": since, "until": until, "limit": limit}
    return (await session.execute(text(statement), values)).all()
