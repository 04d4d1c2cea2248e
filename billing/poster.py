"""The poster process: follows all spools of this host and moves their events into the ledger.

It keeps no state that matters: what is posted is known by the ledger alone, the checkpoints only save reading again,
and Valkey is told after each commit by a script that may be repeated. So it can be killed between any two steps.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from billing import credit_figures, spools
from billing import spool_format as fmt
from billing.metrics import PosterMetrics, poster_metrics
from billing.posting import Posted, Posting, ensure_partitions
from billing.spool_reader import SpoolReader
from billing.types import UsageEvent
from billing.watch import Watch
from core import keyspace, logging, telemetry
from core.clock import Clock, SystemClock
from core.db import Sessions, create_engine, create_sessions
from core.logging import get_logger
from core.resp import RespClient, RespError, RespUnavailable
from core.settings import Settings

BATCH_EVENTS = 5000
BUSY_WAIT_MS = 100  # between two batches that were not full: gathers some more for one commit
IDLE_WAIT_MS = 200
BACKOFF_MIN_MS = 250
BACKOFF_MAX_MS = 5000
REPORT_MS = 10_000
WATCH_MIN_MS = 1000
HOUSEKEEPING_ROUNDS = 6  # of these make a minute
GC_THRESHOLDS = (50_000, 20, 50)  # a batch makes many objects at once, and no cycles
UNSETTLED_MAX = 200  # batches whose settlement Valkey has not taken; beyond it the reconciliation does it
PROCESS = "poster"
EPOCH_NAME = "epoch"
TROUBLE = (DBAPIError, SQLAlchemyError, psycopg.Error, OSError)

_log = get_logger(__name__)


class Poster:
    """One host's poster. `step` does one round; `run` below repeats it."""

    def __init__(
        self, sessions: Sessions, client: RespClient, spool_dir: Path, clock: Clock, metrics: PosterMetrics
    ) -> None:
        self._sessions = sessions
        self._client = client
        self._spool_dir = spool_dir
        self._folder = spool_dir / fmt.POSTER_FOLDER
        self._clock = clock
        self._metrics = metrics
        self._posting = Posting(sessions, clock, metrics)
        self.watch = Watch(sessions, clock)
        self._readers: dict[str, SpoolReader] = {}
        self._unsettled: list[Posted] = []
        self._epoch = self._recall_epoch()
        self._figures_due = False

    async def step(self) -> int:
        """Read a batch from the spools, post it, tell Valkey, move the checkpoints; returns the number of events.

        Raises:
            one of TROUBLE: Postgres did not take it. Nothing is lost: the next step reads it again.
        """
        await self._follow_epoch()
        try:
            events = self._read()
            if events:
                await self._post(events)
        except BaseException:
            for reader in self._readers.values():
                reader.rewind()
            raise
        if await self._settle():
            for reader in self._readers.values():
                reader.acknowledge()
        return len(events)

    async def housekeep(self) -> None:
        """Once a minute: partitions ahead, figures reconciled, spools reported, those of ended replicas tidied."""
        await ensure_partitions(self._sessions, self._clock)
        for reader in list(self._readers.values()):
            reader.tidy()
        await self.report_spools()
        self._metrics.spool_bytes.set(sum(fmt.unposted_bytes(reader.folder) for reader in self._readers.values()))
        try:
            drift = await credit_figures.reconcile(self._sessions, self._client, self._clock)
        except (RespUnavailable, RespError):
            return
        self._metrics.drift_nano.set(drift.figures_nano + drift.sums_nano)
        self._metrics.repairs.inc(drift.figures + drift.leftovers + drift.sums)

    async def report_spools(self) -> None:
        """Write down what is in this host's spools and not posted."""
        await spools.report(self._sessions, self._spool_dir, self._clock.now())

    def _read(self) -> list[UsageEvent]:
        folders = {folder.name: folder for folder in fmt.spool_folders(self._spool_dir)}
        for name in self._readers.keys() - folders.keys():
            del self._readers[name]
        for name in folders.keys() - self._readers.keys():
            self._readers[name] = SpoolReader(folders[name])
        events: list[UsageEvent] = []
        for name, reader in list(self._readers.items()):
            if len(events) >= BATCH_EVENTS:
                break
            try:
                batch = reader.read(BATCH_EVENTS - len(events))
            except OSError as error:  # of this folder; the others go on
                reader.rewind()
                _log.error("spool.unreadable", spool=name, error=str(error))
                continue
            if batch:
                events += batch
                self._readers[name] = self._readers.pop(name)  # last in line next time: no spool waits for another
        return events

    async def _post(self, events: list[UsageEvent]) -> None:
        try:
            posted = await self._posting.post(events)
        except BaseException:
            self._metrics.posting_failures.inc()
            raise
        self._unsettled += posted
        self.watch.note(events)
        oldest_us = min(event.ended_at_us for event in events)
        self._metrics.posting_lag.observe(max(0, self._clock.now_us() - oldest_us) * 1e-6)

    async def _settle(self) -> bool:
        """Tell Valkey of what is posted; tells whether nothing is left to tell."""
        while self._unsettled:
            try:
                await credit_figures.settle_all(self._client, self._unsettled[0].settlements)
            except (RespUnavailable, RespError) as error:
                self._metrics.settle_failures.inc()
                if len(self._unsettled) <= UNSETTLED_MAX:
                    return False
                _log.warning("poster.settlements_dropped", batches=len(self._unsettled), error=str(error))
                self._unsettled.clear()
                return True
            self._unsettled.pop(0)
        return True

    async def _follow_epoch(self) -> None:
        """When Valkey began a new life, enter what is in the spools and not posted, and set all figures anew."""
        try:
            epoch: bytes | None = await self._client.call("GET", keyspace.EPOCH)
            if epoch is not None and epoch != self._epoch:
                count = 0
                for folder in fmt.spool_folders(self._spool_dir):
                    count += await credit_figures.register_spool(self._client, folder)
                _log.info("poster.epoch_followed", unposted_events=count)
                self._remember_epoch(epoch)
                self._figures_due = True
            if self._figures_due:
                await credit_figures.reconcile(self._sessions, self._client, self._clock)
                self._figures_due = False
        except (RespUnavailable, RespError):
            return

    def _remember_epoch(self, epoch: bytes) -> None:
        self._epoch = epoch
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / EPOCH_NAME).write_bytes(epoch)

    def _recall_epoch(self) -> bytes | None:
        try:
            return (self._folder / EPOCH_NAME).read_bytes()
        except FileNotFoundError:
            return None


