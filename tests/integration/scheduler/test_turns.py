"""Whose turn it is, by the scripts themselves on a virtual clock: tier, then tenant, then deadline."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.types import ServedModel
from core.tiers import Tier
from scheduler.caps import Caps
from scheduler.commands import Busy, Code
from tests.factories.scheduler import served_model
from tests.sim.scripts import Scripts

P, S, B = Tier.PRIORITY, Tier.STANDARD, Tier.BATCH


@pytest.fixture
def scripts(valkey: Path) -> Iterator[Scripts]:
    scripts = Scripts(valkey)
    scripts.set_time(0)
    yield scripts
    scripts.close()


def grants(scripts: Scripts) -> list[str]:
    return [request for kind, request in scripts.messages() if kind == "G"]


def serve(scripts: Scripts, running: str, *, used: tuple[int, int] = (100, 100)) -> list[str]:
    """End a request; returns those that get its place."""
    scripts.release(running, used)
    return grants(scripts)


def full(scripts: Scripts, model: ServedModel, places: int = 1) -> list[str]:
    names = [f"full{n}" for n in range(places)]
    for name in names:
        assert scripts.acquire(name, model, "somebody", P)[0] == Code.GRANTED
    return names


def test_the_highest_tier_goes_first_whoever_came_first(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    full(scripts, model)
    for name, tier in (("b", B), ("s", S), ("p", P)):
        assert scripts.acquire(name, model, "t", tier)[0] == Code.QUEUED
    assert serve(scripts, "full0") == ["p"]
    assert serve(scripts, "p") == ["s"]
    assert serve(scripts, "s") == ["b"]


def test_batch_fills_seven_tenths_standard_nine_and_priority_all(scripts: Scripts) -> None:
    model = served_model(inflight_max=10)

    def granted(tier: Tier) -> int:
        asked = (scripts.acquire(f"{tier.label}{n}", model, "t", tier, wait_s=0)[0] for n in range(10))
        return sum(code == Code.GRANTED for code in asked)

    assert [granted(tier) for tier in (B, S, P)] == [7, 2, 1]


def test_of_two_seats_one_is_kept_for_priority(scripts: Scripts) -> None:
    model = served_model(inflight_max=2)
    assert scripts.acquire("b1", model, "t", B)[0] == Code.GRANTED
    assert scripts.acquire("b2", model, "t", B)[0] == Code.QUEUED
    assert scripts.acquire("s1", model, "t", S)[0] == Code.QUEUED
    assert scripts.acquire("p1", model, "t", P)[0] == Code.GRANTED
    assert scripts.acquire("p2", model, "t", P)[0] == Code.QUEUED


def test_who_waits_in_a_lower_tier_lets_a_higher_one_pass(scripts: Scripts) -> None:
    model = served_model(inflight_max=10)
    running = [f"b{n}" for n in range(7)]
    assert {scripts.acquire(name, model, "t", B)[0] for name in running} == {Code.GRANTED}
    assert scripts.acquire("b7", model, "t", B)[0] == Code.QUEUED
    assert scripts.acquire("s", model, "t", S)[0] == Code.GRANTED


def test_a_tier_that_waits_gets_its_floor(scripts: Scripts) -> None:
    """Priority fills everything for a minute; batch still gets 5 % and standard 20 % of the tokens."""
    model, dice = served_model(inflight_max=10, waiting_max=10_000), random.Random(1)
    number, running, cost = itertools.count(), set(full(scripts, model, 10)), Counter[Tier]()
    tiers: dict[str, tuple[Tier, tuple[int, int]]] = {}

    def join(tier: Tier) -> None:
        name, tokens = f"{tier.label}{next(number)}", (dice.randint(10, 2000), dice.randint(10, 500))
        tiers[name] = tier, tokens
        scripts.acquire(name, model, "t", tier, tokens=tokens)

    for tier in (P, S, B):
        for _ in range(30):
            join(tier)
    for step in range(1200):
        scripts.set_time(step * 0.05)
        ended = dice.choice(sorted(running))
        running.remove(ended)
        for name in serve(scripts, ended, used=tiers[ended][1] if ended in tiers else (100, 100)):
            running.add(name)
            tier, (prompt, output) = tiers[name]
            cost[tier] += prompt + 2 * output
            join(tier)
    share = {tier: cost[tier] / cost.total() for tier in (P, S, B)}
    assert 0.05 <= share[B] <= 0.07
    assert 0.20 <= share[S] <= 0.22


@pytest.mark.parametrize(("saturation", "passing", "at_once"), [(0.5, P, 1), (0.5, S, 5), (0.1, P, 5)])
def test_beside_priority_on_a_used_engine_batch_is_granted_one_after_the_other(
    scripts: Scripts, saturation: float, passing: Tier, at_once: int
) -> None:
    """Many places come free in one moment: their prompts would fill the engine's steps, for which priority waits."""
    model = served_model(inflight_max=20)
    running = full(scripts, model, 18)
    scripts.set_caps(model, Caps(requests=20, saturation=saturation))
    for n in range(30):
        assert scripts.acquire(f"b{n}", model, "t", B)[0] == Code.QUEUED
    for second in range(1, 61):  # one ends and one comes each second; batch gets its floor
        scripts.set_time(second)
        running += serve(scripts, running.pop(0))
        if scripts.acquire(f"p{second}", model, "t", passing)[0] == Code.GRANTED:
            running.append(f"p{second}")
    grants(scripts)

    def end_five() -> int:
        while scripts.load(model)[0] > 14:
            scripts.release(running.pop(0), (100, 100))
        grants(scripts)
        return sum(len(serve(scripts, running.pop(0))) for _ in range(5))

    scripts.set_time(61)
    assert end_five() == at_once
    scripts.set_time(61.4)
    scripts.tick()
    assert len(grants(scripts)) == 0
    scripts.set_time(61.6)
    scripts.tick()
    assert len(grants(scripts)) == (1 if at_once == 1 else 0)


