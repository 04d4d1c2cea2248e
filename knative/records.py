"""What the leader writes to Postgres of what it saw: replicas for operators, load times for estimates.

Engines do not depend on it: while Postgres is away the newest of each is kept here and written later.
"""

from collections import defaultdict, deque
from datetime import datetime
from uuid import UUID

import msgspec

from catalog import observed
from catalog.types import ObservedReplica, Wake
from core import db
from knative.types import ReplicaState, Seat

LOADS_WAITING_MAX = 1000


class Records:
    """Rows of one term, written by `write`."""

    def __init__(self, sessions: db.Sessions, term: int) -> None:
        self._sessions = sessions
        self._term = term
        self._loads: defaultdict[UUID, deque[int]] = defaultdict(lambda: deque(maxlen=observed.LOADS_KEPT))
        self._new_loads: deque[tuple[UUID, int]] = deque(maxlen=LOADS_WAITING_MAX)
        self._wakes: dict[UUID, Wake] = {}
        self._replicas: dict[Seat, ObservedReplica] = {}
        self._unwritten: set[Seat] = set()
        self._orphans: set[UUID] = set()  # rows of an earlier term

    async def load(self) -> None:
        async with db.transaction(self._sessions) as session:
            for deployment_id, times in (await observed.load_history(session)).items():
                self._loads[deployment_id].extend(times)
            self._orphans = {row.id for row in await observed.list_replicas(session)}

    def loads(self, deployment_id: UUID) -> tuple[int, ...]:
        """Return the last load times in milliseconds."""
        return tuple(self._loads[deployment_id])

    def note_load(self, deployment_id: UUID, load_ms: int) -> None:
        self._loads[deployment_id].append(load_ms)
        self._new_loads.append((deployment_id, load_ms))

    def note_wake(self, wake: Wake) -> None:
        """Put down a start that is over, and again once its first token is known."""
        if wake.id in self._wakes or len(self._wakes) < LOADS_WAITING_MAX:
            self._wakes[wake.id] = wake

    def note(self, replica: ObservedReplica) -> None:
        """Put down a replica; an estimate that only ticks on is not worth a row."""
        seat = Seat(replica.deployment_id, replica.index)
        known = self._replicas.get(seat)
        if known is None or msgspec.structs.replace(replica, epoch=known.epoch) != known:
            self._replicas[seat] = replica
            self._unwritten.add(seat)

    async def write(self, now: datetime) -> None:
        """Write what is new in one transaction; raises when Postgres is away, and nothing is forgotten."""
        if not (self._unwritten or self._new_loads or self._wakes or self._orphans):
            return
        replicas = [self._replicas[seat] for seat in sorted(self._unwritten)]
        loads, wakes = list(self._new_loads), list(self._wakes.values())
        async with db.transaction(self._sessions) as session:
            for replica_id in sorted(self._orphans - {replica.id for replica in replicas}):
                await observed.remove_replica(session, replica_id, term=self._term)
            for replica in replicas:
                if replica.state == ReplicaState.ABSENT:
                    await observed.remove_seat(session, replica.deployment_id, replica.index, term=self._term)
                else:
                    await observed.record_replica(session, replica)
            for deployment_id, load_ms in loads:
                await observed.record_load(session, deployment_id, load_ms, now=now)
            for wake in wakes:
                await observed.record_wake(session, wake)
        self._wakes.clear()
        self._unwritten.clear()
        self._new_loads.clear()
        self._orphans.clear()
