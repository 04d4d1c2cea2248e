"""How many engines a deployment has: steps by hand, and bounds that hold whatever is seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knative.lifecycle import SECOND_US, Policy
from knative.scale import Bounds, Load, Scale, rescale

S = SECOND_US
POLICY = Policy()
NOW = 1_000 * S
ONE_TO_FOUR = Bounds(0, 4)


@pytest.mark.parametrize(
    ("before", "load", "after_s", "count"),
    [
        (Scale(), Load(0), 0, 1),  # at least one, which sleeps or not as lifecycle says
        (Scale(1), Load(1, 9, waiting=3), 99, 1),  # waiting is seen for the first time
        (Scale(1, short_us=NOW), Load(1, 9, waiting=3), 1.9, 1),
        (Scale(1, short_us=NOW), Load(1, 9, waiting=3), 2, 2),
        (Scale(2, short_us=NOW), Load(1, 9, waiting=3), 99, 2),  # one of them still loads
        (Scale(4, short_us=NOW), Load(4, 9, waiting=3), 99, 4),
        (Scale(1, short_us=NOW), Load(1, None), 99, 1),  # Valkey away: nobody knows
        # Each took 10: three hold 24 of 30 with a fifth to spare, so 16 fit in two and 17 do not.
        (Scale(3, each=10, roomy_us=NOW), Load(3, 16), 299, 3),
        (Scale(3, each=10, roomy_us=NOW), Load(3, 16), 300, 2),
        (Scale(3, each=10, roomy_us=NOW), Load(3, 17), 300, 3),
        (Scale(3, each=10, roomy_us=NOW), Load(3, 8), 300, 1),
        (Scale(3, each=0, roomy_us=NOW), Load(3, 1), 300, 3),  # nobody knows how many one takes
        (Scale(3, each=0, roomy_us=NOW), Load(3, 0), 300, 1),
    ],
)
def test_one_more_where_somebody_waits_and_fewer_where_fewer_do(
    before: Scale, load: Load, after_s: float, count: int
) -> None:
    assert rescale(before, load, ONE_TO_FOUR, POLICY, NOW + int(after_s * S)).count == count


def test_bounds_are_followed_at_once_and_what_one_takes_is_remembered() -> None:
    assert rescale(Scale(3, each=7), Load(3), Bounds(0, 2), POLICY, NOW) == Scale(2, each=7)
    assert rescale(Scale(1), Load(1), Bounds(3, 4), POLICY, NOW) == Scale(3)
    assert rescale(Scale(3), Load(3), Bounds(0, 0), POLICY, NOW) == Scale(0)
    assert rescale(Scale(2, short_us=NOW - 2 * S), Load(2, 21, waiting=1), ONE_TO_FOUR, POLICY, NOW).each == 10


loads = st.builds(Load, serving=st.integers(0, 9), inflight=st.none() | st.integers(0, 200), waiting=st.integers(0, 3))


@given(st.integers(0, 4), st.integers(0, 4), st.lists(st.tuples(loads, st.integers(0, 400)), max_size=40))
def test_the_count_stays_within_bounds_moves_up_by_one_and_never_twice_within_two_seconds(
    least: int, more: int, looks: list[tuple[Load, int]]
) -> None:
    bounds, scale, now_us, moved_us = Bounds(least, least + more), Scale(), NOW, 0
    scale = rescale(scale, Load(0), bounds, POLICY, now_us)
    for load, later_s in looks:
        now_us += later_s * S
        after = rescale(scale, load, bounds, POLICY, now_us)
        assert min(max(least, 1), bounds.most) <= after.count <= bounds.most
        assert after.count <= scale.count + 1
        if after.count != scale.count:
            assert now_us - moved_us >= POLICY.scale_up_us
            moved_us = now_us
        scale = after
