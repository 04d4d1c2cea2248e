"""How far the audit chain was found right, kept on the worker's disk, where the database's owner cannot write."""

from pathlib import Path

import msgspec

from tenants.audit_chain import START, Head


class Anchor(msgspec.Struct, frozen=True):
    """`seq` and `hash` of the newest verified record; `again` is where the next look at older records begins."""

    seq: int = 0
    hash: str = START.hex()
    again: int = 0

    @property
    def head(self) -> Head:
        return Head(self.seq, bytes.fromhex(self.hash))


def path_of(home: Path) -> Path:
    return home / "audit" / "anchor.json"


def load(home: Path) -> Anchor:
    """Return the anchor of this home; the beginning when there is none.

    Raises:
        msgspec.DecodeError: the file is not ours.
    """
    try:
        return msgspec.json.decode(path_of(home).read_bytes(), type=Anchor)
    except FileNotFoundError:
        return Anchor()


def save(home: Path, anchor: Anchor) -> None:
    """Replace the file, whole or not at all, but never by an earlier record (another run went further meanwhile).

    Raises:
        ValueError: another record of that number is anchored; it stays.
    """
    kept = load(home)
    if kept.seq > anchor.seq:
        return
    if kept.seq == anchor.seq and kept.hash != anchor.hash:
        raise ValueError(f"another record {anchor.seq} is anchored in {path_of(home)}")
    path = path_of(home)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(".anchor.json")
    draft.write_bytes(msgspec.json.encode(anchor))
    draft.replace(path)