@pytest.mark.parametrize("weights", [(1, 1), (1, 2), (1, 5)])
def test_tenants_that_wait_share_by_weight(scripts: Scripts, weights: tuple[int, int]) -> None:
    """Of unlike sizes, told wrong at the door: within 5 % of their shares, in tokens as used."""
    model, dice = served_model(inflight_max=8, waiting_max=10_000), random.Random(2)
    number, running, used = itertools.count(), {}, Counter[str]()
    for name in full(scripts, model, 8):
        running[name] = ("somebody", (100, 100))
    sizes: dict[str, tuple[str, tuple[int, int]]] = {}

    def join(tenant: str) -> None:
        prompt, output = (dice.randint(10, 400), dice.randint(10, 100))
        if tenant == "a":  # long prompts, short answers
            prompt, output = prompt * 5, output // 5
        name = f"{tenant}{next(number)}"
        sizes[name] = tenant, (prompt, output)
        estimate = (prompt * 2, 512)
        scripts.acquire(name, model, tenant, S, weight=weights[tenant == "b"], tokens=estimate)

    for tenant in "ab":
        for _ in range(40):
            join(tenant)
    for step in range(2500):
        scripts.set_time(step * 0.02)
        ended = dice.choice(sorted(running))
        tenant, size = running.pop(ended)
        used[tenant] += size[0] + 2 * size[1]
        for name in serve(scripts, ended, used=size):
            running[name] = sizes[name]
            join(sizes[name][0])
    ratio = used["b"] / used["a"] * weights[0] / weights[1]
    assert 0.95 <= ratio <= 1.05


