"""What routing decides, and what a decision costs: `make bench-routing TRACE=mooncake_conversation_trace_sample.jsonl`.

The trace (Mooncake, Apache-2.0) has one hash for each 512 tokens of a prompt; the bytes of a block are made from its
hash, so the real router hashes real prompts of the trace's lengths (4 bytes a token). Engines are played: one reads
prompts one after the other, 60 µs a token that is not in its cache, and gives a token every 15 ms. All of it on a
virtual clock. Tenants are not in the trace: all requests are of one.

*Best possible* is one cache without bound that sees every request. *Spread* is how far the busiest replica is above the
mean: by requests, and by work (tokens read, and four for each token written).
"""

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.router.fleet import OLD_S, Choice
from scheduler.router.replica import Figures, Outcome
from scheduler.router.router import Router

BLOCK_TOKENS, TOKEN_BYTES = 512, 4
READ_S, WRITE_S = 0.00006, 0.015
LOOK_S, FIGURES_S = 0.25, 1.0
WRITE_WEIGHT = 4
SMALL_CACHE = 10_000  # blocks: 5 million tokens, as of a card's memory and some of its host's
POLICIES = ("tidegate", "fewest requests", "round robin")


@dataclass
class Engine:
    """One replica: its cache in blocks, least recently used first, 0 for no bound."""

    blocks_max: int
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    running: int = 0
    requests: int = 0
    work: int = 0

    def read(self, blocks: list[int]) -> int:
        """Return how many blocks from the beginning were in the cache; all of them are afterwards."""
        hits = 0
        for block in blocks:
            if block not in self.cache:
                break
            hits += 1
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while self.blocks_max and len(self.cache) > self.blocks_max:
            self.cache.popitem(last=False)
        return hits


@dataclass
class Result:
    """What one run came to."""

    hits: int = 0
    blocks: int = 0
    first_token_s: list[float] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.hits / self.blocks

    def spread(self, of: Callable[[Engine], int]) -> float:
        loads = [of(engine) for engine in self.engines]
        return max(loads) / statistics.fmean(loads) - 1


