"""What a replica grants alone, by the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.tiers import Tier
from scheduler.fail_static import Credit, FailStatic, Share


def served(static: FailStatic, clock: ManualClock, grants: int, *, at_once: int = 0) -> Share:
    """A share that had so many grants in the last seconds, `at_once` of which still run."""
    share = static.share("caller")
    for n in range(grants):
        share.note_grant(clock.monotonic())
        clock.advance(0.05)
        if n >= at_once:
            share.note_release(clock.monotonic())
    return share


def granted(static: FailStatic, share: Share, tier: Tier, *, asks: int = 100, credit: Credit | None = None) -> int:
    """How many of `asks` requests are granted when each ends at once."""
    count = 0
    for _ in range(asks):
        if static.admits((share,), () if credit is None else (credit,), 10, tier):
            share.note_release(share.since)
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
    share = served(static, clock, 20)
    static.went_away()
    clock.advance(after_s)
    assert granted(static, share, tier) == expected


def test_in_flight_stays_within_the_share_of_what_ran_when_it_began() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 50, at_once=10)
    static.went_away()
    clock.advance(3)
    assert not static.admits((share,), (), 0, Tier.PRIORITY)
    for _ in range(4):
        share.note_release(clock.monotonic())
    assert [static.admits((share,), (), 0, Tier.PRIORITY) for _ in range(4)] == [True, True, False, False]


def test_in_flight_stays_within_the_mean_of_the_last_minute() -> None:
    """Four at once for 30 of the last 60 s, across the turn of a minute, are two."""
    clock = ManualClock()
    static = FailStatic(clock)
    clock.advance(45)
    share = static.share("caller")
    for _ in range(4):
        share.note_grant(clock.monotonic())
    clock.advance(30)
    for _ in range(4):
        share.note_release(clock.monotonic())
    clock.advance(30)
    assert share.last_minute(clock.monotonic()) == (4 * 0.25, (4 * 15 * 0.25 + 4 * 15) / 60, 0)
    static.went_away()
    assert [static.admits((share,), (), 0, Tier.STANDARD) for _ in range(2)] == [True, False]


def test_the_share_renews_each_minute_of_a_long_outage() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20)
    static.went_away()
    clock.advance(2)
    assert granted(static, share, Tier.STANDARD) == 10
    clock.advance(57)
    assert granted(static, share, Tier.STANDARD) == 0
    clock.advance(1)
    assert granted(static, share, Tier.STANDARD) == 10


def test_a_caller_not_served_in_the_last_minute_gets_nothing() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20)
    clock.advance(125)
    static.went_away()
    assert granted(static, share, Tier.PRIORITY) == 0
    assert granted(static, static.share("another"), Tier.PRIORITY) == 0


def test_one_full_share_refuses_and_takes_nothing_of_the_other() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    caller, deployment = served(static, clock, 20), static.share("another")
    static.went_away()
    assert not static.admits((caller, deployment), (), 0, Tier.PRIORITY)
    assert (caller.local, caller.inflight) == (0, 0)


def test_money_by_last_known_credit_divided_by_the_replicas() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share, credit = served(static, clock, 90), static.credit("tenant")
    static.went_away()
    assert granted(static, share, Tier.PRIORITY, credit=credit) == 0  # never heard
    credit.note(100, clock.monotonic())
    static.replicas = 4
    assert granted(static, share, Tier.PRIORITY, credit=credit) == 2


def test_tokens_by_what_was_had_in_the_last_minute() -> None:
    """20 requests of 100 tokens: after the first seconds 1,600 for priority, whatever the number of requests."""
    clock = ManualClock()
    static = FailStatic(clock)
    share = static.share("caller")
    for _ in range(20):
        share.note_grant(clock.monotonic(), 100)
        clock.advance(0.05)
        share.note_release(clock.monotonic())
    static.went_away()
    clock.advance(2)
    got = []
    for tokens in (900, 700, 1, 0):
        got.append(static.admits((share,), (), 0, Tier.PRIORITY, tokens))
        if got[-1]:
            share.note_release(clock.monotonic())
    assert got == [True, True, False, True]


def test_money_by_credit_and_by_the_nearest_budget() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share, credit, budget = served(static, clock, 90), static.credit("tenant"), static.credit(("spend",))
    static.went_away()
    credit.note(1000, clock.monotonic())
    budget.note(35, clock.monotonic())
    got = []
    for _ in range(4):
        got.append(static.admits((share,), (credit, budget), 10, Tier.PRIORITY))
        share.note_release(clock.monotonic())
    assert got == [True, True, True, False]
    assert (credit.used, budget.used) == (30, 30)


def test_what_is_idle_for_ten_minutes_is_forgotten() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    idle, running, credit = static.share("idle"), served(static, clock, 1, at_once=1), static.credit("tenant")
    clock.advance(599)
    static.forget_idle()
    assert static.share("idle") is idle
    clock.advance(2)
    static.forget_idle()
    assert static.share("idle") is not idle
    assert static.share("caller") is running
    assert static.credit("tenant") is not credit


@given(st.integers(0, 300), st.integers(0, 120), st.sampled_from(Tier))
def test_alone_never_more_than_the_last_minute_had(grants: int, seconds: int, tier: Tier) -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, grants)
    static.went_away()
    clock.advance(seconds)
    assert granted(static, share, tier, asks=400) <= grants


def test_who_comes_back_after_a_long_rest_keeps_its_share() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 1)
    clock.advance(601)
    static.forget_idle()
    for _ in range(10):  # its requests still hold the share of before
        share.note_grant(clock.monotonic())
        clock.advance(1.0)
        share.note_release(clock.monotonic())
    static.went_away()
    assert granted(static, share, Tier.PRIORITY) == 10
