"""The gateway's side of the usage spool: one writer per replica, durable before the last byte of an answer leaves.

Group commit is self-clocked: one thread writes all that has come in with one `pwrite` into a preallocated file opened
with `O_DSYNC`, which returns when the bytes are on disk (one system call: the thread has to get the interpreter's lock
back once, not twice), tells the waiters, and starts again at once when a turn of the loop has ended meanwhile.
"""

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from billing import spool_format as fmt
from billing.types import UsageEvent
from core.clock import Clock
from core.tiers import Tier

DEFAULT_MAX_BYTES = 1_000_000_000
DEFAULT_SEGMENT_BYTES = 8 * 1024 * 1024
BATCH_MAX = 2000  # events of one flush
UNWRITTEN_MAX_BYTES = 64 * 1024 * 1024  # kept in memory while the disk takes nothing; beyond it events are refused
RETRY_S = 0.2
REFRESH_S = 1
LOCK_TRIES = 40  # a poster that tidies up holds the lock for a moment
LOCK_WAIT_S = 0.05
ZEROS = bytes(256 * 1024)

OnDurable = Callable[[bool], None]


class SpoolBusyError(RuntimeError):
    """Another writer owns this folder."""


class SpoolFigures(msgspec.Struct):
    """Counters since the start, for metrics."""

    events: int = 0
    flushes: int = 0
    flush_us: int = 0  # sum over all flushes
    flush_us_max: int = 0
    failures: int = 0
    refused: int = 0


