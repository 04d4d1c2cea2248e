"""What this replica's spool says of money held in Valkey.

After Valkey lost its data the charges that wait in the spool are entered, before prepaid admission resumes. After this
replica was killed the holds of what it served then, and of which the spool holds no event, are given back.
"""

import asyncio
from datetime import datetime
from pathlib import Path
from uuid import UUID

import structlog

from billing.credit_figures import register_spool, settle
from billing.spool_reader import unposted_among
from core import keyspace
from core.ids import uuid7_time
from core.resp import RespClient, RespError, RespUnavailable

LOOK_S = 0.5  # well inside the time that admission stays fenced
WRITE_OFF_LOOKS = 20  # the others find a dead replica's leases up to 11 s after it died
WRITE_OFF_MAX = 10_000  # requests at a time

_log = structlog.get_logger("gateway")


class SpoolRegister:
    """Watches the epoch, since a new one means that what Valkey knew of unposted usage is gone; and what is owed.

    Args:
        client: the connection to Valkey.
        folder: this replica's spool; its name is the replica's.
        started: when this process began. Only what was admitted before is of a former life.
        returning: this folder held the spool of a former life too. On a new volume that spool may still be adopted
            elsewhere, so its money stays held.
    """

    def __init__(self, client: RespClient, folder: Path, *, started: datetime, returning: bool) -> None:
        self._client = client
        self._folder = folder
        self._started = started
        self._returning = returning
        self._epoch = b""

    async def run(self) -> None:
        """Watch for ever."""
        looks = 0
        while True:
            await self.look()
            if looks % WRITE_OFF_LOOKS == 0:
                await self.write_off()
            looks += 1
            await asyncio.sleep(LOOK_S)

    async def write_off(self) -> int:
        """Free the money held for requests of former lives that left no usage event; returns how many there were."""
        if not self._returning:
            return 0
        if not self._epoch:  # what was admitted from a block stands in the spool alone until it is entered
            await self.look()
            if not self._epoch:
                return 0
        try:
            return await self._write_off(keyspace.owed(self._folder.name))
        except (RespUnavailable, RespError, OSError) as error:
            _log.warning("holds.not_written_off", error=type(error).__name__)
            return 0

    async def _write_off(self, owed: str) -> int:
        flat = await self._client.call("HRANDFIELD", owed, WRITE_OFF_MAX, "WITHVALUES")
        if not flat:
            return 0
        held = {
            UUID(hex=key.decode()): UUID(hex=tenant.decode()) for key, tenant in zip(*[iter(flat)] * 2, strict=True)
        }
        # What has an event is the poster's; one posted since then is settled, and removing it again does nothing.
        unposted = await asyncio.to_thread(unposted_among, self._folder, held.keys())
        lost: dict[UUID, list[UUID]] = {}
        for request, tenant in held.items():
            if request not in unposted and uuid7_time(request) < self._started:
                lost.setdefault(tenant, []).append(request)
        for tenant, requests in lost.items():
            await settle(self._client, tenant, None, requests)
        await self._client.call("HDEL", owed, *(request.hex for request in held))
        count = sum(map(len, lost.values()))
        if count:
            _log.warning("holds.written_off", requests=count, tenants=len(lost))
        return count

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
