"""What is posted on a budget, from the rollup."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import text
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
