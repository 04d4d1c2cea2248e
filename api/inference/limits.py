"""The x-ratelimit headers: exact on what was admitted or refused by a limit, else as this replica last saw them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from api.inference.ports import LimitState
from core.demand import DemandKind, Unit
from core.errors import PlatformError
from tenants import quotas
from tenants.types import Principal

KEYS_MAX = 50_000
WHENEVER = datetime(1970, 1, 2, tzinfo=UTC)  # rates and concurrencies do not depend on the day
RATE_LINES, CONCURRENCY_LINES = (  # limit, remaining, reset in s
    b"X-Ratelimit-Limit-%b: %%d\r\nX-Ratelimit-Remaining-%b: %%d\r\nX-Ratelimit-Reset-%b: %%ds\r\n" % (3 * (name,))
    for name in (b"Requests", b"Concurrency")
)
_KIND_OF_CODE = {
    quotas.RATE_LIMITED: DemandKind.RATE,
    quotas.CONCURRENCY_LIMITED: DemandKind.CONCURRENCY,
}


class SeenLimits:
    """What the last admitted request of each key said of its limits, and when (monotonic s)."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Sequence[LimitState], float]] = {}  # by key id, as a number: quick to hash

    def note(self, key_id: UUID, limits: Sequence[LimitState], now: float) -> None:
        if len(self._seen) >= KEYS_MAX:
            self._seen.clear()
        self._seen[key_id.int] = (limits, now)

    def headers(self, principal: Principal, now: float, error: PlatformError | None = None) -> bytes:
        """Header lines of an answer to a request that took nothing of its key's limits.

        The limit that `error` names has nothing left; a rate stands as last seen, or whole once its window is over.
        How many requests run now is not known here, so no other concurrency is shown.
        """
        limits, at = self._seen.get(principal.key_id.int, ((), 0.0))
        known = {limit.name: limit for limit in limits}
        kind = _KIND_OF_CODE.get(error.code) if error is not None else None
        lines = []
        if kind is not None and error is not None:
            lines.append(_lines(kind, error.fields["limit"], 0, error.retry_after_s or 1))
        nearest: tuple[int, int, int] | None = None  # remaining, limit, reset
        for demand in quotas.limits(principal, WHENEVER) if kind is not DemandKind.RATE else ():
            if demand.kind is DemandKind.RATE and demand.unit is Unit.REQUEST and demand.enforced:
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
    rate: LimitState | None = None
    running: LimitState | None = None
    for limit in limits:
        if limit.kind is DemandKind.RATE:
            if rate is None or limit.remaining < rate.remaining:
                rate = limit
        elif running is None or limit.remaining < running.remaining:
            running = limit
    lines = b"" if running is None else CONCURRENCY_LINES % (running.limit, running.remaining, running.reset_s)
    return lines if rate is None else lines + RATE_LINES % (rate.limit, rate.remaining, rate.reset_s)


def _lines(kind: DemandKind, limit: int, remaining: int, reset_s: int) -> bytes:
    return (RATE_LINES if kind is DemandKind.RATE else CONCURRENCY_LINES) % (limit, remaining, reset_s)
