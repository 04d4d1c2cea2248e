"""What is lent comes back: batch of a tenant below its share takes places of those above theirs, by a plain model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.types import ServedModel
from core.tiers import Tier
from scheduler.commands import Code
from scheduler.types import Entitlement
from tests.factories.scheduler import served_model
from tests.sim.scripts import Scripts

P, B = Tier.PRIORITY, Tier.BATCH
CAP, SEATS = 20, 14  # of which batch fills seven tenths
TENANTS = "abcd"  # the last is entitled to nothing
WAIT_S, RECLAIM_S, ANSWER_S = 1000.0, 5, 2.0
A_SECOND, TWICE = 1, 2


@dataclass
class Entry:
    tenant: str
    tier: Tier
    at_s: float
    granted_s: float | None
    spent: bool = False  # asked since it was granted, or granted for a floor
    preempted: int = 0


@dataclass
class World:
    """What runs and what waits, told by the scripts' answers alone."""

    scripts: Scripts
    deserved: dict[str, int]
    model: ServedModel = field(default_factory=lambda: served_model(inflight_max=CAP, waiting_max=10_000))
    entries: dict[str, Entry] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)  # without an answer so far: since when
    recent: list[tuple[float, str]] = field(default_factory=list)  # without those that were refused
    now: float = 0.0

    def running(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.granted_s is not None]

    def waiting(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.granted_s is None]

    def count(self, tenant: str) -> int:
        return sum(entry.tenant == tenant for entry in self.running())

    def left(self, tenant: str) -> int:
        """What it has when all that were asked for their places have given them."""
        pending = [name for name, since in self.asked.items() if since + ANSWER_S > self.now + 1e-6]
        return self.count(tenant) - sum(self.entries[name].tenant == tenant for name in pending)

    def is_above(self, tenant: str) -> bool:
        return self.left(tenant) > self.deserved.get(tenant, 0)

    def is_below(self, tenant: str) -> bool:
        return self.count(tenant) < self.deserved.get(tenant, 0)

    def victims(self) -> list[Entry]:
        return [e for e in self.running() if e.tier is B and not e.spent and e.preempted < TWICE]

    def ask(self, tenant: str, tier: Tier) -> None:
        name = f"{tenant}{len(self.entries)}-{self.now}"
        entitled = tuple(Entitlement(who, 0, deserved) for who, deserved in self.deserved.items())
        code = self.scripts.acquire(name, self.model, tenant, tier, wait_s=WAIT_S, entitlements=entitled)[0]
        self.entries[name] = Entry(tenant, tier, self.now, self.now if code == Code.GRANTED else None)
        self.hear()

    def hear(self) -> None:
        for kind, name in self.scripts.messages():
            if kind == "G":
                entry = self.entries[name]
                higher = [other for other in self.waiting() if other.tier > entry.tier]
                entry.granted_s, entry.spent = self.now, bool(higher)
            else:
                self.check_asked(name, Tier(int(kind[1:])))

    def check_asked(self, name: str, by: Tier) -> None:
        victim, above = self.entries[name], [e for e in self.victims() if self.is_above(e.tenant)]
        assert victim in self.victims()
        if above:  # first of those, the newest grant
            assert victim in above
            assert victim.granted_s == max(e.granted_s or 0 for e in above)
        if by is B:  # the share of one is below what it deserves, also with the place; of the other above, also without
            assert above
            below = [e for e in self.waiting() if self.is_below(e.tenant)]
            assert any(self.now >= e.at_s + RECLAIM_S - 1e-6 for e in below)
            assert not [e for e in self.waiting() if e.tier > B]
        assert len([at for at, _ in self.recent if at > self.now - 1 + 1e-6]) < A_SECOND
        self.recent.append((self.now, name))
        self.asked[name], victim.spent = self.now, True

    def answer(self, nth: int, *, gives: bool) -> None:
        if not self.asked:
            return
        name = sorted(self.asked)[nth % len(self.asked)]
        victim = self.entries[name]
        del self.asked[name]
        if not gives:
            self.recent = [(at, who) for at, who in self.recent if who != name]
            assert self.scripts.yield_place(name, -1) == 0
            self.hear()
            return
        first = {e.tenant for e in self.waiting() if self.is_below(e.tenant)}
        higher = [e for e in self.waiting() if e.tier > B]
        free = SEATS - len(self.running()) + 1
        victim.granted_s, victim.preempted = None, victim.preempted + 1
        assert self.scripts.yield_place(name, WAIT_S) == 1
        before = {id(e) for e in self.running()}
        self.hear()
        now_running = [e for e in self.running() if id(e) not in before]
        if higher:
            assert now_running[0].tier is P
        elif first and free > 0:  # never back to whom it was taken from
            assert now_running[0].tenant in first
            assert now_running[0] is not victim

    def end(self, nth: int) -> None:
        names = sorted(name for name, entry in self.entries.items() if entry.granted_s is not None)
        if names:
            name = names[nth % len(names)]
            del self.entries[name]
            self.asked.pop(name, None)
            self.scripts.release(name, (100, 100))
            self.hear()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.scripts.set_time(self.now)
        self.scripts.tick()
        self.hear()

    def check(self) -> None:
        assert self.scripts.load(self.model)[:2] == (len(self.running()), len(self.waiting()))

    def settle(self) -> None:
        """With every place given that is asked for, nobody below its share waits beside batch that could give one."""
        for entry in [e for e in self.waiting() if e.tier is P]:
            name = next(n for n, e in self.entries.items() if e is entry)
            del self.entries[name]
            self.scripts.release(name, (0, 0))
            self.hear()
        self.pass_time(RECLAIM_S)
        for _ in range(4 * CAP):
            while self.asked:
                self.answer(0, gives=True)
            self.pass_time(1.1)
            self.check()
        assert not self.asked
        if len(self.running()) == SEATS and any(self.is_below(e.tenant) for e in self.waiting()):
            assert not [e for e in self.victims() if self.is_above(e.tenant)]


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(TENANTS), st.sampled_from([B, B, B, B, B, B, P])),
        st.tuples(st.just("end"), st.integers(0, 99), st.none()),
        st.tuples(st.just("pass"), st.sampled_from([0.9, 1.1, 1.1, 4.5]), st.none()),
        st.tuples(st.just("give"), st.integers(0, 5), st.none()),
        st.tuples(st.just("give"), st.integers(0, 5), st.none()),
        st.tuples(st.just("keep"), st.integers(0, 5), st.none()),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(deserved=st.tuples(*[st.integers(0, 6)] * 3), lent_to=st.sampled_from(TENANTS), ops=OPS)
def test_places_go_from_those_above_their_share_to_those_below_and_never_back(
    valkey: Path, deserved: tuple[int, ...], lent_to: str, ops: list[tuple[str, Any, Any]]
) -> None:
    scripts = Scripts(valkey)
    scripts.set_time(0)
    world = World(scripts, dict(zip(TENANTS, deserved, strict=False)))
    for _ in range(SEATS):  # one has it all at low tide
        world.ask(lent_to, B)
        world.pass_time(0.001)
    for tenant in TENANTS.replace(lent_to, "") * 3:  # and the others want their share
        world.ask(tenant, B)
    for what, which, tier in ops:
        if what == "ask":
            world.ask(which, tier)
        elif what == "end":
            world.end(which)
        elif what == "pass":
            world.pass_time(which)
        else:
            world.answer(which, gives=what == "give")
        world.check()
    world.settle()
    scripts.close()
