"""A recount: the counters compared with the leases they follow from, beside running traffic. See scripts/recount.lua.

What is off is set right by the script; here it is told: as figures by kind, and in the log.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import structlog

log = structlog.get_logger()

LEASES = 50  # read by one call, which takes some 0.3 ms for them
CALLS_MAX = 5000  # of one round: 500,000 leases
LOGGED_MAX = 20  # counters of one round that are named in the log
MORE, DONE = 1, 2  # the script's answer

KINDS = (
    *("global", "tenant", "tenant_model", "project", "project_model", "key", "key_model", "entitled"),
    *("model_in_flight", "model_tokens", "model_waiting", "queue_cost", "waiting", "other"),
)


class Drift(NamedTuple):
    """A counter that was off: what it said, and what its leases come to."""

    name: str
    value: int
    right: int

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        family, _, rest = self.name.partition(":")
        if family in {"c", "o"}:
            level, _, counted = rest.partition(":")
            kind = level + ("_model" if ":m:" in counted else "")
            return kind if kind in KINDS else "other"
        if family == "m":
            part = rest.rpartition(":")[2]
            return {"inflight": "model_in_flight", "tokens": "model_tokens"}.get(part, "model_waiting")
        return "queue_cost" if family == "d" else "waiting"


class Figures(msgspec.Struct):
    """What recounts of this replica found."""

    rounds: int = 0  # finished
    last: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(KINDS, 0))  # by the last one
    total: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def take(self, found: list[Drift]) -> None:
        """Count a round that is done."""
        self.rounds += 1
        self.last = dict.fromkeys(KINDS, 0)
        for drift in found:
            off = abs(drift.value - drift.right)
            self.last[drift.kind] += off
            self.total[drift.kind] += off


async def run_round(step: Callable[[], Awaitable[list[Any]]], figures: Figures, *, replica: str) -> list[Drift] | None:
    """Call `step` until the round is done, and return what was off; None when another replica counts.

    Args:
        step: one call of the script; returns its answer behind the code.
        figures: where the outcome is counted.
        replica: for the log.
    """
    found: list[Drift] = []
    state = MORE
    try:
        for _ in range(CALLS_MAX):
            state, *triples = await step()
            found += [Drift(name.decode(), value, sum_) for name, value, sum_ in zip(*[iter(triples)] * 3, strict=True)]
            if state != MORE:
                break
    finally:  # what was set right before the connection was lost is told all the same
        if state == DONE or found:
            figures.take(found)
            _tell(found, replica)
    return found if state == DONE or found else None


def _tell(found: list[Drift], replica: str) -> None:
    for drift in found[:LOGGED_MAX]:
        values = {"value": drift.value, "right": drift.right}
        log.warning("counter.drifted", replica=replica, kind=drift.kind, counter=drift.name, **values)
    if found:
        log.warning("counters.corrected", replica=replica, counters=len(found))
