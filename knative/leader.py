"""One controller at a time: a Postgres advisory lock, and a term that rises with each leader.

The lock falls with its connection, so a killed leader is followed at once. Each write to Postgres carries the term,
each state in Valkey an epoch that begins with it, and older ones change nothing there: a leader that does not know yet
that it is none does no harm. While Postgres is away nobody can become leader, so the one there is goes on; when it is
back, the leader takes its lock again, or steps down when somebody else led meanwhile.
"""

import asyncio
import contextlib

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from catalog import observed
from core import db
from core.clock import Clock
from knative import queries

EPOCHS_PER_TERM = 2**30  # a term has room for so many changes, and eight million terms fit into 2^53
ANSWER_S = 3.0
REGAIN_S = 3.0  # our own dead connection may hold the lock for a moment after Postgres is back
UNREACHABLE = (SQLAlchemyError, OSError, TimeoutError)


class Leadership:
    """The lock of one process. `acquire`, then `confirm` every second, `release` at the end."""

    def __init__(self, engine: AsyncEngine, sessions: db.Sessions, holder: str, clock: Clock) -> None:
        self._engine = engine
        self._sessions = sessions
        self._holder = holder
        self._clock = clock
        self._connection: AsyncConnection | None = None
        self._denied_since: float | None = None
        self.term = 0

    async def acquire(self) -> bool:
        """Become leader, with a new term, if nobody else is; False otherwise or when Postgres does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if not await self._lock():
                    return False
                async with db.transaction(self._sessions) as session:
                    self.term = await observed.begin_term(session, self._holder)
        except UNREACHABLE:
            await self.release()
            return False
        self._denied_since = None
        return True

    async def confirm(self) -> bool:
        """Return whether this process may go on as leader: it has the lock, or nobody can have it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._connection is not None:
                    return await queries.holds_lock(self._connection)
                return await self._regain()
        except UNREACHABLE:
            await self.release()
            return True

    async def _regain(self) -> bool:
        if not await self._lock():
            now = self._clock.monotonic()
            self._denied_since = now if self._denied_since is None else self._denied_since
            return now - self._denied_since < REGAIN_S
        self._denied_since = None
        async with db.transaction(self._sessions) as session:
            return await observed.current_term(session) == self.term

    async def _lock(self) -> bool:
        connection = await self._engine.connect()
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            got = await queries.try_lock(connection)
        except BaseException:
            await connection.invalidate()
            raise
        if got:
            self._connection = connection
        else:
            await connection.close()
        return got

    async def release(self) -> None:
        """Let the lock go at once, and close its connection whatever state that is in."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(ANSWER_S):
                await queries.unlock(connection)  # else the next leader waits until the server sees the end of ours
        try:
            async with asyncio.timeout(ANSWER_S):
                await connection.invalidate()  # the session ends, and the lock with it; it must not go to the pool
                await connection.close()
        except UNREACHABLE:
            return
