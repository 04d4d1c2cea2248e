"""What was seen of both versions of a rollout in one stretch of time. Pure: gateways count, the controller adds up."""

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

FIRST_S, GROWTH, COUNT = 0.001, 1.15, 96
BOUNDS_S = tuple(FIRST_S * GROWTH**place for place in range(COUNT))
"""Upper bounds of the times that are counted, 1 ms to 10 min; a percentile is exact to 15 %."""
SAMPLES_MAX = 20
"""Comparisons of which the single figures are kept, by each gateway."""


class Arm(msgspec.Struct):
    """One version's requests. `answers` came whole; only they count for cost, tokens and times."""

    requests: int = 0
    errors: int = 0  # ours or the engine's
    refused: int = 0  # the engine said that the caller was wrong
    answers: int = 0
    cost_pico: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft: dict[int, int] = {}  # place in `BOUNDS_S` → streams
    tpot: dict[int, int] = {}  # place in `BOUNDS_S` → answers of more than one token

    def time(self, times: dict[int, int], seconds: float) -> None:
        place = bisect_left(BOUNDS_S, seconds)
        times[place] = times.get(place, 0) + 1

    def add(self, other: "Arm") -> None:
        for name in ("requests", "errors", "refused", "answers", "cost_pico", "input_tokens", "output_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, more in ((self.ttft, other.ttft), (self.tpot, other.tpot)):
            for place, count in more.items():
                mine[place] = mine.get(place, 0) + count


class Sample(msgspec.Struct, frozen=True):
    """The figures of one comparison; no text."""

    exact: bool
    json_equal: bool | None  # None: the live answer is no JSON
    edit: float  # 0 same, 1 nothing in common, of the first `compare.TEXT_MAX` characters
    live_chars: int
    shadow_chars: int
    live_tokens: int
    shadow_tokens: int


class ShadowFigures(msgspec.Struct):
    """Copies sent to the new version, and how like its answers were. The cost is the platform's."""

    copies: int = 0
    dropped: int = 0  # nobody had time for them
    failed: int = 0
    compared: int = 0
    exact: int = 0
    json: int = 0  # live answers that are JSON
    json_equal: int = 0
    unlike: int = 0  # neither equal nor nearly so
    edit_sum: float = 0.0
    live_chars: int = 0
    shadow_chars: int = 0
    live_tokens: int = 0
    shadow_tokens: int = 0
    cost_pico: int = 0  # what a tenant would have paid
    samples: list[Sample] = []

    def add(self, other: "ShadowFigures") -> None:
        for name in self.__struct_fields__:
            if name != "samples":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.samples = (self.samples + other.samples)[-SAMPLES_MAX:]


class Figures(msgspec.Struct):
    """Both versions in one window, as one gateway counted, or the sum of all."""

    window: int
    stable: Arm = msgspec.field(default_factory=Arm)
    canary: Arm = msgspec.field(default_factory=Arm)
    shadow: ShadowFigures = msgspec.field(default_factory=ShadowFigures)


def total(window: int, seen: Iterable[Figures]) -> Figures:
    """Return the sum of what was counted in this window; what is of another one is left out."""
    found = Figures(window)
    for figures in seen:
        if figures.window == window:
            found.stable.add(figures.stable)
            found.canary.add(figures.canary)
            found.shadow.add(figures.shadow)
    return found


def percentile(times: dict[int, int], part: float) -> float:
    """Return the upper bound below which this part of the times lie; 0.0 when there are none."""
    left = part * sum(times.values())
    if not left:
        return 0.0
    for place in sorted(times):
        left -= times[place]
        if left <= 0:
            return BOUNDS_S[min(place, COUNT - 1)]
    return BOUNDS_S[-1]


def count(times: dict[int, int]) -> int:
    return sum(times.values())
