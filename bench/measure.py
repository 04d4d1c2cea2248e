"""`make bench`: what one gateway worker does on core 0, with load, simulated engine and services on core 1.

Prints one Markdown table and writes `bench/build/bench.json`. Judge by CPU per request: it holds on a machine that is
also doing other things; requests per second and latency do not. Two references are measured in the same rounds: nginx
as a plain proxy, and `py_raw.py`, the least that Python can do.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import redis

from bench import machine
from bench.models import BURST, CHAT, PLAIN, SINGLY
from bench.report import table
from bench.services import BUILD, STATE
from bench.targets import (
    PATH,
    REFERENCE_KEY,
    Json,
    Load,
    Target,
    Tools,
    generate,
    one_key,
    saturate,
    start_all,
    write_inputs,
)
from core.keyspace import PREFIX


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process for a while: usage stays in the spool, so the drain does not share core 1 with the load."""
    machine.send(machine.tree(pid), signal.SIGSTOP)
    try:
        yield
    finally:
        machine.send(machine.tree(pid), signal.SIGCONT)


STREAMS = 2_000
DRAIN_TIMEOUT_S = 300
WARM_S = 6.0
SLICES = (  # name, keys, body, connections
    ("every stage, 200 B, 1 key, 64 connections", "one", "200 B", 64),
    ("every stage, 200 B, 1 key, 128 connections", "one", "200 B", 128),
    ("every stage, 200 B, 10,000 keys, 64 connections", "many", "200 B", 64),
    ("every stage, 200 B, 10,000 keys, 128 connections", "many", "200 B", 128),
    ("every stage, 16 KB, 1 key, 128 connections", "one", "16 KB", 128),
    ("every stage, 16 KB, 10,000 keys, 128 connections", "many", "16 KB", 128),
    ("no limits on key, project, tenant; 200 B, 128 connections", "unlimited", "200 B", 128),
)


def _unposted(valkey: redis.Redis) -> int:
    """Return how many requests have not been posted to the ledger: what is outstanding in the credit figures."""
    return sum(int(valkey.hlen(key)) for key in valkey.scan_iter(match=f"{PREFIX}out:*", count=1000))


def drain(ours: Target) -> Json | None:
    """Time the poster on what the last slice left in the spool, alone on core 1. None when nothing was left."""
    url = json.loads(STATE.read_text(encoding="utf-8"))["environment"]["TIDEGATE_VALKEY__URL"]
    with redis.Redis(unix_socket_path=url.removeprefix("unix://")) as valkey:
        events, before, began = _unposted(valkey), ours.cpu(), time.monotonic()
        machine.wait("the drain of the spool", lambda: _unposted(valkey) == 0, within_s=DRAIN_TIMEOUT_S)
    took = time.monotonic() - began
    spent = {name: total - before[name] for name, total in ours.cpu().items()}
    if events == 0:
        return None
    return {"events": events, "per_s": events / took, "cpu_ms": {n: 1000 * s / events for n, s in spent.items()}}


def measure_requests(tools: Tools, targets: dict[str, Target], rounds: int, seconds: float) -> list[Json]:
    """Measure every slice `rounds` times, each after a slice of the references; return rows of medians."""
    ours, rows, drains = targets["tidegate"], [], []
    references = [targets[name] for name in ("py-raw", "nginx") if name in targets]
    saturate(tools, ours, Load("many", "200 B", 128), WARM_S)  # so that every key has been seen
    for name, keys, body, connections in SLICES:
        runs: list[Json] = []
        for _ in range(rounds):
            beside = {t.name: saturate(tools, t, Load("reference", body, connections), seconds / 2) for t in references}
            with paused(ours.beside["poster"]):
                runs.append(saturate(tools, ours, Load(keys, body, connections), seconds) | {"references": beside})
            drains.append(drain(ours))
        rows.append(_request_row(name, runs))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return [*rows, _drain_row([done for done in drains if done])]


def _drain_row(drains: list[Json]) -> Json:
    parts = ("poster", "postgres", "valkey")
    return {
        "name": "drain of the spool, apart",
        "unit": "event",
        "per_s": _median(drains, "per_s"),
        "cpu_ms_beside": {part: _median(drains, "cpu_ms", part) for part in parts},
        "errors": 0,
    }


def _median(runs: list[Json], *path: str) -> float:
    values = []
    for run in runs:
        value: Any = run
        for step in path:
            value = value[step]
        values.append(float(value))
    return statistics.median(values)


def _request_row(name: str, runs: list[Json]) -> Json:
    cpu = _median(runs, "cpu_ms", "gateway")
    return {
        "name": name,
        "unit": "req",
        "per_s": _median(runs, "rps"),
        "cpu_ms": cpu,
        "per_cpu_s": 1000 / cpu,
        "cpu_ms_beside": {part: _median(runs, "cpu_ms", part) for part in runs[0]["cpu_ms"] if part != "gateway"},
        "ratio": {
            other: cpu / _median(runs, "references", other, "cpu_ms", "gateway") for other in runs[0]["references"]
        },
        "latency_ms": {p: _median(runs, "lat_us", p) / 1000 for p in ("p50", "p99")},
        "errors": sum(run["err"] for run in runs),
    }


