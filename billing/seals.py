"""Seals: Merkle trees over all fields of every transaction and of every other row of money that stays as it is.

Each seal's hash is over the one before. A worker seals what is committed, off the path of posting, and writes each new
head where the database's owner cannot: its log, and a file of its home. `verify` computes all of it again and names the
first row that differs.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import seal_queries as queries
from billing.seal_queries import Leaf

SEAL_MAX = 10_000  # leaves of one seal
START = bytes(32)


class SealHead(msgspec.Struct, frozen=True):
    """The newest seal."""

    seq: int = 0
    hash: bytes = START


class BrokenSeal(msgspec.Struct, frozen=True):
    """The first thing that is not as it was sealed."""

    row: str
    problem: str


def leaf_hash(facts: str) -> bytes:
    return hashlib.sha256(b"\x00" + facts.encode()).digest()


def record_hash(record: str, facts: str) -> bytes:
    """Return the leaf of a row of another table; no transaction's facts begin like it."""
    return leaf_hash(f"{record} {facts}")


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root of the tree over the leaves, in their order (RFC 6962).

    Raises:
        ValueError: there are none.
    """
    if not leaves:
        raise ValueError("a seal covers something")
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + merkle_root(leaves[:half]) + merkle_root(leaves[half:])).digest()


def seal_hash(seq: int, count: int, root: bytes, prev: bytes) -> bytes:
    return hashlib.sha256(f"{seq}|{count}|{root.hex()}|{prev.hex()}".encode()).digest()


async def head(session: AsyncSession) -> SealHead:
    found = await queries.last_seal(session)
    return SealHead() if found is None else SealHead(found.seq, bytes(found.hash))


async def seal(session: AsyncSession) -> int:
    """Seal at most `SEAL_MAX` rows that no seal covers; returns how many."""
    await queries.lock_seals(session)
    leaves: list[Leaf] = []
    for record in queries.RECORDS:
        found = await queries.unsealed_records(session, record, SEAL_MAX - len(leaves))
        leaves += [
            Leaf(None, record, row.key, record_hash(record, row.facts), len(leaves) + n) for n, row in enumerate(found)
        ]
    found = await queries.unsealed(session, SEAL_MAX - len(leaves))
    leaves += [Leaf(row.id, None, None, leaf_hash(row.facts), len(leaves) + n) for n, row in enumerate(found)]
    if not leaves:
        return 0
    before = await head(session)
    seq, root = before.seq + 1, merkle_root([leaf.hash for leaf in leaves])
    sealed = seal_hash(seq, len(leaves), root, before.hash)
    await queries.insert_seal(session, seq, len(leaves), root=root, prev=before.hash, sha256=sealed)
    await queries.insert_leaves(session, seq, leaves)
    return len(leaves)


async def first_broken(session: AsyncSession, anchor: SealHead | None = None) -> BrokenSeal | None:
    """Compute every seal again; the chain must have the anchor. Memory holds one seal."""
    right = SealHead()
    while (row := await queries.seal_after(session, right.seq)) is not None:
        problem = await _problem(session, row.seq, bytes(row.merkle_root), row.leaves)
        if problem is not None:
            return problem
        name = f"seal {row.seq}"
        if row.seq != right.seq + 1 or bytes(row.prev_hash) != right.hash:
            return BrokenSeal(name, "it does not follow the seal before it")
        if seal_hash(row.seq, row.leaves, bytes(row.merkle_root), right.hash) != bytes(row.hash):
            return BrokenSeal(name, "its hash is not over what it says")
        right = SealHead(row.seq, bytes(row.hash))
        if anchor is not None and anchor.seq == right.seq and anchor.hash != right.hash:
            return BrokenSeal(name, "it is not the one that was anchored outside the database")
    if anchor is not None and anchor.seq > right.seq:
        return BrokenSeal(f"seal {right.seq + 1}", "it was anchored outside the database and is gone")
    return None


async def _problem(session: AsyncSession, seq: int, root: bytes, count: int) -> BrokenSeal | None:
    leaves = await queries.leaves(session, seq)
    facts = await _record_hashes(session, [leaf for leaf, _ in leaves])
    for leaf, found in leaves:
        if not (leaf.tx_id is None) == (leaf.record is not None) == (leaf.key is not None):
            return BrokenSeal(f"seal {seq}, place {leaf.place}", "its leaf is of no one row")
        if leaf.record is None:
            now = None if found is None else leaf_hash(found)
        else:
            now = facts.get((leaf.record, leaf.key))
        if now is None:
            return BrokenSeal(leaf.row, f"the row is gone; seal {seq} has it")
        if now != leaf.hash:
            return BrokenSeal(leaf.row, f"the row is not as it was when seal {seq} was made")
    if [leaf.place for leaf, _ in leaves] != list(range(count)) or merkle_root(
        [leaf.hash for leaf, _ in leaves]
    ) != root:
        return BrokenSeal(f"seal {seq}", "its leaves are not those it was made of")
    return None


async def _record_hashes(session: AsyncSession, leaves: Iterable[Leaf]) -> dict[tuple[str, str | None], bytes]:
    """Return the leaves that records have now, by record and key."""
    keys: dict[str, list[str]] = {}
    for leaf in leaves:
        if leaf.record in queries.RECORDS and leaf.key is not None:
            keys.setdefault(leaf.record, []).append(leaf.key)
    found: dict[tuple[str, str | None], bytes] = {}
    for record, wanted in keys.items():
        for key, facts in (await queries.record_facts(session, record, wanted)).items():
            found[record, key] = record_hash(record, facts)
    return found


class _Anchor(msgspec.Struct):
    seq: int
    hash: str


def _path(home: Path) -> Path:
    return home / "ledger" / "anchor.json"


def load_anchor(home: Path) -> SealHead:
    """Return the head this home wrote down last; the beginning when there is none."""
    try:
        kept = msgspec.json.decode(_path(home).read_bytes(), type=_Anchor)
    except FileNotFoundError:
        return SealHead()
    return SealHead(kept.seq, bytes.fromhex(kept.hash))


def save_anchor(home: Path, newest: SealHead) -> None:
    """Replace the file; whole or not at all."""
    path = _path(home)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(".anchor.json")
    draft.write_bytes(msgspec.json.encode(_Anchor(newest.seq, newest.hash.hex())))
    draft.replace(path)
