"""`tidegate audit verify`: the audit trail of a running installation, of a stopped home, or of a database by URL."""

import asyncio
from pathlib import Path

from cli import screen
from cli.books import database
from core.db import create_engine, create_sessions, transaction
from core.settings import Settings
from tenants import audit_anchor, audit_chain
from tenants.audit_chain import Finding, Head


def verify(home_path: Path, anchors: list[str]) -> int:
    """Verify the whole chain; return 0 when it is right, 1 after naming the first wrong record, 2 for a bad anchor.

    Args:
        home_path: the installation; the anchor that its worker keeps is looked up too.
        anchors: further ``SEQ:HASH`` that the chain must have, from the log's lines ``audit.head_anchored``.
    """
    try:
        known = [parse_anchor(text) for text in anchors]
    except ValueError:
        screen.say("An anchor is a number, a colon and 64 hex digits, as in the log's lines audit.head_anchored.")
        return 2
    with database(home_path) as settings:
        return check(settings, home_path, known)


def check(settings: Settings, home_path: Path, known: list[Head]) -> int:
    """The same of a database that answers."""
    finding, right = asyncio.run(_check(settings, [*known, audit_anchor.load(home_path).head]))
    if finding is not None:
        where = f"record {finding.seq}" if finding.seq else "a record"
        screen.say(f"wrong: {where} {finding.record}: {finding.problem}")
        return 1
    screen.say(f"the audit trail is right: {right.seq:,} records, the newest has the hash {right.hash.hex()}")
    return 0


def parse_anchor(text: str) -> Head:
    """Read ``SEQ:HASH``.

    Raises:
        ValueError: it is not one.
    """
    seq, _, digits = text.partition(":")
    if not (seq.isascii() and seq.isdecimal() and len(digits) == 64):
        raise ValueError(text)
    return Head(int(seq), bytes.fromhex(digits))


async def _check(settings: Settings, anchors: list[Head]) -> tuple[Finding | None, Head]:
    engine = create_engine(settings.database)
    try:
        async with transaction(create_sessions(engine)) as session:
            return await audit_chain.verify_whole(session, anchors)
    finally:
        await engine.dispose()
