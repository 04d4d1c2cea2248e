"""One connection to Postgres kept for reads that somebody waits for, each a single round trip."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from core.settings import Database

OPTIONS = (
    "-c statement_timeout=3000 -c TimeZone=UTC -c default_transaction_read_only=on"
    " -c plan_cache_mode=force_generic_plan"
)
CONNECT_TIMEOUT_S = 3


class Reader:
    """Reads one statement at a time: no ping, no BEGIN, no COMMIT; a statement is prepared and planned once.

    It connects with the first read. Nobody asks whether the connection lives: a read that finds it dead opens another.
    """

    def __init__(self, settings: Database, *, name: str) -> None:
        self._url = settings.url.get_secret_value()
        self._name = name
        self._turn = asyncio.Lock()
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def rows(self, statement: str, values: Mapping[str, Any]) -> Sequence[Any]:
        """Return the rows of a statement in psycopg's words, fields by name.

        Raises:
            psycopg.Error: Postgres is away, or refuses.
        """
        async with self._turn:
            if self._connection is not None:
                try:
                    return await self._read(self._connection, statement, values)
                except psycopg.OperationalError:
                    if self._connection is not None:  # it lives: this is about the statement
                        raise
            self._connection = await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                row_factory=namedtuple_row,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name=self._name,
                options=OPTIONS,
            )
            return await self._read(self._connection, statement, values)

    async def _read(
        self, connection: psycopg.AsyncConnection[Any], statement: str, values: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Whoever gives up in the middle of a read leaves a connection that is of no use to the next."""
        done = False
        try:
            cursor = await connection.execute(statement, values, prepare=True)
            rows = await cursor.fetchall()
            done = True
        except psycopg.Error:
            done = not connection.closed
            raise
        finally:
            if not done:
                self._connection = None
                await connection.close()
        return rows

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
