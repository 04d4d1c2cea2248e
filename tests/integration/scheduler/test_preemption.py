"""Who gives its place to whom, by the scripts themselves on a virtual clock."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.types import ServedModel
from core.tiers import Tier
from scheduler.caps import Caps
from scheduler.commands import Code
from scheduler.types import Entitlement
from tests.factories.scheduler import served_model
from tests.sim.scripts import Scripts

P, S, B = Tier.PRIORITY, Tier.STANDARD, Tier.BATCH


@pytest.fixture
def scripts(valkey: Path) -> Iterator[Scripts]:
    scripts = Scripts(valkey)
    scripts.set_time(0)
    yield scripts
    scripts.close()


def run(
    scripts: Scripts, model: ServedModel, tier: Tier, *names: str, every_s: float = 0.01, start_s: float = 0
) -> None:
    """Let requests in one after the other."""
    for n, name in enumerate(names):
        scripts.set_time(start_s + n * every_s)
        assert scripts.acquire(name, model, "t", tier)[0] == Code.GRANTED


def wait(scripts: Scripts, model: ServedModel, tier: Tier, name: str, wait_s: float, **more: object) -> None:
    assert scripts.acquire(name, model, "u", tier, wait_s=wait_s, **more)[0] == Code.QUEUED  # type: ignore[arg-type]


def told(scripts: Scripts) -> list[tuple[str, str]]:
    return list(scripts.messages())


def pressed(scripts: Scripts, model: ServedModel, at_s: float) -> list[tuple[str, str]]:
    scripts.set_time(at_s)
    scripts.press(model)
    return told(scripts)


def full_of_batch(scripts: Scripts) -> ServedModel:
    """Seven of batch and three of priority on ten places, the batch in the order of their numbers."""
    model = served_model(inflight_max=10)
    run(scripts, model, B, *(f"b{n}" for n in range(7)))
    run(scripts, model, P, "p0", "p1", "p2", start_s=0.5)
    return model


def test_priority_gets_the_place_of_the_newest_batch_after_half_its_patience(scripts: Scripts) -> None:
    model = full_of_batch(scripts)
    scripts.set_time(1)
    wait(scripts, model, P, "p", 2)
    assert pressed(scripts, model, 1.99) == []
    assert pressed(scripts, model, 2.01) == [("P2", "b6")]
    assert scripts.load(model)[0] == 10  # nothing is free before its replica has spoken
    assert scripts.yield_place("b6", 60) == 1
    assert told(scripts) == [("G", "p")]
    assert scripts.load(model)[:2] == (10, 1)


def test_standard_gets_a_place_of_batch_after_four_fifths_and_only_then(scripts: Scripts) -> None:
    model = served_model(inflight_max=10)
    run(scripts, model, B, *(f"b{n}" for n in range(7)))
    run(scripts, model, S, "s0", "s1")
    scripts.set_time(1)
    wait(scripts, model, S, "s", 10)
    assert pressed(scripts, model, 8.9) == []
    assert pressed(scripts, model, 9.1) == [("P1", "b6")]
    scripts.yield_place("b6", 60)
    assert told(scripts) == [("G", "s")]


def test_nobody_of_its_own_tier_or_above_is_asked(scripts: Scripts) -> None:
    model = served_model(inflight_max=4)
    run(scripts, model, P, "p0", "p1", "p2", "p3")
    wait(scripts, model, P, "p", 2)
    wait(scripts, model, S, "s", 2)
    assert pressed(scripts, model, 1.9) == []


def test_a_request_that_streams_is_asked_once_and_the_next_one_after_it(scripts: Scripts) -> None:
    model = full_of_batch(scripts)
    scripts.set_time(1)
    wait(scripts, model, P, "p", 100)
    assert pressed(scripts, model, 60) == [("P2", "b6")]
    assert scripts.yield_place("b6", -1) == 0
    assert told(scripts) == [("P2", "b5")]  # at once: what was refused does not count
    scripts.yield_place("b5", -1)
    for n in (4, 3, 2, 1, 0):
        assert told(scripts) == [("P2", f"b{n}")]
        scripts.yield_place(f"b{n}", -1)
    assert told(scripts) == []
    assert pressed(scripts, model, 70) == []


def test_a_replica_that_does_not_answer_is_not_waited_for(scripts: Scripts) -> None:
    model = full_of_batch(scripts)
    scripts.set_time(1)
    wait(scripts, model, P, "p", 100)
    assert pressed(scripts, model, 60) == [("P2", "b6")]
    assert pressed(scripts, model, 61.9) == []  # the place counts as free until then
    assert pressed(scripts, model, 62.1) == [("P2", "b5")]
    assert scripts.yield_place("b6", 50) == 1  # late, and as good
    assert told(scripts) == [("G", "p")]


def test_a_victim_keeps_its_age_and_goes_before_those_that_came_later(scripts: Scripts) -> None:
    model = full_of_batch(scripts)
    scripts.set_time(1)
    assert scripts.acquire("b7", model, "t", B, wait_s=120)[0] == Code.QUEUED
    wait(scripts, model, P, "p", 2)
    assert pressed(scripts, model, 2.5) == [("P2", "b6")]
    scripts.yield_place("b6", 117.5)  # it came at 0 with a patience of 120 s
    assert told(scripts) == [("G", "p")]
    for name in ("p0", "p1", "p2", "p"):
        scripts.release(name, (0, 0))
    assert told(scripts) == [("G", "b6")]


def test_nobody_is_preempted_more_than_twice(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    run(scripts, model, B, "b")
    for turn in range(2):
        at_s = 10.0 * (turn + 1)
        scripts.set_time(at_s)
        wait(scripts, model, P, f"p{turn}", 2)
        assert pressed(scripts, model, at_s + 1.5) == [("P2", "b")]
        scripts.yield_place("b", 100)
        assert told(scripts) == [("G", f"p{turn}")]
        scripts.release(f"p{turn}", (10, 10))
        assert told(scripts) == [("G", "b")]
    scripts.set_time(40)
    wait(scripts, model, P, "p2", 2)
    assert pressed(scripts, model, 41.5) == []


def test_a_place_given_for_a_floor_is_not_taken_back(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    run(scripts, model, P, "p0")
    scripts.set_time(1)
    assert scripts.acquire("b", model, "t", B, wait_s=100, tokens=(4, 3))[0] == Code.QUEUED
    wait(scripts, model, P, "p1", 2)
    wait(scripts, model, P, "p2", 2)
    scripts.release("p0", (100, 100))
    assert told(scripts) == [("G", "p1")]
    scripts.release("p1", (100, 100))
    assert told(scripts) == [("G", "b")]  # its twentieth, before p2
    assert pressed(scripts, model, 2.5) == []


def test_what_is_asked_for_is_enough_for_the_head_or_nothing(scripts: Scripts) -> None:
    """One that needs the tokens of two victims gets them only where two a second may be asked."""
    model, few = served_model(), served_model()
    for which, count in ((model, 40), (few, 10)):
        scripts.set_caps(which, Caps(requests=1000.0, tokens=200.0 * count / 0.7 + 1))
        run(scripts, which, B, *(f"{count}b{n}" for n in range(count)))
        run(scripts, which, P, f"{count}p", start_s=0.5)
        scripts.set_caps(which, Caps(requests=1000.0, tokens=200.0 * (count + 1)))
        scripts.set_time(1)
        wait(scripts, which, P, f"{count}w", 2, tokens=(200, 200))
    assert pressed(scripts, few, 2.5) == []
    assert pressed(scripts, model, 2.5) == [("P2", "40b39"), ("P2", "40b38")]
    scripts.yield_place("40b39", 60)
    assert told(scripts) == []
    scripts.yield_place("40b38", 60)
    assert told(scripts) == [("G", "40w")]


def test_standard_gives_its_place_only_in_an_emergency_and_while_it_is_new(scripts: Scripts) -> None:
    """An emergency: engines a fifth more than full for five seconds."""
    model = served_model(inflight_max=1)

    def asked(at_s: float, waits_s: float) -> list[tuple[str, str]]:
        """Grant standard out of the queue; what it is told once priority has waited long."""
        name = f"{at_s}"
        scripts.set_time(at_s)
        scripts.acquire("p" + name, model, "t", P)
        wait(scripts, model, S, "s" + name, 100)
        scripts.release("p" + name, (0, 0))
        assert told(scripts) == [("G", "s" + name)]
        wait(scripts, model, P, "w" + name, waits_s)
        messages = pressed(scripts, model, at_s + waits_s * 0.6)
        scripts.release("w" + name, (0, 0))
        scripts.release("s" + name, (0, 0))
        return messages

    assert asked(10, 2) == []
    scripts.set_caps(model, Caps(requests=1.0, saturation=1.2))
    assert asked(12, 2) == []
    scripts.set_time(17)
    scripts.set_caps(model, Caps(requests=1.0, saturation=1.3))
    assert asked(17, 4) == []  # it is 2.4 s old by then
    assert asked(20, 2) == [("P2", "s20")]
    scripts.set_caps(model, Caps(requests=1.0, saturation=1.1))
    assert asked(30, 2) == []


def test_a_grant_that_was_not_claimed_is_taken_back_without_asking(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    run(scripts, model, P, "p0")
    assert scripts.acquire("b", model, "t", B, wait_s=100)[0] == Code.QUEUED
    scripts.release("p0", (0, 0))  # its replica has not read the message yet
    scripts.set_time(0.1)
    wait(scripts, model, P, "p", 1)
    scripts.set_time(0.7)
    scripts.press(model)
    assert told(scripts) == [("G", "b"), ("G", "p")]
    assert scripts.load(model)[:2] == (1, 1)
    scripts.release("p", (0, 0))
    assert told(scripts) == [("G", "b")]


def test_what_is_guaranteed_to_a_tenant_is_not_taken(scripts: Scripts) -> None:
    """Its batch within the guarantee stays; what it has above that is as any other's."""
    model = served_model(inflight_max=4)
    entitled = (Entitlement("t", 2, 2, 4),)
    for name, tenant, tier in (("b0", "t", B), ("b1", "t", B), ("b2", "t", B), ("p0", "u", P)):
        assert scripts.acquire(name, model, tenant, tier, entitlements=entitled)[0] == Code.GRANTED
    wait(scripts, model, P, "p1", 2, entitlements=entitled)
    assert pressed(scripts, model, 1.5) == [("P2", "b2")]
    scripts.yield_place("b2", 100)
    assert told(scripts) == [("G", "p1")]
    scripts.set_time(3)
    wait(scripts, model, P, "p2", 2, entitlements=entitled)
    assert pressed(scripts, model, 4.5) == []


