"""What admission costs: `python -m bench.admission`. Acquire and release over a Valkey of its own, append-only file on.

Prints, for each set of limits, pairs per second, the CPU of one pair in the gateway's process (client, encoding, task
switch included) and in Valkey (socket and file included), and how much of it the two scripts are. `--keys` callers take
turns, so that counters are as cold or hot as in real life; `--at-once` requests are in flight.
"""

import argparse
import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import uvloop

from bench import machine
from catalog.types import DeploymentKind, EngineKind, ServedModel
from cli.embedded import valkey as vk
from core import keyspace
from core.clock import SystemClock
from core.credit_figure import LAYOUT
from core.demand import Demand, DemandKind, Unit
from core.ids import new_uuid
from core.resp import RespClient
from core.tiers import Tier
from scheduler.admission import Admission
from scheduler.types import Grant, Prepared

PLENTY = 10**9
POSTED_AFTER = 4096  # pairs
CREDIT_NANO = 10**15
HOLD_NANO, CHARGE_NANO = 250_000, 90_000
INPUT_TOKENS, OUTPUT_TOKENS, USED_INPUT, USED_OUTPUT = 300, 256, 210, 80
MICRO = 1e6
Limits = Callable[[str, str, str], tuple[Demand, ...]]  # of the hex ids of key, project and tenant
KEYS_OF_TENANT = 4

# KEYS: credit, outstanding. ARGV: what is no request.
POST = """
local kept, sum = {}, 0
for _, block in ipairs(ARGV) do kept[block] = true end
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
  if kept[name] then sum = sum + redis.call('HGET', KEYS[2], name) else redis.call('HDEL', KEYS[2], name) end
end
local available, version = struct.unpack('<ddd', redis.call('GET', KEYS[1]))
redis.call('SET', KEYS[1], struct.pack('<ddd', available, version, sum))
"""


def _model() -> ServedModel:
    return ServedModel(
        name="small",
        model_id=uuid4(),
        version_id=uuid4(),
        deployment_id=uuid4(),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="small",
        context_max=4096,
        default_max_tokens=256,
        endpoints=frozenset({"chat"}),
        inflight_max=1000,
        waiting_max=256,
        max_wait_s=30,
    )


def _rate(counter: str, refusal: str, unit: Unit) -> Demand:
    amount = 1 if unit is Unit.REQUEST else 0
    return Demand(DemandKind.RATE, counter, amount, PLENTY, refusal, 60, unit, label="of this key")


def _concurrency(counter: str) -> Demand:
    return Demand(DemandKind.CONCURRENCY, counter, 1, PLENTY, "CONCURRENCY_LIMITED")


def usual(key: str, project: str, tenant: str) -> tuple[Demand, ...]:
    """Requests per minute of key and project, requests at once of key, project and tenant."""
    return (
        _rate(f"key:{key}:rpm", "RATE_LIMITED", Unit.REQUEST),
        _rate(f"project:{project}:rpm", "RATE_LIMITED", Unit.REQUEST),
        _concurrency(f"key:{key}:conc"),
        _concurrency(f"project:{project}:conc"),
        _concurrency(f"tenant:{tenant}:conc"),
    )


def tokens(key: str, project: str, tenant: str) -> tuple[Demand, ...]:
    """The usual, and input and output tokens per minute of the key."""
    return (
        *usual(key, project, tenant),
        _rate(f"key:{key}:itpm", "TOKENS_LIMITED", Unit.INPUT_TOKEN),
        _rate(f"key:{key}:otpm", "TOKENS_LIMITED", Unit.OUTPUT_TOKEN),
    )


def budgets(key: str, project: str, tenant: str) -> tuple[Demand, ...]:
    """All that, and the tenant's spend per day and month."""
    spends = (f"tenant:{tenant}:spend:d:2026-11-30", f"tenant:{tenant}:spend:m:2026-11")
    return (
        *tokens(key, project, tenant),
        *(Demand(DemandKind.SPEND, name, 0, CREDIT_NANO, "BUDGET_EXCEEDED") for name in spends),
    )


SETS: dict[str, Limits] = {"usual": usual, "with tokens": tokens, "with tokens and budgets": budgets}


class Measured(msgspec.Struct):
    """Of one run; CPU in µs for a pair."""

    pairs_per_s: float
    gateway_us: float
    valkey_us: float
    scripts_us: float


