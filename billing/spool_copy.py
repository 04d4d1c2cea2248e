"""Copies of the spools for a backup, taken while gateways write and the poster deletes.

Spools are copied *before* the database's instant. An event that was on disk when the copy began is then in the copy, or
its segment was deleted before it could be read, which the poster does only after the commit that posted it; and that
commit is before the instant. The other way round, an event not posted at the instant could be posted and its segment
deleted before the copy, and be in neither. What is in both is posted once, because the ledger takes each event once.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from billing import spool_format as fmt

KEPT = ("rejected.bin", "damaged-*.bin")  # what no version could read, for a person


class SpoolFile(msgspec.Struct, frozen=True):
    """A file of a spool as it was read; `events` is how many it holds, posted ones among them."""

    spool: str
    name: str
    content: bytes
    events: int = 0


def read_spools(spool_dir: Path) -> Iterator[SpoolFile]:
    """Yield what is needed to post every event that is on disk now; at most a segment is in memory."""
    for folder in fmt.spool_folders(spool_dir):
        yield from _read_spool(folder)


def _read_spool(folder: Path) -> Iterator[SpoolFile]:
    # First: what a checkpoint says was posted, was posted before it said so, and stays posted.
    for name in (fmt.CHECKPOINT_NAME, fmt.IDENTITY_NAME):
        yield from _whole(folder, name)
    numbers = fmt.segment_numbers(folder)
    for number in numbers:
        try:
            content = (folder / fmt.segment_name(number)).read_bytes()
        except FileNotFoundError:
            continue  # posted and deleted since it was listed
        end, events = _written(content)
        # The newest one has zeros after its end, and may have frames half written; all others are kept as they are.
        kept = content[:end] if number == numbers[-1] else content
        yield SpoolFile(folder.name, fmt.segment_name(number), kept, events)
    for pattern in KEPT:
        for path in sorted(folder.glob(pattern)):
            yield from _whole(folder, path.name)


def _whole(folder: Path, name: str) -> Iterator[SpoolFile]:
    try:
        yield SpoolFile(folder.name, name, (folder / name).read_bytes())
    except FileNotFoundError:
        return


def _written(content: bytes) -> tuple[int, int]:
    """Return where the whole frames of a segment end, and how many there are."""
    at, events = fmt.HEADER.size, 0
    while (size := fmt.frame_size(content, at)) is not None:
        at += fmt.FRAME.size + size
        events += 1
    return min(at, len(content)), events
