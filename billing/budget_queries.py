"""What is posted on a budget, from the rollup."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

Part = tuple[datetime | None, datetime | None, UUID | None, UUID | None, UUID | None]
"""From (inclusive), until (exclusive), project, key, model; None: all."""

_SPENT = """
    SELECT (SELECT coalesce(sum(r.amount_pico), 0) FROM usage_rollup r
            WHERE r.tenant_id = :tenant
              AND r.minute >= coalesce(part.start, '-infinity') AND r.minute < coalesce(part.until, 'infinity')
              AND (part.project_id IS NULL OR r.project_id = part.project_id)
              AND (part.key_id IS NULL OR r.key_id = part.key_id)
              AND (part.model_id IS NULL OR r.model_id = part.model_id)) AS amount_pico
    FROM unnest(CAST(:starts AS timestamptz[]), CAST(:untils AS timestamptz[]), CAST(:projects AS uuid[]),
                CAST(:keys AS uuid[]), CAST(:models AS uuid[]))
         WITH ORDINALITY AS part (start, until, project_id, key_id, model_id, place)
    ORDER BY part.place
"""


async def spent_pico(session: AsyncSession, tenant_id: UUID, parts: Sequence[Part]) -> list[int]:
    """Return the posted sum of each part of the tenant's usage, in their order."""
    starts, untils, projects, keys, models = (list(column) for column in zip(*parts, strict=True))
    values = {
        "tenant": tenant_id,
        "starts": starts,
        "untils": untils,
        "projects": projects,
        "keys": keys,
        "models": models,
    }
    return [int(amount) for amount in await session.scalars(text(_SPENT), values)]


Window = tuple[datetime | None, datetime | None]
"""From (inclusive), until (exclusive); None: always."""


async def spent_by_owner(session: AsyncSession, tenant_id: UUID, windows: Sequence[Window]) -> Sequence[Row[Any]]:
    """Return what is posted per window (its place in the sequence), project, key and model. One scan per window."""
    statement = """
        SELECT CAST(w.place AS integer) - 1 AS place, r.project_id, r.key_id, r.model_id, sum(r.amount_pico) AS pico
        FROM unnest(CAST(:starts AS timestamptz[]), CAST(:untils AS timestamptz[]))
             WITH ORDINALITY AS w (start, until, place)
        JOIN usage_rollup r ON r.tenant_id = :tenant
         AND r.minute >= coalesce(w.start, '-infinity') AND r.minute < coalesce(w.until, 'infinity')
        GROUP BY w.place, r.project_id, r.key_id, r.model_id
    """
    values = {"tenant": tenant_id, "starts": [w[0] for w in windows], "untils": [w[1] for w in windows]}
    return (await session.execute(text(statement), values)).all()


async def users_since(session: AsyncSession, tenant_id: UUID, since: datetime | None) -> list[tuple[UUID, UUID]]:
    """Return project and key of all usage of the tenant since then."""
    statement = """
        SELECT DISTINCT project_id, key_id FROM usage_rollup
        WHERE tenant_id = :tenant AND minute >= coalesce(CAST(:since AS timestamptz), '-infinity')
    """
    rows = await session.execute(text(statement), {"tenant": tenant_id, "since": since})
    return [(row[0], row[1]) for row in rows]
