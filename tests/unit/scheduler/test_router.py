from hypothesis import given
from hypothesis import strategies as st

from knative.types import Endpoint
from scheduler.router import pick

A, B, C = (Endpoint(name, f"http://127.0.0.1/{name}") for name in "abc")


def test_nothing_ready_is_none() -> None:
    assert pick((), {}) is None


def test_the_least_loaded_wins_and_an_unknown_one_counts_as_idle() -> None:
    assert pick((A, B, C), {A.url: 2, B.url: 1, C.url: 3}) is B
    assert pick((A, B, C), {A.url: 1, B.url: 1}) is C


def test_equals_take_turns() -> None:
    assert [pick((A, B, C), {}, turn=turn) for turn in range(4)] == [A, B, C, A]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 100))
def test_nobody_has_fewer_in_flight_than_the_one_picked(loads: list[int], turn: int) -> None:
    endpoints = [Endpoint(str(n), f"u{n}") for n in range(len(loads))]
    inflight = {endpoint.url: load for endpoint, load in zip(endpoints, loads, strict=True)}
    picked = pick(endpoints, inflight, turn=turn)
    assert picked is not None
    assert inflight[picked.url] == min(loads)
