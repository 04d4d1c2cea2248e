"""The poster's side of a usage spool: tail it, remember how far it is posted, delete what is done."""

import os
import zlib
from collections.abc import Set as AbstractSet
from pathlib import Path
from uuid import UUID

import msgspec

from billing import spool_format as fmt
from billing.spool_format import Position
from billing.types import UsageEvent
from core.logging import get_logger

READ_BYTES = 2 * 1024 * 1024
READS_MAX = 64  # file reads of one call
EVENTS_PER_PAGE = 5000
REJECTED_NAME = "rejected.bin"  # frames whole by CRC that this version cannot read: for a person

_log = get_logger(__name__)


class SpoolReader:
    """Reads one folder; `read` runs ahead, `acknowledge` makes it so.

    Offering an event twice is harmless (the ledger dedupes), so a lost checkpoint costs time and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._posted = fmt.read_checkpoint(folder)
        self._ahead = self._posted

    @property
    def position(self) -> Position:
        """How far `read` has come."""
        return self._ahead

    def rewind(self) -> None:
        """Read again from what is posted."""
        self._ahead = self._posted

    def read(self, max_events: int) -> list[UsageEvent]:
        """Return the next events, at most `max_events`; empty when there is nothing new. Blocks for file reads."""
        events: list[UsageEvent] = []
        for _ in range(READS_MAX):
            if len(events) >= max_events or not self._read_segment(events, max_events):
                break
        return events

    def acknowledge(self) -> None:
        """Everything read so far is posted: move the checkpoint and delete the segments before it."""
        if self._ahead == self._posted:
            return
        fmt.write_checkpoint(self.folder, self._ahead)
        self._posted = self._ahead
        for number in fmt.segment_numbers(self.folder):
            if number < self._posted.segment:
                (self.folder / fmt.segment_name(number)).unlink(missing_ok=True)

    def tidy(self) -> bool:
        """Delete the last segment too, when no writer lives and all of it is posted; tells whether it did."""
        if self._ahead != self._posted or not fmt.segment_numbers(self.folder):
            return False
        lock = fmt.try_lock(self.folder)
        if lock is None:
            return False
        try:
            if self.read(1):
                self.rewind()
                return False
            done = Position(max(fmt.segment_numbers(self.folder)) + 1, 0)
            fmt.write_checkpoint(self.folder, done)
            for number in fmt.segment_numbers(self.folder):
                (self.folder / fmt.segment_name(number)).unlink(missing_ok=True)
            self._posted = self._ahead = done
        finally:
            os.close(lock)
        return True

    def _read_segment(self, events: list[UsageEvent], max_events: int) -> bool:
        """Take frames from the segment of `_ahead`; tells whether a later segment was entered or more is here."""
        numbers = fmt.segment_numbers(self.folder)
        later = [number for number in numbers if number > self._ahead.segment]
        if self._ahead.segment not in numbers:
            if not later:
                return False
            self._ahead = Position(later[0], 0)
            later = later[1:]
        start = max(self._ahead.offset, fmt.HEADER.size)
        data = self._pread(self._ahead.segment, start)
        offset, whole = self._parse(data, events, max_events)
        self._ahead = Position(self._ahead.segment, start + offset)
        if len(events) >= max_events or (offset and not whole):
            return True  # a full batch, or a read that ended in the middle of a frame: there may be more right here
        if not later or offset:
            return bool(offset)
        # A successor exists and a fresh read found no further frame: what is left here was never acknowledged.
        self._report_rest(data)
        self._ahead = Position(later[0], 0)
        return True

    def _pread(self, number: int, offset: int) -> bytes:
        try:
            descriptor = os.open(self.folder / fmt.segment_name(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, READ_BYTES, offset)
        finally:
            os.close(descriptor)

    def _parse(self, data: bytes, events: list[UsageEvent], max_events: int) -> tuple[int, bool]:
        """Append the whole frames of `data`; returns the bytes taken, and whether it stopped at the written end."""
        at, view = 0, memoryview(data)
        while len(events) < max_events:
            if at + fmt.FRAME.size > len(data):
                return at, len(data) < READ_BYTES
            size, crc = fmt.FRAME.unpack_from(data, at)
            if size == 0 or size > fmt.MAX_PAYLOAD_BYTES:
                return at, True
            end = at + fmt.FRAME.size + size
            if end > len(data):
                return at, len(data) < READ_BYTES
            payload = view[at + fmt.FRAME.size : end]
            if zlib.crc32(payload, size) != crc:
                return at, True
            try:
                events.append(fmt.decode(bytes(payload)))
            except msgspec.DecodeError:
                self._reject(bytes(view[at:end]))
            at = end
        return at, False

    def _reject(self, frame: bytes) -> None:
        with (self.folder / REJECTED_NAME).open("ab") as file:
            file.write(frame)
        _log.error("spool.frame_rejected", spool=self.folder.name, bytes=len(frame))

    def _report_rest(self, rest: bytes) -> None:
        """Say so when a finished segment ends in something; damage beyond a torn frame keeps a copy."""
        torn = rest.rstrip(b"\0")
        if not torn:
            return
        _log.warning("spool.tail_torn", spool=self.folder.name, segment=self._ahead.segment, bytes=len(torn))
        size = fmt.FRAME.unpack_from(rest.ljust(fmt.FRAME.size, b"\0"))[0]
        if size > fmt.MAX_PAYLOAD_BYTES or len(torn) > fmt.FRAME.size + size:
            copy = self.folder / f"damaged-{self._ahead.segment:016d}-{self._ahead.offset}.bin"
            copy.write_bytes(torn)
            _log.error("spool.segment_damaged", spool=self.folder.name, kept=copy.name)


def unposted_among(folder: Path, ids: AbstractSet[UUID]) -> set[UUID]:
    """Return those of `ids` whose events stand in the spool and are not known to be posted. Blocks for file reads."""
    reader, found = SpoolReader(folder), set[UUID]()
    while events := reader.read(EVENTS_PER_PAGE):
        found.update(event.id for event in events if event.id in ids)
    return found
