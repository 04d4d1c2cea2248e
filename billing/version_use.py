"""Whether the books still name a version of a model: its weights are kept as long as they do."""

from datetime import date
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from billing import traffic_queries


async def is_used(session: AsyncSession, version_id: UUID, first: date, last: date) -> bool:
    """Say whether usage of these days, both included, names a version, or may do so in quarantine."""
    return await traffic_queries.names_version(session, version_id, first, last)