def test_nobody_saves_up_turns_by_being_idle(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    running = full(scripts, model)[0]
    for n in range(20):
        scripts.acquire(f"a{n}", model, "a", S)
    for _ in range(10):
        running = serve(scripts, running)[0]
    for n in range(10):
        scripts.acquire(f"b{n}", model, "b", S)
    order = []
    for _ in range(12):
        running = serve(scripts, running)[0]
        order.append(running[0])
    assert "aaa" not in "".join(order)
    assert "bbb" not in "".join(order)


def test_within_a_tenant_the_earliest_deadline_goes_first(scripts: Scripts) -> None:
    model = served_model(inflight_max=1)
    full(scripts, model)
    for name, wait_s in (("later", 30.0), ("soon", 5.0), ("last", 60.0)):
        scripts.acquire(name, model, "t", S, wait_s=wait_s)
    assert serve(scripts, "full0") == ["soon"]
    assert serve(scripts, "soon") == ["later"]


def test_who_would_come_too_late_is_refused_at_the_door(scripts: Scripts) -> None:
    """One place, a second for each of 300 tokens of cost: behind ten of them somebody waits ten seconds."""
    model = served_model(inflight_max=1)
    running = full(scripts, model)[0]
    for n in range(30):
        scripts.acquire(f"a{n}", model, "a", S)
    for second in range(1, 21):
        scripts.set_time(second)
        running = serve(scripts, running)[0]
    code, wait_s, why, *_ = scripts.acquire("late", model, "a", S, wait_s=5)
    assert (code, why) == (Code.BUSY, Busy.TOO_LATE)
    assert 9 <= wait_s <= 12
    assert scripts.acquire("patient", model, "a", S, wait_s=20)[0] == Code.QUEUED
    # another tenant's turn comes after one of theirs, a higher tier's at once
    assert scripts.acquire("other", model, "b", S, wait_s=5)[0] == Code.QUEUED
    assert scripts.acquire("higher", model, "a", P, wait_s=5)[0] == Code.QUEUED


def test_a_full_queue_makes_place_for_a_higher_tier_and_for_a_smaller_tenant(scripts: Scripts) -> None:
    model = served_model(inflight_max=1, waiting_max=4)
    full(scripts, model)
    for name, tier in (("b1", B), ("s1", S), ("s2", S), ("s3", S)):
        assert scripts.acquire(name, model, "a", tier)[0] == Code.QUEUED
    assert scripts.acquire("p1", model, "a", P)[0] == Code.QUEUED
    assert list(scripts.messages()) == [("E", "b1")]
    assert scripts.acquire("b2", model, "c", B)[:1] == [Code.BUSY]
    assert scripts.acquire("s4", model, "a", S)[:1] == [Code.BUSY]
    assert scripts.acquire("s5", model, "c", S)[0] == Code.QUEUED
    [(kind, gone)] = scripts.messages()
    assert (kind, gone[0]) == ("E", "s")
    assert scripts.load(model)[:2] == (1, 4)


def test_tokens_are_a_cap_of_their_own_and_one_request_always_runs(scripts: Scripts) -> None:
    model = served_model(inflight_max=10)
    scripts.set_caps(model, Caps(requests=100, tokens=1000))
    assert scripts.acquire("huge", model, "t", P, tokens=(5000, 100))[0] == Code.GRANTED
    assert scripts.acquire("next", model, "t", P, tokens=(10, 10))[0] == Code.QUEUED
    assert serve(scripts, "huge") == ["next"]
    assert scripts.acquire("other", model, "t", P, tokens=(500, 480))[0] == Code.GRANTED
    assert scripts.acquire("third", model, "t", P, tokens=(1, 0))[0] == Code.QUEUED
    scripts.set_caps(model, Caps(requests=100, tokens=1001))
    assert grants(scripts) == ["third"]


def test_an_adaptive_cap_holds_beside_the_configured_one(scripts: Scripts) -> None:
    model = served_model(inflight_max=4)
    full(scripts, model, 2)
    scripts.set_caps(model, Caps(requests=2))
    assert scripts.acquire("a", model, "t", P)[0] == Code.QUEUED
    scripts.set_caps(model, Caps(requests=9))
    assert grants(scripts) == ["a"]
    assert scripts.acquire("b", model, "t", P)[0] == Code.GRANTED
    assert scripts.acquire("c", model, "t", P)[0] == Code.QUEUED


def test_cached_input_costs_a_tenth_and_output_twice(scripts: Scripts) -> None:
    """In tenths of an input token: 10 for each, 1 when it was cached, 20 for output; over the weight."""
    model = served_model(inflight_max=1)
    full(scripts, model)
    for name, weight in (("a", 1.0), ("b", 4.0)):
        for n in range(2):
            scripts.acquire(f"{name}{n}", model, name, P, weight=weight, tokens=(1000, 100))

    def time_of(tenant: str) -> float:
        queue, past = (f"{{tg}}:{key}:{model.deployment_id.hex}:{int(P)}" for key in "qv")
        return float(scripts.send("ZSCORE", queue, tenant) or scripts.send("HGET", past, tenant))

    began = {name: time_of(name) for name in "ab"}
    assert serve(scripts, "full0") == ["a0"]
    assert time_of("a") - began["a"] == 10 * 1000 + 20 * 100  # as estimated
    scripts.release("a0", (900, 50), cached=800)
    assert grants(scripts) == ["b0"]
    assert time_of("a") - began["a"] == 10 * 100 + 1 * 800 + 20 * 50
    assert time_of("b") - began["b"] == pytest.approx((10 * 1000 + 20 * 100) / 4)
    scripts.release("b0", (1000, 100), cached=1000)
    assert grants(scripts) == ["b1"]  # whose estimate is charged already
    assert time_of("b") - began["b"] == pytest.approx((1 * 1000 + 20 * 100 + 12_000) / 4)
