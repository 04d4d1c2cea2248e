"""A replica's standing with Valkey: epoch, scripts, heartbeat, tick. Knows nothing of requests."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from core import keyspace
from core.resp import Part, RespClient, RespError, RespUnavailable
from scheduler import commands, recount
from scheduler.commands import Code

log = structlog.get_logger()

TICK_S = 1.0
HEARTBEAT_TTL_MS = 10_000
HEARTBEAT_EVERY = 2  # ticks
RECONCILE_EVERY = 30  # ticks
RESYNC_ROUNDS_MAX = 3
RESYNC_WAIT_S = 1.0
REAP_BATCH = 100
REAP_ROUNDS_MAX = 50


class StaleEpoch(Exception):  # noqa: N818 - a state of the server
    """The server lives another life than the one this replica knows, or one that it cannot take part in."""


class Upkeep:
    """Keeps the replica known to Valkey.

    Args:
        client: the connection.
        replica: this replica's name: no space.
        settle_s: how long admission is fenced after data loss.
        reconcile: compares what this replica holds with its leases; awaited after each new start and now and then.
        on_epoch: enters what else was lost with a former epoch; awaited before this replica counts as back.
        on_scripts: told when the server had forgotten the scripts and has them again: say again what failed.
        on_ready: told True once calls may be made again, False when they may not.
        on_beat: told the number of living replicas every 2 s.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        replica: str,
        settle_s: float,
        reconcile: Callable[[], Awaitable[None]],
        on_epoch: Callable[[], Awaitable[object]] | None,
        on_scripts: Callable[[], None],
        on_ready: Callable[[bool], None],
        on_beat: Callable[[int], None],
    ) -> None:
        self._client = client
        self._replica = replica
        self._settle_us = int(settle_s * 1_000_000)
        self._reconcile = reconcile
        self._on_epoch = on_epoch
        self._on_scripts = on_scripts
        self._on_ready = on_ready
        self._on_beat = on_beat
        self._resyncing: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._losses = 0
        self.drift = recount.Figures()
        self.epoch = b""
        self.ready = False

    async def start(self, *, background: bool) -> None:
        """Take part. With Valkey away it returns all the same and joins later."""
        self._client.watch(self._on_connection)
        if self._client.connected:
            await self.resync()
        if background:
            self._loop_task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Leave: whatever is still held is given back by the others at once."""
        for task in (self._loop_task, self._resyncing, self._reloading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._set_ready(ready=False)
        try:
            await self._client.call("ZADD", keyspace.BEAT, "XX", 1, self._replica)
        except (RespUnavailable, RespError):
            log.warning("replica.left_unheard", replica=self._replica)

    def _on_connection(self, connected: bool) -> None:
        self._set_ready(ready=False)
        if connected:
            self.start_resync()
        else:
            self._losses += 1

    def _set_ready(self, *, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._on_ready(ready)

    def start_resync(self) -> asyncio.Task[None]:
        """Begin to take part anew, once however many ask."""
        if self._resyncing is None or self._resyncing.done():
            self._set_ready(ready=False)
            self._resyncing = asyncio.get_running_loop().create_task(self._try_resync())
        return self._resyncing

    async def resync(self) -> None:
        """Take part anew; returns when done or failed (see `ready`)."""
        await asyncio.shield(self.start_resync())

    async def _try_resync(self) -> None:
        """Again when the connection changed meanwhile: what was said on the former one may be lost."""
        for _ in range(RESYNC_ROUNDS_MAX):
            losses = self._losses
            try:
                await self._resync()
            except (RespUnavailable, RespError, StaleEpoch) as error:
                log.warning("replica.resync_failed", replica=self._replica, error=str(error))
                return
            if losses == self._losses:
                self._set_ready(ready=True)
                return

    async def _resync(self) -> None:
        info = await self._client.call("INFO", "server")
        run_id = next(line[7:] for line in info.split(b"\r\n") if line.startswith(b"run_id:"))
        before = self.epoch
        await self.load_scripts()
        self.epoch = await self._ask_epoch(run_id, before, "")
        await self.heartbeat()
        await self._reconcile()
        if self._on_epoch is not None and before != self.epoch:
            await self._on_epoch()
        if await self._ask_epoch(run_id, before, "join") != self.epoch:
            raise StaleEpoch
        if before not in (b"", self.epoch):
            log.warning("epoch.changed", replica=self._replica)

    async def renew(self) -> None:
        """Join the server's new life.

        Raises:
            RespUnavailable: that did not come about in time.
        """
        try:
            async with asyncio.timeout(RESYNC_WAIT_S):
                await self.resync()
        except TimeoutError as error:
            raise RespUnavailable("no epoch") from error
        if not self.ready:
            raise RespUnavailable("no epoch")

    async def load_scripts(self) -> None:
        """Give the server the library, unless it has it."""
        try:
            await self._client.call("FUNCTION", "LOAD", commands.LIBRARY)
        except RespError as error:
            if commands.HAS_LIBRARY not in str(error):
                raise

    async def _call(self, name: str, keys: list[Part], args: list[Part]) -> Any:
        """Call a function of the library, which is loaded when the server has lost it."""
        call = commands.call(name, keys, args)
        try:
            return await self._client.send(call)
        except RespError as error:
            if not str(error).startswith(commands.NO_FUNCTION):
                raise
        await self.load_scripts()
        return await self._client.send(call)

    def start_reload(self) -> None:
        """Begin to load the scripts anew, once however many calls missed them."""
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            await self.load_scripts()
        except (RespUnavailable, RespError) as error:
            log.warning("scripts.not_loaded", replica=self._replica, error=str(error))
        else:
            self._on_scripts()

    async def _ask_epoch(self, run_id: bytes, before: bytes, step: str) -> bytes:
        keys: list[Part] = [keyspace.EPOCH, commands.OFFSET, commands.SETTLE, keyspace.BEAT, commands.AWAITED]
        args: list[Part] = [run_id, self._replica, secrets.token_hex(8), self._settle_us, before, step]
        reply = await self._call(commands.EPOCH, keys, args)
        if reply[0] == Code.NEWER_LAYOUT:
            raise StaleEpoch("gateways of a newer version have taken over: replace this one")
        return bytes(reply[1])

    async def heartbeat(self) -> None:
        """Say that this replica lives.

        Raises:
            StaleEpoch: the server lost its data or was restarted.
        """
        keys: list[Part] = [keyspace.EPOCH, commands.OFFSET, keyspace.BEAT]
        args: list[Part] = [self.epoch, self._replica, HEARTBEAT_TTL_MS]
        reply = self._checked(await self._call(commands.HEARTBEAT, keys, args))
        self._on_beat(reply[1])
        if self.ready and not reply[2]:
            log.warning("replica.was_taken_for_dead", replica=self._replica)
            await self._reconcile()

    async def tick(self) -> int:
        """Reap dead replicas, take back unclaimed grants, grant what fits; returns the leases given back.

        Raises:
            StaleEpoch: as `heartbeat`.
        """
        keys: list[Part] = [keyspace.EPOCH, commands.OFFSET, keyspace.BEAT, commands.UNCLAIMED]
        reaped = due = 0
        for _ in range(REAP_ROUNDS_MAX):
            reply = self._checked(await self._call(commands.TICK, keys, [self.epoch, REAP_BATCH]))
            reaped += reply[1]
            due = reply[3]
            if not reply[2]:
                break
        if reaped:
            log.warning("leases.reaped", replica=self._replica, leases=reaped)
        if due:
            await self.recount()
        return reaped

    async def recount(self, *, now: bool = False, leases: int = recount.LEASES) -> list[recount.Drift] | None:
        """Compare the counters with all leases, and set right what is off; None when another replica does.

        Args:
            now: whether or not it is due.
            leases: read by one call.

        Raises:
            StaleEpoch: as `heartbeat`.
        """
        keys: list[Part] = [keyspace.EPOCH, commands.OFFSET]
        args: list[Part] = [self.epoch, self._replica, leases, int(now)]

        async def step() -> list[Any]:
            reply: list[Any] = self._checked(await self._call(commands.RECOUNT, keys, args))[1:]
            return reply

        return await recount.run_round(step, self.drift, replica=self._replica)

    @staticmethod
    def _checked(reply: Any) -> Any:
        if reply[0] == Code.EPOCH:
            raise StaleEpoch
        return reply

    async def _run(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(TICK_S)
            turn += 1
            try:
                await self._turn(turn)
            except StaleEpoch:
                await self.resync()
            except (RespUnavailable, RespError) as error:
                log.warning("replica.tick_failed", replica=self._replica, error=str(error))
                self._set_ready(ready=False)

    async def _turn(self, turn: int) -> None:
        if not self._client.connected:
            return
        if not self.ready:
            await self.resync()
            return
        if turn % HEARTBEAT_EVERY == 0:
            await self.heartbeat()
        await self.tick()
        if turn % RECONCILE_EVERY == 0:
            await self._reconcile()
