"""A load and an engine small enough for every run of the tests; figures that count come from the yardsticks."""

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

TIERS = {
    "priority": (0.25, 10.0),
    "standard": (0.3, 30.0),
    "batch": (0.45, 300.0),
}  # part of the load, client's timeout s
STEP_S, TOKENS, SEATS = 0.05, 20, 8  # so that 8 requests/s fit
RETRIES_MAX = 3


@dataclass(eq=False)
class Sequence:
    name: str
    prompt_tokens: int
    output_tokens: int
    owner: Any
    generated: int = 0
    state: str = "waiting"


@dataclass
class Engine:
    """So many seats; whoever has one gets a token each step. First come, first served, whatever its policy."""

    policy: str = ""
    running: list[Sequence] = field(default_factory=list)
    line: list[Sequence] = field(default_factory=list)
    kv_tokens: int = 10**9
    kv_used: int = 0
    preemptions: int = 0
    generated_total: int = 0
    steps: int = 0

    def submit(
        self, name: str, prompt_tokens: int, output_tokens: int, priority: int = 0, owner: Any = None
    ) -> Sequence:
        sequence = Sequence(name, prompt_tokens, output_tokens, owner)
        self.line.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> bool:
        for group in (self.running, self.line):
            if sequence in group:
                group.remove(sequence)
                sequence.state = "cancelled"
                return True
        return False

    @property
    def waiting_count(self) -> int:
        return len(self.line)

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.line)

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    def step(self, now: float) -> tuple[float, list[Sequence]]:
        while self.line and len(self.running) < SEATS:
            self.running.append(self.line.pop(0))
        served = [*self.running]
        self.steps += 1
        self.generated_total += len(served)
        for sequence in served:
            sequence.generated += 1
            sequence.state = "finished" if sequence.generated >= sequence.output_tokens else "running"
        self.running = [sequence for sequence in served if sequence.state == "running"]
        return now + STEP_S, served


def _backoff_s(meta: Any, row: dict[str, Any], attempt: int, retry_after: float | None) -> float | None:
    return None if attempt > RETRIES_MAX else max(2.0 ** (attempt - 1), retry_after or 0.0)


YARD = SimpleNamespace(engine=SimpleNamespace(Engine=Engine), load=SimpleNamespace(backoff_s=_backoff_s))


def schedule(*, times_full: float, seconds: float, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return so many times what the engine can serve, in the form of the yardsticks' schedules."""
    draw, rows, at = random.Random(seed), [], 0.0
    for number in itertools.count():
        at += draw.expovariate(times_full * SEATS / (STEP_S * TOKENS))
        if at >= seconds:
            break
        tier = draw.choices([*TIERS], [part for part, _ in TIERS.values()])[0]
        row = {"id": f"q{number}", "time_s": at, "tenant": f"t{draw.randrange(3)}", "tier": tier}
        rows.append(row | {"prompt_tokens": 50, "output_tokens": TOKENS, "max_tokens": 32, "timeout_s": TIERS[tier][1]})
    return {"seconds": seconds, "weights": {}}, rows
