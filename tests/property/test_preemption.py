"""Preemption against a plain model: any order of requests, endings, answers, silence and passing time, on Valkey."""

from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.tiers import Tier
from scheduler.caps import Caps
from scheduler.commands import Code
from tests.factories.scheduler import served_model
from tests.sim.scripts import REPLICA, Scripts

P, S, B = Tier.PRIORITY, Tier.STANDARD, Tier.BATCH
WAITS_S = {P: 0.8, S: 10.0, B: 120.0}
PART = {P: 0.5, S: 0.8}
TOKENS = (60, 20)


@dataclass
class Entry:
    tier: Tier
    at_s: float
    deadline_s: float
    granted: bool
    granted_s: float
    spent: bool = False  # asked for its place since it was granted
    preempted: int = 0


@dataclass
class Book:
    """What the rules say of who may be asked."""

    cap: int
    entries: dict[str, Entry] = field(default_factory=dict)
    asked: list[tuple[float, str]] = field(default_factory=list)  # when; without those that were refused
    pending: list[str] = field(default_factory=list)
    hot_since: float | None = None
    now: float = 0.0

    @property
    def running(self) -> int:
        return sum(entry.granted for entry in self.entries.values())

    def waiting(self, tier: Tier) -> list[Entry]:
        return [entry for entry in self.entries.values() if not entry.granted and entry.tier is tier]

    def check_asked(self, name: str, by: Tier) -> None:
        entry = self.entries[name]
        assert entry.granted
        assert entry.tier < by
        assert not entry.spent, "asked twice, or after it began to stream"
        assert entry.preempted < 2
        if entry.tier is S:
            assert by is P
            assert self.hot_since is not None
            assert self.now >= self.hot_since + 5
            assert self.now - entry.granted_s <= 2
        assert any(self.now >= w.at_s + PART[by] * (w.deadline_s - w.at_s) - 1e-6 for w in self.waiting(by))
        assert by is P or not self.waiting(P)
        recent = [at for at, _ in self.asked if at > self.now - 1 + 1e-6]
        assert len(recent) < max(1, int(self.running * 0.05 + 1e-9))
        newer = [e for e in self.entries.values() if e.tier is B and e.granted and not e.spent and e.preempted < 2]
        if entry.tier is B:
            assert all(e.granted_s <= entry.granted_s for e in newer if e.granted_s == e.at_s)  # never in the queue
        entry.spent = True
        self.asked.append((self.now, name))
        self.pending.append(name)


