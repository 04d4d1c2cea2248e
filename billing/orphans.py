"""Spools whose gateway does not come back: which there are, and how one from another host is taken over.

The poster of a host follows every folder below its spool folder, whether its writer lives or not. So a spool is only
orphaned with its host: then its volume is mounted elsewhere and its folder adopted by a poster there. Adopting a copy
while the first is posted too does no harm, because the ledger takes each event once.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import msgspec

from billing import spool_format as fmt
from billing.assess import LAST_US
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid

EVENTS_LOOKED_AT = 20_000


class SpoolState(msgspec.Struct, frozen=True):
    """One spool folder. `live`: its writer runs. `unposted_bytes` is 0 when all of it is in the ledger."""

    name: str
    replica: str
    host: str
    live: bool
    unposted_bytes: int
    segments: int


class Contents(msgspec.Struct, frozen=True):
    """What is in a spool and not posted. `oldest_us`: when the first request was admitted; None without any."""

    events: int = 0
    tenants: int = 0
    oldest_us: int | None = None


def contents(folder: Path, events_max: int = EVENTS_LOOKED_AT) -> Contents:
    """Return what of a spool is not posted, looking at so many events at most. Blocks for file reads.

    A frame of another version counts as an event of nobody.
    """
    events, tenants, oldest_us = 0, set[UUID](), LAST_US
    for payload in _unposted(folder):
        events += 1
        try:
            event = fmt.decode(payload)
        except msgspec.DecodeError:
            continue
        tenants.add(event.tenant_id)
        oldest_us = min(oldest_us, max(0, event.admitted_at_us))
        if events >= events_max:
            break
    return Contents(events, len(tenants), oldest_us if tenants else None)


def _unposted(folder: Path) -> Iterator[bytes]:
    done = fmt.read_checkpoint(folder)
    for number in fmt.segment_numbers(folder):
        if number < done.segment:
            continue
        try:
            data = (folder / fmt.segment_name(number)).read_bytes()
        except FileNotFoundError:
            continue  # it was posted just now
        at = max(done.offset if number == done.segment else 0, fmt.HEADER.size)
        while (size := fmt.frame_size(data, at)) is not None:
            at += fmt.FRAME.size
            yield data[at : at + size]
            at += size


def list_spools(spool_dir: Path) -> list[SpoolState]:
    """Return the spools of this host, in the order of their names."""
    return [_state(folder) for folder in fmt.spool_folders(spool_dir)]


def _state(folder: Path) -> SpoolState:
    try:
        identity = msgspec.json.decode((folder / fmt.IDENTITY_NAME).read_bytes(), type=fmt.Identity)
    except (FileNotFoundError, msgspec.DecodeError):
        identity = fmt.Identity(folder.name, "", 0)
    return SpoolState(
        folder.name,
        identity.replica,
        identity.host,
        _is_live(folder),
        fmt.unposted_bytes(folder),
        len(fmt.segment_numbers(folder)),
    )


def _is_live(folder: Path) -> bool:
    lock = fmt.try_lock(folder)
    if lock is None:
        return True
    os.close(lock)
    return False


def adopt(spool_dir: Path, source: Path, *, posted_too: bool = False) -> SpoolState:
    """Copy the spool in `source` among this host's, where the poster finds it; the source is left as it is.

    Args:
        spool_dir: this host's spools.
        source: the folder of the spool.
        posted_too: offer all that is in the segments, also what its checkpoint says is posted. That was posted to the
            database of then; one restored from a backup may not have it.

    Raises:
        PlatformError: INVALID_SPOOL: `source` holds no segments, its writer lives, or it is among this host's already.
    """
    source = source.resolve()
    if not fmt.segment_numbers(source):
        raise _invalid(f"{source} holds no spool segments.")
    if source.parent == spool_dir.resolve():
        raise _invalid(f"{source} is among this host's spools already; its poster follows it.")
    if _is_live(source):
        raise _invalid(f"The writer of {source} lives; stop that gateway first.")
    target = spool_dir / f"adopted-{source.name}-{new_uuid().hex[-12:]}"
    partial = spool_dir / fmt.POSTER_FOLDER / target.name  # no poster looks there
    partial.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copytree(source, partial)
    if posted_too:
        partial.joinpath(fmt.CHECKPOINT_NAME).unlink(missing_ok=True)
    partial.rename(target)
    return _state(target)


def _invalid(message: str) -> PlatformError:
    return PlatformError("INVALID_SPOOL", ErrorKind.INVALID, message)
