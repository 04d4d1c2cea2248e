"""The chain of the audit trail: what its hashes cover, and the proof that no record was altered, removed or slipped in.

The database writes the chain by itself (migration `audit_chain`); here it is computed again, without its help.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import audit_queries as queries
from tenants.audit_queries import TrailRow

PAGE = 2000
START = bytes(32)  # before the first record
ANCHOR_LOST = "the chain no longer has the record that was anchored here"


class Head(msgspec.Struct, frozen=True):
    """How far a chain goes: its newest record's number and hash."""

    seq: int = 0
    hash: bytes = START


class Finding(msgspec.Struct, frozen=True):
    """The first record that is wrong."""

    seq: int  # 0: of a record that is not in the chain
    record: str
    problem: str


def instant_text(at: datetime) -> str:
    """Return an instant in UTC to the microsecond, as it is hashed and exported."""
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def hashed_text(row: TrailRow) -> str:
    """Return what a record's hash covers: a JSON array of its number, the hash before it, and each of its fields."""
    fields = [
        row.seq,
        bytes(row.prev_hash).hex(),
        str(row.id),
        instant_text(row.recorded_at),
        row.actor_kind,
        _plain(row.actor_id),
        row.client_ip,
        _plain(row.tenant_id),
        row.action,
        _plain(row.target_id),
        row.request_id,
        row.details,
    ]
    return json.dumps(fields, ensure_ascii=False)


def _plain(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def _wrong(row: TrailRow, before: Head) -> str:
    """Say what is wrong with the record that follows `before`; empty when nothing is."""
    if row.seq != before.seq + 1:
        return f"the records from {before.seq + 1} to {row.seq - 1} are missing"
    if row.id is None:
        return "the record is missing"
    if bytes(row.prev_hash) != before.hash:
        return "it does not follow the record before it"
    if hashlib.sha256(hashed_text(row).encode()).digest() != bytes(row.hash):
        return "it is not what was recorded"
    return ""


async def head(session: AsyncSession) -> Head:
    """Return the newest link."""
    found = await queries.newest(session)
    return Head() if found is None else Head(*found)


async def head_at(session: AsyncSession, seq: int) -> Head:
    """Return the link of that number as the database has it; the beginning when there is none."""
    found = await queries.link_hash(session, seq)
    return Head() if found is None else Head(seq, found)


async def verify_whole(session: AsyncSession, anchors: Iterable[Head]) -> tuple[Finding | None, Head]:
    """Follow the chain from its beginning; it must have every anchor. Takes the transaction for itself."""
    await queries.freeze(session)
    for anchor in sorted(anchors, key=lambda one: one.seq):
        if anchor.seq and await queries.link_hash(session, anchor.seq) != anchor.hash:
            return Finding(anchor.seq, "", ANCHOR_LOST), Head()
    return await verify(session, Head())


async def verify(session: AsyncSession, known: Head, *, links_max: int | None = None) -> tuple[Finding | None, Head]:
    """Follow the chain from a link known to be right; return the first wrong record, and how far all is right.

    Args:
        session: a transaction that sees one instant (`audit_queries.freeze`).
        known: where to begin; `Head()` for all of it. The chain must still have that link.
        links_max: how many links to follow; None: to the end.
    """
    if known.seq and await queries.link_hash(session, known.seq) != known.hash:
        return Finding(known.seq, "", ANCHOR_LOST), known
    right, left = known, links_max
    while left is None or left > 0:
        page = await queries.links(session, right.seq, PAGE if left is None else min(PAGE, left))
        for row in page:
            if problem := _wrong(row, right):
                return Finding(right.seq + 1, str(row.record_id), problem), right
            right = Head(row.seq, bytes(row.hash))
        if not page:
            break
        left = None if left is None else left - len(page)
    unchained = await queries.first_unchained(session)
    if unchained is not None:
        return Finding(0, str(unchained), "the record is not in the chain"), right
    return None, right
