"""What one buffered request costs the gateway's own code: `make bench-hot-path`. No sockets, no disk, one process.

The real protocol, `serve`, admission, engine client and spool run on transports in memory; callers, Valkey, engine and
disk are played here, outside the measured stretches. The calls per request are the same in every run, and the least CPU
of many rounds moves by a few per cent: small changes can be judged by both. What is missing against `make bench` is the
kernel, the event loop's reading, the spool's thread, and caches that others have emptied.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import hiredis
import uvloop

from api.inference import app
from api.inference.access_log import AccessLog
from api.inference.directory import Directory
from api.inference.gateway import Gateway
from api.inference.metrics import Metrics
from api.inference.protocol import InferenceProtocol
from api.inference.sweeper import date_line
from bench.models import PLAIN
from bench.targets import BODIES, ROOT, body_of
from billing.price_table import PriceTable, VersionPrices
from billing.spool import SpoolWriter
from billing.types import Meter, PriceItem
from catalog.types import DeploymentKind, EngineKind, ServedModel
from core.clock import SystemClock
from core.ids import new_uuid
from core.money import Currency
from core.resp import Address, RespClient, _Connection
from core.settings import Gateway as GatewaySettings
from core.tiers import Tier
from engine.client import Connection, UpstreamPool
from scheduler import commands
from scheduler.admission import Admission
from tenants.api_keys import digest, mint
from tenants.types import Limit, LimitLevel, LimitMetric, Principal

PEPPER = b"p" * 32
ENGINE = "http://127.0.0.1:9100"
TURNS = 4  # of the loop, until what was set off by one arrival has been written out
LIMIT = 10_000_000
PLENTY = 10**8  # of what a block has
LIMITS = (  # those of `bench.seed`
    Limit(LimitLevel.KEY, LimitMetric.REQUESTS_PER_MINUTE, LIMIT),
    Limit(LimitLevel.PROJECT, LimitMetric.REQUESTS_PER_MINUTE, LIMIT),
    Limit(LimitLevel.KEY, LimitMetric.CONCURRENCY, LIMIT),
    Limit(LimitLevel.PROJECT, LimitMetric.CONCURRENCY, LIMIT),
    Limit(LimitLevel.TENANT, LimitMetric.CONCURRENCY, LIMIT),
)
ANSWER = (
    b'{"id":"chatcmpl-sim0001","object":"chat.completion","created":1764500000,"model":"%b","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog and then the dog sleeps."},'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":21,"completion_tokens":16,"total_tokens":37}}'
) % PLAIN.encode()
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        setattr(self, "write", self.written.append)  # noqa: B010 - a method of C: no call of ours is counted

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 40000) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        raise RuntimeError("the gateway gave up a connection")

    def take(self) -> bytes:
        data = b"".join(self.written)
        self.written.clear()
        return data


class Valkey:
    """Plays the server on one connection: every request is granted, with all its limits far from their end."""

    def __init__(self, *, limited: bool) -> None:
        self.client = RespClient(Address(), 1.0, 20_000, float)
        self.connection = _Connection(1.0, 20_000)
        self.client._connection = self.connection
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self._reader = hiredis.Reader()
        numbers = [1, 0, 10**12, time.time_ns() // 1000, -1]  # see `scheduler.types.Grant.reply`
        if limited:
            numbers += [LIMIT - 1, 0, LIMIT - 1, 1, 3]
        self._granted = b"*%d\r\n" % len(numbers) + b"".join(b":%d\r\n" % number for number in numbers)
        held = [1, PLENTY, PLENTY, PLENTY * LIMIT, PLENTY, PLENTY, PLENTY, 10**15]  # see scripts/blocks.lua
        self._block = b"*9\r\n" + b"".join(b":%d\r\n" % number for number in held) + self._granted

    def replies(self) -> bytes:
        """The answers to all that was sent since."""
        self._reader.feed(self.wire.take())
        commands_sent = iter(self._reader.gets, False)
        return b"".join(map(self._reply, commands_sent))

    def _reply(self, command: list[bytes]) -> bytes:
        name, function = command[0], command[1].decode("latin-1")
        if name == b"INFO":
            return b"$8\r\nrun_id:x\r\n"
        if function == commands.ACQUIRE:
            return self._granted
        if function in {commands.BLOCK, commands.CHARGE}:
            return self._block if function == commands.BLOCK else b"*1\r\n:1\r\n"
        if function == commands.EPOCH:
            return b"*2\r\n:1\r\n$1\r\ne\r\n"
        if function == commands.HEARTBEAT:
            return b"*3\r\n:1\r\n:1\r\n:1\r\n"
        return b"*0\r\n" if name == b"HKEYS" else b":1\r\n"

    async def answering(self, work: Awaitable[Any]) -> None:
        """Do `work`, answering meanwhile."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            if self.wire.written:
                self.connection.data_received(self.replies())
        await task


