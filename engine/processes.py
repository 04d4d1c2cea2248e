"""Engine processes of this host, by pid and start time: a pid alone may have been given to somebody else."""

import os
import signal
from pathlib import Path

import psutil


def started_ms(pid: int) -> int | None:
    """Return when the process started, in milliseconds of a clock that no change of the wall clock moves.

    None when there is no such process, or it has ended and only waits to be reaped.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return _started_ms_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    if fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[19]) * 1000 // os.sysconf("SC_CLK_TCK")


def _started_ms_elsewhere(pid: int) -> int | None:
    """Where there is no /proc."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except psutil.Error:
        return None


def is_alive(pid: int, since_ms: int) -> bool:
    """Return whether the very process that started then still runs."""
    return started_ms(pid) == since_ms


def send(pid: int, since_ms: int, number: signal.Signals) -> bool:
    """Send a signal to that very process; False when it is gone."""
    if not is_alive(pid, since_ms):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def find_by_argument(argument: str) -> int | None:
    """Return the pid of a process that was started with exactly this argument: for one whose record was lost."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        if argument in (process.info["cmdline"] or ()) and started_ms(process.info["pid"]) is not None:
            return int(process.info["pid"])
    return None