async def serve(settings: Settings, ready: Callable[[], None], stop: asyncio.Event) -> None:
    """Post until `stop` is set."""
    clock = SystemClock()
    engine = create_engine(settings.database)
    client = await RespClient.connect(settings.valkey.url.get_secret_value(), required=False)
    lock = await _only_one(settings.spool_dir, stop)
    registry = telemetry.create_registry()
    poster = Poster(create_sessions(engine), client, settings.spool_dir, clock, poster_metrics(registry))
    ready()
    _log.info("poster.started", spool_dir=str(settings.spool_dir))
    try:
        await _repeat(poster, stop, lambda: telemetry.write_snapshot(registry, settings, PROCESS))
    finally:
        await client.close()
        await engine.dispose()
        if lock is not None:
            os.close(lock)


async def _only_one(spool_dir: Path, stop: asyncio.Event) -> int | None:
    """Wait until no other poster follows these spools. A second one would do no harm, only double work."""
    folder = spool_dir / fmt.POSTER_FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    while not stop.is_set():
        lock = fmt.try_lock(folder)
        if lock is not None:
            return lock
        await _pause(stop, 1000)
    return None


async def _repeat(poster: Poster, stop: asyncio.Event, report: Callable[[], None]) -> None:
    housekeeping = asyncio.create_task(_keep_house(poster, stop, report))
    watching = asyncio.create_task(_keep_watch(poster, stop))
    backoff_ms = BACKOFF_MIN_MS
    while not stop.is_set():
        try:
            count = await poster.step()
        except TROUBLE as error:
            _log.warning("poster.waits", error=type(error).__name__, retry_ms=backoff_ms)
            await _pause(stop, backoff_ms)
            backoff_ms = min(2 * backoff_ms, BACKOFF_MAX_MS)
            continue
        backoff_ms = BACKOFF_MIN_MS
        if count < BATCH_EVENTS:
            await _pause(stop, BUSY_WAIT_MS if count else IDLE_WAIT_MS)
    await housekeeping
    await watching
    for _ in range(1000):  # a clean stop leaves nothing behind that can be posted now
        try:
            if not await poster.step():
                await poster.report_spools()
                return
        except TROUBLE:
            return


async def _keep_house(poster: Poster, stop: asyncio.Event, report: Callable[[], None]) -> None:
    """Beside the posting, so that it delays no event: figures to the file often, the rest each minute."""
    rounds = 0
    while not stop.is_set():
        try:
            report()
            if rounds % HOUSEKEEPING_ROUNDS == 0:
                await poster.housekeep()
        except (*TROUBLE, RespUnavailable, RespError) as error:
            _log.warning("poster.housekeeping_failed", error=type(error).__name__)
        rounds += 1
        await _pause(stop, REPORT_MS)


async def _keep_watch(poster: Poster, stop: asyncio.Event) -> None:
    """Beside the posting, and never busy for more than a quarter of the time: crossings and alerts."""
    while True:
        try:
            await poster.watch.look()
        except Exception as error:  # noqa: BLE001 - whatever it was: posting goes on, and the worker's sweep looks again
            _log.warning("poster.watch_failed", error=type(error).__name__, exc_info=True)
        if stop.is_set():
            return
        await _pause(stop, max(WATCH_MIN_MS, 3 * poster.watch.took_ms))


async def _pause(stop: asyncio.Event, ms: int) -> None:
    try:
        await asyncio.wait_for(stop.wait(), ms * 1e-3)
    except TimeoutError:
        return


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """The process: blocks until SIGTERM or SIGINT; calls `ready` once it follows the spools."""

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(settings, ready, stop)

    logging.configure(settings.log, PROCESS)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(main())