class Stopwatch:
    """CPU of this thread, calls of functions and steps of the interpreter, in the measured stretches only."""

    def __init__(self, count: str = "") -> None:
        """`count` is "calls" or "steps"; both make the CPU meaningless."""
        self.cpu_ns = 0
        self.counts: Counter[str] = Counter()  # by function
        self._count = count

    async def run(self, arrival: Callable[[], object]) -> None:
        """Let something arrive, and the loop turn until its consequences are written."""
        if self._count == "calls":
            sys.setprofile(self._call)
        elif self._count == "steps":
            sys.settrace(self._step)
        began = time.thread_time_ns()
        arrival()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.cpu_ns += time.thread_time_ns() - began
        sys.setprofile(None)
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.counts[_place(frame)] += 1
        elif event == "c_call":
            self.counts[f"{_place(frame)} -> {argument.__qualname__}"] += 1

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.counts[_place(frame)] += 1
        return self._step


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')} {frame.f_code.co_qualname}"


class Stage:
    """A gateway with callers and engine connections, all in memory, that serves its callers in step."""

    def __init__(
        self,
        folder: Path,
        body: bytes,
        *,
        callers: int,
        keys: int,
        limited: bool = True,
        unlike: bool = False,
        blocks: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        clock = SystemClock()
        self.valkey = Valkey(limited=limited)
        self.spool = SpoolWriter(folder, clock=clock)  # never started: its thread's work is done by `_sync`
        self.spool._loop = loop
        self.admission = Admission(
            self.valkey.client, replica="bench", clock=clock, global_inflight_max=LIMIT, background=False, blocks=blocks
        )
        metrics = Metrics()
        pool = UpstreamPool(loop, clock.monotonic, connections_max=callers)
        self.gateway = Gateway(
            loop=loop,
            settings=GatewaySettings(),
            clock=clock,
            pepper=PEPPER,
            new_id=new_uuid,
            directory=_directory(),
            admission=self.admission,
            spool=self.spool,
            states=cast("Any", SimpleNamespace(opening=())),
            pool=pool,
            upstream=cast("Any", None),
            metrics=metrics,
            log=AccessLog(len, metrics.add),
        )
        self.gateway.date_line = date_line(clock.now_us())
        self._callers = [_caller(self.gateway) for _ in range(callers)]
        self._engines = [_engine(pool) for _ in range(callers)]
        self._requests = _requests(self.gateway.directory, body, keys, limited=limited, unlike=unlike)

    async def serve(self, watch: Stopwatch) -> None:
        """One request from every caller."""
        requests = [next(self._requests) for _ in self._callers]
        await watch.run(lambda: _arrive([protocol for protocol, _ in self._callers], requests))
        replies = self.valkey.replies()
        await watch.run(lambda: self.valkey.connection.data_received(replies))
        engines = [connection for connection, wire in self._engines if wire.take()]
        await watch.run(lambda: _arrive(engines, [REPLY] * len(engines)))
        self.valkey.connection.data_received(self.valkey.replies())  # to what was given back
        await watch.run(self._sync)
        answers = [wire.take() for _, wire in self._callers]
        assert all(b"200 OK" in answer and b"X-Tidegate-Cost" in answer for answer in answers)

    def _sync(self) -> None:
        """What the spool's thread does, without the disk."""
        _, waiters = self.spool._take()
        self.spool._deliver(waiters, ok=True)

    def tidy(self) -> None:
        self.gateway.log._lines.clear()
        self.admission._on_beat(1)
        self.admission._on_beat(1)
        self.admission.blocks.turn()
        self.valkey.connection.data_received(self.valkey.replies())


def _arrive(protocols: list[Any], data: list[bytes]) -> None:
    for protocol, piece in zip(protocols, data, strict=True):
        protocol.data_received(piece)


def _directory() -> Directory:
    model = ServedModel(
        name=PLAIN,
        model_id=new_uuid(),
        version_id=new_uuid(),
        deployment_id=new_uuid(),
        kind=DeploymentKind.EXTERNAL,
        engine=EngineKind.OPENAI,
        upstream_model=PLAIN,
        context_max=32768,
        default_max_tokens=512,
        endpoints=frozenset({"chat"}),
        inflight_max=LIMIT,
        base_url=ENGINE,
    )
    items = [PriceItem(model.model_id, Tier.STANDARD, meter, 2_000_000) for meter in (Meter.INPUT, Meter.OUTPUT)]
    directory = Directory()
    directory.models = {PLAIN: model}
    directory.prices = PriceTable([(0, VersionPrices(new_uuid(), Currency.USD, items))], as_of_us=0)
    directory.loaded = True
    return directory


def _caller(gateway: Gateway) -> tuple[InferenceProtocol, Wire]:
    protocol, wire = InferenceProtocol(gateway, set(), set()), Wire()
    protocol.connection_made(wire)
    return protocol, wire


def _engine(pool: UpstreamPool) -> tuple[Connection, Wire]:
    connection, wire = Connection(pool, pool.target(ENGINE)), Wire()
    connection.connection_made(wire)
    pool.give_back(connection)
    return connection, wire


def _requests(directory: Directory, body: bytes, keys: int, *, limited: bool, unlike: bool) -> Iterator[bytes]:
    """Requests of so many keys of one tenant in turn, as `load.c` writes them; `unlike`: no two heads are alike."""
    tenant, project = new_uuid(), new_uuid()
    made = []
    for _ in range(keys):
        key = mint()
        directory.principals[digest(PEPPER, key)] = Principal(
            tenant_id=tenant,
            project_id=project,
            key_id=new_uuid(),
            currency=Currency.USD,
            scopes=frozenset({"inference"}),
            tier_default=Tier.STANDARD,
            tier_max=Tier.PRIORITY,
            limits=LIMITS if limited else (),
        )
        made.append(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:9301\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: load%b\r\nContent-Length: %d\r\n\r\n%b"
            % (key.encode(), key[-8:].encode() if unlike else b"", len(body), body)
        )
    while True:
        yield from made


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Serve until every key has been seen, then count in one round and time in all others."""
    body = body_of(BODIES[options.body]).encode()
    stage = Stage(
        folder,
        body,
        callers=options.callers,
        keys=options.keys,
        limited=not options.unlimited,
        unlike=options.unlike,
        blocks=options.blocks,
    )
    await stage.valkey.answering(stage.admission.start())
    for _ in range(2 * options.keys // options.callers + 20):
        await stage.serve(Stopwatch())
    gc.collect()
    gc.freeze()
    calls, steps, times = Stopwatch("calls"), Stopwatch("steps"), []
    await stage.serve(calls)
    await stage.serve(steps)
    for _ in range(options.rounds):
        watch = Stopwatch()
        await stage.serve(watch)
        times.append(watch.cpu_ns / options.callers / 1000)
        stage.tidy()
    for counted in (calls, steps):
        for name, count in counted.counts.most_common(options.list):
            print(f"{count / options.callers:7.2f}  {name}")
    print(
        f"One request: {calls.counts.total() / options.callers:.1f} calls, "
        f"{steps.counts.total() / options.callers:.0f} steps of the interpreter; "
        f"{min(times):.1f} us at least, {statistics.median(times):.1f} us in the median."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--body", choices=tuple(BODIES), default="200 B")
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--callers", type=int, default=64, help="requests in step")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--unlimited", action="store_true", help="no limits on key, project and tenant")
    parser.add_argument("--blocks", action="store_true", help="admit from leased blocks; with one of `--keys`")
    parser.add_argument("--unlike", action="store_true", help="every key's head is another, so that none is known")
    parser.add_argument(
        "--list", type=int, default=0, metavar="N", help="also the N functions with most calls, and most steps"
    )
    options = parser.parse_args()
    gc.set_threshold(*app.GC_THRESHOLDS)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
