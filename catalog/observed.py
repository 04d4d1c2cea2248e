"""What backends observe: replicas, how long loads took, and whose turn it is to write (the controller's term)."""

from collections import defaultdict
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import queries
from catalog.types import ObservedReplica, Wake

LOADS_KEPT = 20  # per deployment
WAKES_KEPT = 200  # per deployment


async def record_replica(session: AsyncSession, replica: ObservedReplica) -> None:
    """Write what is seen of a replica; an older term or epoch changes nothing."""
    await queries.upsert_replica(session, msgspec.structs.asdict(replica))


async def remove_replica(session: AsyncSession, replica_id: UUID, *, term: int) -> None:
    """Forget a replica whose engine is gone, unless a later term wrote it."""
    await queries.delete_replica(session, replica_id, term)


async def remove_seat(session: AsyncSession, deployment_id: UUID, index: int, *, term: int) -> None:
    """Forget whichever replica had this index, unless a later term wrote it."""
    await queries.delete_seat(session, deployment_id, index, term)


async def list_replicas(session: AsyncSession, deployment_id: UUID | None = None) -> list[ObservedReplica]:
    return [
        ObservedReplica(**{name: getattr(row, name) for name in ObservedReplica.__struct_fields__})
        for row in await queries.replicas(session, deployment_id)
    ]


async def record_load(session: AsyncSession, deployment_id: UUID, load_ms: int, *, now: datetime) -> None:
    await queries.insert_load(session, deployment_id, load_ms, now, LOADS_KEPT)


async def load_history(session: AsyncSession) -> dict[UUID, tuple[int, ...]]:
    """Return the last load times of each deployment in milliseconds, oldest first."""
    found: defaultdict[UUID, list[int]] = defaultdict(list)
    for deployment_id, load_ms in await queries.loads(session):
        found[deployment_id].append(load_ms)
    return {deployment_id: tuple(times) for deployment_id, times in found.items()}


async def record_wake(session: AsyncSession, wake: Wake) -> None:
    """Write one start; again when its first token is known."""
    await queries.upsert_wake(session, msgspec.structs.asdict(wake), WAKES_KEPT)


async def list_wakes(session: AsyncSession, deployment_id: UUID) -> list[Wake]:
    """Return the last starts of a deployment's engines, newest first."""
    return [
        msgspec.convert({name: getattr(row, name) for name in Wake.__struct_fields__}, Wake)
        for row in await queries.wakes(session, deployment_id)
    ]


async def begin_term(session: AsyncSession, holder: str) -> int:
    """Start a leader's term and return its number, one larger than the last."""
    return await queries.next_term(session, holder)


async def current_term(session: AsyncSession) -> int:
    return await queries.current_term(session)


async def changes_since(session: AsyncSession, seen: int) -> tuple[int, bool]:
    """Return the newest configuration revision, and whether the catalog changed after `seen`."""
    return await queries.changes_since(session, seen)
