"""The spool on disk: names, frames and positions, shared by its writer (gateway) and its reader (poster).

A spool is a folder of one gateway replica::

    lock                     held (flock) by the one writer while it lives
    identity.json            which replica writes here, and on which host
    checkpoint.json          how far the poster has posted: {"segment": n, "offset": bytes}
    seg-0000000000000007.tgs frames, one after another, then zeros up to the preallocated end

A segment starts with `HEADER` (magic, its number). A frame is `FRAME` (payload length, CRC-32 of length and payload)
and the payload: one `UsageEvent` in msgpack. A length of 0 is the end of what is written so far. A writer never writes
to a segment of an earlier run, so whatever is torn at the end of a segment that has a successor was never acknowledged.
"""

import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import msgspec

from billing.types import UsageEvent

MAGIC = b"TGSPOOL1"
HEADER = struct.Struct("<8sQ")
FRAME = struct.Struct("<II")
MAX_PAYLOAD_BYTES = 64 * 1024
RAW_USAGE_MAX_CHARS = 8 * 1024
PAGE_BYTES = 4096

LOCK_NAME = "lock"
IDENTITY_NAME = "identity.json"
CHECKPOINT_NAME = "checkpoint.json"
POSTER_FOLDER = "poster"  # beside the spools: the lock of the host's one poster, and what it remembers

_frame_head = FRAME.pack
_encode = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_decoder = msgspec.msgpack.Decoder(UsageEvent)


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in a spool: everything before it is posted (or read)."""

    segment: int = 0
    offset: int = 0


class Identity(msgspec.Struct, frozen=True):
    """Who writes a spool."""

    replica: str
    host: str
    started_at_us: int


def encode(event: UsageEvent) -> bytes:
    """Return the frame of `event`; an overlong raw usage is cut, so that a frame always fits."""
    if event.raw_usage and len(event.raw_usage) > RAW_USAGE_MAX_CHARS:
        event = msgspec.structs.replace(event, raw_usage=event.raw_usage[:RAW_USAGE_MAX_CHARS])
    payload = _encode(event)
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a usage event of {size} bytes does not fit the spool")
    return _frame_head(size, crc32(payload, size)) + payload


def encode_payload(event: UsageEvent) -> bytes:
    """Return the event as a frame carries it."""
    return _encode(event)


def decode(payload: bytes) -> UsageEvent:
    """Return the event in `payload`.

    Raises:
        msgspec.DecodeError: it is not an event of a version known here (also as ValidationError).
    """
    return _decoder.decode(payload)


def segment_name(number: int) -> str:
    return f"seg-{number:016d}.tgs"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in `folder`, ascending; none when the folder is not there."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name[4:20]) for name in names if name.startswith("seg-") and name.endswith(".tgs"))


def spool_folders(spool_dir: Path) -> list[Path]:
    """Return the spools below, in the order of their names; none when there is no such folder."""
    try:
        return sorted(path for path in spool_dir.iterdir() if path.is_dir() and path.name != POSTER_FOLDER)
    except FileNotFoundError:
        return []


def frame_size(data: bytes, at: int) -> int | None:
    """Return the payload's size of the whole frame that begins there; None when none does."""
    if at + FRAME.size > len(data):
        return None
    size, crc = FRAME.unpack_from(data, at)
    end = at + FRAME.size + size
    if not 0 < size <= MAX_PAYLOAD_BYTES or end > len(data):
        return None
    return size if crc32(memoryview(data)[at + FRAME.size : end], size) == crc else None


def read_checkpoint(folder: Path) -> Position:
    """Return how far the spool is posted; the beginning when nothing says so (posting again does no harm)."""
    try:
        return msgspec.json.decode((folder / CHECKPOINT_NAME).read_bytes(), type=Position)
    except (FileNotFoundError, msgspec.DecodeError):
        return Position()


def write_checkpoint(folder: Path, position: Position) -> None:
    """Replace the checkpoint at once. Not synced: an old one only means that events are offered twice."""
    partial = folder / (CHECKPOINT_NAME + ".part")
    partial.write_bytes(msgspec.json.encode(position))
    partial.replace(folder / CHECKPOINT_NAME)


def file_end(path: Path) -> int:
    """Return the size of a segment in bytes, with what is only preallocated.

    Raises:
        FileNotFoundError: it was posted and deleted.
    """
    return path.stat().st_size


def written_end(path: Path) -> int:
    """Return how many bytes of a segment are written; a last frame that ends in zeros counts without them.

    Found by halving, since what is written comes first and has no page of zeros: a read or a dozen, whatever its size.

    Raises:
        FileNotFoundError: it was posted and deleted.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        low, high = 0, -(-size // PAGE_BYTES)  # pages before `low` are written, those from `high` on are zeros
        at = high - 1  # first the last one: a segment that was ended properly is cut to what is written
        while low < high:
            if os.pread(file.fileno(), PAGE_BYTES, at * PAGE_BYTES).strip(b"\0"):
                low = at + 1
            else:
                high = at
            at = (low + high) // 2
        start = max(0, low - 1) * PAGE_BYTES
        return start + len(os.pread(file.fileno(), PAGE_BYTES, start).rstrip(b"\0"))


def unposted_bytes(folder: Path, end_of: Callable[[Path], int] = written_end) -> int:
    """Return the bytes of segments that are not posted yet, each up to its end as `end_of` says it."""
    done = read_checkpoint(folder)
    total = 0
    for number in segment_numbers(folder):
        try:
            size = end_of(folder / segment_name(number))
        except FileNotFoundError:
            continue
        if number > done.segment:
            total += max(0, size - HEADER.size)
        elif number == done.segment:
            total += max(0, size - max(done.offset, HEADER.size))
    return max(0, total)


def try_lock(folder: Path) -> int | None:
    """Take the writer's lock; returns its file descriptor, or None when a writer holds it."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
