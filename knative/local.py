"""Engines as processes of this host: children of the controller, or adopted from an earlier one.

There is one for each seat. Beside each lie its lock (held by the engine itself, see engine.launcher), its record (pid,
start time, address, what it was started for) and its log, in ``<home>/run/engines``. A successor after a crash finds
them there.
"""

import asyncio
import os
import signal
import subprocess
import time
from hashlib import sha256
from pathlib import Path
from uuid import UUID

import msgspec

from catalog.types import Deployment
from core.errors import PlatformError
from core.ids import new_uuid
from engine import launcher, processes
from knative.types import Seat, parse_seat
from knative.wakes import Timing

STOP_POLL_S = 0.02


class Record(msgspec.Struct, frozen=True):
    """What is known of a running engine."""

    replica_id: UUID
    url: str
    pid: int
    started_ms: int
    fingerprint: str


def fingerprint(deployment: Deployment) -> str:
    """Return what an engine depends on, as a digest; another one means the engine must be started anew. Pure."""
    facts = (
        deployment.engine,
        deployment.engine_args,
        deployment.source,
        deployment.upstream_model,
        deployment.context_max,
    )
    return sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


class LocalBackend:
    """The engines of this host, by seat."""

    def __init__(self, folder: Path, home: Path, *, zone: str = "") -> None:
        self._folder = folder
        self._home = home
        self.zone = zone  # where this host stands
        self._records: dict[Seat, Record] = {}
        self._children: dict[Seat, subprocess.Popen[bytes]] = {}
        self._fetched_ns = 0  # when the weights of the engine that is being started were there
        self._notes: dict[Seat, str] = {}  # why the last start did not work, until somebody looks

    def adopt(self) -> list[Seat]:
        """Take over the engines that run already; returns their seats. Records of dead ones are removed."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.glob("*.lock")):
            try:
                seat = parse_seat(path.stem)
            except ValueError:
                continue
            if seat in self._records:
                continue
            lock = launcher.take_lock(path)
            if lock is not None:
                os.close(lock)  # no engine has it
                self._path(seat, "json").unlink(missing_ok=True)
            elif (record := self._find(seat)) is not None:
                self._records[seat] = record
        return sorted(self._records)

    def record(self, seat: Seat) -> Record | None:
        return self._records.get(seat)

    def look(self, seat: Seat) -> tuple[bool, str]:
        """Return whether the engine runs and, if it ended or could not be started since the last look, how or why."""
        record = self._records.get(seat)
        if record is None:
            return False, self._notes.pop(seat, "")
        child = self._children.get(seat)
        status = child.poll() if child is not None else None
        if status is None and processes.is_alive(record.pid, record.started_ms):
            return True, ""
        if status is None and child is not None:
            status = child.poll()  # it ended between the two looks: only now is its status there
        self._children.pop(seat, None)
        del self._records[seat]
        self._path(seat, "json").unlink(missing_ok=True)
        return False, _ending(status)

    def start(self, seat: Seat, deployment: Deployment) -> Timing:
        """Start the engine; when that does not work, the next look says why. Returns what took how long."""
        begun_ns = time.perf_counter_ns()
        self._fetched_ns = begun_ns
        self._path(seat, "fetched").unlink(missing_ok=True)
        if reason := self._try_to_start(seat, deployment):
            self._notes[seat] = reason
        fetched_us = (self._fetched_ns - begun_ns) // 1000
        return Timing(fetched_us, (time.perf_counter_ns() - begun_ns) // 1000 - fetched_us)

    def fetched_us(self, seat: Seat) -> int:
        """Return how long the weights took in the engine's own process (engine.prepare); 0 where they were there."""
        try:
            return int(self._path(seat, "fetched").read_text("ascii"))
        except (OSError, ValueError):
            return 0

    def _try_to_start(self, seat: Seat, deployment: Deployment) -> str:
        lock_path = self._path(seat, "lock")
        lock = launcher.take_lock(lock_path)
        if lock is None:
            return "an engine of this seat runs already on this host"
        try:
            listen = launcher.choose_listen(self._folder, seat.name)
            launch = launcher.plan_launch(deployment, listen, str(lock_path), self._home)
            self._fetched_ns = time.perf_counter_ns()
            child = launcher.spawn(launch, lock, self._path(seat, "log"))
        except PlatformError as problem:
            return problem.message
        except OSError as problem:
            return f"the engine could not be started ({problem.strerror})"
        finally:
            os.close(lock)
        since = processes.started_ms(child.pid) or 0
        record = Record(new_uuid(), launch.url, child.pid, since, fingerprint(deployment))
        self._children[seat], self._records[seat] = child, record
        self._write(seat, record)
        return ""

    def trim_logs(self) -> None:
        """Keep the engines' logs bounded."""
        for seat in self._records:
            launcher.trim_log(self._path(seat, "log"))

    def send(self, seat: Seat, number: signal.Signals) -> None:
        if (record := self._records.get(seat)) is not None:
            processes.send(record.pid, record.started_ms, number)

    async def end_all(self, timeout_s: float) -> None:
        """SIGTERM to every engine, and SIGKILL to those that do not end in time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for seat in list(self._records):
                self.send(seat, number)
            deadline = loop.time() + timeout_s
            while self._look_at_all() and loop.time() < deadline:  # noqa: ASYNC110 - nobody tells when a process ends
                await asyncio.sleep(STOP_POLL_S)

    def _look_at_all(self) -> bool:
        """Return whether any engine still runs."""
        return any([self.look(seat)[0] for seat in list(self._records)])  # noqa: C419 - every one

    def _path(self, seat: Seat, suffix: str) -> Path:
        return self._folder / f"{seat.name}.{suffix}"

    def _write(self, seat: Seat, record: Record) -> None:
        path = self._path(seat, "json")
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)

    def _find(self, seat: Seat) -> Record | None:
        """Return the record of an engine that holds its lock; made anew when its starter died before writing it."""
        try:
            record = msgspec.json.decode(self._path(seat, "json").read_bytes(), type=Record)
            if processes.is_alive(record.pid, record.started_ms):
                return record
        except (OSError, msgspec.MsgspecError):
            pass
        pid = processes.find_by_argument(str(self._path(seat, "lock")))
        since = processes.started_ms(pid) if pid is not None else None
        if pid is None or since is None:
            return None
        return Record(new_uuid(), "", pid, since, "")  # where it answers is unknown: it is replaced


def _ending(status: int | None) -> str:
    if status is None:
        return "the engine ended"
    if status < 0:
        return f"the engine was ended by {signal.Signals(-status).name}"
    return f"the engine ended with status {status}; the last lines of its log say why"
