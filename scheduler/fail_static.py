"""Admission while Valkey is away: every replica goes on with what it had, then with less. Pure but for the clock.

For the first 2 s a caller may have what it had here in the last minute: as many grants and tokens, and as many requests
in flight as their mean or as run when the outage begins. After that 80 % of it for priority, 50 % for standard and
nothing for batch; after a minute, in which engines may have gone that nobody here has heard of, 50 and 20 %. A caller
that was not served here lately is refused. Because nobody gets more than the share that was admitted under all its
limits, the sum over the replicas stays about within them.

While Valkey decides, a request is noted on its caller's share and nowhere else; what a deployment had, and the money
last heard of, is summed up from the shares when an outage begins.
"""

import math
from collections.abc import Sequence
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec

from core.clock import Clock
from core.tiers import Tier

BLIP_S = 2.0
WINDOW_S = 60.0
PHASES = (  # from so many s of an outage on, the last first: how many percent of its share a tier gets
    (60.0, {Tier.PRIORITY: 50, Tier.STANDARD: 20, Tier.BATCH: 0}),
    (BLIP_S, {Tier.PRIORITY: 80, Tier.STANDARD: 50, Tier.BATCH: 0}),
    (0.0, {Tier.PRIORITY: 100, Tier.STANDARD: 100, Tier.BATCH: 100}),
)
REMEMBER_S = 600.0
Name = tuple[UUID, str, tuple[str, ...], tuple[str, ...]]
"""Deployment, tenant in hex (empty without money), counters of the caller's limits, of its budgets."""


class ShareFigures(msgspec.Struct, frozen=True):
    """A share as data: grants, most in flight and tokens of a minute; credit and budget left (nano, -1: unknown)."""

    name: Name
    grants: float
    inflight: float
    tokens: float
    credit: int = -1
    budget: int = -1


class Figures(msgspec.Struct, frozen=True):
    """All shares of a replica, and how many replicas there were."""

    replicas: int = 1
    shares: tuple[ShareFigures, ...] = ()


