"""What a replica grants alone, by the clock."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import ManualClock
from core.tiers import Tier
from scheduler.fail_static import FailStatic, Name, Share

DEPLOYMENT, OTHER_DEPLOYMENT = UUID(int=1), UUID(int=2)
CALLER: Name = (DEPLOYMENT, "", ("key:k:rpm",), ())
PAYER: Name = (DEPLOYMENT, "tenant", ("key:p:rpm", "key:p:spend:t"), ("key:p:spend:t",))


def named(text: str, deployment: UUID = DEPLOYMENT) -> Name:
    return (deployment, "", (text,), ())


def reply(credit: int = -1, budget: int = -1) -> list[int]:
    """What the script says of a grant: nano left in the credit and in the nearest budget."""
    return [1, 0, credit, 0, budget]


def served(
    static: FailStatic, clock: ManualClock, grants: int, *, at_once: int = 0, name: Name = CALLER, tokens: int = 0
) -> Share:
    """A share that had so many grants in the last seconds, `at_once` of which still run."""
    share = static.share(name)
    for n in range(grants):
        share.note_grant(clock.monotonic(), tokens, reply())
        clock.advance(0.05)
        if n >= at_once:
            share.note_release(clock.monotonic())
    return share


def ended(static: FailStatic, clock: ManualClock, share: Share, correction: int | None = 0) -> None:
    share.note_release(clock.monotonic())
    static.note_release(share, correction)


def granted(static: FailStatic, clock: ManualClock, share: Share, tier: Tier, *, asks: int = 100) -> int:
    """How many of `asks` requests of 10 nano are granted when each ends at once and costs what was held."""
    count = 0
    for _ in range(asks):
        if static.admits(share, 10, tier):
            ended(static, clock, share)
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
        (59.9, Tier.PRIORITY, 16),
        (60.0, Tier.PRIORITY, 10),
        (60.0, Tier.STANDARD, 4),
        (600.0, Tier.STANDARD, 4),
        (600.0, Tier.BATCH, 0),
    ],
)
def test_share_by_time_and_tier(after_s: float, tier: Tier, expected: int) -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20)
    static.went_away()
    clock.advance(after_s)
    assert granted(static, clock, share, tier) == expected


def test_in_flight_stays_within_the_share_of_what_ran_when_it_began() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 50, at_once=10)
    static.went_away()
    clock.advance(3)
    assert not static.admits(share, 0, Tier.PRIORITY)
    for _ in range(4):
        ended(static, clock, share, None)
    assert [static.admits(share, 0, Tier.PRIORITY) for _ in range(4)] == [True, True, False, False]


def test_in_flight_stays_within_the_mean_of_the_last_minute() -> None:
    """Four at once for 30 of the last 60 s, across the turn of a minute, are two."""
    clock = ManualClock()
    static = FailStatic(clock)
    clock.advance(45)
    share = static.share(CALLER)
    for _ in range(4):
        share.note_grant(clock.monotonic(), 0, reply())
    clock.advance(30)
    for _ in range(4):
        share.note_release(clock.monotonic())
    clock.advance(30)
    assert share.last_minute(clock.monotonic()) == (4 * 0.25, (4 * 15 * 0.25 + 4 * 15) / 60, 0)
    static.went_away()
    assert [static.admits(share, 0, Tier.STANDARD) for _ in range(2)] == [True, False]


def test_the_share_renews_each_minute_of_a_long_outage() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20)
    static.went_away()
    clock.advance(2)
    assert granted(static, clock, share, Tier.STANDARD) == 10
    clock.advance(57)
    assert granted(static, clock, share, Tier.STANDARD) == 0
    for _ in range(3):
        clock.advance(60)
        assert granted(static, clock, share, Tier.STANDARD) == 4


def test_a_caller_not_served_in_the_last_minute_gets_nothing() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20)
    clock.advance(125)
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 0
    assert granted(static, clock, static.share(named("another")), Tier.PRIORITY) == 0


def test_a_deployment_has_what_all_its_callers_had() -> None:
    """Two callers had 10 grants and 20, a third none: 30 in all, of which 24 are left for priority after 2 s."""
    clock = ManualClock()
    static = FailStatic(clock)
    one, two = (served(static, clock, n, name=named(f"key:{n}")) for n in (10, 20))
    stranger, elsewhere = static.share(named("new")), served(static, clock, 5, name=named("k", OTHER_DEPLOYMENT))
    static.went_away()
    clock.advance(2)
    assert [granted(static, clock, share, Tier.PRIORITY) for share in (one, two, stranger, elsewhere)] == [8, 16, 0, 4]


def test_a_deployment_does_not_run_more_than_ran_when_it_began() -> None:
    """Of two callers one had 6 in flight for a moment, the other has 4: shares of 6 and 4 parts, together of 10."""
    clock = ManualClock()
    static = FailStatic(clock)
    one, two = (served(static, clock, 50, at_once=n, name=named(f"key:{n}")) for n in (6, 4))
    static.went_away()
    clock.advance(2)  # 5 of 6, 4 of 4 and 8 of 10
    for _ in range(6):
        ended(static, clock, one, None)
    for _ in range(4):
        ended(static, clock, two, None)
    assert sum(static.admits(one, 0, Tier.PRIORITY) for _ in range(9)) == 5
    assert sum(static.admits(two, 0, Tier.PRIORITY) for _ in range(9)) == 3
    ended(static, clock, one)
    assert static.admits(two, 0, Tier.PRIORITY)


def test_a_full_deployment_refuses_and_takes_nothing_of_the_caller() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    caller = static.share(CALLER)
    static.went_away()
    served(static, clock, 20)  # since: the deployment had nothing when it began
    caller.freeze(clock.monotonic())
    assert not static.admits(caller, 0, Tier.PRIORITY)
    assert (caller.local, caller.inflight) == (0, 0)


def test_money_by_last_known_credit_divided_by_the_replicas() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 90, name=PAYER)
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 0  # never heard
    static.came_back()
    clock.advance(1)
    share.note_grant(clock.monotonic(), 0, reply(100, 1000))
    ended(static, clock, share)
    static.replicas = 4
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 2


def test_tokens_by_what_was_had_in_the_last_minute() -> None:
    """20 requests of 100 tokens: after the first seconds 1,600 for priority, whatever the number of requests."""
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 20, tokens=100)
    static.went_away()
    clock.advance(2)
    got = []
    for tokens in (900, 700, 1, 0):
        got.append(static.admits(share, 0, Tier.PRIORITY, tokens))
        if got[-1]:
            ended(static, clock, share)
    assert got == [True, True, False, True]


def test_money_by_credit_and_by_the_nearest_budget() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 90, name=PAYER)
    share.note_grant(clock.monotonic(), 0, reply(1000, 35))
    share.note_release(clock.monotonic())
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 3


def test_what_costs_less_than_its_hold_leaves_room_and_what_ran_before_does_not() -> None:
    """A credit of 30 and holds of 10: three run, two of which cost 4 in the end."""
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 90, at_once=9, name=PAYER)
    share.note_grant(clock.monotonic(), 0, reply(30, 1000))
    ended(static, clock, share, None)
    static.went_away()
    for _ in range(9):
        ended(static, clock, share, None)
    assert [static.admits(share, 10, Tier.PRIORITY) for _ in range(4)] == [True, True, True, False]
    ended(static, clock, share, 4 - 10)
    assert not static.admits(share, 10, Tier.PRIORITY)
    ended(static, clock, share, 4 - 10)
    assert static.admits(share, 10, Tier.PRIORITY)


def test_what_was_granted_in_one_outage_counts_in_the_next_until_more_is_heard() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 90, name=PAYER)
    share.note_grant(clock.monotonic(), 0, reply(50, 1000))
    share.note_release(clock.monotonic())
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY, asks=3) == 3
    static.came_back()
    static.forget_idle()
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 2
    static.came_back()
    clock.advance(1)
    share.note_grant(clock.monotonic(), 0, reply(60, 1000))
    share.note_release(clock.monotonic())
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 6


def test_the_newest_figure_of_a_tenant_counts_whichever_caller_heard_it() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    other: Name = (DEPLOYMENT, "tenant", ("key:other:rpm",), ())
    shares = [served(static, clock, 40, name=name) for name in (other, PAYER)]
    for share, left in ((shares[1], 100), (shares[0], 20)):
        clock.advance(1)
        share.note_grant(clock.monotonic(), 0, reply(left, 1000))
        share.note_release(clock.monotonic())
    static.went_away()
    assert [granted(static, clock, share, Tier.PRIORITY, asks=1) for share in (*shares, *shares)] == [1, 1, 0, 0]


def test_what_is_idle_for_ten_minutes_is_forgotten() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    clock.advance(59)
    static.share(named("idle")).before = 7
    served(static, clock, 1, at_once=1)
    clock.advance(539)
    static.forget_idle()
    assert static.share(named("idle")).before == 7
    clock.advance(61)
    static.forget_idle()
    assert static.share(named("idle")).before == 0
    assert static.share(CALLER).inflight == 1


@given(st.integers(0, 300), st.integers(0, 120), st.sampled_from(Tier))
def test_alone_never_more_than_the_last_minute_had(grants: int, seconds: int, tier: Tier) -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, grants)
    static.went_away()
    clock.advance(seconds)
    assert granted(static, clock, share, tier, asks=400) <= grants


def test_who_comes_back_after_a_long_rest_keeps_its_share() -> None:
    clock = ManualClock()
    static = FailStatic(clock)
    share = served(static, clock, 1)
    clock.advance(601)
    static.forget_idle()
    for _ in range(10):  # its requests still hold the share of before
        share.note_grant(clock.monotonic(), 0, reply())
        clock.advance(1.0)
        share.note_release(clock.monotonic())
    static.went_away()
    assert granted(static, clock, share, Tier.PRIORITY) == 10


def test_the_shares_of_a_former_life_rule_for_priority_alone() -> None:
    before, clock = FailStatic(ManualClock()), ManualClock()
    name: Name = (UUID(int=9), "t", (), ())
    for _ in range(10):
        before.share(name).note_grant(0.0, 100, [1, 0, 1000, 0, -1])
    before.replicas = 2
    figures = before.export()
    assert figures is not None
    after = FailStatic(clock)
    after.went_away()
    after.restore(figures)
    share = after.share(name)
    assert not after.admits(share, 1, Tier.STANDARD)
    assert not after.admits(share, 1, Tier.BATCH)
    assert not after.admits(share, 501, Tier.PRIORITY)  # half of the credit last heard of: there were two replicas
    assert sum(after.admits(share, 1, Tier.PRIORITY, 1) for _ in range(20)) == 8
    after.came_back()
    assert after.export() is not None