class World:
    def __init__(self, valkey: Path, cap: int) -> None:
        self.scripts, self.model, self.book = Scripts(valkey), served_model(inflight_max=cap), Book(cap)
        self.scripts.set_time(0)
        self.number = 0

    def hear(self) -> list[tuple[str, str]]:
        told = list(self.scripts.messages())
        for kind, name in told:
            if kind == "G":
                entry = self.book.entries[name]
                entry.granted, entry.granted_s, entry.spent = True, self.book.now, False
            elif kind == "X":
                assert self.book.entries.pop(name).deadline_s <= self.book.now + 1e-5
            else:
                self.book.check_asked(name, Tier(int(kind[1:])))
        return told

    def ask(self, tier: Tier) -> None:
        name, book = f"r{self.number}", self.book
        self.number += 1
        code = self.scripts.acquire(name, self.model, f"t{self.number % 3}", tier, tokens=TOKENS, wait_s=WAITS_S[tier])[
            0
        ]
        if code in {Code.GRANTED, Code.QUEUED}:
            granted = code == Code.GRANTED
            book.entries[name] = Entry(tier, book.now, book.now + WAITS_S[tier], granted, book.now)
        self.hear()

    def end(self, nth: int) -> None:
        names = [name for name, entry in self.book.entries.items() if entry.granted]
        if names:
            name = names[nth % len(names)]
            del self.book.entries[name]
            self.scripts.release(name, TOKENS)
            self.hear()

    def answer(self, nth: int, *, gives: bool) -> None:
        book = self.book
        book.pending = [name for name in book.pending if name in book.entries and book.entries[name].spent]
        if not book.pending:
            return
        name = book.pending.pop(nth % len(book.pending))
        entry, places = book.entries[name], book.cap - book.running + 1
        if not gives:
            book.asked = [(at, who) for at, who in book.asked if who != name or at <= book.now - 1 + 1e-6]
            assert self.scripts.yield_place(name, -1) == 0
            self.hear()
            return
        if entry.deadline_s <= book.now:  # its caller has lost patience
            del book.entries[name]
            self.scripts.release(name, TOKENS)
            self.hear()
            return
        entry.granted, entry.preempted = False, entry.preempted + 1
        higher = [w for w in book.waiting(P) if w.deadline_s > book.now]
        assert self.scripts.yield_place(name, entry.deadline_s - book.now) == 1
        granted = [who for kind, who in self.hear() if kind == "G"]
        if higher and places > 0:  # no loop: the place is not its own again while somebody above waits for it
            assert book.entries[granted[0]].tier is P

    def check(self) -> None:
        book, load = self.book, self.scripts.load(self.model)
        waiting = [len(book.waiting(tier)) for tier in (B, S, P)]
        assert load[0] == book.running <= book.cap
        assert load[1] == sum(waiting)
        assert [load[8], load[9]] == waiting[:2]
        assert load[3] == sum(TOKENS) * book.running
        held = {key.decode().rstrip("_") for key in self.scripts.send("HKEYS", f"{{tg}}:lease:{REPLICA}")}
        assert held == book.entries.keys()

    def close(self) -> None:
        for name in list(self.book.entries):
            self.scripts.release(name, TOKENS)
        list(self.scripts.messages())
        assert self.scripts.load(self.model)[:4:3] == (0, 0)
        assert int(self.scripts.send("GET", "{tg}:waiters") or 0) == 0
        assert self.scripts.send("EXISTS", f"{{tg}}:r:{self.model.deployment_id.hex}:0") == 0
        self.scripts.close()


OPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([P, P, S, B])),
    st.tuples(st.just("end"), st.integers(0, 50)),
    st.tuples(st.just("pass"), st.sampled_from([0.05, 0.5, 0.5, 1.01, 8.5])),
    st.tuples(st.just("press"), st.none()),
    st.tuples(st.just("give"), st.integers(0, 5)),
    st.tuples(st.just("keep"), st.integers(0, 5)),
    st.tuples(st.just("heat"), st.sampled_from([0.5, 1.3])),
)


@given(cap=st.sampled_from([1, 3, 10, 60]), ops=st.lists(OPS, min_size=20, max_size=80))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_preemption_keeps_its_rules(valkey: Path, cap: int, ops: list[tuple[str, object]]) -> None:
    world = World(valkey, cap)
    book = world.book
    for _ in range(cap):  # as much batch as its ceiling lets in; priority fills the rest
        world.ask(B)
    while book.running < cap:
        world.ask(P)
    for what, how in ops:
        if what == "ask":
            assert isinstance(how, Tier)
            world.ask(how)
        elif what == "end":
            world.end(int(how))  # type: ignore[call-overload]
        elif what == "pass":
            book.now += float(how)  # type: ignore[arg-type]
            world.scripts.set_time(book.now)
            world.scripts.tick()
            world.hear()
        elif what == "press":
            world.scripts.press(world.model)
            world.hear()
        elif what in {"give", "keep"}:
            world.answer(int(how), gives=what == "give")  # type: ignore[call-overload]
        else:
            heat = float(how)  # type: ignore[arg-type]
            book.hot_since = (book.hot_since if book.hot_since is not None else book.now) if heat >= 1.2 else None
            world.scripts.set_caps(world.model, Caps(requests=float(cap), saturation=heat))
            world.hear()
        world.check()
    world.close()