def measure_streams(tools: Tools, targets: dict[str, Target], seconds: float) -> list[Json]:
    """Chunks in bursts, chunks that arrive one by one, and 2,000 slow streams with their memory."""
    bursts = (BURST, 64, ("-c", 16, "-w", 1, "-d", seconds))
    singly = (SINGLY, 500, ("-c", 300, "-w", 0, "-d", 4))  # all start at once and end after 5 s
    return [
        _stream_row("chunks in bursts of 64, 16 streams", _both(tools, targets, bursts[0], bursts[2]), bursts[1]),
        _stream_row("chunks singly, 300 streams x 100/s", _both(tools, targets, singly[0], singly[2]), singly[1]),
        measure_many_streams(tools, targets["tidegate"], one_key("one")),
    ]


def _both(tools: Tools, targets: dict[str, Target], model: str, options: tuple[object, ...]) -> dict[str, Json]:
    keys = {"py-raw": REFERENCE_KEY, "tidegate": one_key("one")}
    return {name: generate(tools, targets[name], key, model, *options, "-s", "-U") for name, key in keys.items()}


def _stream_row(name: str, runs: dict[str, Json], chunks: int) -> Json:
    """Make a row; `chunks` is how many content chunks a stream has."""
    ours = runs["tidegate"]
    per_chunk, yardstick = (run["cpu_ms"]["gateway"] / chunks for run in (ours, runs["py-raw"]))
    return {
        "name": name,
        "unit": "chunk",
        "per_s": ours["chunks_s"],
        "cpu_ms": per_chunk,
        "per_cpu_s": 1000 / per_chunk,
        "ratio": {"py-raw": per_chunk / yardstick},
        "core_share": ours["core_share"],
        "gap_ms": {p: ours["gap_us"][p] / 1000 for p in ("p50", "p99")},
        "errors": ours["err"],
    }


def measure_many_streams(tools: Tools, target: Target, key: str) -> Json:
    """2,000 streams of 20 tokens/s for 15 s; memory is read at rest and in the middle."""
    assert target.process is not None
    at_rest = machine.pss_bytes([target.process.pid])
    before, began = target.cpu(), time.monotonic()
    command = [tools.lgen, "-P", target.port, "-u", PATH, "-m", CHAT, "-H", f"Authorization: Bearer {key}"]
    command += ["-c", STREAMS, "-d", 14, "-w", 0, "-s", "-U"]
    with subprocess.Popen(
        ["taskset", "-c", str(machine.OTHER_CORE), *map(str, command)], stdout=subprocess.PIPE, text=True
    ) as load:
        time.sleep(8)
        meanwhile = machine.pss_bytes([target.process.pid])
        output, _ = load.communicate()
    result = json.loads(output)
    spent = target.cpu()["gateway"] - before["gateway"]
    return {
        "name": f"{STREAMS:,} streams x 20 tokens/s",
        "unit": "chunk",
        "per_s": result["chunks_s"],
        "cpu_ms": 1000 * spent / (300 * max(1, result["total_ok"])),
        "core_share": spent / (time.monotonic() - began),
        "kb_per_stream": (meanwhile - at_rest) / STREAMS / 1024,
        "gap_ms": {p: result["gap_us"][p] / 1000 for p in ("p50", "p99")},
        "errors": result["err"],
        "error_status": result["status_err"],
    }


def measure_latency(tools: Tools, targets: dict[str, Target], rounds: int, seconds: float) -> list[Json]:
    """Latency from the intended send time at 1,000 requests/s, less that of the simulator itself in the same round.

    With the poster at work beside and with it stopped: it shares its core with load generator and simulated engine.
    """
    added: dict[str, list[Json]] = {}
    errors: dict[str, int] = {}
    for _ in range(rounds):
        options = ("-r", 1000, "-c", 256, "-w", 1)
        base = generate(tools, targets["direct"], "", PLAIN, *options, "-d", seconds / 2)["lat_us"]
        ours = targets["tidegate"]
        for name, key, still in (
            ("py-raw", REFERENCE_KEY, False),
            ("tidegate", one_key("one"), True),
            ("tidegate, poster beside", one_key("one"), False),
        ):
            with paused(ours.beside["poster"]) if still else nullcontext():
                run = generate(tools, targets[name.partition(",")[0]], key, PLAIN, *options, "-d", seconds)
            errors[name] = errors.get(name, 0) + run["err"]
            added.setdefault(name, []).append({p: (run["lat_us"][p] - base[p]) / 1000 for p in ("p50", "p99")})
    return [
        {
            "name": f"added latency at 1,000 req/s, {name}",
            "unit": "req",
            "per_s": 1000,
            "latency_ms": {p: _median(runs, p) for p in ("p50", "p99")},
            "errors": errors[name],
        }
        for name, runs in added.items()
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each saturated slice")
    parser.add_argument("--only", choices=("requests", "streams", "latency"), help="measure one part")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    parts: dict[str, Callable[[Tools, dict[str, Target]], list[Json]]] = {
        "requests": lambda tools, targets: measure_requests(tools, targets, options.rounds, options.seconds),
        "streams": lambda tools, targets: measure_streams(tools, targets, options.seconds),
        "latency": lambda tools, targets: measure_latency(tools, targets, options.rounds, options.seconds),
    }
    rows: list[Json] = []
    BUILD.mkdir(exist_ok=True)
    tools = Tools.build()
    write_inputs()
    with ExitStack() as stack:
        targets = start_all(stack, tools)
        for name, part in parts.items():
            if options.only in (None, name):
                rows += part(tools, targets)
                (BUILD / "bench.json").write_text(
                    json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1), encoding="utf-8"
                )
    print(table(rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything started here is stopped
    main()
