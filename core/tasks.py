"""What the worker does, as data: a package's `tasks.py` has a tuple `TASKS` of these, and the worker runs them.

A *periodic* task runs at the worker's start and then every so often; it may run twice or late, so it is idempotent. A
*job* is the effect of an outbox row: it runs in the transaction that marks the row done, so its effect in Postgres is
made exactly once, however often the broker delivers.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import Sessions
from core.resp import RespClient
from core.settings import Settings
from core.telemetry import TaskFigures, create_registry

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task works with."""

    settings: Settings
    sessions: Sessions
    clock: Clock
    figures: TaskFigures = field(default_factory=lambda: TaskFigures(create_registry()))

    @asynccontextmanager
    async def valkey(self) -> AsyncIterator[RespClient]:
        """Open a connection for this task: between tasks the loop stands still, and no connection survives that."""
        client = await RespClient.connect(self.settings.valkey.url.get_secret_value())
        try:
            yield client
        finally:
            await client.close()


@dataclass(frozen=True, slots=True)
class Periodic:
    """Runs every `every_s` seconds, at most `timeout_s` long; a run that could not start in time is dropped.

    `apart`: it may take minutes, so it runs in a thread of its own (`core.lane`), and the others go on meanwhile.
    """

    name: str
    run: Callable[[TaskContext], Awaitable[None]]
    every_s: float
    timeout_s: float = TIMEOUT_S
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The effect of an outbox row of this name; `run` is given the row's arguments and its transaction."""

    name: str
    run: Callable[[TaskContext, AsyncSession, Mapping[str, Any]], Awaitable[None]]
    timeout_s: float = TIMEOUT_S


Task = Periodic | Job
