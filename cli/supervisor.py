"""Starts processes in order, restarts what dies, stops all in order. One thread, no event loop, so that it can fork."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType

import psutil

from cli import logs
from cli.embedded import lifeline
from cli.fork import READY, fork
from cli.processes import ProcessRecord, end, record

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 15.0
STEADY_S = 60.0  # who ran so long starts again with the first backoff
START_ATTEMPTS = 3
PROBE_S = 0.02
PROBE_MAX_S = 0.5
IDLE_S = 5.0
ORPHAN_TIMEOUT_S = 5.0


class StartError(Exception):
    """Something does not come up; the message says what, and where its log is."""


class Stopped(Exception):  # noqa: N818 - not an error: the user asked
    """Asked to stop while still starting."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process. Either `run` (a fork of ours, which says when it is ready) or `command` and `probe` (a program)."""

    name: str
    run: Callable[[Callable[[], None]], None] | None = None
    command: Callable[[], "subprocess.Popen[bytes]"] | None = None
    probe: Callable[[], bool] | None = None
    stop_stage: int = 0  # lower ones are stopped first
    stop_signal: int = signal.SIGTERM
    stop_timeout_s: float = 20.0
    start_timeout_s: float = 60.0


class _State(Enum):
    WAITING = "waiting"  # to be started at `due`
    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"  # and not to be started again


@dataclass(slots=True)
class _Child:
    service: Service
    state: _State = _State.WAITING
    record: ProcessRecord | None = None
    program: "subprocess.Popen[bytes] | None" = None
    ready_end: int = -1
    since: float = 0.0  # monotonic: of the state
    due: float = 0.0
    next_probe: float = 0.0
    failures: int = 0
    reason: str = ""
    was_ready: bool = False

    @property
    def running(self) -> bool:
        return self.state in (_State.STARTING, _State.READY)


@dataclass(frozen=True, slots=True)
class Voice:
    """How the supervisor tells people and files what happens."""

    ready: Callable[[str, float], None]  # name, seconds it took: at the first start
    trouble: Callable[[str], None]  # a sentence
    changed: Callable[[Sequence[ProcessRecord]], None]  # the processes that run now


