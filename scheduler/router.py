"""Which replica of a deployment answers: the one with the fewest requests of this gateway in flight.

One that has said nothing for a while to those who wait for it may be hung. It is asked only where all others are like
it, and once every half minute to see whether it speaks again, so that it costs nearly nobody anything. An engine that
is only slow loses nothing by it: others are asked first.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """A replica, and how many requests this gateway has running there."""

    @property
    def inflight(self) -> int: ...

    silent_since: float  # monotonic; 0: it has said something lately, or owes nobody anything


Replica = TypeVar("Replica", bound=Loaded)


SILENT_S = 1.5  # engines speak several times a second while they work on a stream
PROBE_S = 31.5  # of silence, after which it is asked once more


def pick(replicas: Sequence[Replica], *, besides: Replica | None = None, turn: int = 0, now: float = 0.0) -> Replica:
    """Return the replica to ask.

    Args:
        replicas: the ready ones, at least one.
        besides: one that was asked before; it is asked again only where there is no other.
        now: monotonic, the clock of `silent_since`.
        turn: a number that differs from call to call, so that equals take turns.
    """
    count = len(replicas)
    if count == 1:
        return replicas[0]
    start = turn % count
    order = [*replicas[start:], *replicas[:start]]
    others = [replica for replica in order if replica is not besides] or order
    speaking = [one for one in others if not SILENT_S <= now - (one.silent_since or now) < PROBE_S]
    picked = min(speaking or others, key=_inflight)
    if picked.silent_since and now - picked.silent_since >= PROBE_S:
        picked.silent_since = now - SILENT_S  # one request is enough to see
    return picked


def _inflight(replica: Loaded) -> int:
    return replica.inflight
