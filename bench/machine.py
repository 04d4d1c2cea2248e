"""Processes on this machine: start them on a core, read what CPU and memory they took."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

GATEWAY_CORE = 0
OTHER_CORE = 1  # load generator, simulated engine, Valkey, Postgres, poster
NANOSECONDS = 1e9


def tree(pid: int) -> list[int]:
    """Return `pid` and its descendants; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes and their descendants, by the scheduler's nanosecond counters."""
    total = 0
    for pid in {member for root in pids for member in tree(root)}:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(task.read_text().split()[0])
            except (OSError, ValueError, IndexError):
                continue  # the thread ended in between
    return total / NANOSECONDS


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes and their descendants, shared pages divided between those that share."""
    return sum(psutil.Process(member).memory_full_info().pss for root in pids for member in tree(root))


def start(core: int, command: Sequence[str | Path], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start `command` on one core, its output in `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | environment,
        )


def wait(
    what: str, ready: Callable[[], bool], *, within_s: float, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Return when `ready`; RuntimeError when it takes too long or `process` ends."""
    deadline = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not ready within {within_s:g} s.")
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what} ended with {process.returncode}.")
        time.sleep(0.1)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Stop one that was started here, and what it started."""
    members = tree(process.pid)
    send([process.pid], signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        send(members, signal.SIGKILL)
        process.wait()
