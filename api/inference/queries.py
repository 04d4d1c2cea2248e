"""The two statements the gateway itself says to Postgres; all else is its neighbours' queries."""

from typing import Any
from uuid import UUID

from psycopg import AsyncConnection

LISTEN = "LISTEN config_change"
CHANGES_MAX = 1000  # of one look; more are found by the next


async def newest_revision(connection: AsyncConnection[Any]) -> int:
    cursor = await connection.execute("SELECT coalesce(max(revision), 0) FROM config_change")
    row = await cursor.fetchone()
    return int(row[0]) if row is not None else 0


async def changes_after(connection: AsyncConnection[Any], revision: int) -> list[tuple[int, str, UUID | None, float]]:
    """Return (revision, kind, entity, age in seconds by the database's clock) of later changes, oldest first."""
    cursor = await connection.execute(
        "SELECT revision, kind, entity_id, extract(epoch FROM clock_timestamp() - changed_at)::float8 "
        "FROM config_change WHERE revision > %s ORDER BY revision LIMIT %s",
        (revision, CHANGES_MAX),
    )
    return await cursor.fetchall()
