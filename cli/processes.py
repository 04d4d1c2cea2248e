"""Which process is which: a pid is reused, a pid with its start time is not."""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

STEP_S = 0.02


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process of ours, as the home remembers it. `started` tells it from a later one with the same pid."""

    name: str
    pid: int
    started: str


def start_token(pid: int) -> str:
    """Return what only the process that has this pid now has; empty when there is none (or only a zombie)."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if Path("/proc/self/stat").exists():
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return "" if fields[0] == "Z" else f"{boot}:{fields[19]}"
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except (OSError, psutil.Error, IndexError):
        return ""


def record(name: str, pid: int) -> ProcessRecord:
    return ProcessRecord(name, pid, start_token(pid))


def is_alive(process: ProcessRecord) -> bool:
    """Whether exactly that process still runs."""
    return bool(process.started) and start_token(process.pid) == process.started


def end(processes: Iterable[ProcessRecord], number: int, timeout_s: float) -> list[ProcessRecord]:
    """Send `number` to those that still run, wait at most `timeout_s`, return those that are still there."""
    alive = [process for process in processes if is_alive(process)]
    for process in alive:
        try:
            psutil.Process(process.pid).send_signal(number)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in alive if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(STEP_S)
    return alive
