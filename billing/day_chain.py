"""The chain of dropped days: each hash over what was kept of a day, and over the hash before."""

import hashlib
from datetime import date

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import usage_day_queries as queries

START = bytes(32)


class DayHead(msgspec.Struct, frozen=True):
    """The day that was dropped last."""

    seq: int = 0
    hash: bytes = START


def day_hash(seq: int, day: date, events: int, kept: bytes, prev: bytes) -> bytes:
    return hashlib.sha256(f"{seq}|{day.isoformat()}|{events}|{kept.hex()}|{prev.hex()}".encode()).digest()


async def kept_digest(session: AsyncSession, day: date) -> bytes:
    """Return the hash over every sum that is kept of a day."""
    digest = hashlib.sha256()
    async for line in queries.kept_lines(session, day):
        digest.update(line.encode() + b"\n")
    return digest.digest()


async def head(session: AsyncSession) -> DayHead:
    dropped = [row for row in await queries.known(session) if row.state == "dropped"]
    return DayHead(dropped[-1].seq, bytes(dropped[-1].hash)) if dropped else DayHead()


async def first_broken(session: AsyncSession) -> tuple[str, str] | None:
    """Return the first dropped day that is not as it was when it was dropped, and what is wrong with it."""
    right, there = DayHead(), set(await queries.days(session))
    for row in await queries.known(session):
        if row.state != "dropped":
            continue
        name = row.day.isoformat()
        if row.day in there:
            return name, "it was dropped and has events"
        if row.seq != right.seq + 1 or bytes(row.prev_hash) != right.hash:
            return name, "it does not follow the day dropped before it"
        kept = await kept_digest(session, row.day)
        if kept != bytes(row.kept_sha256):
            return name, "what is kept of it is not what it was when it was dropped"
        if day_hash(row.seq, row.day, row.events, kept, right.hash) != bytes(row.hash):
            return name, "its hash is not over what it says"
        right = DayHead(row.seq, bytes(row.hash))
    return None