class Share:
    """What a caller had on one deployment (in an outage also: all of them together) at this replica in the last minute.

    Kept by the minute and read as a sliding one: the current minute and the rest of the one before. The sums over the
    replicas are what the script admitted, grants and mean requests in flight alike, so they stay within its limits.
    """

    __slots__ = (
        *("__weakref__", "allowed", "area", "area_before", "before", "ends", "grants", "heard_at", "inflight", "local"),
        *("local_since", "local_tokens", "minute", "name", "reply", "tokens", "tokens_before"),
    )

    def __init__(self, name: Name, now: float) -> None:
        self.name = name
        self.reply: Sequence[int] = ()  # the script's last; see `scheduler.types.Grant`
        self.heard_at = 0.0  # when that came
        self.inflight = 0
        self.minute = now // WINDOW_S
        self.ends = (self.minute + 1) * WINDOW_S
        self.grants = self.before = 0  # in `minute` and in the one before
        self.tokens = self.tokens_before = 0  # input and output as estimated, likewise
        # Requests in flight times seconds, likewise; of `minute` without those that run: `inflight` times the time of
        # reading is missing, so that a grant is one subtraction and an ending one addition.
        self.area = self.area_before = 0.0
        self.allowed = (0.0, 0.0, 0.0)  # grants a minute, most in flight, tokens a minute, before the tier's part
        self.local = self.local_tokens = 0  # grants and their tokens since local_since
        self.local_since = 0.0

    def note_grant(self, now: float, tokens: int, reply: Sequence[int]) -> None:
        """Count a grant of the script."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        self.reply = reply
        self.heard_at = now
        self.area -= now
        self.inflight += 1
        self.grants += 1
        self.tokens += tokens

    def note_release(self, now: float) -> None:
        """Count an ending, whoever granted."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        self.area += now
        self.inflight -= 1

    def note_local(self, now: float, tokens: int) -> None:
        """Count a grant of this replica's own."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        self.area -= now
        self.inflight += 1
        self.local += 1
        self.local_tokens += tokens

    def _turn(self, minute: float) -> None:
        start = minute * WINDOW_S
        if minute == self.minute + 1:
            self.before, self.area_before = self.grants, self.area + self.inflight * start
            self.tokens_before = self.tokens
        else:
            self.before, self.area_before, self.tokens_before = 0, self.inflight * WINDOW_S, 0
        self.grants, self.tokens, self.area, self.minute = 0, 0, -self.inflight * start, minute
        self.ends = start + WINDOW_S

    def last_minute(self, now: float) -> tuple[float, float, float]:
        """Return grants, mean requests in flight and tokens of the last minute."""
        if now >= self.ends:
            self._turn(now // WINDOW_S)
        rest = 1 - (now - self.minute * WINDOW_S) / WINDOW_S
        inflight = (self.area_before * rest + self.area + self.inflight * now) / WINDOW_S
        return self.before * rest + self.grants, inflight, self.tokens_before * rest + self.tokens

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

    def __init__(self) -> None:
        self.left = -1  # -1: never heard
        self.used = 0
        self.heard_at = -1.0

    def hear(self, left: int, at: float) -> None:
        """Take the figure unless this one or a later is known: then what was granted on its strength still counts."""
        if left >= 0 and at > self.heard_at:
            self.left, self.used, self.heard_at = left, 0, at


def _part(value: float, percent: int) -> int:
    return math.ceil(value * percent / 100)


class FailStatic:
    """Decides alone. One per replica; `replicas` is how many were alive when last heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self._shares: WeakValueDictionary[Name, Share] = WeakValueDictionary()  # all that anybody holds
        self._kept: set[Share] = set()  # those that are held here, because they were in use lately
        self._deployments: dict[UUID, Share] = {}  # sums, made when an outage begins
        self._credits: dict[str | tuple[str, ...], Credit] = {}  # by tenant and by budgets, likewise
        self.away = False
        self.replicas = 1
        self._from_disk = False  # the shares are those of a former life: see `restore`

    def share(self, name: Name) -> Share:
        """Return the share of that name; a new one has had nothing."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Share(name, self._clock.monotonic())
        self._kept.add(share)
        return share

    def forget_idle(self) -> None:
        """Let go what was not in use for some ten minutes; who still holds it goes on with it."""
        oldest = self._clock.monotonic() - REMEMBER_S + WINDOW_S
        self._kept = {share for share in self._shares.values() if share.ends > oldest or share.inflight}
        named = {part for share in self._kept for part in (share.name[1], share.name[3])}
        self._credits = {name: credit for name, credit in self._credits.items() if name in named}

    def went_away(self) -> None:
        """Valkey does not answer; told again it changes nothing."""
        if self.away:
            return
        self.away, self._since = True, self._clock.monotonic()
        self._deployments.clear()
        for share in list(self._shares.values()):
            share.freeze(self._since)
            self._sum_up(share)

    def _sum_up(self, share: Share) -> None:
        deployment, tenant, _, budgets = share.name
        whole = self._deployments.get(deployment)
        if whole is None:
            whole = self._deployments[deployment] = Share((deployment, "", (), ()), self._since)
            whole.local_since = self._since
        grants, inflight, tokens = whole.allowed
        whole.allowed = (grants + share.allowed[0], inflight + share.allowed[1], tokens + share.allowed[2])
        whole.inflight += share.inflight
        if share.reply and tenant:
            self._credit(tenant).hear(share.reply[2], share.heard_at)
            if budgets:
                self._credit(budgets).hear(share.reply[4], share.heard_at)

    def _credit(self, name: str | tuple[str, ...]) -> Credit:
        credit = self._credits.get(name)
        if credit is None:
            credit = self._credits[name] = Credit()
        return credit

    def _money(self, share: Share) -> list[Credit]:
        """The tenant's credit and what is left of the caller's nearest budget; nothing of a request without money."""
        _, tenant, _, budgets = share.name
        if not tenant:
            return []
        return [self._credit(tenant), self._credit(budgets)] if budgets else [self._credit(tenant)]

    def came_back(self) -> None:
        self.away = self._from_disk = False

    def export(self) -> Figures | None:
        """Return the shares as they would rule now; None in an outage, whose shares are those of its beginning."""
        if self.away:
            return None
        now, found = self._clock.monotonic(), []
        for share in list(self._shares.values()):
            grants, mean, tokens = share.last_minute(now)
            if grants:
                left = (share.reply[2], share.reply[4]) if share.reply else (-1, -1)
                found.append(ShareFigures(share.name, grants, max(mean, share.inflight), tokens, *left))
        return Figures(self.replicas, tuple(found))

    def restore(self, figures: Figures) -> None:
        """Go by the shares of a former life of this replica, which started with Valkey away: for priority alone."""
        if not self.away:
            return
        now, self.replicas, self._from_disk = self._clock.monotonic(), figures.replicas, True
        for had in figures.shares:
            share = self.share(had.name)
            share.freeze(now)
            share.allowed = (had.grants, had.inflight, had.tokens)
            share.reply, share.heard_at = (0, 0, had.credit, 0, had.budget), now
            self._sum_up(share)

    def percent(self, tier: Tier) -> int:
        """Return how much of its last minute's share a tier gets now."""
        if self._from_disk and tier is not Tier.PRIORITY:
            return 0
        lasts_s = max(self._clock.monotonic() - self._since, BLIP_S if self._from_disk else 0.0)
        return next(percent[tier] for from_s, percent in PHASES if lasts_s >= from_s)

    def admits(self, share: Share, hold: int, tier: Tier, tokens: int = 0) -> bool:
        """Decide, and when it fits in the caller's share, in the deployment's and in all the money, take it.

        Args:
            share: of the caller on the deployment.
            hold: nano.
            tier: the request's.
            tokens: input and output as estimated, where the caller has a limit of tokens.
        """
        now, percent = self._clock.monotonic(), self.percent(tier)
        whole, money = self._deployments.get(share.name[0]), self._money(share)
        if whole is None or not (self._fits(share, now, percent) and self._fits(whole, now, percent)):
            return False
        if tokens and share.local_tokens + tokens > _part(share.allowed[2], percent):
            return False
        for credit in money:
            if credit.left < 0 or credit.left // max(1, self.replicas) - credit.used < hold:
                return False
        for credit in money:
            credit.used += hold
        share.note_local(now, tokens)
        whole.note_local(now, tokens)
        return True

    def note_release(self, share: Share, correction: int | None) -> None:
        """Count, in an outage, an ending on what is summed up.

        Args:
            share: of the caller on the deployment.
            correction: nano by which the charge differs from the hold, of a grant of this replica's own; else None.
        """
        whole = self._deployments.get(share.name[0])
        if whole is not None:
            whole.note_release(self._clock.monotonic())
        if correction is not None:
            for credit in self._money(share):
                credit.used += correction

    def _fits(self, share: Share, now: float, percent: int) -> bool:
        if now - share.local_since >= WINDOW_S:
            share.local, share.local_tokens, share.local_since = 0, 0, now
        grants, inflight, _ = share.allowed
        return share.local < _part(grants, percent) and share.inflight < _part(math.ceil(inflight), percent)
