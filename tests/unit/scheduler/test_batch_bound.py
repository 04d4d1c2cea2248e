"""The batch bound and the cap that begins at it, on an engine with the founding example's memory and a knee at 26."""

from dataclasses import dataclass, field

import pytest

from catalog.hardware import batch_bound_mb
from scheduler import caps
from scheduler.caps import Caps, Sample

KV_GB, FIRST_GB = 64.0, 1.2  # of 80 GB a fifth is not for KV; what a request has as it begins doubles until it ends
STEPS, KNEE, STEP_S = 300, 26, 0.02  # tokens of an answer; above the knee more requests make all of them slower
SEATS = 256


@dataclass
class Card:
    """One engine: a token for each that runs in a step, which takes longer above the knee; the newest gives way."""

    done: list[int] = field(default_factory=list)  # steps behind each that runs, the oldest first
    waiting: int = 0
    ended: int = 0
    preemptions: int = 0
    at_s: float = 0.0
    steps: int = 0

    @property
    def kv_gb(self) -> float:
        return sum(FIRST_GB * (1 + step / STEPS) for step in self.done)

    def send_to(self, inflight: int) -> None:
        """Callers ask for as much as they are let; they come apart, so that not all have the same age."""
        self.waiting += max(0, min(1, inflight - len(self.done) - self.waiting))

    def step(self) -> None:
        while self.waiting and self.kv_gb + FIRST_GB <= KV_GB:
            self.waiting -= 1
            self.done.append(0)
        self.done = [step + 1 for step in self.done]
        while self.kv_gb > KV_GB:  # what it had generated is lost
            self.done.pop()
            self.waiting += 1
            self.preemptions += 1
        self.at_s += STEP_S * max(1.0, len(self.done) / KNEE)
        self.steps += 1
        self.ended += sum(step >= STEPS for step in self.done)
        self.done = [step for step in self.done if step < STEPS]


def throughput(inflight: int) -> float:
    """Return answers a second with so many always in flight."""
    card = Card()
    while card.at_s < 120:
        card.send_to(inflight)
        card.step()
    return card.ended / card.at_s


def follow(bound: int, seconds: int) -> tuple[Card, list[float]]:
    """Run the card under the cap that follows its figures, which more want than it lets pass; returns the caps."""
    card, state, trail = Card(), Caps(float(bound or 32)), []
    for second in range(seconds):
        steps, since = card.steps, card.at_s
        while card.at_s < second + 1:
            card.send_to(state.most)
            card.step()
        itl = (card.at_s - since) / max(1, card.steps - steps)
        inflight = len(card.done) + card.waiting
        said = Sample(card.at_s, 1, card.waiting, card.kv_gb / KV_GB, card.preemptions, itl, inflight, 0.0)
        state = caps.after(state, said, per_pod=bound or SEATS * caps.HEADROOM)
        trail.append(state.requests)
    return card, trail


def test_what_an_operator_states_gives_the_bound_of_the_founding_example() -> None:
    """80 GB times 0.8, over 1.2 GB times 2: 26.67; of what is not known there is none."""
    assert batch_bound_mb(80_000, 1_200) == 26
    assert batch_bound_mb(24_000, 500) == 19  # 19.2
    assert batch_bound_mb(0, 0) == 0


def test_the_card_of_this_test_has_its_knee_where_the_example_says() -> None:
    """Up to 26 each request more is as many answers more; above it they are fewer, as memory is taken back."""
    few, half, knee, above, flood = map(throughput, (6, 13, 26, 29, 60))
    assert half / few == pytest.approx(13 / 6, rel=0.05)
    assert knee / half == pytest.approx(2, rel=0.05)
    assert flood < above < knee


def test_the_cap_settles_at_the_knee_and_the_engine_never_takes_memory_back() -> None:
    card, trail = follow(batch_bound_mb(80_000, 1_200), 300)
    assert all(24 <= requests <= 28 for requests in trail[30:])
    assert all(20 <= requests <= 28 for requests in trail)  # while all that runs is of one age, memory rules
    assert card.preemptions == 0
    assert card.ended / card.at_s > throughput(KNEE)


def test_without_a_bound_the_cap_swings_about_what_the_memory_holds() -> None:
    """So it is worth stating: the same card, found full by its figures alone, takes memory back again and again."""
    card, trail = follow(0, 300)
    assert min(trail[60:]) < 28 < max(trail[60:])
    assert card.preemptions > 100
    assert card.ended / card.at_s < throughput(KNEE)
