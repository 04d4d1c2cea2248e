"""The adaptive caps of one deployment, pure: how many requests and how many tokens its engines hold well.

The cap follows what the engines say: it shrinks when their own queue or their KV memory fills, and grows while it is
used and the time between tokens does not (gradient2 of Netflix' concurrency-limits, on the time between tokens).
Nothing is ever probed by squeezing.
"""

import math
from enum import StrEnum

import msgspec

WAITING_PER_POD = 5  # of the engine's own queue: more means that it is full
KV_FULL = 0.9  # of the KV memory: above it engines begin to preempt
KV_TARGET = 0.85
TOLERANCE, SLOWEST = 1.5, 0.5  # gradient2: how much slower than of late is still well; the most it shrinks by
SMOOTHING, TOKEN_SMOOTHING = 0.2, 0.3
GROWTH = 0.3  # a second, of an empty engine whose tokens are not slower; the fuller or slower, the less
SHRINK, SHRINK_EVERY_S = 0.9, 2.0
LONG_S = 60.0  # what "of late" means for the time between tokens
LOST_S, DECAY = 10.0, 0.95  # without figures for so long the caps fall, to this part each second
HEADROOM = 1.15  # above the seats: what is on its way to a seat, or from it. A batch bound has its own room


class Cause(StrEnum):
    """The rule by which the cap of requests moved."""

    MEMORY = "memory"  # the engines' KV memory is full: a tenth less
    ENGINE_PREEMPTED = "engine_preempted"  # an engine took memory from a request it had begun: a tenth less
    ENGINE_QUEUE = "engine_queue"  # requests wait inside the engines: less by those
    SLOWER = "slower"  # tokens come slower than of late: less
    USED = "used"  # it is used and the engines are not full: more
    PODS = "pods"  # its bounds moved: pods came or went, or their batch bound was stated anew
    UNSEEN = "unseen"  # no figures for 10 s: less


class Sample(msgspec.Struct, frozen=True):
    """What one scrape of all ready pods says, and the load at that moment."""

    at_s: float  # monotonic
    pods: int
    waiting: int  # in the engines' queues
    kv_used: float  # part of the KV memory, mean over the pods
    preemptions: int  # since the engines started
    itl_s: float  # mean time between tokens since the last scrape; 0: no token came
    inflight: int  # granted by the scheduler
    tokens: float  # reserved by what is in flight, as estimated


class Caps(msgspec.Struct, frozen=True):
    """What the scheduler goes by. `requests` and `tokens`: 0 is none."""

    requests: float
    tokens: float = 0.0
    saturation: float = 0.0
    itl_s: float = 0.0  # smoothed over some scrapes, as the prompts of one second tell little
    itl_long_s: float = 0.0
    preemptions: int = 0
    shrunk_at_s: float = -math.inf
    sampled_at_s: float = -math.inf
    cause: Cause | None = None  # of the last step; None: `requests` stayed

    @property
    def most(self) -> int:
        return max(1, math.floor(self.requests))


def saturation(sample: Sample) -> float:
    """Return how full the engines are: 1 is full."""
    return fullness(sample.waiting / max(1, sample.pods), sample.kv_used)


def fullness(waiting: float, kv_used: float) -> float:
    """Return how full one engine is by its own queue and the part of its KV memory in use: 1 is full."""
    return max(waiting / WAITING_PER_POD, kv_used / KV_FULL)


def after(caps: Caps, sample: Sample, *, per_pod: float) -> Caps:
    """Return the caps after a scrape. `per_pod`: the most one pod is given, its batch bound or its seats and some."""
    pods = max(1, sample.pods)
    most = max(1.0, pods * per_pod)
    itl, long = caps.itl_s, caps.itl_long_s
    if sample.itl_s > 0:
        itl = itl + (sample.itl_s - itl) * SMOOTHING if itl > 0 else sample.itl_s
        weight = min(1.0, max(0.0, sample.at_s - caps.sampled_at_s) / LONG_S) if long > 0 else 1.0
        long += (itl - long) * weight
        if long > 2 * itl:
            long *= 0.95
    full = saturation(sample)
    requests, shrunk_at, cause = caps.requests, caps.shrunk_at_s, Cause.USED
    if sample.kv_used >= KV_FULL or sample.preemptions > caps.preemptions:
        cause = Cause.MEMORY if sample.kv_used >= KV_FULL else Cause.ENGINE_PREEMPTED
        if sample.at_s - shrunk_at >= SHRINK_EVERY_S:
            requests, shrunk_at = min(requests, float(max(sample.inflight, pods))) * SHRINK, sample.at_s
    elif sample.waiting >= WAITING_PER_POD * pods:  # prompts come faster than they are read, or all seats are taken
        requests, cause = min(requests, float(sample.inflight - sample.waiting + pods)), Cause.ENGINE_QUEUE
    elif sample.inflight >= requests / 2:  # else what it could hold is not known
        gradient = min(1.0, max(SLOWEST, TOLERANCE * long / itl)) if itl > 0 and long > 0 else 1.0
        requests = _grown(requests, gradient, full, pods)
        cause = Cause.USED if requests > caps.requests else Cause.SLOWER
    bounded = min(most, max(float(pods), requests))
    return Caps(
        requests=bounded,
        tokens=_tokens(caps.tokens, sample),
        saturation=full,
        itl_s=itl,
        itl_long_s=long,
        preemptions=sample.preemptions,
        shrunk_at_s=shrunk_at,
        sampled_at_s=sample.at_s,
        cause=_cause(caps.requests, requests, bounded, cause),
    )


def _cause(before: float, wanted: float, bounded: float, cause: Cause) -> Cause | None:
    """Return what moved the cap: the rule that wanted so, or the bounds when these moved it another way."""
    if bounded == before:
        return None
    return cause if (wanted > before) == (bounded > before) and wanted != before else Cause.PODS


def _grown(requests: float, gradient: float, full: float, pods: int) -> float:
    """Return the cap of an engine that is used and not full: after a burst it must not take a minute to come back."""
    unhurried = (gradient - SLOWEST) / (1 - SLOWEST)
    more = max(SMOOTHING * max(float(pods), math.sqrt(requests)), GROWTH * (1 - full) * unhurried * requests)
    return requests * (1 - SMOOTHING + SMOOTHING * gradient) + more


def _tokens(before: float, sample: Sample) -> float:
    """Estimates are not tokens: what may be reserved is what fills the memory as it was filled by what is reserved."""
    if sample.kv_used < 0.2 or sample.tokens <= 0:
        return before
    fits = sample.tokens * KV_TARGET / sample.kv_used
    return fits if before <= 0 else before + (fits - before) * TOKEN_SMOOTHING


def unseen(caps: Caps, now_s: float, *, pods: int, per_pod: float) -> Caps:
    """Return the caps when no scrape came: as they are at first, falling to half of what the pods hold after 10 s."""
    if now_s - caps.sampled_at_s < LOST_S:
        return msgspec.structs.replace(caps, cause=None)
    floor = max(1.0, pods * per_pod / 2)
    requests = max(min(floor, caps.requests), caps.requests * DECAY)
    cause = Cause.UNSEEN if requests < caps.requests else None
    return msgspec.structs.replace(caps, requests=requests, cause=cause)
