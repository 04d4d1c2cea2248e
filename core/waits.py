"""Why a request waited for its place: what was full, who went before. Pure data and words, for receipts and errors."""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from core.tiers import Tier


class Full(IntEnum):
    """What a request waited for. `scheduler/scripts/acquire.lua` tells it by these numbers."""

    PLATFORM_PLACES = 1
    CAPABILITY = 2  # what its tenant may have in flight on the model at most
    CALLER_PLACES = 3  # another cap of its caller
    MODEL_PLACES = 4
    MODEL_TOKENS = 5
    TURN = 6  # there was room, but others waited before it

    @property
    def label(self) -> str:
        """The word programs meet, e.g. ``model_places``."""
        return self.name.lower()


class Wait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What admission decided of one request that waited. Counts are of requests on its deployment.

    `full` is a `Full`, or a number of a later version.
    """

    full: int
    limit: int  # how much of that there is for its tier: requests, or tokens as estimated; 0 of `TURN`
    estimate_us: int  # how long it would wait, as reckoned at the door; 0 also when nothing was known
    ahead: int  # waited when it came, in its tier or a higher one
    passed_batch: int = 0  # granted while it waited, by tier; more than `ahead` where others had the better turn
    passed_standard: int = 0
    passed_priority: int = 0

    @property
    def label(self) -> str:
        """What was full, in one word."""
        return Full(self.full).label if self.full in _WORDS else "other"

    @property
    def passed(self) -> dict[Tier, int]:
        """How many went before it, the highest tier first."""
        return {Tier.PRIORITY: self.passed_priority, Tier.STANDARD: self.passed_standard, Tier.BATCH: self.passed_batch}


_WORDS = {
    Full.PLATFORM_PLACES: "all {limit:,} places of the platform that its tier may fill were taken",
    Full.CAPABILITY: "the {limit:,} places your organisation may have on this model were taken",
    Full.CALLER_PLACES: "the {limit:,} places its caller may have were taken",
    Full.MODEL_PLACES: "the model's {limit:,} places for its tier were taken",
    Full.MODEL_TOKENS: "the model's memory for {limit:,} tokens, as its tier may fill it, was taken",
    Full.TURN: "others waited before it",
}


def passed(before: Sequence[int], after: Sequence[int], tier: Tier) -> tuple[int, ...]:
    """Return how many were granted between two counts by tier, without the request itself, which is of `tier`."""
    return tuple(max(0, n - had - (of == tier)) for of, (had, n) in enumerate(zip(before, after, strict=False)))


def words(wait: Wait, waited_us: int, preemptions: int = 0) -> str:
    """Say in one sentence why the request waited and for how long.

    Args:
        wait: what admission knew.
        waited_us: how long it waited in all.
        preemptions: how often it gave its place again.
    """
    why = _WORDS.get(wait.full, "what it needed was taken").format(limit=wait.limit)  # type: ignore[call-overload]
    parts = [f"Waited {_seconds(waited_us)}: {why}"]
    if wait.estimate_us:
        parts.append(f"about {_seconds(wait.estimate_us)} were expected")
    went = [f"{count:,} of {tier.label}" for tier, count in wait.passed.items() if count]
    if went:
        parts.append(f"requests that went before: {', '.join(went)}")
    if preemptions:
        times = "once" if preemptions == 1 else f"{preemptions} times"
        parts.append(f"its place went to a higher tier {times}, and it waited again")
    return "; ".join(parts) + "."


def _seconds(us: int) -> str:
    return f"{us / 1_000_000:,.1f} s" if us >= 100_000 else f"{us / 1000:,.0f} ms"