class Bench:
    """Callers of one set of limits on an emptied Valkey."""

    def __init__(self, client: RespClient, own: RespClient, limits: Limits, *, blocks: bool = False) -> None:
        self._own = own
        self._limits = limits
        self._model = _model()
        self._turn: Iterator[Prepared] = iter(())
        self._tenants: list[UUID] = []
        self._used: set[UUID] = set()  # since the last posting
        self.admission = Admission(
            client,
            replica="bench",
            clock=SystemClock(),
            global_inflight_max=100_000,
            budget_loader=self._load,
            blocks=blocks,
        )

    async def start(self, keys: int, keys_of_tenant: int = KEYS_OF_TENANT) -> None:
        await self._own.call("FLUSHALL")
        await self.admission.start()
        callers = []
        for n in range(keys):
            if n % keys_of_tenant == 0:
                self._tenants.append(uuid4())
                await self._own.call("SET", keyspace.credit(self._tenants[-1]), LAYOUT.pack(CREDIT_NANO, 1, 0))
            tenant = self._tenants[-1].hex
            demands = self._limits(uuid4().hex, uuid4().hex, tenant)
            callers.append(self.admission.prepare(demands, self._model, tenant))
        self._turn = itertools.cycle(callers)

    async def run(self, pairs: int, at_once: int) -> int:
        """Return how many pairs were made."""
        for _ in range(max(1, pairs // POSTED_AFTER)):
            await asyncio.gather(*(self._work(POSTED_AFTER // at_once) for _ in range(at_once)))
            await self.post()
        return max(1, pairs // POSTED_AFTER) * (POSTED_AFTER // at_once) * at_once

    async def _work(self, count: int) -> None:
        for _ in range(count):
            grant = await self._ask()
            await asyncio.sleep(0)
            self.admission.release(grant, CHARGE_NANO, USED_INPUT, USED_OUTPUT)

    async def _ask(self) -> Grant:
        prepared = next(self._turn)
        self._used.add(UUID(hex=prepared.tenant))
        if prepared.block is not None:
            tokens = (INPUT_TOKENS, OUTPUT_TOKENS)
            grant = self.admission.take(new_uuid(), prepared, HOLD_NANO, *tokens, Tier.STANDARD)
            if grant is not None:
                return grant
        return await self.admission.acquire(
            new_uuid(),
            prepared,
            hold=HOLD_NANO,
            input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            tier=Tier.STANDARD,
            wait_s=5.0,
        )

    async def acquire(self, count: int) -> list[Grant]:
        """Ask for the next callers, all at once."""
        return await asyncio.gather(*(self._ask() for _ in range(count)))

    async def release(self, grants: list[Grant]) -> None:
        """Give all back; returns once the server has done it."""
        for grant in grants:
            self.admission.release(grant, CHARGE_NANO, USED_INPUT, USED_OUTPUT)
        await self.admission.heartbeat()  # its answer comes after theirs

    async def post(self) -> None:
        """Take away what is outstanding, as the poster does, so that it stays as small as in life."""
        blocks = [key.decode() for key in self.admission.blocks.keys()]  # noqa: SIM118 - it is no dict
        for tenant in self._used:
            await self._own.call("EVAL", POST, 2, keyspace.credit(tenant), keyspace.outstanding(tenant), *blocks)
        self._used.clear()
        await self._own.call("PING")

    async def _load(self, tenant: UUID, spends: tuple[Demand, ...]) -> None:  # noqa: ARG002 - nobody spent anything yet
        for demand in spends:
            await self._own.call("SET", keyspace.counter(demand.counter), 0)


async def _scripts_us(client: RespClient) -> int:
    found = (await client.call("INFO", "commandstats")).decode().split("\r\n")
    lines = [line for line in found if line.startswith("cmdstat_fcall:")]
    return sum(int(line.partition("usec=")[2].partition(",")[0]) for line in lines)


async def measure(url: str, valkey_pid: int, limits: Limits, options: argparse.Namespace) -> Measured:
    client, own = await RespClient.connect(url), await RespClient.connect(url)
    bench = Bench(client, own, limits, blocks=options.blocks)
    await bench.start(options.keys)
    await bench.run(max(options.pairs // 4, options.keys), options.at_once)
    scripts_us, valkey_s = await _scripts_us(own), machine.cpu_s([valkey_pid])
    began, gateway_s = time.perf_counter(), time.process_time()
    pairs = await bench.run(options.pairs, options.at_once)
    seconds, gateway_s = time.perf_counter() - began, time.process_time() - gateway_s
    valkey_s, scripts_us = machine.cpu_s([valkey_pid]) - valkey_s, await _scripts_us(own) - scripts_us
    await bench.admission.close()
    await client.close()
    await own.close()
    return Measured(pairs / seconds, gateway_s / pairs * MICRO, valkey_s / pairs * MICRO, scripts_us / pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40_000)
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--blocks", action="store_true", help="leased blocks for callers that come fast: few `--keys`")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tg-bench-", dir="/tmp"))
    process = vk.start(folder, folder / "v.sock")
    try:
        vk.wait_ready(folder, folder / "v.sock", lambda: process.poll() is None)
        print("| limits | pairs/s | gateway µs | Valkey µs | of it scripts µs |\n|---|---|---|---|---|")
        for name in options.sets:
            runs = [
                uvloop.run(measure(f"unix://{folder / 'v.sock'}", process.pid, SETS[name], options))
                for _ in range(options.rounds)
            ]
            best = min(runs, key=lambda run: run.gateway_us + run.valkey_us)
            figures = f"{best.pairs_per_s:,.0f} | {best.gateway_us:.1f} | {best.valkey_us:.1f} | {best.scripts_us:.1f}"
            print(f"| {name} | {figures} |", flush=True)
    finally:
        vk.stop(process)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
