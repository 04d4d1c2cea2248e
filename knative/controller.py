"""The controller: it owns engines and answers wakes. One process leads, the others stand by.

`run` → `Controller.run` (who leads) → `Reign` (one term of one leader): `look` sees, decides by knative.lifecycle and
acts, four times a second and whenever something happens; `housekeep` once a second confirms the leadership, reads the
catalog when it changed, heals what Valkey lost and writes to Postgres what was observed.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence

from prometheus_client import CollectorRegistry

from core import db, keyspace, logging, telemetry
from core.clock import Clock, SystemClock
from core.logging import get_logger
from core.resp import RespClient
from core.sealing import sealing_key
from core.settings import Settings
from knative.leader import UNREACHABLE, Leadership
from knative.lifecycle import SECOND_US, Policy
from knative.local import LocalBackend
from knative.metrics import controller_metrics
from knative.reign import Reign

TICK_S = 0.25
STAND_BY_S = 1.0
HOUSEKEEP_S = 1.0
FIGURES_S = 10.0
log = get_logger(__name__)


def policy_of(settings: Settings) -> Policy:
    """Return the times of the settings; an engine is called idle at a third of its window, at most after 10 s."""
    window_us = settings.controller.idle_window_s * SECOND_US
    return Policy(
        idle_window_us=window_us,
        idle_after_us=min(10 * SECOND_US, window_us // 3),
        drain_timeout_us=settings.controller.drain_timeout_s * SECOND_US,
        start_timeout_us=settings.controller.start_timeout_s * SECOND_US,
    )


class Controller:
    """One process of the controller, leading or standing by."""

    def __init__(
        self,
        sessions: db.Sessions,
        client: RespClient,
        leadership: Leadership,
        backend: LocalBackend,
        *,
        policy: Policy,
        clock: Clock,
        sealing: bytes,
        registry: CollectorRegistry,
        tick_s: float = TICK_S,
    ) -> None:
        self._sessions = sessions
        self._client = client
        self._leadership = leadership
        self._backend = backend
        self._policy = policy
        self._clock = clock
        self._sealing = sealing
        self._metrics = controller_metrics(registry)
        self._tick_s = tick_s
        self._nudge = asyncio.Event()

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Lead whenever nobody else does, until `stop`; then end the engines and let the lock go."""
        await self._client.subscribe([keyspace.WAKE_CHANNEL], lambda _channel, _id: self._nudge.set(), self._nudge.set)
        self._client.watch(lambda _connected: self._nudge.set())
        said_ready = False
        while not stop.is_set():
            leads = await self._leadership.acquire()
            if leads:
                await self._lead(stop, ready if not said_ready else lambda: None)
            elif not said_ready:
                ready()
            said_ready = True
            if not stop.is_set():
                await pause(stop, STAND_BY_S)

    async def _lead(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """One term. Whatever ends it, the engines end with it: the next leader may be on another host."""
        log.info("controller.term_begun", term=self._leadership.term)
        self._metrics.term.set(self._leadership.term)
        reign = Reign(
            self._sessions,
            self._client,
            self._backend,
            term=self._leadership.term,
            policy=self._policy,
            clock=self._clock,
            sealing=self._sealing,
            nudge=self._nudge,
            metrics=self._metrics,
        )
        try:
            await reign.begin()
            ready()
            await self._reign_on(reign, stop)
        except UNREACHABLE as problem:
            log.warning("controller.postgres_away", error=type(problem).__name__)
        finally:
            await reign.end()
            await self._leadership.release()
            self._metrics.term.set(0)
            log.info("controller.term_ended", term=self._leadership.term)

    async def _reign_on(self, reign: Reign, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        next_housekeeping = loop.time()
        while not stop.is_set():
            if loop.time() >= next_housekeeping:
                next_housekeeping = loop.time() + HOUSEKEEP_S
                if not await self._leadership.confirm():
                    log.warning("controller.leadership_lost", term=self._leadership.term)
                    return
                await reign.housekeep()
            await reign.look()
            await self._rest(stop)

    async def _rest(self, stop: asyncio.Event) -> None:
        """Wait for the next tick, a wake, a probe's answer or the end."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._nudge, stop)]
        await asyncio.wait(waits, timeout=self._tick_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._nudge.clear()


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the end."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


async def write_figures(registry: CollectorRegistry, settings: Settings) -> None:
    """Leave this process's figures where the control plane finds them, again and again."""
    while True:
        try:
            telemetry.write_snapshot(registry, settings, "controller")
        except OSError as problem:
            log.warning("controller.figures_not_written", error=type(problem).__name__)
        await asyncio.sleep(FIGURES_S)


Beside = Callable[[Settings, RespClient, CollectorRegistry], Coroutine[None, None, None]]


async def serve(settings: Settings, ready: Callable[[], None], beside: Sequence[Beside] = ()) -> None:
    """Run until SIGTERM or SIGINT; what runs `beside` ends with it."""
    clock = SystemClock()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = db.create_engine(settings.database)
    sessions = db.create_sessions(engine)
    client = await RespClient.connect(settings.valkey.url.get_secret_value(), required=False)
    registry = telemetry.create_registry()
    holder = f"{socket.gethostname()}:{os.getpid()}"
    controller = Controller(
        sessions,
        client,
        Leadership(engine, sessions, holder, clock),
        LocalBackend(settings.home.resolve() / "run" / "engines", settings.home.resolve(), zone=settings.zone),
        policy=policy_of(settings),
        clock=clock,
        sealing=sealing_key(settings.secrets.sealing),
        registry=registry,
    )
    works = [write_figures(registry, settings), *(work(settings, client, registry) for work in beside)]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await controller.run(stop, ready)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        await engine.dispose()


def run(settings: Settings, ready: Callable[[], None], beside: Sequence[Beside] = ()) -> None:
    """The process entry: blocks until SIGTERM; `ready` is called once it leads and has published, or stands by."""
    logging.configure(settings.log, "controller")
    asyncio.run(serve(settings, ready, beside))
