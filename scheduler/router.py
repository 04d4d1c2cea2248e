"""Which replica of a deployment answers: the ready one with the fewest requests of ours in flight. Pure."""

from collections.abc import Mapping, Sequence

from knative.types import Endpoint


def pick(endpoints: Sequence[Endpoint], inflight: Mapping[str, int], *, turn: int = 0) -> Endpoint | None:
    """Return the endpoint to use, or None when there is none.

    Args:
        endpoints: the ready ones, as the controller publishes them.
        inflight: by endpoint URL, requests this gateway has running there; missing means 0.
        turn: a number that differs from call to call, so that equals take turns.
    """
    count = len(endpoints)
    if count <= 1:
        return endpoints[0] if count else None
    start = turn % count
    order = (endpoints[(start + step) % count] for step in range(count))
    return min(order, key=lambda endpoint: inflight.get(endpoint.url, 0))
