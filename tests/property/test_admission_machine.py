"""Admission against a plain model: any order of acquire, release, post, crash, reap, passing time and data loss.

The machine drives real replicas on a real Valkey; `Book` says in plain Python what must hold after every step.
"""

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand, Unit
from core.errors import PlatformError
from core.resp import Part
from scheduler import commands
from scheduler.types import Grant, Prepared
from tests.factories.credit_figures import add_outstanding, figure_of, set_figure
from tests.factories.scheduler import Fleet, ask, concurrency, money, rate, served_model, spend, tokens

GLOBAL_CAP, CAPS, CONCURRENCY, RPM, CREDIT, WAIT_S = 4, (2, 3), 6, 12, 100, 30
TPM, BUDGET = 60, 80
SPEND = "key:k:spend:t"
T = TypeVar("T")


@dataclass
class Entry:
    """A request that was let in: granted, or waiting."""

    request: UUID
    replica: int
    model: int
    hold: int
    estimate: int  # tokens
    at_s: float
    granted: bool
    task: "asyncio.Task[Grant]"
    unclaimed: bool = False  # granted to a replica that had died


@dataclass
class Book:
    """What the platform owes to whom, by the rules."""

    entries: list[Entry] = field(default_factory=list)  # in the order they came
    out: dict[str, int] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    credit: int = CREDIT
    rated: list[float] = field(default_factory=list)
    tokens: dict[str, tuple[float, int]] = field(default_factory=dict)  # request → when, how many it counts for

    @property
    def spent(self) -> int:
        """What the budget has paid or holds: all that is posted, and all that is outstanding."""
        return CREDIT - self.credit + sum(self.out.values())

    def tokens_of(self, since: float) -> int:
        return sum(amount for at, amount in self.tokens.values() if at > since)

    def running(self, model: int | None = None) -> int:
        return sum(e.granted and model in (None, e.model) for e in self.entries)

    def fits(self, model: int) -> bool:
        return self.running() < GLOBAL_CAP and self.running(model) < CAPS[model]

    def dispatch(self, dead: Collection[int]) -> None:
        """Grant the oldest waiter that fits, as often as one does."""
        while waiter := next((e for e in self.entries if not e.granted and self.fits(e.model)), None):
            waiter.granted, waiter.unclaimed = True, waiter.replica in dead

    def remove(self, entry: Entry, *, served: bool) -> None:
        self.entries.remove(entry)
        if not served:
            self.out.pop(entry.request.hex)
            self.rated.remove(entry.at_s)
            self.tokens.pop(entry.request.hex)


