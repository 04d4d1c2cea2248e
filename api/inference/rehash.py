"""Stores keys that were met under an old pepper under the current one too, behind the requests' back.

Only digests are kept here, and only until they are written. What cannot be written now is met again with its next call.
"""

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from api.inference.metrics import Metrics
from core.db import Sessions, transaction
from tenants import key_secrets

WAITING_MAX = 1000
PAUSE_S = 1.0  # what is met within it is written together

_log = structlog.get_logger("gateway")


class Rehash:
    """`note` is called by requests, `run` is the one task that writes."""

    def __init__(self, sessions: Sessions, pepper_name: str, metrics: Metrics) -> None:
        self._sessions = sessions
        self._pepper_name = pepper_name
        self._metrics = metrics
        self._waiting: dict[bytes, bytes] = {}  # old digest → new digest
        self._some = asyncio.Event()

    def note(self, older: bytes, digest: bytes) -> None:
        if older in self._waiting:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._metrics.add("rehash_dropped_total")
            return
        self._waiting[older] = digest
        self._some.set()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(PAUSE_S)
            await self.write()

    async def write(self) -> None:
        """Write what waits; on trouble it is forgotten, and counted."""
        self._some.clear()
        pairs, self._waiting = self._waiting, {}
        try:
            async with transaction(self._sessions) as session:
                self._metrics.add("rehashed_total", await key_secrets.rehash(session, pairs, self._pepper_name))
        except (SQLAlchemyError, OSError) as error:
            self._metrics.add("rehash_dropped_total", len(pairs))
            _log.warning("rehash.failed", error=type(error).__name__)
