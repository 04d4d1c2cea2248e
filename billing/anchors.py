"""The anchor: the newest seal as this home wrote it down, where the database's owner cannot write.

It only goes forward, and only along the chain: nothing is sealed or anchored anew on a chain that does not have it.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from billing import seals
from billing.seals import AnchorLostError, BrokenSeal, SealHead
from core.db import Sessions, transaction
from core.files import write_private


class _Anchor(msgspec.Struct):
    seq: int
    hash: str


def _path(home: Path) -> Path:
    return home / "ledger" / "anchor.json"


def load(home: Path) -> SealHead:
    """Return the head this home wrote down last; the beginning when there is none.

    Raises:
        msgspec.DecodeError: the file is not ours.
    """
    try:
        kept = msgspec.json.decode(_path(home).read_bytes(), type=_Anchor)
    except FileNotFoundError:
        return SealHead()
    return SealHead(kept.seq, bytes.fromhex(kept.hash))


def save(home: Path, newest: SealHead) -> bool:
    """Move the anchor on to `newest`; return False when it is there or further (another process sealed meanwhile).

    Raises:
        AnchorLostError: another seal of that number is anchored; it stays.
    """
    with _locked(home):
        kept = load(home)
        if kept.seq == newest.seq and kept.hash != newest.hash:
            raise AnchorLostError(BrokenSeal(f"seal {newest.seq}", seals.NOT_ANCHORED))
        if kept.seq >= newest.seq:
            return False
        write_private(_path(home), msgspec.json.encode(_Anchor(newest.seq, newest.hash.hex())))
        return True


async def seal(sessions: Sessions, home: Path) -> tuple[int, SealHead, bool]:
    """Seal at most `SEAL_MAX` rows behind this home's anchor; return how many, the head, and whether the anchor moved.

    Raises:
        AnchorLostError: the chain does not have the anchor, or does not lead on from it; nothing is sealed or anchored.
    """
    anchor = load(home)
    async with transaction(sessions) as session:
        count = await seals.seal(session, anchor)
        newest = await seals.follow(session, anchor)
    return count, newest, save(home, newest)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process at a time compare and replace; the worker and the command line may both seal."""
    folder = _path(home).parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "anchor.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