LENT = (Entitlement("u", 0, 2), Entitlement("t", 0, 3))


def lent_out(scripts: Scripts) -> ServedModel:
    """Four places of batch, all with a tenant that deserves three; another deserves two and comes at 1 s."""
    model = served_model(inflight_max=6)
    for n in range(4):
        scripts.set_time(n * 0.01)
        assert scripts.acquire(f"t{n}", model, "t", B, entitlements=LENT)[0] == Code.GRANTED
    scripts.set_time(1)
    for n in range(2):
        wait(scripts, model, B, f"u{n}", 100, entitlements=LENT)
    return model


def test_batch_below_its_share_takes_back_what_was_lent_and_no_more(scripts: Scripts) -> None:
    """After 5 s, one place for one; who gave it has its share, and its own batch waits."""
    model = lent_out(scripts)
    assert pressed(scripts, model, 5.9) == []
    assert pressed(scripts, model, 6.1) == [("P0", "t3")]
    assert pressed(scripts, model, 7.5) == []  # with that place given it has what it deserves
    assert scripts.yield_place("t3", 100) == 1
    assert told(scripts) == [("G", "u0")]
    assert pressed(scripts, model, 20) == []
    scripts.release("t2", (100, 100))
    assert told(scripts)[0][1] in {"t3", "u1"}  # both are below what they deserve


