"""Which replica of a deployment answers: the one with the fewest requests of this gateway in flight. Pure."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """A replica, and how many requests this gateway has running there."""

    @property
    def inflight(self) -> int: ...


Replica = TypeVar("Replica", bound=Loaded)


def pick(replicas: Sequence[Replica], *, besides: Replica | None = None, turn: int = 0) -> Replica:
    """Return the replica to ask.

    Args:
        replicas: the ready ones, at least one.
        besides: one that was asked before; it is asked again only where there is no other.
        turn: a number that differs from call to call, so that equals take turns.
    """
    count = len(replicas)
    if count == 1:
        return replicas[0]
    start = turn % count
    order = [*replicas[start:], *replicas[:start]]
    others = [replica for replica in order if replica is not besides]
    return min(others or order, key=_inflight)


def _inflight(replica: Loaded) -> int:
    return replica.inflight
