"""Estimates, times of a deployment's own, and the record of wakes, by hand."""

from uuid import UUID

import pytest

from catalog.types import WakeCause, WakeOutcome
from core.ids import new_uuid
from knative.lifecycle import SECOND_US, Life, Policy, eta_s, policy_for
from knative.types import ReplicaState, Seat
from knative.wakes import FIRST_TOKEN_MAX_US, Timing, Wakes, cause_of

S = SECOND_US
NOW = 1_000 * S
SEAT = Seat(UUID(int=0x71DE))
LOADS = (9_000, 10_000, 11_000, 30_000, 31_000)


@pytest.mark.parametrize(
    ("state", "spent_s", "loads", "expected"),
    [
        (ReplicaState.ABSENT, 0, (), 10),
        (ReplicaState.ABSENT, 0, LOADS, 11),
        (ReplicaState.LOADING, 4, LOADS, 7),
        (ReplicaState.LOADING, 12, LOADS, 19),  # those that took longer than 12 s took 30 and 31 s
        (ReplicaState.LOADING, 40, LOADS, 40),  # longer than any: as long again
        (ReplicaState.LOADING, 4, (), 6),
        (ReplicaState.LOADING, 60, (), 60),
        (ReplicaState.LOADING, 9.5, (10_000,), 1),
        (ReplicaState.READY, 5, LOADS, 0),
    ],
)
def test_the_estimate_is_the_median_of_loads_that_took_longer_than_this_one_has(
    state: ReplicaState, spent_s: float, loads: tuple[int, ...], expected: int
) -> None:
    assert eta_s(Life(state, since_us=NOW - int(spent_s * S)), loads, NOW) == expected


def test_a_deployments_own_times_go_before_the_controllers() -> None:
    policy = Policy()
    assert policy_for(policy, 0, 0) is policy
    own = policy_for(policy, 15, 7200)
    assert (own.idle_window_us, own.idle_after_us, own.start_timeout_us) == (15 * S, 5 * S, 7200 * S)
    assert policy.start_timeout_us > 15 * 60 * S


def test_a_start_is_timed_by_phase_with_its_tries() -> None:
    wakes = Wakes(new_uuid)
    wakes.begin(SEAT, WakeCause.CALL, Timing(3_000, 4_000), now_us=NOW, wished_us=12_000)
    wakes.begin(SEAT, WakeCause.CRASH, Timing(9, 9), now_us=NOW + S)  # the first try failed
    wake = wakes.end(SEAT, WakeOutcome.READY, now_us=NOW + 2 * S, held=5)
    assert wake is not None
    assert (wake.cause, wake.attempts, wake.held) == (WakeCause.CALL, 2, 5)
    assert (wake.decide_ms, wake.fetch_ms, wake.schedule_ms, wake.load_ms, wake.ready_ms) == (12, 3, 4, 1993, 2012)
    assert wakes.end(SEAT, WakeOutcome.READY, now_us=NOW) is None
    assert wakes.tokenless(NOW + 3 * S) == [SEAT.deployment_id]
    for strange in (b"", b"soon", b"1 5", b"%d -5" % (NOW + 2 * S)):
        assert wakes.first_token(SEAT.deployment_id, strange) is None
    told = wakes.first_token(SEAT.deployment_id, b"%d 61" % (NOW + 2 * S))
    assert told is not None
    assert (told.id, told.first_token_ms) == (wake.id, 61)
    assert wakes.tokenless(NOW) == []


def test_weights_that_the_engines_own_process_brings_are_no_part_of_its_load() -> None:
    wakes = Wakes(new_uuid)
    for fetched_us, expected in ((700_000, (701, 1299)), (9 * S, (2000, 0))):  # a clock that jumped
        wakes.begin(SEAT, WakeCause.CALL, Timing(fetch_us=1_000), now_us=NOW)
        wake = wakes.end(SEAT, WakeOutcome.READY, now_us=NOW + 2 * S, fetched_us=fetched_us)
        assert wake is not None
        assert (wake.fetch_ms, wake.load_ms) == expected


def test_a_first_token_is_not_waited_for_for_ever() -> None:
    wakes = Wakes(new_uuid)
    wakes.begin(SEAT, WakeCause.CALL, Timing(), now_us=NOW)
    wakes.end(SEAT, WakeOutcome.READY, now_us=NOW)
    assert wakes.tokenless(NOW + FIRST_TOKEN_MAX_US)
    assert not wakes.tokenless(NOW + FIRST_TOKEN_MAX_US + 1)


@pytest.mark.parametrize(
    ("index", "before", "min_scale", "cause"),
    [
        (0, ReplicaState.ABSENT, 0, WakeCause.CALL),
        (0, ReplicaState.FAILED, 0, WakeCause.CALL),
        (0, ReplicaState.ABSENT, 1, WakeCause.FLOOR),
        (1, ReplicaState.ABSENT, 1, WakeCause.LOAD),
        (1, ReplicaState.LOADING, 2, WakeCause.CRASH),
    ],
)
def test_why_an_engine_is_started(index: int, before: ReplicaState, min_scale: int, cause: WakeCause) -> None:
    assert cause_of(Seat(SEAT.deployment_id, index), before, min_scale) is cause
