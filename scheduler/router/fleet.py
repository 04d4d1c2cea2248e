"""The replicas of one deployment, and which of them answers: filters, then scores, then the cheapest.

**Filters**: listed as ready by the controller (one that drains is not), not left alone for its failures, not silent
towards those who wait for it, not the one that was asked before. Where none passes all, the last filters give way.

**Scores** are in bytes of prompt to be read. What a replica costs beforehand (`Fleet.price`): requests running and
waiting there, how full its KV memory is, its zone, and its *heat*, what it had to read of late, so that work is even
over minutes and not only at this moment. What this prompt costs: its bytes that are not in that replica's cache, by
what was sent there before (`prefixes`). The figures of `BUSY` and `HEAT` were chosen on a trace of conversations
(`bench/routing.py`).

**Picker**: of all replicas while their figures are fresh; of two at random where these are old, because then many
gateways would all go to the one that was the best a while ago (power of two choices). Beside them stand those that know
most of the prompt, and one that the first block which nobody knows points to (*home*): where all gateways would send a
prompt of which they know nothing, so that a conversation that moves from one gateway to another finds its cache.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from struct import Struct
from zlib import crc32

import msgspec

from knative.types import DeploymentState, Endpoint
from scheduler.router import replica as rules
from scheduler.router.prefixes import ENDS, Level, PrefixTable, block_keys, bytes_known
from scheduler.router.replica import EJECTED_SHARE, Figures, Outcome, Phase, Replica

BUSY = 0.25  # what a request running there costs, in mean prompts
QUEUED = 1.0  # and one that waits in the engine's own queue
FULL_KV, FROM_KV = 4.0, 0.8  # what a full KV memory costs, from which part of it on
REMOTE = 0.5  # what another zone costs
HEAT, HEAT_S = 0.1, 120.0  # what was read of late costs a tenth of reading it, and fades in so many seconds
ANSWER_BYTES = 2048  # what an answer counts for in the heat, beside its prompt
MEAN_MIN, MEAN_PACE = 1024.0, 0.02
OLD_S = 3.0  # figures are read each second
HOME = 1.0  # of the bytes that nobody here knows, and of the part that others send: what being its home is worth
OWN = 2  # replicas that know more than others do: a conversation that is at home with them
ELSEWHERE_PACE, ALONE = 0.1, 0.05  # below that part nobody else is taken to be there
POINTS = 128  # of each replica on the ring by which homes are found
HOME_BYTES = 256  # of a block that point to its home
LEVELS, HOLDERS = 3, 6  # of those who know the prompt's beginning: looked at
BITS_MAX = 256  # replicas that ever were; then the fleet forgets whose prefixes are where, and counts anew
SILENT_S = 1.5  # engines speak several times a second while they work on a stream
PROBE_AGAIN_S = 30.0  # one that is silent, or whose probe said nothing, is asked once more
OUTLIERS_EVERY_S = 2.0
SAMPLE_EVERY_S = 1.0
SAMPLES, SHOWN = 5, 8  # decisions that are kept, replicas shown of each
UNKNOWN = Figures(0, 0, 0.0)
_COST = attrgetter("cost")
_POINT = Struct("<16I")


class Considered(msgspec.Struct, frozen=True):
    """One replica in a decision; `score` and the parts in bytes, the lowest score wins. `why_not` it could not win."""

    replica: str
    score: int
    cached_bytes: int
    heat_bytes: int
    inflight: int
    elsewhere: int
    waiting: int
    kv_used: float
    weight: float
    phase: str
    why_not: str


class Decision(msgspec.Struct, frozen=True):
    """Why a request went where it went. No content; `by`: least, two choices, prefix, home, probe.

    `considered`: the chosen one, then those with the lowest scores, then those that could not win; of `replicas`.
    """

    at_s: float  # monotonic, of the gateway
    prompt_bytes: int
    chosen: str
    by: str
    replicas: int
    considered: tuple[Considered, ...]


class Choice:
    """A replica chosen for one attempt. `sent` when the attempt begins, `ended` when it is over: both, or neither."""

    __slots__ = ("fleet", "keys", "probe", "replica", "to_read")

    def __init__(self, fleet: "Fleet", replica: Replica, keys: list[int], to_read: int, *, probe: bool) -> None:
        self.fleet = fleet
        self.replica = replica
        self.keys = keys
        self.to_read = to_read  # bytes of the prompt that are not in its cache
        self.probe = probe

    def sent(self) -> None:
        """The request goes there now."""
        fleet, replica = self.fleet, self.replica
        replica.inflight += 1
        replica.peak = max(replica.peak, replica.inflight)
        replica.picked += 1
        replica.heat += self.to_read + ANSWER_BYTES
        fleet.mean += (max(MEAN_MIN, self.to_read) - fleet.mean) * MEAN_PACE
        if self.keys:
            fleet.table.note(self.keys, replica.bit)
        fleet.price(replica)

    def ended(self, outcome: Outcome, first_byte_s: float, now: float) -> None:
        """The attempt is over, and says this of the replica."""
        replica = self.replica
        replica.inflight -= 1
        replica.note(outcome, first_byte_s)
        self.fleet.judge(replica, outcome, now, probe=self.probe)


class Fleet:
    """See the module. One per deployment with more than one replica, and per gateway."""

    def __init__(
        self, state: DeploymentState, table: PrefixTable, *, zone: str, random: Callable[[], float], now: float
    ) -> None:
        self.table = table
        self.mean = MEAN_MIN * 4
        self.used_at = now
        self.samples: deque[Decision] = deque(maxlen=SAMPLES)
        self.replicas: dict[str, Replica] = {}
        self.live: list[Replica] = []
        self.due: list[Replica] = []  # to be probed
        self.fresh_until = 0.0  # monotonic: figures
        self.elsewhere = 0.0  # the part of all requests that other gateways sent
        self._zone = zone
        self._random = random
        self._now = now
        self._next_bit = 0
        self._life = 0
        self._seed = 0
        self._mask = 0
        self._by_bit: dict[int, Replica] = {}
        self._ring: list[int] = []
        self._owners: list[str] = []
        self._sample_at = self._fade_at = self._outliers_at = 0.0
        self._anew(state)
        self.state = state
        self.refresh(state, now)
        for replica in self.replicas.values():
            replica.slow_from = 0.0  # all of them are new: none has a share to grow into

    # ---- who there is

    def refresh(self, state: DeploymentState, now: float) -> None:
        """Take in which replicas are ready now. One that is new among others starts slowly."""
        self._now = now
        names = {endpoint.replica: endpoint for endpoint in state.endpoints}
        same = self.replicas.keys() == names.keys()
        for name in self.replicas.keys() - names.keys():
            self._by_bit.pop(self.replicas.pop(name).bit, None)
        if self._next_bit + len(names) > BITS_MAX:
            self._anew(state)
        for name, endpoint in names.items():
            known = self.replicas.get(name)
            if known is None or known.url != endpoint.url:
                self._add(endpoint, now)
        self.state = state
        if not same:
            ring = sorted((point, one.name) for one in self.replicas.values() for point in _points(one.name))
            self._ring, self._owners = [point for point, _ in ring], [name for _, name in ring]
        self._sort(now)

    def _anew(self, state: DeploymentState) -> None:
        """Number replicas from the first bit on, under a seed that finds nothing of before."""
        self._life += 1
        self._seed = hash((state.deployment, self._life))
        self._next_bit = 0
        self._by_bit = {}
        for replica in self.replicas.values():
            replica.bit = self._bit()
            self._by_bit[replica.bit] = replica

    def _bit(self) -> int:
        bit = 1 << self._next_bit
        self._next_bit += 1
        return bit

    def _add(self, endpoint: Endpoint, now: float) -> None:
        remote = bool(self._zone and endpoint.zone and endpoint.zone != self._zone)
        replica = Replica(endpoint.replica, endpoint.url, bit=self._bit(), remote=remote)
        if (before := self.replicas.get(replica.name)) is not None:
            self._by_bit.pop(before.bit, None)
        replica.come_back(now, self._usual_heat())
        self.replicas[replica.name] = self._by_bit[replica.bit] = replica

    def _usual_heat(self) -> float:
        return sum(one.heat for one in self.live) / len(self.live) if self.live else 0.0

    def _sort(self, now: float) -> None:
        """Find out who may be asked, and what each costs."""
        serving = [one for one in self.replicas.values() if one.phase is Phase.SERVING]
        self.live = [one for one in serving if not one.silent_since] or serving or list(self.replicas.values())
        self._mask = 0
        for one in self.live:
            self._mask |= one.bit
        for one in self.replicas.values():
            self.price(one)
        self._now = now

    def price(self, replica: Replica) -> None:
        """Set what it costs beforehand to send something there."""
        busy = BUSY * (replica.inflight + replica.others + 1) / replica.weight(self._now)
        if replica.waiting:
            busy += QUEUED * replica.waiting
        if replica.kv_used > FROM_KV:
            busy += FULL_KV * (replica.kv_used - FROM_KV) / (1 - FROM_KV)
        if replica.remote:
            busy += REMOTE
        replica.cost = busy * self.mean + HEAT * replica.heat

    # ---- which one

    def pick(self, prompt: bytes, begin: int, salt: str | None, now: float, *, besides: str = "") -> Choice:
        """Return the replica to ask.

        Args:
            prompt: what the engine reads is in it,
            begin: from here on.
            salt: what the caller's part of the engines' caches goes by; None where there is nothing to be cached.
            now: monotonic.
            besides: the address of one that was asked before; it is asked again only where there is no other.
        """
        self.used_at = now
        size = len(prompt) - begin
        keys = block_keys(prompt, begin, hash((self._seed, salt))) if salt is not None else []
        if self.due and not besides and (probed := self._to_probe(now)) is not None:
            self._sample(probed, "probe", size, [])
            return Choice(self, probed, keys, size, probe=True)
        live = self.live
        if besides:
            others = [one for one in live if one.url != besides]
            live = others or [one for one in self.replicas.values() if one.url != besides] or live
        if now < self.fresh_until:
            best, by = min(live, key=_COST), "least"
        else:
            best, by = self._of_two(live), "two choices"
        levels: list[Level] = []
        known = 0
        if keys:
            levels = self.table.find(keys, self._mask)
            best, by, known = self._who_knows(levels, best, by, besides)
            depth = levels[-1][0] if levels else 0
            if self.elsewhere > ALONE and depth < len(keys) and (not depth or levels[-1][1].bit_count() > OWN):
                start = ENDS[depth - 1] if depth else 0
                home = self._home(prompt[begin + start : begin + start + HOME_BYTES], salt or "")
                worth = HOME * self.elsewhere * (size - start)
                if home is not best and home.url != besides and home.cost - worth < best.cost - known:
                    best, by, known = home, "home", bytes_known(levels, home.bit)
        if now >= self._sample_at:
            self._sample(best, by, size, levels, besides)
        return Choice(self, best, keys, size - known, probe=False)

    def _who_knows(self, levels: list[Level], best: Replica, by: str, besides: str) -> tuple[Replica, str, int]:
        """Return a replica that has more of the prompt, where that is worth more than what it costs beforehand."""
        known = bytes_known(levels, best.bit)
        score = best.cost - known
        for depth, mask in levels[-LEVELS:]:
            if mask == self._mask:
                continue  # all have it
            saved = ENDS[depth - 1]
            for holder in self._holders(mask):
                if holder.cost - saved < score and holder.url != besides:
                    best, by, known, score = holder, "prefix", saved, holder.cost - saved
        return best, by, known

    def _home(self, block: bytes, salt: str) -> Replica:
        """Return the replica that a block points to; the next one on the ring where that may not be asked."""
        ring, owners = self._ring, self._owners
        at = bisect_right(ring, crc32(block, crc32(salt.encode())))
        for step in range(len(ring)):
            owner = self.replicas[owners[(at + step) % len(ring)]]
            if owner.bit & self._mask:
                return owner
        return self.live[0]

    def _of_two(self, live: Sequence[Replica]) -> Replica:
        one, other = (live[int(self._random() * len(live))] for _ in range(2))
        return one if one.cost <= other.cost else other

    def _holders(self, mask: int) -> list[Replica]:
        found: list[Replica] = []
        while mask and len(found) < HOLDERS:
            bit = mask & -mask
            mask ^= bit
            found.append(self._by_bit[bit])
        return found

    def _to_probe(self, now: float) -> Replica | None:
        replica = self.due.pop()
        if self.replicas.get(replica.name) is not replica:
            return None
        replica.phase, replica.probed_at = Phase.PROBING, now
        return replica

    # ---- how it went, and what is seen of them

    def judge(self, replica: Replica, outcome: Outcome, now: float, *, probe: bool) -> None:
        """Leave it alone, or take it back, by the end of an attempt."""
        if replica.phase is Phase.SERVING:
            if outcome in {Outcome.FAILED, Outcome.REFUSED} and (reason := rules.broken(replica)):
                self._eject(replica, now, reason)
        elif outcome is Outcome.WELL and (probe or replica.phase is Phase.PROBING):
            replica.come_back(now, self._usual_heat())
            self._sort(now)
        elif probe and outcome is not Outcome.NOTHING:
            replica.eject(now, replica.reason or "its probe failed")
            self._sort(now)
        self.price(replica)

    def _eject(self, replica: Replica, now: float, reason: str) -> None:
        ejected = sum(one.phase is not Phase.SERVING for one in self.replicas.values())
        if ejected + 1 > EJECTED_SHARE * len(self.replicas):
            return
        replica.eject(now, reason)
        self._sort(now)

    def take_figures(self, figures: Mapping[str, Figures], now: float) -> None:
        """What the engines said of themselves, read a moment ago; of a replica that is missing nothing is known."""
        self.fresh_until = now + OLD_S
        for name, replica in self.replicas.items():
            said = figures.get(name, UNKNOWN)
            # what is read now was said up to two seconds ago, when more of ours may have run there
            replica.others = max(0, said.running + said.waiting - max(replica.peak, replica.peak_before))
            replica.peak_before, replica.peak = replica.peak, replica.inflight
            replica.waiting, replica.kv_used = said.waiting, said.kv_used
            self.price(replica)
        others = sum(one.others for one in self.replicas.values())
        if all_ := others + sum(one.inflight for one in self.replicas.values()):
            self.elsewhere += (others / all_ - self.elsewhere) * ELSEWHERE_PACE

    def look(self, now: float, silent_since: Callable[[str], float]) -> None:
        """Several times a second: who is silent, whose time is over, what has faded. See `rules`."""
        passed = now - self._now
        cooler = max(0.0, 1 - passed / HEAT_S)
        if now >= self.fresh_until:
            self.fresh_until = 0.0
        fade, self._fade_at = _due(now, self._fade_at, rules.FADE_EVERY_S)
        outliers, self._outliers_at = _due(now, self._outliers_at, OUTLIERS_EVERY_S)
        self.due = []
        for replica in self.replicas.values():
            replica.heat *= cooler
            if not self.fresh_until:
                replica.others, replica.waiting, replica.kv_used = 0, 0, 0.0
            if fade:
                replica.fade()
            self._listen_to(replica, now, silent_since)
            if outliers and replica.phase is Phase.SERVING:
                others = [one for one in self.live if one is not replica]
                if reason := rules.outlier(replica, others):
                    self._eject(replica, now, reason)
        self._sort(now)

    def _listen_to(self, replica: Replica, now: float, silent_since: Callable[[str], float]) -> None:
        """Note whether it is silent, and whether it is to be probed."""
        if replica.inflight:
            since = silent_since(replica.url)
            if since and now - since >= SILENT_S:
                replica.silent_since = since
            elif replica.silent_since:
                replica.silent_since = 0.0
                if replica.phase is not Phase.EJECTED:
                    replica.come_back(now, self._usual_heat())
        if replica.phase is Phase.EJECTED:
            if now >= replica.until:
                self.due.append(replica)
        elif (replica.phase is Phase.PROBING or replica.silent_since) and (
            now - max(replica.silent_since + SILENT_S, replica.probed_at) >= PROBE_AGAIN_S
        ):
            self.due.append(replica)

    # ---- for whoever wants to see it

    def _sample(self, chosen: Replica, by: str, size: int, levels: list[Level], besides: str = "") -> None:
        self._sample_at = self.used_at + SAMPLE_EVERY_S
        all_ = [self.considered(one, levels, besides) for one in self.replicas.values()]
        all_.sort(key=lambda one: (one.replica != chosen.name, bool(one.why_not), one.score))
        decision = Decision(self.used_at, size, chosen.name, by, len(all_), tuple(all_[:SHOWN]))
        self.samples.append(decision)

    def considered(self, replica: Replica, levels: list[Level], besides: str = "") -> Considered:
        """Return what speaks for and against a replica."""
        cached = bytes_known(levels, replica.bit)
        return Considered(
            replica=replica.name,
            score=round(replica.cost) - cached,
            cached_bytes=cached,
            heat_bytes=round(replica.heat),
            inflight=replica.inflight,
            elsewhere=replica.others,
            waiting=replica.waiting,
            kv_used=round(replica.kv_used, 3),
            weight=round(replica.weight(self._now), 2),
            phase=replica.phase.value,
            why_not=self._why_not(replica, besides),
        )

    def _why_not(self, replica: Replica, besides: str) -> str:
        if replica.url == besides:
            return "asked before"
        if replica.phase is Phase.EJECTED:
            return f"{replica.reason}; left alone for {max(0.0, replica.until - self._now):.0f} s more"
        if replica.phase is Phase.PROBING:
            return f"{replica.reason}; one request is finding out whether it is well again"
        return "says nothing to those who wait for it" if replica.silent_since else ""


def _due(now: float, at: float, every_s: float) -> tuple[bool, float]:
    return (True, now + every_s) if now >= at else (False, at)


def _points(name: str) -> tuple[int, ...]:
    """Return a replica's places on the ring, the same in every gateway."""
    each = _POINT.size // 4
    digests = (blake2b(b"%d %b" % (n, name.encode())).digest() for n in range(POINTS // each))
    return tuple(point for digest in digests for point in _POINT.unpack(digest))