class SpoolWriter:
    """One per gateway process; `append` and the callbacks belong to the event loop's thread.

    Args:
        folder: ``<home>/spool/<replica>``; made when missing.
        clock: for the identity file.
        marks: unposted usage, bytes by tier, from which `refuses` says to take no new work; appends still succeed.
        segment_bytes: size a file is preallocated to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock,
        marks: tuple[int, int, int] = (DEFAULT_MAX_BYTES,) * 3,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._marks = marks
        self._segment_bytes = segment_bytes
        self._pending: deque[tuple[bytes, OnDurable]] = deque()
        self._unwritten: list[bytes] = []  # whole frames of a failed write, first in line for the next try
        self._unwritten_bytes = 0
        self._failing = False
        self._unposted = 0
        self._refreshed_ns = 0
        self._lock: int | None = None
        self._segment: int | None = None  # file descriptor
        self._number = 0
        self._offset = 0
        self._prepared: int | None = None
        self._preparing: threading.Thread | None = None
        self._waking = False  # the loop will wake the thread at the end of its turn
        self._wake = threading.Lock()  # free when there may be work; an Event would make a lock for every wait
        self._wake.acquire()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.figures = SpoolFigures()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lock the folder, open a new segment and start the thread. Blocks for some milliseconds.

        Raises:
            SpoolBusyError: another process writes there.
            OSError: the folder or the first segment cannot be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for _ in range(LOCK_TRIES):
            self._lock = fmt.try_lock(self._folder)
            if self._lock is not None:
                break
            time.sleep(LOCK_WAIT_S)
        if self._lock is None:
            raise SpoolBusyError(f"the spool {self._folder} has a writer already; give every replica its own id")
        identity = fmt.Identity(self._folder.name, socket.gethostname(), self._clock.now_us())
        (self._folder / fmt.IDENTITY_NAME).write_bytes(msgspec.json.encode(identity))
        for leftover in self._folder.glob("*.new"):
            leftover.unlink()
        last = max(fmt.segment_numbers(self._folder), default=0)
        self._number = max(last, fmt.read_checkpoint(self._folder).segment)
        self._open_segment()
        self._refresh(force=True)
        self._loop = loop
        self._wake_up()  # for what was appended before
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def append(self, event: UsageEvent, on_durable: OnDurable) -> None:
        """Hand over an event; `on_durable(ok)` runs on the loop after the flush that holds it.

        It may be a future's `set_result`, even of one that is done by then. False means that the disk took nothing: the
        event stays in memory and is written when the disk does again.

        Raises:
            ValueError: the event is larger than a frame may be.
        """
        frame = fmt.encode(event)
        if self._closing or self._unwritten_bytes > UNWRITTEN_MAX_BYTES:
            self.figures.refused += 1
            on_durable(False)
            return
        self._pending.append((frame, on_durable))
        if not self._waking and not self._failing and self._loop is not None:
            self._waking = True
            self._loop.call_soon(self._end_of_turn)  # one flush for all events of this turn

    def _end_of_turn(self) -> None:
        self._waking = False
        self._wake_up()

    def _wake_up(self) -> None:
        """Let the thread look for work now; it may do so once too often."""
        with suppress(RuntimeError):  # it is free already
            self._wake.release()

    @property
    def bytes_unposted(self) -> int:
        """Bytes on disk that the poster has not posted yet; at most a second old."""
        return self._unposted + self._unwritten_bytes

    def refuses(self, tier: Tier) -> bool:
        """Whether new work of that tier should be refused: the disk fails, or too much waits for the poster."""
        return self._failing or self._unposted + self._unwritten_bytes >= self._marks[tier]

    def close(self, timeout_s: int = 10) -> None:
        """Flush what was appended, stop the thread and free the lock. Later appends are refused."""
        self._closing = True
        self._wake_up()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _run(self) -> None:
        while True:
            frames, waiters = self._take()
            if not frames and not self._unwritten:
                if self._closing:
                    break
                self._refresh()
                continue
            ok = self._flush(frames)
            self._deliver(waiters, ok=ok)
            self._refresh()
            if not ok:
                if self._closing:
                    break
                self._wake.acquire(timeout=RETRY_S)
        self._end_segment()
        if self._preparing is not None:
            self._preparing.join()
        if self._prepared is not None:
            os.close(self._prepared)
            self._partial().unlink(missing_ok=True)

    def _take(self) -> tuple[Sequence[bytes], Sequence[OnDurable]]:
        """Return what has come in, up to a batch; sleeps (at most until the next refresh) when there is nothing."""
        if not self._closing and not self._failing:
            self._wake.acquire(timeout=REFRESH_S)
        pending = self._pending
        batch = [pending.popleft() for _ in range(min(len(pending), BATCH_MAX))]
        if pending:  # more than a batch: no turn's end will tell of the rest
            self._wake_up()
        frames, waiters = zip(*batch, strict=True) if batch else ((), ())
        return frames, waiters

    def _flush(self, frames: Sequence[bytes]) -> bool:
        started = time.perf_counter_ns()
        data = b"".join((*self._unwritten, *frames))
        try:
            self._write(data)
        except OSError:
            self.figures.failures += 1
            self._failing = True
            self._unwritten.extend(frames)
            self._unwritten_bytes = len(data)
            # After a failed sync nothing is known of this file's end: all of the batch goes to the next one.
            self._abandon_segment()
            return False
        self._unwritten, self._unwritten_bytes = [], 0
        if self._failing:
            self._failing = False
            self._wake_up()  # what came in meanwhile has told nobody
        self._unposted += len(data)
        took_us = (time.perf_counter_ns() - started) // 1000
        self.figures.events += len(frames)
        self.figures.flushes += 1
        self.figures.flush_us += took_us
        self.figures.flush_us_max = max(self.figures.flush_us_max, took_us)
        return True

    def _write(self, data: bytes) -> None:
        used = self._offset > fmt.HEADER.size
        if self._segment is not None and used and self._offset + len(data) > self._segment_bytes:
            self._end_segment()
        if self._segment is None:
            self._open_segment()
        segment = self._segment
        if segment is None:
            raise OSError("no segment")
        view, at = memoryview(data), self._offset
        while view:
            written = os.pwrite(segment, view, at)
            view, at = view[written:], at + written
        self._offset = at
        if at > self._segment_bytes // 2 and self._prepared is None and self._preparing is None:
            self._preparing = threading.Thread(target=self._prepare, name="spool-prepare", daemon=True)
            self._preparing.start()

    def _deliver(self, waiters: Sequence[OnDurable], *, ok: bool) -> None:
        loop = self._loop
        if loop is None or not waiters:
            return

        def run() -> None:
            for tell in waiters:
                try:
                    tell(ok)
                except asyncio.InvalidStateError:
                    continue  # a future whose owner no longer waits

        try:
            loop.call_soon_threadsafe(run)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more, and the events are on disk

    def _partial(self) -> Path:
        return self._folder / "next.new"

    def _prepare(self) -> None:
        """Write the next segment's zeros ahead of need: a sync into allocated blocks is the quick one."""
        descriptor = None
        try:
            descriptor = os.open(
                self._partial(), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_DSYNC, 0o600
            )
            at = 0
            while at < self._segment_bytes:  # in small steps: a large one would hold up the flushes beside it
                at += os.pwrite(descriptor, ZEROS[: self._segment_bytes - at], at)
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            self._partial().unlink(missing_ok=True)  # and give its blocks back to the segment in use
            return
        self._prepared = descriptor

    def _open_segment(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._prepared is None:
            self._prepare()
        descriptor, self._prepared = self._prepared, None
        if descriptor is None:
            raise OSError("the next spool segment cannot be made")
        try:
            os.pwrite(descriptor, fmt.HEADER.pack(fmt.MAGIC, self._number + 1), 0)
            self._partial().replace(self._folder / fmt.segment_name(self._number + 1))
            fmt.sync_folder(self._folder)
        except OSError:
            os.close(descriptor)
            raise
        self._number += 1
        self._segment = descriptor
        self._offset = fmt.HEADER.size

    def _end_segment(self) -> None:
        """Close the segment in use, cut to what is written."""
        if self._segment is not None:
            os.ftruncate(self._segment, self._offset)
            os.close(self._segment)
            self._segment = None

    def _abandon_segment(self) -> None:
        if self._segment is not None:
            os.close(self._segment)
            self._segment = None

    def _refresh(self, *, force: bool = False) -> None:
        now_ns = time.monotonic_ns()
        if not force and now_ns - self._refreshed_ns < REFRESH_S * 1_000_000_000:
            return
        self._refreshed_ns = now_ns
        try:
            unposted = fmt.unposted_bytes(self._folder, fmt.file_end)  # it knows itself, to the byte, what is written
        except OSError:
            return
        ahead = max(0, self._segment_bytes - self._offset) if self._segment is not None else 0
        self._unposted = max(0, unposted - ahead)