class Prompts:
    """The bytes of the trace's blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}

    def of(self, row: dict[str, Any]) -> bytes:
        size = row["input_length"] * TOKEN_BYTES
        return b"".join(self._block(block) for block in row["hash_ids"])[:size]

    def _block(self, number: int) -> bytes:
        found = self._blocks.get(number)
        if found is None:
            if len(self._blocks) > 20_000:
                self._blocks.clear()
            found = self._blocks[number] = random.Random(number).randbytes(BLOCK_TOKENS * TOKEN_BYTES)
        return found


def state_of(count: int) -> DeploymentState:
    endpoints = tuple(Endpoint(f"r{n}", f"unix:/r{n}") for n in range(count))
    return DeploymentState("bench", ReplicaState.READY, endpoints)


def run(rows: list[dict[str, Any]], policy: str, count: int, *, gateways: int = 1, blocks_max: int = 0) -> Result:
    """Send the whole trace."""
    draw = random.Random(7)
    engines = [Engine(blocks_max) for _ in range(count)]
    result, state, prompts = Result(engines=engines), state_of(count), Prompts()
    routers = [Router(random=draw.random) for _ in range(gateways)]
    ends: list[tuple[float, int, int, Choice | None]] = []
    looked = read = 0.0
    for number, row in enumerate(rows):
        now = row["timestamp"] / 1000 + 1
        while ends and ends[0][0] <= now:
            _, _, at, choice = heapq.heappop(ends)
            engines[at].running -= 1
            if choice is not None:
                choice.ended(Outcome.WELL, 0.1, now)
        if now - read >= FIGURES_S:
            read = now
            said = {f"r{n}": Figures(engine.running, 0, 0.0) for n, engine in enumerate(engines)}
            for router in routers:
                router.take_figures("bench", said, now)
        if now - looked >= LOOK_S:
            looked = now
            for router in routers:
                router.look(now, lambda _: 0.0)
        choice = None
        if policy == "round robin":
            at = number % count
        elif policy == "fewest requests":
            at = min(range(count), key=lambda n: (engines[n].running, (n - number) % count))
        else:
            choice = routers[draw.randrange(gateways)].pick(state, prompts.of(row), 0, "tenant", now)
            at = int(choice.replica.name[1:])
            choice.sent()
        engine, blocks = engines[at], row["hash_ids"]
        hits = engine.read(blocks)
        to_read = max(0, row["input_length"] - hits * BLOCK_TOKENS)
        engine.free_at = max(now, engine.free_at) + to_read * READ_S
        result.hits += hits
        result.blocks += len(blocks)
        result.first_token_s.append(engine.free_at - now)
        engine.requests += 1
        engine.running += 1
        engine.work += to_read + WRITE_WEIGHT * row["output_length"]
        heapq.heappush(ends, (engine.free_at + row["output_length"] * WRITE_S, number, at, choice))
    return result


def best_possible(rows: list[dict[str, Any]]) -> float:
    one, hits, blocks = Engine(0), 0, 0
    for row in rows:
        hits += one.read(row["hash_ids"])
        blocks += len(row["hash_ids"])
    return hits / blocks


def show(name: str, result: Result, best: float) -> None:
    first = sorted(result.first_token_s)
    sys.stdout.write(
        f"| {name} | {result.rate:.1%} | {result.rate / best:.1%} "
        f"| {result.spread(lambda engine: engine.requests):.1%} | {result.spread(lambda engine: engine.work):.1%} "
        f"| {statistics.fmean(first):.2f} | {first[len(first) * 99 // 100]:.2f} |\n"
    )
    sys.stdout.flush()


def trace(rows: list[dict[str, Any]], counts: list[int], policies: list[str]) -> None:
    best = best_possible(rows)
    sys.stdout.write(f"{len(rows):,} requests; best possible with one cache {best:.1%} of the blocks\n\n")
    sys.stdout.write(
        "| replicas, policy | hit rate | of the best | spread of requests | of work | first token mean s | p99 s |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for count in counts:
        for policy in policies:
            show(f"{count}, {policy}", run(rows, policy, count), best)
        show(f"{count}, tidegate, 4 gateways", run(rows, "tidegate", count, gateways=4), best)
    for policy in policies:
        name = f"{counts[0]}, {policy}, caches of {SMALL_CACHE:,} blocks"
        show(name, run(rows, policy, counts[0], blocks_max=SMALL_CACHE), best)


def cost(count: int) -> None:
    """Time a decision and its two notes at `count` replicas, with prompts that were never seen and ones that were."""
    sys.stdout.write(f"\n{count} replicas, µs of CPU a request\n\n")
    sys.stdout.write("| prompt | choose | sent | ended |\n|---|---|---|---|\n")
    for size in (200, 2_000, 16_000, 64_000):
        for fresh in (True, False):
            sys.stdout.write(_cost_row(count, size, fresh=fresh))


def _cost_row(count: int, size: int, *, fresh: bool) -> str:
    router, state, draw = Router(random=random.Random(1).random), state_of(count), random.Random(2)
    prompts = [draw.randbytes(size) for _ in range(50)]
    said = {f"r{n}": Figures(n % 7, 0, 0.0) for n in range(count)}
    took: list[list[float]] = [[], [], []]
    for turn in range(60):
        now = 100.0 + turn * OLD_S * (0.2 if fresh else 2)
        if fresh or turn == 0:
            router.take_figures("bench", said, now)
        router.look(now, lambda _: 0.0)
        begun = time.process_time_ns()
        choices = [router.pick(state, prompt, 0, "tenant", now) for prompt in prompts]
        took[0].append((time.process_time_ns() - begun) / len(prompts) / 1000)
        begun = time.process_time_ns()
        for choice in choices:
            choice.sent()
        took[1].append((time.process_time_ns() - begun) / len(prompts) / 1000)
        begun = time.process_time_ns()
        for choice in choices:
            choice.ended(Outcome.WELL, 0.1, now)
        took[2].append((time.process_time_ns() - begun) / len(prompts) / 1000)
    figures = " | ".join(f"{statistics.median(column):.1f} ({min(column):.1f} at least)" for column in took)
    return f"| {size:,} B, {'figures fresh' if fresh else 'figures old'} | {figures} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; without it only the cost is measured")
    parser.add_argument("--replicas", default="4,8,16")
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    if options.trace is not None:
        with options.trace.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        trace(rows, [int(count) for count in options.replicas.split(",")], options.policies.split(","))
    cost(64)


if __name__ == "__main__":
    main()
