"""An overloaded engine behind the scheduler, event by event on a virtual clock; seeded, without a wall clock.

The decisions are those of the product: the scripts in Valkey and `scheduler.caps`. The load, the engine and the scores
come from yardsticks that know nothing of us.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

from catalog.types import ServedModel
from core.tiers import Tier
from scheduler import caps, patience
from scheduler.commands import Code
from scheduler.waiting import PRESS_AFTER
from tests.sim.scripts import Scripts

SCRAPE_S, TICK_S, DRAIN_S = 1.0, 1.0, 120.0
TEMPLATE_BYTES = 200  # of a request's body beside the prompt
BYTES_PER_TOKEN = 2
TTFT_S = {Tier.PRIORITY: 2.0, Tier.STANDARD: 10.0, Tier.BATCH: 120.0}


@dataclass(eq=False)
class Attempt:
    """One HTTP request of a client."""

    row: dict[str, Any]
    number: int
    record: dict[str, Any]
    sequence: Any = None
    state: str = "new"  # waiting, running, ended
    until_s: float = 0.0  # how long it waits for a place


@dataclass(frozen=True)
class Rules:
    """`whole_batch`: batch is answered whole instead of streamed, so it can be preempted until it ends.

    Without `preempt` whoever is asked for its place keeps it.
    """

    whole_batch: bool = False
    preempt: bool = True


DEFAULT = Rules()


@dataclass
class World:
    """The rig: clients, gateway, scheduler, engine."""

    yard: Any
    scripts: Scripts
    model: ServedModel
    meta: dict[str, Any]
    engine: Any
    per_pod: int
    rules: Rules
    events: list[Any] = field(default_factory=list)
    order: Any = field(default_factory=itertools.count)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)  # for its place: tier, and whether it gave it
    trail: list[tuple[float, ...]] = field(default_factory=list)
    ttft: Any = field(default_factory=dict)

    def at(self, when: float, what: str, item: Any = None) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, item))

    def note(self, event: str, now: float, sequence: Any) -> None:
        self.log.append(
            {
                "s": now,
                "event": event,
                "name": sequence.name,
                "in_flight": self.engine.in_flight,
                "generated": sequence.generated,
                "state": sequence.state,
            }
        )

    # clients

    def send(self, now: float, row: dict[str, Any], number: int) -> None:
        """A client asks; it leaves when no token came within its timeout."""
        record = dict.fromkeys(("first_s", "end_s", "code", "retry_after", "result"))
        record |= {"id": row["id"], "attempt": number, "sent_s": now, "tokens": 0, "status": 200}
        attempt = Attempt(row, number, record)
        name = f"{row['id']}.{number}"
        self.attempts[name] = attempt
        tier = Tier[row["tier"].upper()]
        wait_s = max(0.0, patience.of_retry(TTFT_S[tier], tier, number))
        attempt.until_s = now + wait_s
        reply = self.scripts.acquire(
            name,
            self.model,
            row["tenant"],
            tier,
            weight=self.meta["weights"].get(row["tenant"], 1),
            tokens=self.estimate(row),
            wait_s=wait_s,
        )
        if reply[0] == Code.GRANTED:
            self.start(now, attempt)
        elif reply[0] == Code.QUEUED:
            attempt.state = "waiting"
            self.at(now + wait_s, "deadline", attempt)
            if part := PRESS_AFTER.get(tier):
                self.at(now + wait_s * part + 1e-3, "press")
        else:
            self.refuse(now, attempt, reply[1], f"busy{reply[2]}")
            return
        self.at(now + row["timeout_s"], "timeout", attempt)

    @staticmethod
    def estimate(row: dict[str, Any]) -> tuple[int, int]:
        return row["prompt_tokens"] * BYTES_PER_TOKEN + TEMPLATE_BYTES, row["max_tokens"]

    def start(self, now: float, attempt: Attempt) -> None:
        row = attempt.row
        attempt.state = "running"
        attempt.record["granted_s"] = now
        attempt.sequence = self.engine.submit(
            f"{row['id']}.{attempt.number}",
            row["prompt_tokens"],
            row["output_tokens"],
            priority=Tier.PRIORITY - Tier[row["tier"].upper()],
            owner=attempt,
        )
        self.note("start", now, attempt.sequence)

    def refuse(self, now: float, attempt: Attempt, after_s: float, why: str) -> None:
        why = f"{why} {attempt.row['tier']}"
        self.refused[why] = self.refused.get(why, 0) + 1
        attempt.record.update(status=503, code="MODEL_BUSY", retry_after=float(max(1, after_s)))
        self.end(now, attempt, "refused")

    def end(self, now: float, attempt: Attempt, result: str) -> None:
        """The client has its answer, or none."""
        attempt.state = "ended"
        attempt.record.update(result=result, end_s=now)
        self.outcomes.append(attempt.record)
        if result == "ok":
            return
        number = attempt.number + 1
        pause = self.yard.load.backoff_s(self.meta, attempt.row, number, attempt.record["retry_after"])
        if pause is not None:
            self.at(now + pause, "send", (attempt.row, number))

    # gateway

    def leave(self, now: float, attempt: Attempt) -> None:
        """The client is gone: out of the queue, or the engine is told to stop."""
        name = f"{attempt.row['id']}.{attempt.number}"
        if attempt.state == "running":
            used = (attempt.row["prompt_tokens"], attempt.sequence.generated)
            if self.engine.cancel(attempt.sequence):
                self.note("end", now, attempt.sequence)
        else:
            used = (0, 0)
        self.scripts.release(name, used)

    def give_place(self, now: float, name: str, attempt: Attempt) -> None:
        """A higher tier needs its place: given when no token of it has come."""
        given = (
            self.rules.preempt
            and attempt.state == "running"
            and attempt.record["first_s"] is None
            and now < attempt.until_s
        )
        if attempt.state == "running":
            what = f"{attempt.row['tier']} {'given' if given else 'kept'}"
            self.asked[what] = self.asked.get(what, 0) + 1
        if given:
            if self.engine.cancel(attempt.sequence):
                self.note("end", now, attempt.sequence)
            attempt.state = "waiting"
            self.at(attempt.until_s, "deadline", attempt)
        self.scripts.yield_place(name, attempt.until_s - now if given else -1.0)

    def hear(self, now: float) -> None:
        for kind, name in self.scripts.messages():
            attempt = self.attempts[name]
            if kind.startswith("P"):
                self.give_place(now, name, attempt)
                continue
            if attempt.state != "waiting":
                continue
            if kind == "G":
                self.start(now, attempt)
            else:
                self.refuse(now, attempt, 1, "deadline" if kind == "X" else "evicted")

    def handle(self, now: float, what: str, item: Any) -> None:
        if what == "send":
            self.send(now, *item)
        elif what == "deadline" and item.state == "waiting":
            self.leave(now, item)
            self.refuse(now, item, 1, "deadline")
        elif what == "press":
            self.scripts.press(self.model)
        elif what == "timeout" and item.state in ("waiting", "running") and item.record["first_s"] is None:
            self.leave(now, item)
            self.end(now, item, "timeout")

    def step(self, now: float) -> float:
        """One iteration of the engine."""
        now, emitted = self.engine.step(now)
        for sequence in emitted:
            record = sequence.owner.record
            whole = self.rules.whole_batch and sequence.owner.row["tier"] == "batch" and sequence.state != "finished"
            if record["result"] is None and not whole:
                record["first_s"] = now if record["first_s"] is None else record["first_s"]
                record["tokens"] = sequence.generated
            if sequence.state == "finished":
                self.note("end", now, sequence)
                self.scripts.set_time(now)
                self.scripts.release(sequence.name, (sequence.prompt_tokens, sequence.generated))
                self.end(now, sequence.owner, "ok")
        return now


def simulate(
    yard: Any,
    scripts: Scripts,
    model: ServedModel,
    meta: dict[str, Any],
    schedule: list[dict[str, Any]],
    *,
    per_pod: int,
    rules: Rules = DEFAULT,
) -> World:
    """Run the schedule to its end; `outcomes` and `log` are what the scorer reads."""
    world = World(yard, scripts, model, meta, yard.engine.Engine(policy="priority"), per_pod, rules)
    engine, state = world.engine, caps.Caps(requests=float(per_pod))
    scripts.set_time(0.0)
    for row in schedule:
        world.at(row["time_s"], "send", (row, 0))
    now, stop, next_scrape, next_tick = 0.0, meta["seconds"] + DRAIN_S, 0.0, TICK_S
    tokens_before, steps_before = 0, 0
    decoding_s = 0.0
    while now < stop:
        scripts.set_time(now)
        while world.events and world.events[0][0] <= now:
            _, _, what, item = heapq.heappop(world.events)
            world.handle(now, what, item)
        if now >= next_scrape:
            load = scripts.load(model)
            steps = engine.steps - steps_before
            sample = caps.Sample(
                at_s=now,
                pods=1,
                waiting=engine.waiting_count,
                kv_used=engine.kv_used / engine.kv_tokens,
                preemptions=engine.preemptions,
                itl_s=decoding_s / steps if steps and engine.generated_total > tokens_before else 0.0,
                inflight=int(load[0]),
                tokens=load[3],
            )
            steps_before, tokens_before, decoding_s = engine.steps, engine.generated_total, 0.0
            state = caps.after(state, sample, per_pod=per_pod * caps.HEADROOM)
            scripts.set_caps(model, state)
            world.trail.append(
                (now, state.requests, state.tokens, state.saturation, load[0], load[1], sample.kv_used, sample.waiting)
            )
            next_scrape += SCRAPE_S
        if now >= next_tick:
            scripts.tick()
            next_tick += TICK_S
        world.hear(now)
        if engine.busy:
            before = now
            now = world.step(now)
            decoding_s += now - before
        else:
            now = min(world.events[0][0] if world.events else stop, next_scrape, next_tick)
        world.hear(now)
    for sequence in [*engine.running]:
        engine.cancel(sequence)
        world.note("end", now, sequence)
    return world
