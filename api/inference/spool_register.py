"""After Valkey lost its data: enter the charges that wait in this replica's spool, before prepaid admission resumes."""

import asyncio
from pathlib import Path

import structlog

from billing.credit_figures import register_spool
from core import keyspace
from core.resp import RespClient, RespError, RespUnavailable

LOOK_S = 0.5  # well inside the time that admission stays fenced

_log = structlog.get_logger("gateway")


class SpoolRegister:
    """Watches the epoch; a new one means that what Valkey knew of unposted usage is gone."""

    def __init__(self, client: RespClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._epoch = b""

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> int:
        """Register once per epoch; returns how many events were entered."""
        try:
            epoch = await self._client.call("GET", keyspace.EPOCH)
            if not epoch or epoch == self._epoch:
                return 0
            count = await register_spool(self._client, self._folder)
        except (RespUnavailable, RespError, OSError) as error:
            _log.warning("spool.not_registered", error=type(error).__name__)
            return 0
        self._epoch = epoch
        if count:
            _log.info("spool.registered", events=count)
        return count
