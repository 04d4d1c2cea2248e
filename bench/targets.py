"""Programs of a benchmark: load generators, simulated engine, references, and the gateway with its services."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench import machine
from bench.models import PLAIN, UPSTREAM_PORT
from bench.services import BUILD, STATE

ROOT = Path(__file__).resolve().parents[1]
PATH = "/v1/chat/completions"
PORTS = {"tidegate": 9301, "py-raw": 9211, "nginx": 9201}
REFERENCE_KEY = "sk-bench-0001"  # one that py_raw.py knows
BODIES = {"200 B": 64, "16 KB": 16_000}  # bytes of the user's message
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """Where the programs are."""

    bench_dir: Path
    upstream: Path
    lgen: Path
    load: Path

    @classmethod
    def build(cls) -> "Tools":
        """Compile the load generators and the simulator."""
        bench_dir = Path(os.environ.get("BENCH_DIR") or ROOT.parent / "shared" / "bench").resolve()
        if not (bench_dir / "lgen.c").exists():
            sys.exit(
                f"bench: no lgen.c in {bench_dir}. Name the folder of the load generator: make bench BENCH_DIR=..."
            )
        tools = cls(bench_dir, BUILD / "upstream", BUILD / "lgen", BUILD / "load")
        sources = {
            tools.upstream: bench_dir / "upstream.c",
            tools.lgen: bench_dir / "lgen.c",
            tools.load: ROOT / "bench/load.c",
        }
        for program, source in sources.items():
            subprocess.run(["cc", "-O2", "-w", "-o", program, source], check=True)
        return tools


@dataclass(slots=True)
class Target:
    """A running gateway that is measured, and the services whose CPU is shown beside."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None
    beside: dict[str, int] = field(default_factory=dict)

    def cpu(self) -> dict[str, float]:
        """Return CPU seconds so far of the gateway and of each service."""
        own = [self.process.pid] if self.process else []
        return {"gateway": machine.cpu_s(own)} | {name: machine.cpu_s([pid]) for name, pid in self.beside.items()}


def _loaded(target: Target, command: list[str | Path]) -> Json:
    """Run a load generator against `target`; add CPU seconds spent meanwhile and CPU milliseconds per answer."""
    before, began = target.cpu(), time.monotonic()
    done = subprocess.run(
        ["taskset", "-c", str(machine.OTHER_CORE), *command], check=True, capture_output=True, text=True
    )
    result: Json = json.loads(done.stdout)
    spent = {name: max(0.0, total - before[name]) for name, total in target.cpu().items()}  # a child may have ended
    answers = result.get("total_ok", result.get("total", 0)) or 1
    result["cpu_ms"] = {name: 1000 * seconds / answers for name, seconds in spent.items()}
    result["core_share"] = spent["gateway"] / (time.monotonic() - began)
    result["cpu_s"] = spent
    return result


@dataclass(frozen=True, slots=True)
class Load:
    """Buffered requests in a closed loop. `keys` and `body` name files in the build folder."""

    keys: str
    body: str
    connections: int


def saturate(tools: Tools, target: Target, load: Load, seconds: float) -> Json:
    """Send `load` for `seconds` after half a second of warming up."""
    files = ("-k", BUILD / f"keys-{load.keys}.txt", "-b", BUILD / f"body-{load.body}.json")
    shape = ("-c", str(load.connections), "-d", str(seconds), "-w", "0.5", "-u", PATH)
    return _loaded(target, [tools.load, "-p", str(target.port), *files, *shape])


def generate(tools: Tools, target: Target, key: str, model: str, *options: object) -> Json:
    """Run BENCH_DIR's generator with one key: streams, and open-loop latency."""
    command = [tools.lgen, "-P", target.port, "-u", PATH, "-m", model, "-H", f"Authorization: Bearer {key}", *options]
    return _loaded(target, [str(part) for part in command])


def _answers(target: Target, key: str) -> bool:
    body = {"model": PLAIN, "messages": [{"role": "user", "content": "hi"}]}
    url = f"http://127.0.0.1:{target.port}{PATH}"
    try:
        response = httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=5.0)
    except httpx.TransportError:
        return False
    return response.status_code == httpx.codes.OK and "usage" in response.json()


@contextmanager
def _running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        machine.end(process)


def body_of(size: int) -> str:
    """A chat request whose user says so many bytes."""
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "fox " * (size // 4)}]
    return json.dumps({"model": PLAIN, "messages": messages, "max_tokens": 64}, separators=(",", ":"))


def write_inputs() -> None:
    for name, size in BODIES.items():
        (BUILD / f"body-{name}.json").write_text(body_of(size), encoding="utf-8")
    (BUILD / "keys-reference.txt").write_text(REFERENCE_KEY + "\n", encoding="utf-8")


def start_all(stack: ExitStack, tools: Tools) -> dict[str, Target]:
    """Start simulator, references, services and the gateway; return the targets by name."""
    start_upstream(stack, tools)
    targets = {"direct": Target("direct", UPSTREAM_PORT, None)}
    raw: list[str | Path] = [sys.executable, tools.bench_dir / "conf" / "py_raw.py", str(PORTS["py-raw"])]
    commands: dict[str, list[str | Path]] = {"py-raw": raw}
    if nginx := shutil.which("nginx"):
        (BUILD / "run").mkdir(exist_ok=True)
        commands["nginx"] = [nginx, "-p", f"{BUILD}/", "-c", tools.bench_dir / "conf" / "nginx.conf"]
    for name, command in commands.items():
        process = stack.enter_context(_running(machine.start(machine.GATEWAY_CORE, command, BUILD / f"{name}.log")))
        targets[name] = Target(name, PORTS[name], process)
        machine.wait(name, partial(_answers, targets[name], REFERENCE_KEY), within_s=20, process=process)
    targets["tidegate"] = start_tidegate(stack)
    return targets


def start_upstream(stack: ExitStack, tools: Tools) -> None:
    """Start the simulated engine."""
    command: list[str | Path] = [tools.upstream, "-p", str(UPSTREAM_PORT)]
    stack.enter_context(_running(machine.start(machine.OTHER_CORE, command, BUILD / "upstream.log")))


def start_tidegate(stack: ExitStack) -> Target:
    """Start the services and one gateway worker."""
    STATE.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.services"]
    services = stack.enter_context(_running(machine.start(machine.OTHER_CORE, command, BUILD / "services.log")))
    machine.wait("services (see bench/build/services.log)", STATE.exists, within_s=240, process=services)
    command = [sys.executable, "-m", "bench.gateway", str(PORTS["tidegate"])]
    gateway = stack.enter_context(_running(machine.start(machine.GATEWAY_CORE, command, BUILD / "gateway.log")))
    target = Target("tidegate", PORTS["tidegate"], gateway, json.loads(STATE.read_text(encoding="utf-8"))["pids"])
    key = one_key("one")
    machine.wait("gateway (see bench/build/gateway.log)", lambda: _answers(target, key), within_s=60, process=gateway)
    return target


def one_key(name: str) -> str:
    return (BUILD / f"keys-{name}.txt").read_text(encoding="utf-8").split("\n", 1)[0]
