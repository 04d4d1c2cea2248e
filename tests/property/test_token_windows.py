"""Tokens against a plain model: whatever comes and ends in any order, a window never holds more than the limit.

What runs counts as estimated, what has ended as used; each in the second in which it was admitted.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.demand import Unit
from scheduler.admission import Admission
from scheduler.types import Grant
from tests.factories.scheduler import Fleet, ask, outcomes, served_model, tokens

LIMIT, SECOND = 100, 1_000_000
COUNTER = "key:k:itpm"

Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 60), st.integers(0, 1)),
        st.tuples(st.just("end"), st.integers(0, 20), st.integers(0, 100)),
        st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
    ),
    min_size=5,
    max_size=60,
)


class Ledger:
    """What every request counts for, and when it was admitted (server µs)."""

    def __init__(self) -> None:
        self.admitted: list[tuple[int, int]] = []  # when, how much it counts for
        self.running: list[tuple[int, Grant, int]] = []  # place in `admitted`, grant, replica

    def in_buckets(self, since: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for at, amount in self.admitted:
            if at // SECOND >= since:
                found[at // SECOND] = found.get(at // SECOND, 0) + amount
        return found

    def fullest_window(self) -> int:
        """The largest sum of any 60 s."""
        return max(
            (sum(n for at, n in self.admitted if start <= at <= start + 60 * SECOND) for start, _ in self.admitted),
            default=0,
        )


class Game:
    """Two replicas, and the steps that a run may take."""

    def __init__(self, fleet: Fleet, replicas: list[Admission]) -> None:
        self.fleet, self.replicas, self.ledger = fleet, replicas, Ledger()
        self.model = served_model()

    async def wait(self, seconds: int, _: int) -> None:
        await self.fleet.advance(seconds)
        for replica in self.replicas:
            await replica.heartbeat()

    async def ask(self, estimate: int, n: int) -> None:
        ledger = self.ledger
        demand = tokens(LIMIT, Unit.INPUT_TOKEN)
        (got,) = await outcomes(
            asyncio.ensure_future(ask(self.replicas[n], self.model, demand, used=(estimate, 0))),
        )
        if isinstance(got, Grant):
            ledger.admitted.append((got.reply[3], estimate))
            ledger.running.append((len(ledger.admitted) - 1, got, n))
        else:  # and rightly: a bucket counts for 61 s, and the test itself takes some time
            since = await self.fleet.server_us() - 62 * SECOND
            assert got == "TOKENS_LIMITED"
            assert sum(n for at, n in ledger.admitted if at > since) + estimate > LIMIT

    async def end(self, which: int, percent: int) -> None:
        if self.ledger.running:
            place, grant, n = self.ledger.running.pop(which % len(self.ledger.running))
            used = grant.input_tokens * percent // 100
            self.replicas[n].release(grant, 0, used, 0)
            await self.fleet.settled()  # else the other replica's next request may come before it
            self.ledger.admitted[place] = (self.ledger.admitted[place][0], used)


async def play(valkey: Path, steps: list[Step]) -> None:
    fleet = await Fleet.open(valkey)
    await fleet.client.call("FLUSHALL")
    game = Game(fleet, [await fleet.replica() for _ in range(2)])
    for what, first, second in [*steps, *(("end", 0, 10),) * len(steps)]:
        await getattr(game, what)(first, second)
        assert game.ledger.fullest_window() <= LIMIT
    assert not game.ledger.running
    buckets = await fleet.rated(COUNTER)  # which checks that the counter is their sum
    expected = game.ledger.in_buckets(min(buckets, default=0))
    assert {at: n for at, n in buckets.items() if n} == {at: n for at, n in expected.items() if n}
    await fleet.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_no_window_holds_more_tokens_than_the_limit_and_what_ended_counts_as_used(
    valkey: Path, runner: asyncio.Runner, steps: list[Step]
) -> None:
    runner.run(play(valkey, steps))
