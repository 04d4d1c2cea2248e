"""The controller's lock; private to this package. Everything else it stores is the catalog's."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

LEADER_LOCK = 7_481_202  # any constant of ours


async def try_lock(connection: AsyncConnection) -> bool:
    """Take the leader's lock for the life of this connection; False when another has it.

    The server notices the death of this host within seven seconds and lets the lock go.
    """
    await connection.execute(
        text(
            "SELECT set_config('tcp_keepalives_idle', '3', false), set_config('tcp_keepalives_interval', '2', false),"
            " set_config('tcp_keepalives_count', '2', false)"
        )
    )
    got = await connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": LEADER_LOCK})
    return bool(got.scalar_one())


async def holds_lock(connection: AsyncConnection) -> bool:
    """Return whether this connection has the lock. Raises when the connection is gone."""
    held = await connection.execute(
        text(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            " AND objid = :key AND granted)"
        ),
        {"key": LEADER_LOCK},
    )
    return bool(held.scalar_one())


async def unlock(connection: AsyncConnection) -> None:
    """Give the leader's lock back, if this connection has it."""
    await connection.execute(text("SELECT pg_advisory_unlock_all()"))
