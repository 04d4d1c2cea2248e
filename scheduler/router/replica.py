"""One replica as a gateway's router knows it, and the rules by which it is left alone and comes back. Pure.

A replica that fails is left alone for a while (a *circuit breaker*: failures in a row; *outlier ejection*: it fails, or
is slow, where the others are not), then one request finds out whether it is well again (*probe*), and then it is given
work again little by little (*slow start*). No more than `EJECTED_SHARE` of a deployment's replicas are left alone for
their failures: where most fail, the fault is elsewhere, and leaving them alone would only overload the rest.
"""

from enum import StrEnum
from typing import NamedTuple

IN_A_ROW = 5  # failures, after which it is left alone; of connections that nobody took: REFUSED_IN_A_ROW
REFUSED_IN_A_ROW = 2
EJECTED_SHARE = 0.5  # at most, rounded down; never the last one
FIRST_S, LONGEST_S = 5.0, 80.0  # how long it is left alone: twice as long each time
FORGIVE_S = 60.0  # well for so long: the next time is the first again
SLOW_START_S = 30.0  # from a tenth of its share to all of it
WEIGHT_MIN = 0.1
SEEN_MIN = 10  # answers that say something of it
FAILING = 0.5  # of its answers, twice the others' part: an outlier
SLOW_TIMES, SLOW_S = 4.0, 1.0  # so many times the others' median to the first byte, and so much longer: an outlier
FADE = 0.5  # of what was counted stays after FADE_EVERY_S
FADE_EVERY_S = 10.0
PACE = 0.1  # weight of a new answer in the mean time to the first byte


class Phase(StrEnum):
    """What a replica gets."""

    SERVING = "serving"
    EJECTED = "ejected"  # nothing, until its time is over
    PROBING = "probing"  # one request, which shows whether it is well again


class Outcome(StrEnum):
    """What one attempt says of the replica."""

    WELL = "well"
    FAILED = "failed"  # it broke off, answered nonsense, or said that something is wrong with it
    REFUSED = "refused"  # nobody took the connection
    NOTHING = "nothing"  # the caller left, was wrong, or it had too much to do


class Figures(NamedTuple):
    """What an engine said of itself: requests that run, and in its own queue; the used part of its KV memory."""

    running: int
    waiting: int
    kv_used: float


class Replica:
    """The state of one replica. `bit` is its place in masks; `load` and `others` are in requests, `heat` in bytes."""

    __slots__ = (
        *("answers", "bit", "cost", "ejections", "failures", "first_byte_s", "first_bytes", "heat", "in_a_row"),
        *("inflight", "kv_used", "name", "others", "peak", "peak_before", "phase", "picked", "probed_at", "reason"),
        *("refused", "remote", "serving_since", "silent_since", "slow_from", "until", "url", "waiting"),
    )

    def __init__(self, name: str, url: str, *, bit: int, remote: bool = False) -> None:
        self.name = name
        self.url = url
        self.bit = bit
        self.remote = remote  # in another zone than this gateway
        self.inflight = 0  # requests of this gateway
        self.peak = self.peak_before = 0  # of `inflight`, since figures were read last, and before that
        self.others = 0  # requests of other gateways there, when its figures were read last
        self.waiting = 0  # of all those, in the engine's own queue
        self.kv_used = 0.0
        self.heat = 0.0  # what was sent there of late and not in its cache; fades
        self.cost = 0.0  # see `fleet`
        self.picked = 0  # requests sent there from here
        self.phase = Phase.SERVING
        self.reason = ""  # why it is not serving
        self.until = 0.0  # monotonic: ejected
        self.probed_at = 0.0
        self.ejections = 0  # in a row
        self.serving_since = 0.0
        self.slow_from = 0.0  # begin of its slow start; 0: over
        self.in_a_row = 0  # failures
        self.refused = 0  # connections in a row
        self.answers = 0.0  # of late, fading
        self.failures = 0.0
        self.first_bytes = 0
        self.first_byte_s = 0.0
        self.silent_since = 0.0  # monotonic: it owes answers and has said nothing for a while; 0: it speaks

    def weight(self, now: float) -> float:
        """Its part of a full share: less than 1 while it starts slowly."""
        if not self.slow_from:
            return 1.0
        part = (now - self.slow_from) / SLOW_START_S
        if part >= 1:
            self.slow_from = 0.0
            return 1.0
        return max(WEIGHT_MIN, part)

    def note(self, outcome: Outcome, first_byte_s: float) -> None:
        """Count what an attempt said; `first_byte_s` is 0 when none came."""
        if outcome is Outcome.NOTHING:
            return
        self.answers += 1
        if outcome is Outcome.WELL:
            self.in_a_row = self.refused = 0
        else:
            self.in_a_row += 1
            self.failures += 1
            self.refused = self.refused + 1 if outcome is Outcome.REFUSED else 0
        if first_byte_s > 0:
            self.first_bytes += 1
            pace = max(PACE, 1 / self.first_bytes)
            self.first_byte_s += (first_byte_s - self.first_byte_s) * pace

    def fade(self) -> None:
        """Let what was counted weigh less."""
        self.answers *= FADE
        self.failures *= FADE

    def eject(self, now: float, reason: str) -> None:
        """Leave it alone for a while, longer each time."""
        if self.ejections and self.serving_since and now - self.serving_since > FORGIVE_S:
            self.ejections = 0
        self.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(self.ejections, 10))
        self.ejections += 1
        self.phase, self.reason = Phase.EJECTED, reason

    def come_back(self, now: float, heat: float) -> None:
        """It is well: serve, slowly at first. `heat`: of the others, so that it does not get all that they had."""
        self.phase, self.reason = Phase.SERVING, ""
        self.in_a_row = self.refused = 0
        self.answers = self.failures = self.silent_since = 0.0
        self.first_bytes, self.first_byte_s = 0, 0.0
        self.slow_from = self.serving_since = now
        self.heat = max(self.heat, heat)


def broken(replica: Replica) -> str:
    """Return why a serving replica is to be left alone by what it did itself; empty when it is not."""
    if replica.refused >= REFUSED_IN_A_ROW:
        return "takes no connections"
    if replica.in_a_row >= IN_A_ROW:
        return f"{replica.in_a_row} failures in a row"
    return ""


def outlier(replica: Replica, others: list[Replica]) -> str:
    """Return why a replica is to be left alone beside others that do better; empty when it is not."""
    if max(replica.answers, replica.first_bytes) < SEEN_MIN:
        return ""
    known = [one for one in others if one.answers >= SEEN_MIN]
    if replica.answers >= SEEN_MIN and known:
        rate = replica.failures / replica.answers
        rest = sum(one.failures for one in known) / sum(one.answers for one in known)
        if rate >= FAILING and rate > 2 * rest:
            return f"{rate:.0%} of its answers fail, of the others' {rest:.0%}"
    paced = sorted(one.first_byte_s for one in others if one.first_bytes >= SEEN_MIN)
    if replica.first_bytes >= SEEN_MIN and paced:
        usual = paced[len(paced) // 2]
        if replica.first_byte_s > max(SLOW_TIMES * usual, usual + SLOW_S):
            return f"its first byte takes {replica.first_byte_s:.1f} s, the others' {usual:.1f} s"
    return ""