def test_batch_takes_nothing_back_while_a_higher_tier_waits_or_would_get_it(scripts: Scripts) -> None:
    model = lent_out(scripts)
    for n in range(2):
        assert scripts.acquire(f"p{n}", model, "v", P, entitlements=LENT)[0] == Code.GRANTED
    wait(scripts, model, P, "p", 100, entitlements=LENT)
    assert pressed(scripts, model, 20) == []
    scripts.release("p", (0, 0))
    assert pressed(scripts, model, 21) == []  # priority has two of the six: one place given would not be batch's


def test_a_higher_tier_takes_the_place_of_who_is_above_its_share_before_the_newest(scripts: Scripts) -> None:
    """Also when sixty others were granted since, and hold what they deserve."""
    model = served_model(inflight_max=100)
    entitled = (Entitlement("u", 0, 60),)
    for n in range(70):
        tenant = "t" if n < 10 else "u"
        scripts.set_time(n * 0.01)
        assert scripts.acquire(f"{tenant}{n}", model, tenant, B, entitlements=entitled)[0] == Code.GRANTED
    for n in range(30):
        assert scripts.acquire(f"p{n}", model, "v", P, entitlements=entitled)[0] == Code.GRANTED
    scripts.set_time(10)
    wait(scripts, model, P, "w", 2, entitlements=entitled)
    assert [name for _, name in pressed(scripts, model, 11.5)] == ["t9"]


