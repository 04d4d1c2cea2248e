"""Runs the yardsticks' programs against a rig: make a schedule, drive it, score it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.overload.rig import Rig

DRAIN_S = 15.0  # what has not ended so long after the last arrival is not counted
SAMPLE_S = 0.1

Rows = list[dict[str, Any]]


def schedule(rig: Rig, *options: str, only: str = "", name: str = "schedule") -> Path:
    """Write a schedule of the yardsticks' making; `only`: of one tier."""
    command: list[str | Path] = [sys.executable, rig.yardsticks / "overload_load.py", "--retries", *options]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first, *rows = text.splitlines()
    if only:
        rows = [row for row in rows if json.loads(row)["tier"] == only]
    path = rig.folder / f"{name}.jsonl"
    path.write_text("\n".join([first, *rows]) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    first, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return first["meta"], rows


def write(path: Path, meta: dict[str, Any], rows: Rows) -> Path:
    path.write_text("\n".join(map(json.dumps, ({"meta": meta}, *rows))) + "\n", encoding="utf-8")
    return path


def drive(
    rig: Rig, wanted: Path, *, at: Sequence[tuple[float, Callable[[], object]]] = (), drain_s: float = DRAIN_S
) -> tuple[Path, dict[str, list[float]]]:
    """Drive the schedule; `at` does something so many seconds in. Returns the outcomes and what was sampled."""
    meta, _ = read(wanted)
    outcomes = wanted.with_suffix(".outcomes.jsonl")
    command: list[str | Path] = [
        sys.executable,
        rig.yardsticks / "overload_client.py",
        "--schedule",
        wanted,
        "--keys",
        rig.keys,
    ]
    urls = [part for url in rig.urls for part in ("--url", url)]
    begun, sampled = time.monotonic(), Sampler(rig)
    client = subprocess.Popen([*command, *urls, "--out", outcomes])
    todo, shown = sorted(at, key=lambda one: one[0]), 0.0
    try:
        while client.poll() is None and (now := time.monotonic() - begun) < meta["seconds"] + drain_s:
            while todo and todo[0][0] <= now:
                todo.pop(0)[1]()
            sampled.take()
            if now - shown >= 10:
                shown = now
                sys.stderr.write(f"    {now:4.0f} of {meta['seconds']:.0f} s, load average {os.getloadavg()[0]:.1f}\n")
            time.sleep(SAMPLE_S)
    finally:
        sampled.close()
        if client.poll() is None:
            client.send_signal(signal.SIGKILL)
        client.wait()
    _drop_half_a_line(outcomes)
    return outcomes, sampled.found


class Sampler:
    """Reads each engine's waiting queue and lag ten times a second, in a thread: a hung engine stops nobody."""

    def __init__(self, rig: Rig) -> None:
        self.found: dict[str, list[float]] = {"waiting": [], "lag": [], "rss_mb": []}
        self._rig, self._stop = rig, threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(engine,)) for engine in rig.engines]
        for thread in self._threads:
            thread.start()

    def _watch(self, engine: Any) -> None:
        while not self._stop.wait(SAMPLE_S):
            waiting, lag = engine.figure("vllm:num_requests_waiting"), engine.figure("sim:lag_seconds_max")
            if waiting is not None:
                self.found["waiting"].append(waiting)
            if lag is not None:
                self.found["lag"].append(lag)

    def take(self) -> None:
        pages = sum(int(Path(f"/proc/{p.pid}/statm").read_text().split()[1]) for p in self._rig.gateways)
        self.found["rss_mb"].append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def score(rig: Rig, wanted: Path, outcomes: Path) -> dict[str, Any]:
    """Return the yardsticks' figures of a run."""
    logs = [engine.log for engine in rig.engines]
    for log in logs:
        _drop_half_a_line(log)
    program = rig.yardsticks / "overload_score.py"
    command: list[str | Path] = [sys.executable, program, wanted, outcomes, "--engine-log", *logs, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def first_tokens(wanted: Path, outcomes: Path, tier: str, since_s: float, until_s: float) -> tuple[float, float]:
    """Return the P95 to the first token (s from the scheduled arrival) of what came then, and the part answered."""
    _, rows = read(wanted)
    came = {row["id"]: row["time_s"] for row in rows if row["tier"] == tier and since_s <= row["time_s"] < until_s}
    times: dict[str, float] = {}
    for row in map(json.loads, outcomes.read_text(encoding="utf-8").splitlines()[1:]):
        if row["id"] in came and row["result"] == "ok":
            times[row["id"]] = row["first_s"] - came[row["id"]]
    ordered = sorted(times.values())
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else float("inf")
    return p95, len(ordered) / max(1, len(came))


def _drop_half_a_line(path: Path) -> None:
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
