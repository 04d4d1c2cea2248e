"""Which of several replicas answers."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.router.fleet import Choice, Fleet
from scheduler.router.prefixes import PrefixTable
from scheduler.router.replica import Figures, Outcome, Phase
from scheduler.router.router import Router

WELL, FAILED, REFUSED, NOTHING = Outcome.WELL, Outcome.FAILED, Outcome.REFUSED, Outcome.NOTHING
STEP_S = 0.25


def state_of(*names: str, zone: str = "") -> DeploymentState:
    return DeploymentState("d", ReplicaState.READY, tuple(Endpoint(name, f"unix:/{name}", zone) for name in names))


class Rig:
    """A fleet, its clock, and which replicas have been silent since when."""

    def __init__(self, *names: str, fresh: bool = True) -> None:
        self.now = 1000.0
        self.fresh = fresh
        self.random = random.Random(1)
        self.silent: dict[str, float] = {}
        self.fleet = Fleet(state_of(*names), PrefixTable(10**6), zone="", random=self.random.random, now=self.now)
        self.say()

    def say(self, **figures: Figures) -> None:
        if self.fresh:
            self.fleet.take_figures(figures, self.now)

    def pick(self, prompt: bytes = b"", salt: str | None = "t", besides: str = "") -> Choice:
        return self.fleet.pick(prompt, 0, salt, self.now, besides=besides and f"unix:/{besides}")

    def serve(
        self, outcome: Callable[[str], Outcome] = lambda _: WELL, prompt: bytes = b"", *, took_s: float = 0.1
    ) -> str:
        """One request from its choice to its end."""
        choice = self.pick(prompt)
        choice.sent()
        choice.ended(outcome(choice.replica.name), took_s, self.now)
        return choice.replica.name

    def hold(self) -> str:
        """One request that goes on."""
        choice = self.pick()
        choice.sent()
        return choice.replica.name

    def run(self, requests: int, outcome: Callable[[str], Outcome] = lambda _: WELL) -> Counter[str]:
        return Counter(self.serve(outcome) for _ in range(requests))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            self.say()
            self.fleet.look(self.now, lambda url: self.silent.get(url.removeprefix("unix:/"), 0.0))

    def phase(self, name: str) -> Phase:
        return self.fleet.replicas[name].phase


def test_requests_are_spread_evenly() -> None:
    assert set(Rig("a", "b", "c", "d").run(400).values()) == {100}


def test_the_one_with_fewer_requests_is_asked() -> None:
    rig = Rig("a", "b")
    assert Counter(rig.hold() for _ in range(6)) == {"a": 3, "b": 3}
    rig.fleet.replicas["a"].inflight += 3
    rig.wait(STEP_S)
    assert [rig.hold() for _ in range(3)] == ["b"] * 3


def test_what_others_send_counts_and_a_queue_counts_more() -> None:
    rig = Rig("a", "b", "c")
    rig.say(a=Figures(5, 0, 0.1), b=Figures(4, 0, 0.1), c=Figures(1, 3, 0.1))
    assert rig.pick().replica.name == "b"
    rig.say(a=Figures(1, 0, 0.99), b=Figures(4, 0, 0.1), c=Figures(1, 3, 0.1))
    assert rig.pick().replica.name == "b"  # the memory of `a` is full


def test_a_zone_nearby_is_preferred_until_it_is_busier() -> None:
    near, far = Endpoint("near", "unix:/near", "z1"), Endpoint("far", "unix:/far", "z2")
    state = DeploymentState("d", ReplicaState.READY, (far, near))
    fleet = Fleet(state, PrefixTable(10**6), zone="z1", random=random.Random(1).random, now=1.0)
    fleet.take_figures({}, 1.0)
    sent = [fleet.pick(b"", 0, "t", 1.0) for _ in range(1)]
    assert [choice.replica.name for choice in sent] == ["near"]
    for _ in range(20):
        choice = fleet.pick(b"", 0, "t", 1.0)
        choice.sent()
        sent.append(choice)
    assert {choice.replica.name for choice in sent} == {"near", "far"}


def test_with_old_figures_it_is_the_better_one_of_two_at_random() -> None:
    rig = Rig(*"abcd", fresh=False)
    for _ in range(300):
        choice = rig.pick()
        assert choice.replica.cost <= max(one.cost for one in rig.fleet.live)
        choice.sent()
    loads = [one.inflight for one in rig.fleet.replicas.values()]
    assert max(loads) - min(loads) <= 3  # one of one at random would be ±15


# ---- prefixes


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    rig = Rig(*"abcdefgh")
    conversation = random.Random(2).randbytes(20_000)
    first = rig.serve(prompt=conversation)
    for turn in range(1, 6):
        longer = conversation + random.Random(turn).randbytes(turn * 3000)
        assert rig.serve(prompt=longer) == first


def test_a_busy_holder_is_passed_over_when_reading_again_is_cheaper() -> None:
    rig = Rig("a", "b")
    prompt = random.Random(2).randbytes(2000)
    first = rig.serve(prompt=prompt)
    for _ in range(40):
        rig.fleet.replicas[first].inflight += 1
    rig.wait(STEP_S)
    assert rig.pick(prompt).replica.name != first


def test_another_tenants_prompt_is_not_known() -> None:
    rig = Rig(*"abcd")
    prompt = random.Random(2).randbytes(20_000)
    choice = rig.pick(prompt, "one")
    choice.sent()
    assert rig.pick(prompt, "one").to_read < 4096
    assert rig.pick(prompt, "two").to_read == 20_000
    assert rig.pick(prompt, None).to_read == 20_000


def test_what_a_replica_read_is_forgotten_with_it() -> None:
    rig = Rig("a", "b")
    prompt = random.Random(2).randbytes(20_000)
    first = rig.serve(prompt=prompt)
    rig.fleet.refresh(state_of(*({"a", "b"} - {first}), "c"), rig.now)
    assert rig.pick(prompt).to_read == 20_000
    rig.fleet.refresh(state_of("a", "b"), rig.now)  # it came back, with an empty cache
    assert rig.pick(prompt).to_read == 20_000


def test_replicas_that_come_and_go_for_ever_leave_masks_short() -> None:
    rig = Rig("a", "b")
    prompt = random.Random(2).randbytes(5000)
    for number in range(1000):
        rig.fleet.refresh(state_of("a", f"b{number}"), rig.now)
        rig.serve(prompt=prompt)
    assert max(one.bit for one in rig.fleet.replicas.values()) < 1 << 256
    assert rig.serve(prompt=prompt) == rig.serve(prompt=prompt)


def test_gateways_that_know_nothing_of_each_other_agree_on_a_home() -> None:
    """Each gateway sends the first turn it sees of a conversation where the other has sent the turns before."""
    names = [f"r{n}" for n in range(8)]
    rigs = [Rig(*names), Rig(*names)]
    others = {name: Figures(6, 0, 0.1) for name in names}  # of the other one
    for rig in rigs:
        for _ in range(30):
            rig.say(**others)
    agreed = 0
    for seed in range(100):
        conversation = random.Random(seed).randbytes(30_000)
        homes = [rig.serve(prompt=conversation[: 20_000 + 10_000 * turn]) for turn, rig in enumerate(rigs)]
        agreed += homes[0] == homes[1]
    assert agreed >= 85


# ---- who is left alone, and comes back


def test_five_failures_in_a_row_and_it_is_left_alone_then_probed_once_then_starts_slowly() -> None:
    rig = Rig("a", "b", "c")
    fails = lambda name: FAILED if name == "a" else WELL  # noqa: E731
    assert rig.run(60, fails)["a"] == 5
    assert rig.phase("a") is Phase.EJECTED
    rig.wait(4.75)
    assert rig.run(30, fails)["a"] == 0
    rig.wait(0.5)
    assert rig.run(30, fails)["a"] == 1  # the probe, which fails
    rig.wait(5.5)
    assert rig.run(30)["a"] == 0  # twice as long now
    rig.wait(5.0)
    held = [rig.pick() for _ in range(2)]
    for choice in held:
        choice.sent()
    assert [choice.probe for choice in held] == [True, False]
    held[0].ended(WELL, 0.1, rig.now)
    assert rig.phase("a") is Phase.SERVING
    assert rig.fleet.replicas["a"].weight(rig.now) == pytest.approx(0.1)
    rig.wait(15.0)
    assert rig.fleet.replicas["a"].weight(rig.now) == pytest.approx(0.5, abs=0.01)
    rig.wait(20.0)
    assert rig.fleet.replicas["a"].weight(rig.now) == 1.0


def test_one_that_starts_slowly_gets_less_and_more_and_more() -> None:
    rig = Rig("a", "b")
    rig.run(100)
    rig.fleet.refresh(state_of("a", "b", "new"), rig.now)
    shares = []
    for _ in range(4):
        held = []
        for _ in range(60):
            choice = rig.pick()
            choice.sent()
            held.append(choice)
        shares.append(sum(choice.replica.name == "new" for choice in held))
        for choice in held:
            choice.ended(WELL, 0.1, rig.now)
        rig.wait(10.0)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 10 <= shares[2]
    assert shares[3] in range(15, 30)


def test_two_refused_connections_are_enough() -> None:
    rig = Rig("a", "b", "c")
    assert rig.run(60, lambda name: REFUSED if name == "a" else WELL)["a"] == 2


def test_what_the_caller_did_wrong_says_nothing_of_a_replica() -> None:
    rig = Rig("a", "b")
    assert rig.run(100, lambda name: NOTHING if name == "a" else WELL)["a"] == 50
    assert rig.phase("a") is Phase.SERVING


def test_where_all_fail_half_are_left_alone_and_no_more() -> None:
    rig = Rig(*"abcde")
    rig.run(200, lambda _: FAILED)
    phases = Counter(rig.phase(name) for name in "abcde")
    assert phases == {Phase.EJECTED: 2, Phase.SERVING: 3}
    pair = Rig("a", "b")
    pair.run(100, lambda _: REFUSED)
    assert sorted(pair.phase(name) for name in "ab") == [Phase.EJECTED, Phase.SERVING]


def test_one_whose_answers_fail_more_often_than_the_others_is_left_alone() -> None:
    rig = Rig("a", "b", "c")
    turns = iter(range(10_000))
    rig.run(
        120, lambda name: FAILED if name == "a" and next(turns) % 5 < 3 else WELL
    )  # three of five, never five in a row
    rig.wait(2.5)
    assert rig.phase("a") is Phase.EJECTED
    assert "60% of its answers fail" in rig.fleet.replicas["a"].reason


def test_one_that_is_much_slower_than_the_others_is_left_alone() -> None:
    rig = Rig("a", "b", "c")
    for _ in range(60):
        choice = rig.pick()
        choice.sent()
        choice.ended(WELL, 4.0 if choice.replica.name == "a" else 0.5, rig.now)
    rig.wait(2.5)
    assert rig.phase("a") is Phase.EJECTED
    assert rig.fleet.replicas["a"].reason == "its first byte takes 4.0 s, the others' 0.5 s"


def test_a_silent_one_is_asked_where_no_other_speaks_and_once_in_half_a_minute() -> None:
    rig = Rig("hung", "well")
    hanging = rig.pick(besides="well")
    hanging.sent()
    rig.silent["hung"] = rig.now
    rig.wait(1.25)
    assert "hung" in rig.run(20)  # not long enough to say
    rig.wait(0.5)
    assert rig.run(50) == {"well": 50}
    rig.wait(29.0)
    assert rig.run(10) == {"well": 10}
    rig.wait(1.5)
    probe = rig.pick()
    probe.sent()
    assert (probe.replica.name, probe.probe) == ("hung", True)
    assert rig.run(10) == {"well": 10}
    rig.wait(31.0)
    assert rig.pick().probe
    rig.silent.clear()  # it speaks again, to those who wait
    rig.wait(STEP_S)
    assert rig.phase("hung") is Phase.SERVING
    hanging.ended(WELL, 60.0, rig.now)
    probe.ended(WELL, 30.0, rig.now)
    rig.wait(31.0)
    assert rig.run(200)["hung"] > 50


def test_one_whose_callers_have_all_left_is_still_taken_to_be_silent() -> None:
    rig = Rig("hung", "well")
    held = [rig.pick(besides=name) for name in ("well", "hung")]
    for choice in held:
        choice.sent()
    rig.silent["hung"] = rig.now
    rig.wait(2.0)
    for choice in held:
        choice.ended(NOTHING, 0.0, rig.now)
    rig.wait(5.0)
    assert rig.run(20) == {"well": 20}


def test_another_one_is_asked_when_there_is_another() -> None:
    rig = Rig("a", "b")
    assert all(rig.pick(besides="a").replica.name == "b" for _ in range(10))
    rig.fleet.refresh(state_of("a"), rig.now)
    assert rig.pick(besides="a").replica.name == "a"


# ---- what is shown


def test_a_decision_can_be_looked_at() -> None:
    router = Router(zone="z", random=lambda: 0.0)
    state = state_of("a", "b", zone="z")
    prompt = random.Random(1).randbytes(3000)
    router.pick(state, prompt, 0, "t", 100.0).sent()
    router.pick(state, prompt, 0, "t", 102.0).sent()
    report = router.report("d", gateway="g1", now=102.0, now_us=7)
    assert report is not None
    assert [seen.sent for seen in report.replicas] == [2, 0]
    last = report.decisions[-1]
    assert (last.chosen, last.prompt_bytes, last.by) == ("a", 3000, "two choices")
    assert [one.cached_bytes for one in last.considered] == [2048, 0]
    assert last.considered[0].score < last.considered[1].score
    assert router.report("other", gateway="g1", now=0.0, now_us=0) is None


def test_a_fleet_that_nobody_uses_is_forgotten() -> None:
    router = Router()
    router.pick(state_of("a", "b"), b"", 0, None, 100.0)
    router.look(699.0, lambda _: 0.0)
    assert router.deployments == ["d"]
    router.look(700.0, lambda _: 0.0)
    assert router.deployments == []