def test_a_place_that_was_asked_for_counts_as_free_with_its_tokens(scripts: Scripts) -> None:
    """Three may be asked for in a second of sixty that run; one is enough, however often somebody presses."""
    model = served_model()
    scripts.set_caps(model, Caps(1000.0, tokens=12_000.0))
    run(scripts, model, B, *(f"b{n}" for n in range(42)))  # of 200 tokens each: 70 % of the memory
    run(scripts, model, P, *(f"p{n}" for n in range(18)), start_s=0.5)
    scripts.set_time(1)
    wait(scripts, model, P, "w", 10)
    assert pressed(scripts, model, 6.5) == [("P2", "b41")]
    assert pressed(scripts, model, 6.6) == []
    assert pressed(scripts, model, 7.7) == []


def test_a_place_that_was_asked_for_is_no_more_among_those_its_tenant_may_miss(scripts: Scripts) -> None:
    """Two of three are guaranteed to it: with one asked for it has no other to give, whoever comes and needs more."""
    model, entitled = served_model(inflight_max=100), (Entitlement("t", 2, 2),)
    scripts.set_caps(model, Caps(100.0, tokens=4_000.0))
    for n in range(20):
        tenant, tier = ("t", B) if n < 3 else ("v", P)
        scripts.set_time(n * 0.01)
        assert scripts.acquire(f"{tenant}{n}", model, tenant, tier, entitlements=entitled)[0] == Code.GRANTED
    scripts.set_time(1)
    wait(scripts, model, P, "w", 10, entitlements=entitled)
    assert pressed(scripts, model, 7) == [("P2", "t2")]
    scripts.set_time(7.1)
    first = scripts.acquire("a", model, "u", P, wait_s=2.4, tokens=(200, 200), entitlements=entitled)
    assert first[0] == Code.QUEUED
    assert pressed(scripts, model, 8.35) == []
    scripts.yield_place("t2", 60)
    scripts.release("v19", (100, 100))
    assert [name for kind, name in told(scripts) if kind == "G"] == ["a"]  # its time ends first
