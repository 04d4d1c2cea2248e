"""A replay agrees with the admission script that recorded the traffic, and never contradicts itself."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.demand import Demand, Unit
from scheduler import commands
from scheduler.types import Grant
from tenants.recorded import Sum, spread
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode
from tenants.what_if import Outcome, Replay, Traffic, run
from tests.factories.scheduler import Fleet, ask, concurrency, outcomes, rate, served_model, tokens

TENANT, PROJECT = UUID(int=1), UUID(int=2)
RPM, AT_ONCE = LimitMetric.REQUESTS_PER_MINUTE, LimitMetric.CONCURRENCY
ITPM, OTPM = LimitMetric.INPUT_TOKENS_PER_MINUTE, LimitMetric.OUTPUT_TOKENS_PER_MINUTE
S = 1_000_000
BEGIN_US = 1_780_000_000 * S


def replayed(traffic: list[Traffic], *limits: Limit) -> Outcome:
    return run(Replay(TENANT, "UTC", lambda _project, _key: limits, {}, BEGIN_US), traffic, BEGIN_US)


@st.composite
def traces(draw: st.DrawFn, *, sums: bool = False) -> list[Traffic]:
    """Requests of three keys over some minutes, in order; bursts as well as pauses."""
    gaps = draw(st.lists(st.sampled_from((0, 1, 1000, S // 3, S, 7 * S, 61 * S)), max_size=80))
    at_us, found = BEGIN_US, []
    for gap in gaps:
        at_us += gap
        found.append(
            Traffic(
                at_us,
                at_us + draw(st.sampled_from((0, S, 30 * S))),
                PROJECT,
                UUID(int=draw(st.integers(10, 12))),
                draw(st.sampled_from("ab")),
                draw(st.integers(1, 9)) if sums else 1,
                draw(st.integers(0, 50)),
                draw(st.integers(0, 50)),
                draw(st.integers(0, 50)),
            )
        )
    return found


@st.composite
def limits(draw: st.DrawFn) -> tuple[Limit, ...]:
    metrics = st.sampled_from(list(LimitMetric))
    levels, models = st.sampled_from(list(LimitLevel)), st.sampled_from(("", "a"))
    one = st.builds(Limit, levels, metrics, st.integers(0, 60), st.just(LimitMode.HARD), models)
    return tuple(draw(st.lists(one, max_size=4, unique_by=lambda x: (x.level, x.metric, x.model))))


@given(traces(), limits())
def test_what_was_admitted_under_limits_passes_them_again(traffic: list[Traffic], recorded: tuple[Limit, ...]) -> None:
    """Record under limits, keep what passed, and replay that under the same limits: nothing is refused."""
    first = replayed(traffic, *recorded)
    admitted = [item for item, passed in zip(traffic, first.passed, strict=True) if passed]
    again = replayed(admitted, *recorded)
    assert again.passed == [1] * len(admitted)
    assert again.total.newly_refused == 0
    assert again.refused_by == {}


@given(traces(), st.integers(0, 30), st.integers(0, 5), st.sampled_from(list(LimitLevel)))
def test_a_lower_limit_of_requests_refuses_at_least_as_many(
    traffic: list[Traffic], amount: int, less: int, level: LimitLevel
) -> None:
    """At every instant, not only in the end."""
    high = replayed(traffic, Limit(level, RPM, amount + less)).passed
    low = replayed(traffic, Limit(level, RPM, amount)).passed
    sum_high = sum_low = 0
    for more, fewer in zip(high, low, strict=True):
        sum_high, sum_low = sum_high + more, sum_low + fewer
        assert sum_high >= sum_low


@given(traces(sums=True), limits())
def test_no_window_and_no_instant_has_more_than_the_limit(traffic: list[Traffic], tried: tuple[Limit, ...]) -> None:
    outcome = replayed(traffic, *tried)
    for limit in tried:
        for owner in {_owner(limit, item) for item in traffic}:
            counted = [
                (item, passed)
                for item, passed in zip(traffic, outcome.passed, strict=True)
                if _owner(limit, item) == owner and limit.model in ("", item.model)
            ]
            for last, _ in counted:
                assert _most(limit, counted, last.at_us) <= limit.amount
    assert outcome.total.refused == sum(outcome.refused_by.values())
    assert all(0 <= passed <= item.requests for item, passed in zip(traffic, outcome.passed, strict=True))


def _owner(limit: Limit, item: Traffic) -> UUID:
    return {LimitLevel.KEY: item.key_id, LimitLevel.PROJECT: item.project_id, LimitLevel.TENANT: TENANT}[limit.level]


def _most(limit: Limit, counted: list[tuple[Traffic, int]], now_us: int) -> int:
    """What is in the window that ends now, or runs now, or was spent until now; counted anew, without buckets."""
    before = [(item, passed) for item, passed in counted if item.at_us <= now_us]
    if limit.metric is AT_ONCE:
        return sum(passed for item, passed in before if item.until_us > now_us and item.until_us > item.at_us)
    in_window = [(item, passed) for item, passed in before if item.at_us > now_us - 60 * S]
    match limit.metric:
        case LimitMetric.REQUESTS_PER_MINUTE:
            return sum(passed for _, passed in in_window)
        case LimitMetric.INPUT_TOKENS_PER_MINUTE:
            return sum(item.input_tokens * passed // item.requests for item, passed in in_window)
        case LimitMetric.OUTPUT_TOKENS_PER_MINUTE:
            return sum(item.output_tokens * passed // item.requests for item, passed in in_window)
        case _:  # the trace lies within one day
            return sum(item.nano * passed // item.requests for item, passed in before)


@given(st.integers(1, 500), st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10**12))
def test_a_spread_sum_keeps_its_sums(requests: int, tokens: int, output: int, nano: int) -> None:
    parts = list(spread(Sum(BEGIN_US, 60 * S, PROJECT, TENANT, "m", requests, tokens, output, nano)))
    assert [sum(getattr(part, name) for part in parts) for name in ("requests", "input_tokens")] == [requests, tokens]
    assert [sum(getattr(part, name) for part in parts) for name in ("output_tokens", "nano")] == [output, nano]
    assert all(BEGIN_US <= part.at_us < BEGIN_US + 60 * S and part.requests for part in parts)


# ---- against the real thing


@dataclass(frozen=True)
class Trial:
    """Limits of a random trace: of each key, of the tenant, and requests at once and output tokens of each key."""

    seed: int
    key_rpm: int
    tenant_rpm: int
    at_once: int
    key_otpm: int
    dark_itpm: int = 500


async def _move_to(fleet: Fleet, at_us: int) -> None:
    """Let Valkey's time be this; a call takes far less than the half second to the bucket's end."""
    seconds, micros = await fleet.client.call("TIME")
    await fleet.client.call("SET", commands.OFFSET, at_us - (int(seconds) * S + int(micros)))


TRIALS = (
    Trial(1, 6, 15, 1000, 10**6),
    Trial(2, 1000, 20, 3, 10**6),
    Trial(3, 9, 1000, 2, 10**6),
    Trial(4, 1000, 1000, 1000, 300),
    Trial(5, 8, 20, 3, 400),
)


@pytest.mark.parametrize("trial", TRIALS, ids=str)
async def test_the_admission_script_refuses_the_same_requests(valkey: Path, trial: Trial) -> None:
    """A random trace at the middle of buckets (1 s), driven through the real scheduler: request by request equal.

    What a request uses is known at the door here, so tokens need no correction.
    """
    choose = random.Random(trial.seed)
    fleet, model = await Fleet.open(valkey), served_model()
    replicas = [await fleet.replica(), await fleet.replica()]
    running: list[tuple[int, int, Grant]] = []
    decided, over = list[int](), 0
    traffic: list[Traffic] = []
    seconds, _ = await fleet.client.call("TIME")
    at_us = (int(seconds) + 10) * S + S // 2
    try:
        for number in range(200):
            at_us += choose.choice((0, 0, 0, 1, 1, 2, 5, 19)) * S
            key, used = UUID(int=choose.randint(10, 12)), (choose.randint(0, 200), choose.randint(0, 90))
            traffic.append(Traffic(at_us, at_us + choose.choice((1, 4, 40)) * S, PROJECT, key, "m", 1, *used))
            await _move_to(fleet, at_us)
            while running and min(running)[0] <= at_us:
                ended = min(running)
                running.remove(ended)
                replicas[ended[1] % 2].release(ended[2], 0)
                await fleet.count("nothing")  # what was sent is done
            asked = asyncio.ensure_future(ask(replicas[number % 2], model, *_demands(trial, key), used=used))
            [got] = await outcomes(asked)
            decided.append(int(isinstance(got, Grant)))
            if isinstance(got, Grant):
                running.append((traffic[-1].until_us, number, got))
                over += len(got.over)
    finally:
        await fleet.close()
    dark = Limit(LimitLevel.TENANT, ITPM, trial.dark_itpm, LimitMode.DARK)
    outcome = replayed(
        traffic,
        Limit(LimitLevel.KEY, RPM, trial.key_rpm),
        Limit(LimitLevel.KEY, OTPM, trial.key_otpm),
        Limit(LimitLevel.KEY, AT_ONCE, trial.at_once),
        Limit(LimitLevel.TENANT, RPM, trial.tenant_rpm),
        dark,
    )
    assert outcome.passed == decided
    assert outcome.over == {dark: over}
    assert 0.1 < sum(decided) / len(decided) < 0.9  # it was about something


def _demands(trial: Trial, key: UUID) -> tuple[Demand, ...]:
    dark = f"tenant:{TENANT.hex}:itpm:dark"
    return (
        rate(trial.key_rpm, counter=f"key:{key.hex}:rpm"),
        tokens(trial.key_otpm, Unit.OUTPUT_TOKEN, counter=f"key:{key.hex}:otpm"),
        concurrency(trial.at_once, counter=f"key:{key.hex}:conc"),
        rate(trial.tenant_rpm, counter=f"tenant:{TENANT.hex}:rpm"),
        tokens(trial.dark_itpm, Unit.INPUT_TOKEN, counter=dark, enforced=False),
    )
