"""Engines as processes of this host: children of the controller, or adopted from an earlier one.

Beside each engine lie its lock (held by the engine itself, see engine.launcher), its record (pid, start time, address,
what it was started for) and its log, in ``<home>/run/engines``. A successor after a crash finds them there.
"""

import asyncio
import os
import signal
import subprocess
from hashlib import sha256
from pathlib import Path
from uuid import UUID

import msgspec

from catalog.types import Deployment
from core.errors import PlatformError
from core.ids import new_uuid
from engine import launcher, processes

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
    """The engines of this host, by deployment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[UUID, Record] = {}
        self._children: dict[UUID, subprocess.Popen[bytes]] = {}
        self._notes: dict[UUID, str] = {}  # why the last start did not work, until somebody looks

    def adopt(self) -> list[UUID]:
        """Take over the engines that run already; returns their deployments. Records of dead ones are removed."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.glob("*.lock")):
            try:
                deployment_id = UUID(hex=path.stem)
            except ValueError:
                continue
            if deployment_id in self._records:
                continue
            lock = launcher.take_lock(path)
            if lock is not None:
                os.close(lock)  # no engine has it
                self._path(deployment_id, "json").unlink(missing_ok=True)
            elif (record := self._find(deployment_id)) is not None:
                self._records[deployment_id] = record
        return sorted(self._records)

    def record(self, deployment_id: UUID) -> Record | None:
        return self._records.get(deployment_id)

    def look(self, deployment_id: UUID) -> tuple[bool, str]:
        """Return whether the engine runs and, if it ended or could not be started since the last look, how or why."""
        record = self._records.get(deployment_id)
        if record is None:
            return False, self._notes.pop(deployment_id, "")
        child = self._children.get(deployment_id)
        status = child.poll() if child is not None else None
        if status is None and processes.is_alive(record.pid, record.started_ms):
            return True, ""
        if status is None and child is not None:
            status = child.poll()  # it ended between the two looks: only now is its status there
        self._children.pop(deployment_id, None)
        del self._records[deployment_id]
        self._path(deployment_id, "json").unlink(missing_ok=True)
        return False, _ending(status)

    def start(self, deployment: Deployment) -> None:
        """Start the engine; when that does not work, the next look says why."""
        if reason := self._try_to_start(deployment):
            self._notes[deployment.id] = reason

    def _try_to_start(self, deployment: Deployment) -> str:
        name = deployment.id.hex
        lock_path = self._path(deployment.id, "lock")
        lock = launcher.take_lock(lock_path)
        if lock is None:
            return "an engine of this deployment runs already on this host"
        try:
            launch = launcher.plan_launch(deployment, launcher.choose_listen(self._folder, name), str(lock_path))
            child = launcher.spawn(launch, lock, self._path(deployment.id, "log"))
        except PlatformError as problem:
            return problem.message
        except OSError as problem:
            return f"the engine could not be started ({problem.strerror})"
        finally:
            os.close(lock)
        since = processes.started_ms(child.pid) or 0
        record = Record(new_uuid(), launch.url, child.pid, since, fingerprint(deployment))
        self._children[deployment.id], self._records[deployment.id] = child, record
        self._write(deployment.id, record)
        return ""

    def trim_logs(self) -> None:
        """Keep the engines' logs bounded."""
        for deployment_id in self._records:
            launcher.trim_log(self._path(deployment_id, "log"))

    def send(self, deployment_id: UUID, number: signal.Signals) -> None:
        if (record := self._records.get(deployment_id)) is not None:
            processes.send(record.pid, record.started_ms, number)

    async def end_all(self, timeout_s: float) -> None:
        """SIGTERM to every engine, and SIGKILL to those that do not end in time."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for deployment_id in list(self._records):
                self.send(deployment_id, number)
            deadline = loop.time() + timeout_s
            while self._look_at_all() and loop.time() < deadline:  # noqa: ASYNC110 - nobody tells when a process ends
                await asyncio.sleep(STOP_POLL_S)

    def _look_at_all(self) -> bool:
        """Return whether any engine still runs."""
        return any([self.look(deployment_id)[0] for deployment_id in list(self._records)])  # noqa: C419 - every one

    def _path(self, deployment_id: UUID, suffix: str) -> Path:
        return self._folder / f"{deployment_id.hex}.{suffix}"

    def _write(self, deployment_id: UUID, record: Record) -> None:
        path = self._path(deployment_id, "json")
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)

    def _find(self, deployment_id: UUID) -> Record | None:
        """Return the record of an engine that holds its lock; made anew when its starter died before writing it."""
        try:
            record = msgspec.json.decode(self._path(deployment_id, "json").read_bytes(), type=Record)
            if processes.is_alive(record.pid, record.started_ms):
                return record
        except (OSError, msgspec.MsgspecError):
            pass
        pid = processes.find_by_argument(str(self._path(deployment_id, "lock")))
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
