"""Admission while Valkey is away: every replica goes on with what it had, then with less. Pure but for the clock.

For the first 2 s a caller may have what it had here in the last minute: as many grants and tokens, and as many requests
in flight as their mean or as run when the outage begins. After that 80 % of it for priority, 50 % for standard and
nothing for batch. A caller that was not served here lately is refused. Because nobody gets more than the share that was
admitted under all its limits, the sum over the replicas stays about within them.
"""

import math

from core.clock import Clock
from core.tiers import Tier

BLIP_S = 2.0
WINDOW_S = 60.0
PERCENT = {Tier.PRIORITY: 80, Tier.STANDARD: 50, Tier.BATCH: 0}
REMEMBER_S = 600.0


class Share:
    """What one caller had on one deployment (or a deployment had altogether) at this replica in the last minute.

    Kept by the minute and read as a sliding one: the current minute and the rest of the one before. The sums over the
    replicas are what the script admitted, grants and mean requests in flight alike, so they stay within its limits.
    """

    __slots__ = (
        *("allowed", "area", "area_before", "before", "ends", "inflight", "local", "local_since", "local_tokens"),
        *("minute", "now", "since", "tokens", "tokens_before"),
    )

    def __init__(self, now: float) -> None:
        self.inflight = 0
        self.minute = now // WINDOW_S
        self.ends = (self.minute + 1) * WINDOW_S
        self.since = now  # `area` is complete until then
        self.now = self.before = 0  # grants in `minute` and in the one before
        self.tokens = self.tokens_before = 0  # input and output as estimated, likewise
        self.area = self.area_before = 0.0  # requests in flight times seconds, likewise
        self.allowed = (0.0, 0.0, 0.0)  # grants a minute, most in flight, tokens a minute, before the tier's part
        self.local = self.local_tokens = 0  # grants and their tokens since local_since
        self.local_since = 0.0

    def note_grant(self, now: float, tokens: int = 0) -> None:
        """Count a grant of the script."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        inflight = self.inflight
        self.area += inflight * (now - self.since)
        self.since = now
        self.now += 1
        self.tokens += tokens
        self.inflight = inflight + 1

    def note_release(self, now: float) -> None:
        """Count an ending, whoever granted."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        inflight = self.inflight
        self.area += inflight * (now - self.since)
        self.since = now
        self.inflight = inflight - 1

    def note_time(self, now: float) -> None:
        """Bring the figures up to `now`."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        self.area += self.inflight * (now - self.since)
        self.since = now

    def _turn(self, minute: float) -> None:
        start = minute * WINDOW_S
        if minute == self.minute + 1:
            self.before, self.area_before = self.now, self.area + self.inflight * (start - self.since)
            self.tokens_before = self.tokens
        else:
            self.before, self.area_before, self.tokens_before = 0, self.inflight * WINDOW_S, 0
        self.now, self.tokens, self.area, self.minute, self.since = 0, 0, 0.0, minute, start
        self.ends = start + WINDOW_S

    def last_minute(self, now: float) -> tuple[float, float, float]:
        """Return grants, mean requests in flight and tokens of the last minute."""
        self.note_time(now)
        rest = 1 - (now - self.minute * WINDOW_S) / WINDOW_S
        inflight = (self.area_before * rest + self.area) / WINDOW_S
        return self.before * rest + self.now, inflight, self.tokens_before * rest + self.tokens

    def freeze(self, now: float) -> None:
        """An outage begins: what was had until now rules."""
        grants, mean, tokens = self.last_minute(now)
        self.allowed, self.local_since = (grants, max(mean, self.inflight), tokens), now
        self.local = self.local_tokens = 0


class Credit:
    """Nano as last heard, and what was granted on the strength of it since.

    A tenant's credit, or what is left in the nearest budget of a caller.
    """

    __slots__ = ("heard_at", "left", "used")

    def __init__(self, now: float) -> None:
        self.left = -1  # -1: never heard
        self.used = 0
        self.heard_at = now

    def note(self, left: int, now: float) -> None:
        self.left, self.used, self.heard_at = left, 0, now


def _part(value: float, percent: int) -> int:
    return math.ceil(value * percent / 100)


class FailStatic:
    """Decides alone. One per replica; `replicas` is how many were alive when last heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self._shares: dict[tuple[object, ...], Share] = {}
        self._credits: dict[object, Credit] = {}
        self.away = False
        self.replicas = 1

    def went_away(self) -> None:
        """Valkey does not answer; told again it changes nothing."""
        if not self.away:
            self.away = True
            self._since = self._clock.monotonic()
            for share in self._shares.values():
                share.freeze(self._since)

    def came_back(self) -> None:
        self.away = False

    def share(self, *name: object) -> Share:
        """Return the share of that name; a new one has had nothing."""
        return self._shares.setdefault(name, Share(self._clock.monotonic()))

    def credit(self, name: object) -> Credit:
        """Return the credit of that tenant, or the nearest budget of a caller with these spends."""
        return self._credits.setdefault(name, Credit(self._clock.monotonic()))

    def forget_idle(self) -> None:
        """Drop what was not touched for ten minutes; who still holds it goes on with it."""
        oldest = self._clock.monotonic() - REMEMBER_S
        for name, share in list(self._shares.items()):
            if share.since < oldest and share.inflight == 0:
                del self._shares[name]
        for tenant, credit in list(self._credits.items()):
            if credit.heard_at < oldest:
                del self._credits[tenant]

    def percent(self, tier: Tier) -> int:
        """Return how much of its last minute's share a tier gets now."""
        return 100 if self._clock.monotonic() - self._since < BLIP_S else PERCENT[tier]

    def admits(
        self, shares: tuple[Share, ...], money: tuple[Credit, ...], hold: int, tier: Tier, tokens: int = 0
    ) -> bool:
        """Decide, and when it fits in every share and in all the money, take it.

        Args:
            shares: of the caller on the deployment and of the deployment.
            money: the tenant's credit and the caller's nearest budget; empty for a request without money.
            hold: nano.
            tier: the request's.
            tokens: input and output as estimated, where the caller has a limit of tokens.
        """
        now, percent = self._clock.monotonic(), self.percent(tier)
        for share in shares:
            if share.local_since < self._since:  # dropped as idle, and in use again: not known when the outage began
                share.freeze(self._since)
        if not all(self._fits(share, now, percent) for share in shares):
            return False
        if tokens and shares[0].local_tokens + tokens > _part(shares[0].allowed[2], percent):
            return False
        for credit in money:
            if credit.left < 0 or credit.left // max(1, self.replicas) - credit.used < hold:
                return False
        for credit in money:
            credit.used += hold
        for share in shares:
            share.local += 1
            share.local_tokens += tokens
            share.note_time(now)
            share.inflight += 1
        return True

    def _fits(self, share: Share, now: float, percent: int) -> bool:
        if now - share.local_since >= WINDOW_S:
            share.local, share.local_tokens, share.local_since = 0, 0, now
        grants, inflight, _ = share.allowed
        return share.local < _part(grants, percent) and share.inflight < _part(math.ceil(inflight), percent)
