"""The record of wakes: each start of an engine, timed by phase from the first wish to the first token. Pure.

decide (wish → decision), fetch (the weights are on the host), schedule (decision → process, but for the fetch), load
(process → ready), first token (ready → first token of a caller that was held, as a gateway timed it).
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from uuid import UUID

import msgspec

from catalog.types import Wake, WakeCause, WakeOutcome
from knative.types import ReplicaState, Seat

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_TOKEN_MAX_US = 600_000_000  # a first token that comes later is no wake's
OPEN_MAX = 1000


OUTCOMES = MappingProxyType({ReplicaState.READY: WakeOutcome.READY, ReplicaState.FAILED: WakeOutcome.FAILED})
"""By the state that a loading engine came to; any other: it was ended."""


def cause_of(seat: Seat, before: ReplicaState, min_scale: int) -> WakeCause:
    """Return why an engine is started where its seat was in this state."""
    if before is ReplicaState.LOADING:  # only one that ended waits there for its next start
        return WakeCause.CRASH
    if seat.index < min_scale:
        return WakeCause.FLOOR
    return WakeCause.LOAD if seat.index else WakeCause.CALL


class Timing(msgspec.Struct, frozen=True):
    """What a backend needed to start one engine, in microseconds."""

    fetch_us: int = 0
    schedule_us: int = 0


class _Open(msgspec.Struct, frozen=True):
    """A start that is not over."""

    cause: WakeCause
    decided_us: int
    wished_us: int  # how long before that it was first wished for
    timing: Timing
    attempts: int = 1


class Wakes:
    """What is open, and what waits for its first token."""

    def __init__(self, new_id: Callable[[], UUID]) -> None:
        self._new_id = new_id
        self._open: dict[Seat, _Open] = {}
        self._tokenless: dict[UUID, tuple[Wake, int]] = {}  # by deployment: the last that is ready, and since when

    def begin(self, seat: Seat, cause: WakeCause, timing: Timing, *, now_us: int, wished_us: int = 0) -> None:
        """An engine is started; one more try of the same start where one is open."""
        known = self._open.get(seat)
        if known is not None:
            self._open[seat] = msgspec.structs.replace(known, attempts=known.attempts + 1)
        elif len(self._open) < OPEN_MAX:
            self._open[seat] = _Open(cause, now_us, wished_us, timing)

    def end(
        self, seat: Seat, outcome: WakeOutcome, *, now_us: int, fetched_us: int = 0, held: int = 0, reason: str = ""
    ) -> Wake | None:
        """The start is over; None when none was open. `fetched_us`: what the weights took once there was a process."""
        known = self._open.pop(seat, None)
        if known is None:
            return None
        timing = known.timing
        load_us = max(0, now_us - known.decided_us - timing.fetch_us - timing.schedule_us)
        fetched_us = min(fetched_us, load_us)
        load_us -= fetched_us
        wake = Wake(
            id=self._new_id(),
            deployment_id=seat.deployment_id,
            index=seat.index,
            cause=known.cause,
            outcome=outcome,
            woken_at=UNIX_EPOCH + timedelta(microseconds=known.decided_us - known.wished_us),
            decide_ms=known.wished_us // 1000,
            fetch_ms=(timing.fetch_us + fetched_us) // 1000,
            schedule_ms=timing.schedule_us // 1000,
            load_ms=load_us // 1000 if outcome is WakeOutcome.READY else None,
            first_token_ms=None,
            held=held,
            attempts=known.attempts,
            reason=reason,
        )
        if outcome is WakeOutcome.READY and known.cause is WakeCause.CALL:
            self._tokenless[seat.deployment_id] = (wake, now_us)
        return wake

    def tokenless(self, now_us: int) -> list[UUID]:
        """Return the deployments whose last wake has no first token yet; those that waited too long are forgotten."""
        for deployment_id, (_, ready_us) in list(self._tokenless.items()):
            if now_us - ready_us > FIRST_TOKEN_MAX_US:
                del self._tokenless[deployment_id]
        return sorted(self._tokenless)

    def first_token(self, deployment_id: UUID, said: bytes) -> Wake | None:
        """Return the wake with its first token, when this is one of it: ``<since when it was ready> <ms>``."""
        wake, ready_us = self._tokenless.get(deployment_id, (None, 0))
        opened, _, ms = said.partition(b" ")
        if wake is None or opened != b"%d" % ready_us or not ms.isdigit():
            return None
        del self._tokenless[deployment_id]
        return msgspec.structs.replace(wake, first_token_ms=int(ms))
