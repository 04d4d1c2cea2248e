"""The x-ratelimit headers: exact on what was admitted or refused by a limit, else as this replica last saw them."""

from collections.abc import Sequence
from uuid import UUID

from api.inference.ports import LimitState
from core.demand import DemandKind
from core.errors import PlatformError
from tenants import quotas
from tenants.types import Principal

KEYS_MAX = 50_000
_KIND_OF_CODE = {
    quotas.RATE_LIMITED: DemandKind.RATE,
    quotas.CONCURRENCY_LIMITED: DemandKind.CONCURRENCY,
}


class SeenLimits:
    """What the last admitted request of each key said of its limits, and when (monotonic s)."""

    def __init__(self) -> None:
        self._seen: dict[UUID, tuple[Sequence[LimitState], float]] = {}

    def note(self, key_id: UUID, limits: Sequence[LimitState], now: float) -> None:
        if len(self._seen) >= KEYS_MAX:
            self._seen.clear()
        self._seen[key_id] = (limits, now)

    def headers(self, principal: Principal, now: float, error: PlatformError | None = None) -> bytes:
        """Header lines of an answer to a request that took nothing of its key's limits.

        The limit that `error` names has nothing left; a rate stands as last seen, or whole once its window is over.
        How many requests run now is not known here, so no other concurrency is shown.
        """
        limits, at = self._seen.get(principal.key_id, ((), 0.0))
        known = {limit.name: limit for limit in limits}
        kind = _KIND_OF_CODE.get(error.code) if error is not None else None
        lines = []
        if kind is not None and error is not None:
            lines.append(_lines(kind, error.fields["limit"], 0, error.retry_after_s or 1))
        nearest: tuple[int, int, int] | None = None  # remaining, limit, reset
        for demand in quotas.limits(principal) if kind is not DemandKind.RATE else ():
            if demand.kind is DemandKind.RATE:
                seen = known.get(demand.counter)
                fresh = seen is not None and at + seen.reset_s > now
                remaining = min(seen.remaining, demand.limit) if seen is not None and fresh else demand.limit
                reset = seen.reset_s if seen is not None and fresh else demand.window_s
                nearest = min(nearest or (remaining, demand.limit, reset), (remaining, demand.limit, reset))
        if nearest is not None:
            remaining, limit, reset = nearest
            lines.append(_lines(DemandKind.RATE, limit, remaining, reset))
        return b"".join(lines)


def limit_headers(limits: Sequence[LimitState]) -> bytes:
    """Header lines of the limits nearest to their end: one of requests per minute, one of requests at once."""
    nearest: dict[DemandKind, LimitState] = {}
    for limit in limits:
        if limit.kind not in nearest or limit.remaining < nearest[limit.kind].remaining:
            nearest[limit.kind] = limit
    return b"".join([_lines(kind, limit.limit, limit.remaining, limit.reset_s) for kind, limit in nearest.items()])


def _lines(kind: DemandKind, limit: int, remaining: int, reset_s: int) -> bytes:
    name = b"Requests" if kind is DemandKind.RATE else b"Concurrency"
    return b"X-Ratelimit-Limit-%b: %d\r\nX-Ratelimit-Remaining-%b: %d\r\nX-Ratelimit-Reset-%b: %ds\r\n" % (
        *(name, limit),
        *(name, remaining),
        *(name, reset_s),
    )
