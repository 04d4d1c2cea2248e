"""Seals: Merkle trees over all fields of every transaction and of every other row of money that stays as it is.

Each seal's hash is over the one before. A worker seals what is committed, off the path of posting, and writes each new
head where the database's owner cannot: its log, and a file of its home (`anchors`); it seals only behind that.
`verify` computes all of it again and names the first row that differs.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import seal_queries as queries
from billing.seal_queries import Leaf

SEAL_MAX = 10_000  # leaves of one seal
START = bytes(32)
ANCHOR_GONE = "it was anchored outside the database and is gone"
NOT_ANCHORED = "it is not the one that was anchored outside the database"
UNLINKED = "it does not follow the seal before it"
MISHASHED = "its hash is not over what it says"


class SealHead(msgspec.Struct, frozen=True):
    """The newest seal."""

    seq: int = 0
    hash: bytes = START


class BrokenSeal(msgspec.Struct, frozen=True):
    """The first thing that is not as it was sealed."""

    row: str
    problem: str


class AnchorLostError(Exception):
    """The chain does not have the anchor, or does not lead on from it: seals were altered or removed.

    Attributes:
        broken: the first seal that is wrong.
    """

    def __init__(self, broken: BrokenSeal) -> None:
        super().__init__(f"{broken.row}: {broken.problem}")
        self.broken = broken


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


async def follow(session: AsyncSession, anchor: SealHead) -> SealHead:
    """Return the head, reached from the anchor seal by seal, each hash over the one before.

    So the head's hash binds the anchor and all before it: a seal slipped in between cannot carry the anchor over to
    another chain. What seals cover is not computed again (`first_broken` does).

    Raises:
        AnchorLostError: the chain does not have the anchor, or breaks behind it.
    """
    right = anchor
    if anchor.seq:
        row = await queries.seal_after(session, anchor.seq - 1)
        if row is None or row.seq != anchor.seq:
            raise AnchorLostError(BrokenSeal(f"seal {anchor.seq}", ANCHOR_GONE))
        if bytes(row.hash) != anchor.hash:
            raise AnchorLostError(BrokenSeal(f"seal {anchor.seq}", NOT_ANCHORED))
    while (row := await queries.seal_after(session, right.seq)) is not None:
        problem = _unlinked(row, right)
        if problem:
            raise AnchorLostError(BrokenSeal(f"seal {row.seq}", problem))
        right = SealHead(row.seq, bytes(row.hash))
    return right


def _unlinked(row: Row[Any], before: SealHead) -> str:
    """Say what is wrong with the seal that follows `before`; empty when nothing is."""
    if row.seq != before.seq + 1 or bytes(row.prev_hash) != before.hash:
        return UNLINKED
    if seal_hash(row.seq, row.leaves, bytes(row.merkle_root), before.hash) != bytes(row.hash):
        return MISHASHED
    return ""


async def seal(session: AsyncSession, anchor: SealHead | None = None) -> int:
    """Seal at most `SEAL_MAX` rows of those that wait for it; returns how many.

    Args:
        session: a transaction of its own.
        anchor: what the chain must have; None: nothing is anchored, and the chain is followed from its beginning.

    Raises:
        AnchorLostError: the chain does not have the anchor, or breaks behind it; nothing is sealed.
    """
    await queries.lock_seals(session)
    before = await follow(session, anchor or SealHead())
    leaves: list[Leaf] = []
    for record in queries.RECORDS:
        found = await queries.unsealed_records(session, record, SEAL_MAX - len(leaves))
        leaves += [
            Leaf(None, record, key, record_hash(record, facts), len(leaves) + n) for n, (key, facts) in enumerate(found)
        ]
    rows = await queries.unsealed(session, SEAL_MAX - len(leaves))
    leaves += [Leaf(row.id, None, None, leaf_hash(row.facts), len(leaves) + n) for n, row in enumerate(rows)]
    if not leaves:
        return 0
    seq, root = before.seq + 1, merkle_root([leaf.hash for leaf in leaves])
    sealed = seal_hash(seq, len(leaves), root, before.hash)
    await queries.insert_seal(session, seq, len(leaves), root=root, prev=before.hash, sha256=sealed)
    await queries.insert_leaves(session, seq, leaves)
    await queries.leave_queue(session, leaves)
    return len(leaves)


async def first_broken(session: AsyncSession, anchor: SealHead | None = None) -> BrokenSeal | None:
    """Compute every seal again; the chain must have the anchor. Memory holds one seal."""
    right = SealHead()
    while (row := await queries.seal_after(session, right.seq)) is not None:
        problem = await _problem(session, row.seq, bytes(row.merkle_root), row.leaves)
        if problem is not None:
            return problem
        name = f"seal {row.seq}"
        if unlinked := _unlinked(row, right):
            return BrokenSeal(name, unlinked)
        right = SealHead(row.seq, bytes(row.hash))
        if anchor is not None and anchor.seq == right.seq and anchor.hash != right.hash:
            return BrokenSeal(name, NOT_ANCHORED)
    if anchor is not None and anchor.seq > right.seq:
        return BrokenSeal(f"seal {right.seq + 1}", ANCHOR_GONE)
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