class AdmissionMachine(RuleBasedStateMachine):
    valkey: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.book = Book()
        self.tenant = uuid4()
        self.now = 0.0
        self.dead: dict[int, float] = {}  # replica → when it died
        self.run(self.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def open(self) -> None:
        self.fleet = await Fleet.open(self.valkey)
        await self.fleet.client.call("FLUSHALL")
        self.models: list[ServedModel] = [served_model(inflight_max=cap) for cap in CAPS]
        self.prepared: dict[tuple[int, int], Prepared] = {}
        for _ in range(2):
            await self.join()
        await self.fleet.set_credit(self.tenant, CREDIT)

    async def join(self) -> None:
        await self.fleet.replica(global_inflight_max=GLOBAL_CAP, budget_loader=self.load_budget)

    async def load_budget(self, _: UUID, spends: tuple[Demand, ...]) -> None:
        """What billing makes of the ledger and of what is outstanding."""
        assert [demand.counter for demand in spends] == [SPEND]
        await self.fleet.client.call("SET", f"{{tg}}:c:{SPEND}", self.book.spent, "NX")

    def alive(self) -> list[int]:
        return [n for n in range(len(self.fleet.replicas)) if n not in self.dead]

    def pick(self, n: int) -> int:
        return self.alive()[n % len(self.alive())]

    async def quiet(self) -> None:
        """Return when every answer and every message is in: as many tasks are done as the book says."""
        async with asyncio.timeout(30):
            while True:
                for n in self.alive():
                    await self.fleet.client.call("PING")
                    await self.fleet.replicas[n].heartbeat()
                mine = [e for e in self.book.entries if e.replica not in self.dead]
                if all(e.task.done() == e.granted for e in mine):
                    return

    # rules

    @rule(
        n=st.integers(0, 5),
        which=st.integers(0, 1),
        hold=st.integers(0, 30),
        estimate=st.integers(0, 15),
        waits=st.booleans(),
    )
    def acquire(self, n: int, which: int, hold: int, estimate: int, waits: bool) -> None:
        self.run(self._acquire(self.pick(n), which, hold, estimate, waits=waits))

    def expected(self, which: int, hold: int, estimate: int, *, window_s: float, waits: bool) -> str:
        """What is to be said when a rate remembers so many seconds."""
        book, since = self.book, self.now - window_s
        refusals = {
            "CONCURRENCY_LIMITED": len(book.entries) >= CONCURRENCY,
            "RATE_LIMITED": sum(at > since for at in book.rated) >= RPM,
            "TOKENS_LIMITED": estimate > 0 and book.tokens_of(since) + estimate > TPM,
            "INSUFFICIENT_CREDIT": book.credit - sum(book.out.values()) < hold,
            "BUDGET_EXCEEDED": book.spent + hold > BUDGET,
        }
        behind = any(not e.granted and e.model == which for e in book.entries)
        passed = "granted" if book.fits(which) and not behind else "waiting" if waits else "MODEL_BUSY"
        return next((code for code, refuses in refusals.items() if refuses), passed)

    async def _acquire(self, n: int, which: int, hold: int, estimate: int, *, waits: bool) -> None:
        book, replica, request = self.book, self.fleet.replicas[n], uuid4()
        if (n, which) not in self.prepared:
            demands = (rate(RPM), concurrency(CONCURRENCY), tokens(TPM, Unit.INPUT_TOKEN), spend(BUDGET, counter=SPEND))
            self.prepared[n, which] = replica.prepare(demands, self.models[which], self.tenant.hex)
        # at the edge of the window either is right
        right = [self.expected(which, hold, estimate, window_s=edge, waits=waits) for edge in (59, 63)]
        task = asyncio.create_task(
            ask(
                replica,
                self.models[which],
                prepared=self.prepared[n, which],
                money=money(self.tenant, hold),
                used=(estimate, 0),
                wait_s=WAIT_S if waits else 0,
                request_id=request,
            )
        )
        async with asyncio.timeout(30):
            while not task.done() and request.hex.encode() not in replica._waiting:
                await replica.heartbeat()
        said = await self.said(task)
        assert said in right
        if said in ("granted", "waiting"):
            entry = Entry(request, n, which, hold, estimate, self.now, said == "granted", task)
            book.entries.append(entry)
            book.out[request.hex] = hold
            book.rated.append(self.now)
            book.tokens[request.hex] = (self.now, estimate)

    async def said(self, task: "asyncio.Task[Grant]") -> str:
        if not task.done():
            return "waiting"
        error = task.exception()
        if error is None:
            return "granted"
        assert isinstance(error, PlatformError)
        return error.code

    @precondition(lambda self: self.mine(granted=True))
    @rule(n=st.integers(0, 9), share=st.integers(0, 100), how=st.sampled_from(["event", "no event", "unserved"]))
    def release(self, n: int, share: int, how: str) -> None:
        entry = self.mine(granted=True)[n % len(self.mine(granted=True))]
        charges = {"event": entry.hold * share // 100, "unserved": commands.UNSERVED}
        self.run(self._release(entry, share, charges.get(how)))

    async def _release(self, entry: Entry, share: int, charge: int | None) -> None:
        replica, grant = self.fleet.replicas[entry.replica], entry.task.result()
        used = 0 if charge in {None, commands.UNSERVED} else entry.estimate * share // 100
        replica.release(grant, charge, used, 0)
        replica.release(grant, 1, 1, 1)
        self.book.tokens[entry.request.hex] = (entry.at_s, used)
        self.book.remove(entry, served=charge != commands.UNSERVED)
        if charge is None:
            self.book.out.pop(entry.request.hex)
        elif charge != commands.UNSERVED:
            self.book.out[entry.request.hex] = charge
            self.book.settled.append(entry.request.hex)
        self.book.dispatch(self.dead)
        await self.quiet()

    @precondition(lambda self: self.mine(granted=False))
    @rule(n=st.integers(0, 9))
    def cancel(self, n: int) -> None:
        entry = self.mine(granted=False)[n % len(self.mine(granted=False))]
        self.run(self._cancel(entry))

    async def _cancel(self, entry: Entry) -> None:
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
        self.book.remove(entry, served=False)
        self.book.dispatch(self.dead)
        await self.quiet()

    @precondition(lambda self: self.book.settled)
    @rule(n=st.integers(0, 99))
    def post(self, n: int) -> None:
        key = self.book.settled.pop(n % len(self.book.settled))
        self.run(self._post(key, self.book.out.pop(key)))

    async def _post(self, key: str, charge: int) -> None:
        """What the poster does after its commit."""
        self.book.credit -= charge
        await self.fleet.client.call("HDEL", keyspace.outstanding(self.tenant), key)
        await add_outstanding(self.fleet.client, self.tenant, -charge)
        await set_figure(self.fleet.client, self.tenant, available=self.book.credit)

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(n=st.integers(0, 5))
    def crash(self, n: int) -> None:
        self.run(self._crash(self.pick(n)))

    async def _crash(self, n: int) -> None:
        """The process is gone: nothing it would do at its end is done."""
        await self.fleet.clients[n].close()
        self.dead[n] = self.now
        for entry in self.book.entries:
            if entry.replica == n:
                entry.task.cancel()
                await asyncio.gather(entry.task, return_exceptions=True)
        await self.join()

    @rule(steps=st.integers(1, 8))
    def pass_time(self, steps: int) -> None:
        self.run(self._pass_time(steps))

    async def _pass_time(self, steps: int) -> None:
        """Steps of 7 s, a tick after each: the dead are reaped at 14 s, waiters end at 35 s."""
        for _ in range(steps):
            await self._step(7.0)

    async def _step(self, seconds: float) -> None:
        await self.fleet.advance(seconds)
        self.now += seconds
        for n in self.alive():
            await self.fleet.replicas[n].heartbeat()
        self.reap_in_book()
        for n in self.alive():
            await self.fleet.replicas[n].tick()
        await self.quiet()

    def reap_in_book(self) -> None:
        """Withdraw what nobody claimed; drop the dead's leases and late waiters; grant."""
        book = self.book
        for entry in list(book.entries):
            dead = self.now - self.dead.get(entry.replica, self.now) > 10
            if dead or entry.unclaimed:
                book.remove(entry, served=entry.granted and not entry.unclaimed)
            elif not entry.granted and self.now - entry.at_s > WAIT_S:
                book.remove(entry, served=False)
        book.dispatch(self.dead)

    @precondition(lambda self: all(e.granted for e in self.book.entries))
    @rule()
    def lose_data(self) -> None:
        self.run(self._lose_data())

    async def _lose_data(self) -> None:
        """Valkey is empty; the ledger has posted what was settled, as billing's part of the recovery."""
        book = self.book
        for key in book.settled:
            book.credit -= book.out[key]
        book.settled.clear()
        offset = await self.fleet.client.call("GET", commands.OFFSET)
        await self.fleet.client.call("FLUSHALL")
        await self.fleet.client.call("SET", commands.OFFSET, offset or 0)
        await self.fleet.set_credit(self.tenant, book.credit)
        book.entries = [e for e in book.entries if e.replica not in self.dead]
        for entry in book.entries:  # what runs is entered anew
            entry.at_s = self.now
        book.rated = [self.now] * len(book.entries)
        book.tokens = {e.request.hex: (self.now, e.estimate) for e in book.entries}
        book.out = {e.request.hex: e.hold for e in book.entries}
        for n in self.alive():
            await self.fleet.replicas[n].resync()
        await self._step(5.1)

    @rule(steps=st.integers(1, 8))
    def count_anew(self, steps: int) -> None:
        """Some steps of a recount, one lease each, with whatever comes between them: no counter is ever off."""
        self.run(self._count_anew(steps))

    async def _count_anew(self, steps: int) -> int:
        state = 0
        for _ in range(steps):
            epoch = await self.fleet.client.call("GET", keyspace.EPOCH)
            keys: list[Part] = [keyspace.EPOCH, commands.OFFSET]
            code, state, *drift = await self.fleet.client.send(
                commands.call(commands.RECOUNT, keys, [epoch, "counter", 1, 1])
            )
            assert (code, drift) == (1, [])
        return state

    @rule(which=st.sampled_from(["c:global", "o:key:k", "waiters", "o:key:gone"]), by=st.integers(1, 3))
    def corrupt(self, which: str, by: int) -> None:
        """A counter that somebody changed is found, and right again: the book is compared after each rule."""
        self.run(self._corrupt(which, by))

    async def _corrupt(self, which: str, by: int) -> None:
        while await self._count_anew(1) == 1:
            pass
        value = await self.fleet.corrupt(keyspace.PREFIX + which, by)
        found = await self.fleet.replicas[self.alive()[0]].recount(now=True, leases=1)
        assert found == [(which, value, value - by)]

    # what must hold

    def mine(self, *, granted: bool) -> list[Entry]:
        return [e for e in self.book.entries if e.granted == granted and e.replica not in self.dead]

    @invariant()
    def valkey_says_what_the_book_says(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        fleet, book = self.fleet, self.book
        for n in self.alive():
            await fleet.replicas[n].heartbeat()  # its answer comes after all that was sent before
        assert await fleet.outstanding(self.tenant) == book.out
        available, _, outstanding = await figure_of(fleet.client, self.tenant)
        assert (available, outstanding) == (book.credit, sum(book.out.values()))
        assert available >= outstanding
        for which, model in enumerate(self.models):
            waiting = sum(not e.granted and e.model == which for e in book.entries)
            assert await fleet.load(model) == (book.running(which), waiting)
        assert await fleet.count("global") == book.running()
        assert await fleet.running("key:k") == len(book.entries)
        spent = await fleet.client.call("GET", f"{{tg}}:c:{SPEND}")
        assert spent is None or int(spent) == book.spent
        await fleet.rated("key:k:rpm")  # each is the sum of its buckets
        await fleet.rated("key:k:itpm")
        waiters = await fleet.client.call("GET", commands.WAITERS)
        assert int(waiters or 0) == sum(not e.granted for e in book.entries)

    def teardown(self) -> None:
        self.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        tasks = [entry.task for entry in self.book.entries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fleet.close()


def test_admission_does_what_the_book_says(valkey: Path) -> None:
    machine = type("Machine", (AdmissionMachine,), {"valkey": valkey})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
