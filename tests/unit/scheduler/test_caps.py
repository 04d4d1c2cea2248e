"""Adaptive caps: what the engines say moves them, and nothing moves them out of bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.hardware import batch_bound
from scheduler.caps import Caps, Cause, Sample, after, saturation, unseen


def sample(**values: float) -> Sample:
    base = {"at_s": 10.0, "pods": 1, "waiting": 0, "kv_used": 0.5, "preemptions": 0, "itl_s": 0.02, "inflight": 20}
    return Sample(**{**base, "tokens": 50_000.0, **values})  # type: ignore[arg-type]


def test_the_batch_bound_by_formula() -> None:
    """80 GB times 0.8, over 1.2 GB times 2, is 26.67."""
    assert batch_bound(80, 1.2) == 26
    assert batch_bound(1, 40) == 1
    with pytest.raises(ValueError, match="positive"):
        batch_bound(80, 0)


def test_a_full_memory_of_the_engine_shrinks_the_cap_by_a_tenth_at_most_every_two_seconds() -> None:
    first = after(Caps(30.0), sample(kv_used=0.9, inflight=30), per_pod=64)
    assert (first.requests, first.saturation) == (27.0, 1.0)
    assert after(first, sample(kv_used=0.95, inflight=27, at_s=11.0), per_pod=64).requests == 27.0
    assert after(first, sample(kv_used=0.95, inflight=27, at_s=12.0), per_pod=64).requests == pytest.approx(24.3)


def test_what_waits_in_the_engine_is_not_sent_again() -> None:
    """Of 30 in flight 12 wait: its seats or its prefill hold 18; one more keeps it busy."""
    held = after(Caps(30.0), sample(waiting=12, inflight=30, kv_used=0.4), per_pod=64)
    assert (held.requests, held.saturation) == (19.0, 2.4)
    assert after(Caps(10.0), sample(waiting=12, inflight=30), per_pod=64).requests == 10.0


def test_it_comes_back_in_seconds_while_the_engine_is_empty_and_quick() -> None:
    state = Caps(30.0, itl_s=0.02, itl_long_s=0.02)
    for second in range(10, 18):
        used = sample(at_s=float(second), inflight=int(state.requests), kv_used=0.3)
        state = after(state, used, per_pod=128)
    assert state.requests > 100
    nearly_full = after(Caps(30.0), sample(inflight=30, kv_used=0.89), per_pod=128)
    assert 31 < nearly_full.requests < 32


def test_a_preemption_in_the_engine_shrinks_it_too() -> None:
    assert after(Caps(20.0, preemptions=3), sample(preemptions=4), per_pod=64).requests == 18.0
    assert after(Caps(20.0, preemptions=4), sample(preemptions=4), per_pod=64).requests > 20.0


def test_it_never_grows_while_it_is_not_used() -> None:
    assert after(Caps(50.0), sample(inflight=24), per_pod=64).requests == 50.0
    assert after(Caps(50.0), sample(inflight=25), per_pod=64).requests > 50.0


def test_slower_tokens_shrink_it() -> None:
    state = Caps(40.0, itl_s=0.02, itl_long_s=0.02, sampled_at_s=9.0)
    for second in range(10, 20):
        state = after(state, sample(at_s=float(second), itl_s=0.08, inflight=40), per_pod=64)
    assert state.requests < 35.0


def test_what_may_be_reserved_follows_how_full_the_memory_is_with_what_is_reserved() -> None:
    """100,000 reserved as estimated fill 0.425 of the memory: 200,000 fill it to 0.85."""
    assert after(Caps(20.0), sample(tokens=100_000.0, kv_used=0.425), per_pod=64).tokens == pytest.approx(200_000)
    assert after(Caps(20.0, tokens=9.0), sample(tokens=1000.0, kv_used=0.01), per_pod=64).tokens == 9.0


def test_without_figures_it_stays_and_then_falls_to_half() -> None:
    state = Caps(60.0, sampled_at_s=100.0)
    assert unseen(state, 109.9, pods=1, per_pod=64) == state
    fallen = state
    for _ in range(100):
        fallen = unseen(fallen, 111.0, pods=1, per_pod=64)
    assert fallen.requests == pytest.approx(32)


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 50), st.floats(0, 1), st.integers(0, 3), st.floats(0, 1), st.integers(0, 500)),
            st.floats(0, 1e6),
        ),
        max_size=60,
    ),
    st.integers(1, 8),
    st.integers(1, 256),
)
def test_it_is_always_within_bounds(
    steps: list[tuple[int, float, int, float, int, float]], pods: int, per_pod: int
) -> None:
    state, preemptions = Caps(float(per_pod)), 0
    for second, (waiting, kv, preempted, itl, inflight, tokens) in enumerate(steps):
        preemptions += preempted
        said = Sample(float(second), pods, waiting, kv, preemptions, itl, inflight, tokens)
        state = after(state, said, per_pod=per_pod)
        assert pods <= state.requests <= pods * per_pod
        assert state.most >= 1
        assert state.tokens >= 0
        assert state.saturation == saturation(said)


@pytest.mark.parametrize(
    ("before", "said", "cause"),
    [
        (Caps(30.0), sample(kv_used=0.9, inflight=30), Cause.MEMORY),
        (Caps(30.0, shrunk_at_s=9.0), sample(kv_used=0.9, inflight=30), None),  # one such step in two seconds
        (Caps(20.0, preemptions=3), sample(preemptions=4), Cause.ENGINE_PREEMPTED),
        (Caps(30.0), sample(waiting=12, inflight=30), Cause.ENGINE_QUEUE),
        (Caps(10.0), sample(waiting=12, inflight=30), None),
        (
            Caps(50.0, itl_s=0.2, itl_long_s=0.02, sampled_at_s=9.0),
            sample(inflight=50, itl_s=0.2, kv_used=0.8),
            Cause.SLOWER,
        ),
        (Caps(50.0), sample(inflight=25), Cause.USED),
        (Caps(50.0), sample(inflight=24), None),
        (Caps(60.0), sample(inflight=10), None),
        (Caps(90.0), sample(inflight=10), Cause.PODS),  # of which two pods were, and one is left
        (Caps(2.0), sample(inflight=0, pods=5), Cause.PODS),
    ],
)
def test_the_rule_that_moved_it_is_named_and_none_when_it_stayed(
    before: Caps, said: Sample, cause: Cause | None
) -> None:
    moved = after(before, said, per_pod=64)
    assert (moved.cause, moved.requests != before.requests) == (cause, cause is not None)


def test_a_cap_that_falls_in_silence_says_so() -> None:
    grown = Caps(60.0, sampled_at_s=100.0, cause=Cause.USED)
    assert [unseen(grown, at, pods=1, per_pod=64).cause for at in (109.0, 111.0)] == [None, Cause.UNSEEN]
