"""What a replica grants alone, by the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.tiers import Tier
from scheduler.fail_static import Credit, FailStatic, Share


def served(static: FailStatic, grants: int, *, at_once: int = 1) -> Share:
    """A share that had so many grants this minute, at most `at_once` of them in flight together, none now."""
    share = Share(static.minute())
    for n in range(grants):
        share.note_grant(static.minute())
        if share.inflight > at_once or n == grants - 1:
            share.inflight = at_once - 1 if n < grants - 1 else 0
    share.peak = at_once
    return share


def granted(static: FailStatic, share: Share, tier: Tier, *, asks: int = 100, credit: Credit | None = None) -> int:
    """How many of `asks` requests are granted when each ends at once."""
    count = 0
    for _ in range(asks):
        if static.admits((share,), credit, 10, tier):
            share.inflight -= 1
            count += 1
    return count


@pytest.mark.parametrize(
    ("after_s", "tier", "expected"),
    [
        (0.0, Tier.PRIORITY, 20),
        (1.9, Tier.BATCH, 20),
        (2.0, Tier.PRIORITY, 16),
        (2.0, Tier.STANDARD, 10),
        (2.0, Tier.BATCH, 0),
    ],
)
def test_share_by_time_and_tier(after_s: float, tier: Tier, expected: int) -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, 20)
    static.went_away()
    clock.advance(after_s)
    assert granted(static, share, tier) == expected


def test_in_flight_stays_within_the_share_of_the_peak() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, 50, at_once=10)
    static.went_away()
    clock.advance(3)
    assert [static.admits((share,), None, 0, Tier.PRIORITY) for _ in range(10)] == [True] * 8 + [False] * 2


def test_the_share_renews_each_minute_of_a_long_outage() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, 20)
    static.went_away()
    clock.advance(2)
    assert granted(static, share, Tier.STANDARD) == 10
    clock.advance(59)
    assert granted(static, share, Tier.STANDARD) == 0
    clock.advance(1)
    assert granted(static, share, Tier.STANDARD) == 10


def test_a_caller_not_served_in_the_last_minute_gets_nothing() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, 20)
    clock.advance(125)
    static.went_away()
    assert granted(static, share, Tier.PRIORITY) == 0
    assert granted(static, Share(static.minute()), Tier.PRIORITY) == 0


def test_one_full_share_refuses_and_takes_nothing_of_the_other() -> None:
    static = FailStatic(ManualClock())
    caller, deployment = served(static, 20), Share(static.minute())
    static.went_away()
    assert not static.admits((caller, deployment), None, 0, Tier.PRIORITY)
    assert (caller.local, caller.inflight) == (0, 0)


def test_money_by_last_known_credit_divided_by_the_replicas() -> None:
    static = FailStatic(ManualClock())
    share, credit = served(static, 90), Credit(static.minute())
    static.went_away()
    assert granted(static, share, Tier.PRIORITY, credit=credit) == 0  # never heard
    credit.note(100, static.minute())
    static.replicas = 4
    assert granted(static, share, Tier.PRIORITY, credit=credit) == 2


@given(st.integers(0, 300), st.integers(0, 120), st.sampled_from(Tier))
def test_alone_never_more_than_the_last_minute_had(grants: int, seconds: int, tier: Tier) -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, grants)
    static.went_away()
    clock.advance(seconds)
    assert granted(static, share, tier, asks=400) <= grants
