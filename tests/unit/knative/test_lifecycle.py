"""An engine's life: each step by hand, and what must hold whatever happens."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knative.lifecycle import SECOND_US, SERVING, Action, Facts, Life, Policy, adopted, decide, eta_s
from knative.types import ReplicaState as State

S = SECOND_US
POLICY = Policy()
NOW = 1_000 * S
WELL = Facts(wanted=True, alive=True, healthy=True)
GONE = Facts(wanted=True, alive=False)


def life(state: State, **members: int) -> Life:
    return msgspec.structs.replace(Life(state, since_us=NOW, ready_us=NOW, active_us=NOW), **members)


def look(before: Life, facts: Facts, after_s: float = 0.0) -> tuple[State, Action]:
    after, action = decide(before, facts, POLICY, NOW + int(after_s * S))
    return after.state, action


def replace(facts: Facts, **members: object) -> Facts:
    return msgspec.structs.replace(facts, **members)


LOADING = Life(State.LOADING, since_us=NOW)
READY = life(State.READY)
DRAINING = Life(State.DRAINING, since_us=NOW)
STOPPING = Life(State.DRAINING, since_us=NOW, stop_sent_us=NOW)
BROKEN = Life(State.FAILED, since_us=NOW, attempts=5, retry_at_us=NOW + 10 * S, reason="x")


@pytest.mark.parametrize(
    ("before", "facts", "after_s", "expected"),
    [
        (Life(), GONE, 0, (State.ABSENT, Action.NONE)),
        (Life(), replace(GONE, woken=True), 0, (State.LOADING, Action.START)),
        (Life(), replace(GONE, hot=True), 0, (State.LOADING, Action.START)),
        (Life(), replace(GONE, woken=True, wanted=False), 0, (State.ABSENT, Action.NONE)),
        (LOADING, replace(WELL, healthy=False), 1, (State.LOADING, Action.NONE)),
        (LOADING, replace(WELL, healthy=None), 1, (State.LOADING, Action.NONE)),
        (LOADING, WELL, 1, (State.READY, Action.NONE)),
        (LOADING, replace(WELL, wanted=False), 1, (State.DRAINING, Action.STOP)),
        (LOADING, replace(WELL, healthy=None), 1799, (State.LOADING, Action.NONE)),  # a slow one is no failure
        (LOADING, replace(WELL, healthy=None), 1800, (State.LOADING, Action.KILL)),
        (LOADING, GONE, 1, (State.LOADING, Action.NONE)),  # it died: waits before the next try
        (READY, WELL, 9.9, (State.READY, Action.NONE)),
        (READY, WELL, 10, (State.IDLE, Action.NONE)),
        (READY, replace(WELL, inflight=1), 1000, (State.READY, Action.NONE)),
        (READY, replace(WELL, inflight=None), 1000, (State.READY, Action.NONE)),  # Valkey away: nobody knows
        (READY, replace(WELL, last_us=NOW + 95 * S), 100, (State.READY, Action.NONE)),
        (life(State.IDLE), WELL, 299, (State.IDLE, Action.NONE)),
        (life(State.IDLE), WELL, 300, (State.DRAINING, Action.NONE)),
        (life(State.IDLE), replace(WELL, hot=True), 9999, (State.IDLE, Action.NONE)),
        (life(State.IDLE), replace(WELL, woken=True), 9999, (State.READY, Action.NONE)),
        (READY, replace(WELL, stale=True), 1, (State.DRAINING, Action.NONE)),
        (READY, replace(WELL, wanted=False, inflight=3), 1, (State.DRAINING, Action.NONE)),
        (READY, GONE, 1, (State.LOADING, Action.NONE)),
        (life(State.READY, bad_probes=4), replace(WELL, healthy=False), 1, (State.LOADING, Action.KILL)),
        (life(State.READY, bad_probes=4), replace(WELL, healthy=None), 1, (State.READY, Action.NONE)),
        (DRAINING, replace(WELL, inflight=0), 0.9, (State.DRAINING, Action.NONE)),  # not every gateway knows yet
        (DRAINING, replace(WELL, inflight=0), 1, (State.DRAINING, Action.STOP)),
        (DRAINING, replace(WELL, inflight=1), 29, (State.DRAINING, Action.NONE)),
        (DRAINING, replace(WELL, inflight=None), 29, (State.DRAINING, Action.NONE)),
        (DRAINING, replace(WELL, inflight=1), 30, (State.DRAINING, Action.STOP)),
        (DRAINING, replace(WELL, woken=True), 0.5, (State.READY, Action.NONE)),
        (DRAINING, replace(WELL, woken=True, stale=True), 0.5, (State.DRAINING, Action.NONE)),
        (STOPPING, replace(WELL, woken=True), 0.5, (State.DRAINING, Action.NONE)),  # too late to keep it
        (STOPPING, WELL, 10, (State.DRAINING, Action.KILL)),
        (STOPPING, GONE, 1, (State.ABSENT, Action.NONE)),
        (BROKEN, replace(GONE, woken=True), 9, (State.FAILED, Action.NONE)),
        (BROKEN, replace(GONE, woken=True), 10, (State.LOADING, Action.START)),
        (BROKEN, GONE, 1000, (State.FAILED, Action.NONE)),  # nobody asks: nothing is tried
        (BROKEN, replace(GONE, wanted=False), 1, (State.ABSENT, Action.NONE)),
        (BROKEN, replace(GONE, stale=True), 1, (State.ABSENT, Action.NONE)),  # other arguments: a fresh start
    ],
)
def test_each_look_takes_the_one_right_step(
    before: Life, facts: Facts, after_s: float, expected: tuple[State, Action]
) -> None:
    assert look(before, facts, after_s) == expected


def test_five_crashes_in_a_row_back_off_and_then_fail_with_the_reason() -> None:
    current, now, waits = LOADING, NOW, []
    for _ in range(4):
        current, action = decide(current, replace(GONE, note="out of memory"), POLICY, now)
        assert (current.state, action) == (State.LOADING, Action.NONE)
        waits.append(current.retry_at_us - now)
        now = current.retry_at_us
        current, action = decide(current, GONE, POLICY, now)
        assert action is Action.START
    current, action = decide(current, replace(GONE, note="out of memory"), POLICY, now)
    assert (current.state, current.reason, action) == (State.FAILED, "out of memory", Action.NONE)
    assert waits == [S // 10, S // 5, 2 * S // 5, 4 * S // 5]


def test_a_failed_one_gets_one_more_try_for_a_wake() -> None:
    current, action = decide(BROKEN, replace(GONE, woken=True), POLICY, NOW + 10 * S)
    assert action is Action.START
    current, action = decide(current, replace(GONE, woken=True), POLICY, NOW + 11 * S)
    assert (current.state, action) == (State.FAILED, Action.NONE)


def test_a_minute_of_good_service_forgives_earlier_crashes() -> None:
    shaky = life(State.READY, attempts=4)
    assert decide(shaky, GONE, POLICY, NOW + 59 * S)[0].state is State.FAILED
    after, _ = decide(shaky, GONE, POLICY, NOW + 60 * S)
    assert (after.state, after.attempts) == (State.LOADING, 1)


@pytest.mark.parametrize(
    ("current", "loads_ms", "after_s", "expected"),
    [
        (READY, (9000,), 5, 0),
        (Life(), (), 0, 10),
        (Life(), (40_000, 1_000, 2_000), 0, 2),  # one slow load does not frighten callers away
        (LOADING, (5_000,), 3, 2),
        (LOADING, (5_000,), 60, 60),  # longer than ever: as long again
        (BROKEN, (5_000,), 4, 11),
    ],
)
def test_the_estimate_is_the_median_of_longer_loads_less_what_has_passed(
    current: Life, loads_ms: tuple[int, ...], after_s: int, expected: int
) -> None:
    assert eta_s(current, loads_ms, NOW + after_s * S) == expected


LOOKS = st.lists(
    st.tuples(
        st.integers(0, 40 * S),  # time that passes
        st.sampled_from(["nothing", "crash", "well", "unwell"]),
        st.booleans(),  # woken
        st.integers(0, 2),  # in flight
        st.sampled_from(["wanted", "wanted", "wanted", "unwanted", "stale", "hot"]),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(LOOKS)
def test_whatever_happens_there_is_one_engine_and_no_work_is_cut_short(
    looks: list[tuple[int, str, bool, int, str]],
) -> None:
    current, alive, now = Life(), False, NOW
    for passed, event, woken, inflight, wish in looks:
        now += passed
        alive = alive and event != "crash"
        facts = Facts(
            wanted=wish != "unwanted",
            alive=alive,
            hot=wish == "hot",
            stale=wish == "stale",
            woken=woken,
            healthy={"well": True, "unwell": False}.get(event) if alive else None,
            inflight=inflight,
            last_us=now if inflight else 0,
        )
        before = current
        current, action = decide(before, facts, POLICY, now)
        assert action is not Action.START or not alive, "a second engine was started"
        assert current.state not in SERVING or alive, "a dead engine was offered"
        assert current.attempts <= POLICY.attempts_max
        if action is Action.STOP and before.state is not State.LOADING:
            assert before.state is State.DRAINING, "it was stopped without draining"
            assert inflight == 0 or now - before.since_us >= POLICY.drain_timeout_us
        if action is Action.START:
            assert current.state is State.LOADING
            alive = True
        elif action in {Action.STOP, Action.KILL}:
            alive = False
    assert_it_goes_to_sleep(current, alive=alive, now=now)


def assert_it_goes_to_sleep(current: Life, *, alive: bool, now: int) -> None:
    """With nobody calling, every cold engine ends, or has failed and is left alone."""
    for _ in range(2_000):
        now += S
        current, action = decide(current, Facts(wanted=True, alive=alive, healthy=alive or None), POLICY, now)
        alive = action is Action.START or (alive and action is Action.NONE)
        if current.state in {State.ABSENT, State.FAILED} and not alive:
            return
    raise AssertionError(f"it stays {current}")


def test_an_adopted_engine_serves_at_once() -> None:
    assert look(adopted(NOW), WELL, 1) == (State.READY, Action.NONE)
