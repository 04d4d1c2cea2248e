"""What is told of a deployment with several engines, by hand."""

from uuid import UUID

import pytest

from knative.lifecycle import Life
from knative.summary import Seen, summarize
from knative.types import Endpoint, ReplicaState, Seat, parse_seat

State = ReplicaState
TIDE = UUID(int=0x71DE)
NOW = 50_000_000


def seen(state: State, url: str = "", since_us: int = NOW, reason: str = "") -> Seen:
    return Seen(Life(state, since_us=since_us, reason=reason), Endpoint(url, url) if url else None)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((), State.ABSENT),
        ((State.LOADING, State.READY), State.READY),
        ((State.IDLE, State.IDLE), State.IDLE),
        ((State.FAILED, State.LOADING), State.LOADING),
        ((State.DRAINING, State.FAILED), State.FAILED),
        ((State.ABSENT, State.DRAINING), State.DRAINING),
    ],
)
def test_a_deployment_is_as_well_as_the_best_of_its_engines(states: tuple[State, ...], expected: State) -> None:
    found = summarize(TIDE, {index: seen(state) for index, state in enumerate(states)}, (), NOW)
    assert found.state is expected


def test_only_engines_that_serve_are_offered_in_order_and_what_ails_another_is_said() -> None:
    engines = {
        2: seen(State.IDLE, "c", 3),
        0: seen(State.READY, "a", 9),
        1: seen(State.LOADING, "b", reason="the engine ended"),
        3: seen(State.DRAINING, "d"),
    }
    found = summarize(TIDE, engines, (4000,), NOW)
    assert [endpoint.url for endpoint in found.endpoints] == ["a", "c"]
    assert (found.eta_s, found.since_us, found.reason) == (0, 9, "the engine ended")


def test_the_estimate_is_that_of_the_engine_that_is_next() -> None:
    engines = {0: seen(State.LOADING, since_us=NOW - 1_000_000), 1: seen(State.LOADING, since_us=NOW - 3_000_000)}
    assert summarize(TIDE, engines, (5000,), NOW).eta_s == 2


def test_a_seat_has_a_name_that_leads_back_to_it() -> None:
    assert Seat(TIDE).name == TIDE.hex
    assert parse_seat(Seat(TIDE, 11).name) == Seat(TIDE, 11)
    for name in ("engine", f"{TIDE.hex}-0", f"{TIDE.hex}-01", f"{TIDE.hex}--1", f"{TIDE.hex}-"):
        with pytest.raises(ValueError, match=r".+"):
            parse_seat(name)