@dataclass(slots=True)
class Supervisor:
    """Owns the children of this process.

    Args:
        log_folder: each service logs to ``<name>.log`` in it, kept small here.
        voice: where the news goes.
        close_in_child: descriptors that forks must not keep (the home's lock).
    """

    log_folder: Path
    voice: Voice
    close_in_child: tuple[int, ...] = ()
    _children: dict[str, _Child] = field(default_factory=dict)
    _stop_requests: int = 0
    _wake: tuple[int, int] = (-1, -1)
    _lifeline: tuple[int, int] = (-1, -1)
    _logs_checked: float = 0.0
    _up: bool = False

    def open(self) -> None:
        """Take over the signals of this process. Call once, from the main thread."""
        self._wake = os.pipe()
        self._lifeline = os.pipe()
        for descriptor in self._wake:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._request_stop)
        lifeline.adopt_orphans()

    def _request_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_requests += 1

    # -- starting

    def begin(self, *services: Service) -> None:
        """Start `services` and return at once."""
        for service in services:
            child = self._children[service.name] = _Child(service)
            self._start(child)

    def wait_ready(self, *names: str) -> None:
        """Return when all of `names` are ready.

        Raises:
            StartError: one of them ended three times or took too long.
            Stopped: the user asked to stop.
        """
        while any(self._children[name].state is not _State.READY for name in names):
            self._step_or_stop()
            for name in names:
                self._check_first_start(self._children[name])
        self._changed()

    def _check_first_start(self, child: _Child) -> None:
        if child.state is _State.READY or child.failures < START_ATTEMPTS:
            return
        log = self.log_folder / f"{child.service.name}.log"
        tail = "\n".join(f"    {line}" for line in logs.tail(log, 15))
        raise StartError(f"{child.service.name} does not start: it {child.reason}. The end of {log}:\n{tail}")

    def begin_job(self, name: str, run: Callable[[], None], timeout_s: float) -> None:
        """Start a short job in a fork and return at once."""

        def job(ready: Callable[[], None]) -> None:
            run()
            ready()

        self.begin(Service(name, run=job, start_timeout_s=timeout_s))

    def wait_job(self, name: str) -> None:
        """Return when the job has done its work and ended.

        Raises:
            StartError: it failed.
            Stopped: the user asked to stop.
        """
        child = self._children[name]
        try:
            while child.state is _State.STARTING:
                self._step_or_stop()
            if not child.was_ready:
                child.failures = START_ATTEMPTS
                self._check_first_start(child)
            while child.running:  # it has said that it is done, and is about to end
                self._step_or_stop()
        finally:
            if child.running and child.record is not None:
                os.kill(child.record.pid, signal.SIGKILL)
            del self._children[name]

    def serve(self) -> None:
        """Look after the children until the user asks to stop."""
        self._up = True
        while not self._stop_requests:
            self._step()

    # -- one turn of the loop

    def _step_or_stop(self) -> None:
        if self._stop_requests:
            raise Stopped
        self._step()

    def _step(self) -> None:
        """Wait for something to happen, at most until the next thing is due, and deal with it."""
        ends = [child.ready_end for child in self._children.values() if child.ready_end >= 0]
        try:
            readable, _, _ = select.select([self._wake[0], *ends], [], [], self._patience())
        except InterruptedError:
            readable = []
        if self._wake[0] in readable:
            _drain(self._wake[0])
        for child in list(self._children.values()):
            if child.ready_end in readable:
                self._read_ready(child)
        self._reap()
        now = time.monotonic()
        for child in list(self._children.values()):
            self._advance(child, now)
        if now - self._logs_checked > IDLE_S:
            self._logs_checked = now
            logs.shorten_all(self.log_folder)

    def _patience(self) -> float:
        now = time.monotonic()
        waits = [IDLE_S]
        for child in self._children.values():
            if child.state is _State.STARTING:
                waits.append(max(0.0, child.next_probe - now) if child.service.probe else 1.0)
            elif child.state is _State.WAITING:
                waits.append(max(0.0, child.due - now))
        return min(waits)

    def _advance(self, child: _Child, now: float) -> None:
        if child.state is _State.STARTING:
            if child.service.probe is not None and now >= child.next_probe:
                if child.service.probe():
                    self._became_ready(child)
                    return
                child.next_probe = now + min(PROBE_S + (now - child.since) / 10, PROBE_MAX_S)  # a recovery takes long
            if now - child.since > child.service.start_timeout_s and child.record is not None:
                child.reason = f"was not ready within {child.service.start_timeout_s:.0f} s"
                os.kill(child.record.pid, signal.SIGKILL)
                child.since = now  # its end comes by the reaper
        elif child.state is _State.WAITING and now >= child.due:
            self._start(child)

    def _start(self, child: _Child) -> None:
        service = child.service
        child.state, child.since, child.reason = _State.STARTING, time.monotonic(), ""
        child.next_probe = child.since + PROBE_S
        try:
            pid = self._launch(child)
        except (OSError, RuntimeError) as error:
            self._failed(child, f"could not be started ({error})")
            return
        child.record = record(service.name, pid)
        self._changed()

    def _launch(self, child: _Child) -> int:
        service = child.service
        if service.command is not None:
            child.program = service.command()
            return child.program.pid
        if service.run is None:
            raise ValueError(f"{service.name} has neither run nor command")
        pid, child.ready_end = fork(
            service.name,
            service.run,
            log_file=self.log_folder / f"{service.name}.log",
            lifeline_end=self._lifeline[0],
            close=self._parents_own(),
        )
        return pid

    def _parents_own(self) -> list[int]:
        ends = [child.ready_end for child in self._children.values() if child.ready_end >= 0]
        return [*self._wake, self._lifeline[1], *self.close_in_child, *ends]

    def _read_ready(self, child: _Child) -> None:
        try:
            said = os.read(child.ready_end, 1)
        except BlockingIOError:
            return
        os.close(child.ready_end)
        child.ready_end = -1
        if said == READY and child.state is _State.STARTING:
            self._became_ready(child)

    def _became_ready(self, child: _Child) -> None:
        now = time.monotonic()
        took, child.state, child.since, child.was_ready = now - child.since, _State.READY, now, True
        if not self._up:
            self.voice.ready(child.service.name, took)
        elif child.failures and child.record is not None:
            self.voice.trouble(f"{child.service.name} is back (pid {child.record.pid}).")

    # -- ends

    def _reap(self) -> None:
        """Collect every child that ended, ours or adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self._children.values():
                if child.running and child.record is not None and child.record.pid == pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        if child.ready_end >= 0:
            self._read_ready(child)
        if child.ready_end >= 0:
            os.close(child.ready_end)
            child.ready_end = -1
        if child.program is not None:
            child.program.returncode = code  # we reaped it, Popen must not
            child.program = None
        self._failed(child, child.reason or _describe(code))

    def _failed(self, child: _Child, reason: str) -> None:
        """Plan the next start, later each time; who ran steadily begins anew."""
        now = time.monotonic()
        if child.state is _State.READY and now - child.since > STEADY_S:
            child.failures = 0
        delay = min(FIRST_BACKOFF_S * 2**child.failures, MAX_BACKOFF_S)
        child.reason = reason
        child.failures += 1
        child.state, child.due, child.record = _State.WAITING, now + delay, None
        if self._up:
            self.voice.trouble(f"{child.service.name} {reason}; starting it again in {delay:.1f} s.")
        self._changed()

    def _changed(self) -> None:
        self.voice.changed([child.record for child in self._children.values() if child.running and child.record])

    def stop(self) -> None:
        """Stop everything, stage by stage, each within its time, then by force. Never raises, always returns."""
        self._up = False
        seen = self._stop_requests
        for stage in sorted({child.service.stop_stage for child in self._children.values()}):
            stopping = [child for child in self._children.values() if child.service.stop_stage == stage]
            for child in stopping:
                if child.running and child.record is not None:
                    os.kill(child.record.pid, child.service.stop_signal)
            start = time.monotonic()
            while alive := [child for child in stopping if child.running]:
                impatient = self._stop_requests > seen  # a second Ctrl-C
                for child in alive:
                    late = time.monotonic() - start > (1.0 if impatient else child.service.stop_timeout_s)
                    if late and child.record is not None:
                        os.kill(child.record.pid, signal.SIGKILL)
                select.select([self._wake[0]], [], [], PROBE_S)
                _drain(self._wake[0])
                self._reap()
            for child in stopping:
                child.state = _State.ENDED
        self._end_orphans()
        self._changed()

    def _end_orphans(self) -> None:
        """End what children left behind and we adopted, e.g. engines of a controller that had to be killed."""
        orphans = [record("orphan", process.pid) for process in psutil.Process().children(recursive=True)]
        end(end(orphans, signal.SIGTERM, ORPHAN_TIMEOUT_S), signal.SIGKILL, ORPHAN_TIMEOUT_S)
        self._reap()


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 512):
            pass
    except BlockingIOError:
        return


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
