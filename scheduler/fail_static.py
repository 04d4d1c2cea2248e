"""Admission while Valkey is away: every replica goes on with what it had, then with less. Pure but for the clock.

For the first 2 s a caller may have what it had here in its last minute; after that 80 % of it for priority, 50 % for
standard and nothing for batch. A caller that was not served here lately is refused. Because nobody gets more than the
share that was admitted under all its limits, the sum over the replicas stays within them.
"""

from core.clock import Clock
from core.tiers import Tier

BLIP_S = 2.0
WINDOW_S = 60.0
PERCENT = {Tier.PRIORITY: 80, Tier.STANDARD: 50, Tier.BATCH: 0}
REMEMBER_MINUTES = 10


class Share:
    """What one caller had on one deployment (or a deployment had altogether) at this replica, by the minute."""

    __slots__ = ("before", "inflight", "local", "local_since", "minute", "now", "outage", "peak", "peak_before")

    def __init__(self, minute: int) -> None:
        self.inflight = 0
        self.minute = minute
        self.now = self.peak = 0  # grants and most in flight in `minute`
        self.before = self.peak_before = 0  # the same in the minute before
        self.outage = 0  # the outage that `local` belongs to
        self.local = 0
        self.local_since = 0.0

    def note_grant(self, minute: int) -> None:
        """Count a grant of the script."""
        if minute != self.minute:
            self._turn(minute)
        self.now += 1
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)

    def _turn(self, minute: int) -> None:
        follows = minute == self.minute + 1
        self.before, self.peak_before = (self.now, self.peak) if follows else (0, 0)
        self.now, self.peak, self.minute = 0, self.inflight, minute

    def last_minute(self, minute: int) -> tuple[int, int]:
        """Return grants and most in flight in the last minute, both 0 when it was idle."""
        if minute - self.minute > 1:
            return 0, 0
        return max(self.now, self.before), max(self.peak, self.peak_before)


class Credit:
    """A tenant's credit as last heard, and what was granted on the strength of it since, in nano."""

    __slots__ = ("left", "minute", "used")

    def __init__(self, minute: int) -> None:
        self.left = -1  # -1: never heard
        self.used = 0
        self.minute = minute

    def note(self, left: int, minute: int) -> None:
        self.left, self.used, self.minute = left, 0, minute


def _part(value: int, percent: int) -> int:
    return -(-value * percent // 100)


class FailStatic:
    """Decides alone. One per replica; `replicas` is how many were alive when last heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outage = 0
        self._since = 0.0
        self._minute = 0
        self.away = False
        self.replicas = 1

    def minute(self) -> int:
        return int(self._clock.monotonic() // WINDOW_S)

    def went_away(self) -> None:
        """Valkey does not answer; told again it changes nothing."""
        if not self.away:
            self.away = True
            self._outage += 1
            self._since = self._clock.monotonic()
            self._minute = self.minute()

    def came_back(self) -> None:
        self.away = False

    def percent(self, tier: Tier) -> int:
        """Return how much of its last minute's share a tier gets now."""
        return 100 if self._clock.monotonic() - self._since < BLIP_S else PERCENT[tier]

    def admits(self, shares: tuple[Share, ...], credit: Credit | None, hold: int, tier: Tier) -> bool:
        """Decide, and when it fits in every share and the credit, take it.

        Args:
            shares: of the caller on the deployment and of the deployment.
            credit: the tenant's; None for a request without money.
            hold: nano.
            tier: the request's.
        """
        percent = self.percent(tier)
        if not all(self._fits(share, percent) for share in shares):
            return False
        if credit is not None:
            if credit.left < 0 or credit.left // max(1, self.replicas) - credit.used < hold:
                return False
            credit.used += hold
        for share in shares:
            share.local += 1
            share.inflight += 1
        return True

    def _fits(self, share: Share, percent: int) -> bool:
        now = self._clock.monotonic()
        if share.outage != self._outage or now - share.local_since >= WINDOW_S:
            share.outage, share.local, share.local_since = self._outage, 0, now
        grants, peak = share.last_minute(self._minute)
        return share.local < _part(grants, percent) and share.inflight < _part(peak, percent)
