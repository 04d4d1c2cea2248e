"""What holds of routing whatever replicas do, and in whatever order."""

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.router.fleet import Choice
from scheduler.router.replica import EJECTED_SHARE, Figures, Outcome, Phase
from scheduler.router.router import Router

NAMES = [f"r{n}" for n in range(6)]
names = st.sampled_from(NAMES)


class Routing(RuleBasedStateMachine):
    """A router, replicas that come, go, hang, fail and come back, and a model of who may be asked."""

    @initialize(ready=st.sets(names, min_size=2))
    def begin(self, ready: set[str]) -> None:
        self.now = 100.0
        self.draw = random.Random(5)
        self.router = Router(random=self.draw.random)
        self.silent: dict[str, float] = {}
        self.running: list[Choice] = []
        self.publish(ready)
        self.picked = Counter[str]()

    def publish(self, ready: set[str]) -> None:
        endpoints = tuple(Endpoint(name, f"unix:/{name}") for name in sorted(ready))
        self.state = DeploymentState("d", ReplicaState.READY, endpoints, epoch=int(self.now * 1000))
        self.ready = ready

    @rule(ready=st.sets(names, min_size=2))
    def change(self, ready: set[str]) -> None:
        """Some drain or die, others are ready now."""
        self.publish(ready)

    @rule(prompt=st.integers(0, 5), size=st.sampled_from([0, 300, 5000]), besides=st.none() | names)
    def send(self, prompt: int, size: int, besides: str | None) -> None:
        address = f"unix:/{besides}" if besides else ""
        body = random.Random(prompt).randbytes(size)
        choice = self.router.pick(self.state, body, 0, "t", self.now, besides=address)
        replica = choice.replica
        assert replica.name in self.ready, "it drains, or is gone"
        if besides is not None and self.ready - {besides}:
            assert replica.name != besides
        fleet = choice.fleet
        well = {one.name for one in fleet.replicas.values() if one.phase is Phase.SERVING and not one.silent_since}
        if well - {besides}:
            assert replica.name in well or choice.probe, "another one is fine"
        if len(self.running) < 50:
            choice.sent()
            self.running.append(choice)
            self.picked[replica.name] += 1

    @rule(at=st.integers(0, 49), outcome=st.sampled_from(list(Outcome)), first_byte_s=st.floats(0, 20))
    def end(self, at: int, outcome: Outcome, first_byte_s: float) -> None:
        if self.running:
            self.running.pop(at % len(self.running)).ended(outcome, first_byte_s, self.now)

    @rule(name=names, hangs=st.booleans())
    def hang(self, name: str, hangs: bool) -> None:
        if hangs:
            self.silent.setdefault(name, self.now)
        else:
            self.silent.pop(name, None)

    @rule(seconds=st.floats(0.25, 60.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.router.look(self.now, lambda url: self.silent.get(url.removeprefix("unix:/"), 0.0))

    @rule(figures=st.dictionaries(names, st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1))))
    def say(self, figures: dict[str, tuple[int, int, float]]) -> None:
        said = {name: Figures(*parts) for name, parts in figures.items()}
        self.router.take_figures("d", said, self.now)

    @invariant()
    def never_all_are_left_alone(self) -> None:
        for fleet in getattr(self, "router", Router())._fleets.values():
            replicas = fleet.replicas.values()
            alone = sum(one.phase is Phase.EJECTED for one in replicas)
            assert fleet.live
            assert alone <= max(EJECTED_SHARE * len(replicas), len(replicas) - 1)
            assert all(one.inflight >= 0 for one in replicas)

    def teardown(self) -> None:
        """Whoever is well again gets work again, and in the end its share."""
        if not hasattr(self, "router"):
            return
        self.silent.clear()
        for choice in self.running:
            choice.ended(Outcome.NOTHING, 0.0, self.now)
        for _ in range(150):  # probes, slow starts and what is remembered of work: five minutes
            self.now += 2.0
            self.router.take_figures("d", {}, self.now)
            self.router.look(self.now, lambda _: 0.0)
            self._serve_one()
        (fleet,) = self.router._fleets.values()
        sent = {one.name: one.picked for one in fleet.replicas.values()}
        for _ in range(60):
            self._serve_one()
        got = [one.picked - sent[one.name] for one in fleet.replicas.values()]
        assert all(one.phase is Phase.SERVING for one in fleet.replicas.values())
        assert max(got) - min(got) <= 6 + 60 // len(got) // 4, got

    def _serve_one(self) -> None:
        choice = self.router.pick(self.state, b"", 0, None, self.now)
        choice.sent()
        choice.ended(Outcome.WELL, 0.1, self.now)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
