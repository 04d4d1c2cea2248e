"""A rollout's moves as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec

from catalog import rollouts
from catalog.rollout_types import ENDS
from core.clock import Clock
from core.db import Sessions, transaction

LOOK_S = 0.5
BEAT_S = 10.0
OPEN_S = 50.0  # below the time limit of a request


def plain(value: Any) -> Any:
    """Return a struct as JSON's own types."""
    return msgspec.to_builtins(value)


async def follow(
    sessions: Sessions, rollout_id: UUID, after: int, *, clock: Clock, look_s: float = LOOK_S
) -> AsyncIterator[bytes]:
    """Yield each note after the one of that id as an event, and a comment now and then, until it ends or is cut."""
    began = beat_at = clock.monotonic()
    yield b"retry: 1000\n\n"
    while clock.monotonic() - began < OPEN_S:
        async with transaction(sessions) as session:
            notes = await rollouts.notes(session, rollout_id, after)
            state = (await rollouts.get(session, rollout_id)).state
        for note in notes:
            after = note.id
            data = msgspec.json.encode({"at": note.at, "state": note.state, "step": note.step, "reason": note.reason})
            yield b"id: %d\nevent: moved\ndata: %b\n\n" % (note.id, data)
        if state in ENDS:
            yield b'event: ended\ndata: {"state":"%b"}\n\n' % state.value.encode()
            return
        if clock.monotonic() - beat_at >= BEAT_S:
            beat_at = clock.monotonic()
            yield b": still there\n\n"
        await asyncio.sleep(look_s)
