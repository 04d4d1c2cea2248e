"""The gateway's process: its parts put together, served by uvicorn's server with our protocol, ended in order."""

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
import uvicorn
import uvloop

from api.inference import policy, shadow, sweeper
from api.inference.access_log import AccessLog
from api.inference.bearers import Bearers
from api.inference.claims import Claims
from api.inference.cold import ColdApp
from api.inference.control_proxy import ControlProxy
from api.inference.directory import Directory
from api.inference.ending import end_running as end_running_of
from api.inference.gateway import Gateway
from api.inference.metrics import Metrics
from api.inference.new_keys import NewKeys
from api.inference.policy import PolicyKeeper
from api.inference.protocol import InferenceProtocol
from api.inference.readiness import Readiness
from api.inference.refusals import RefusalWriter
from api.inference.rehash import Rehash
from api.inference.rollout_post import RolloutPost
from api.inference.snapshot import Follower
from api.inference.spool_register import SpoolRegister
from api.server import Server
from billing import budgets, credit_figures
from billing.spool import SpoolWriter
from billing.spool_format import IDENTITY_NAME
from core import db, logging
from core.clock import Clock, SystemClock
from core.ids import new_uuid
from core.reader import Reader
from core.resp import RespClient
from core.sealing import sealing_key
from core.settings import Settings
from engine.client import UpstreamPool
from engine.tls_client import TlsClient, UpstreamClient
from knative.wake import StateFeed
from scheduler.admission import Admission
from scheduler.held import HeldEverywhere
from scheduler.router.router import Router
from scheduler.routing_feed import RoutingFeed
from scheduler.saturation import read_part_full
from tenants.credentials import Peppers, peppers_of
from tenants.oidc.clients import Clients

BACKLOG = 4096
DRAIN_S = 12  # running answers may end within it; the supervisor's patience is longer
LAST_S = 3.0  # for those that were cut then, to be settled
GC_THRESHOLDS = (50_000, 20, 100)  # the maps are frozen, requests make no cycles

_log = structlog.get_logger("gateway")


def replica_name(settings: Settings) -> str:
    """The name of this replica's spool and leases."""
    return settings.gateway.replica_id or f"{socket.gethostname()}-{settings.gateway.port}".replace(" ", "-")


class DrainingServer(Server):
    """The gateway's: on a signal it takes nothing new, and lets running requests end."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, serving: Callable[[], None]) -> None:
        super().__init__(config, serving)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.draining = True
        await super().shutdown(sockets)


def server_config(gateway: Gateway) -> uvicorn.Config:
    """Uvicorn without any of its own HTTP: every connection is an `InferenceProtocol`."""

    def make(*, server_state: Any, **_: Any) -> InferenceProtocol:
        return InferenceProtocol(gateway, server_state.connections, server_state.tasks)

    protocol: Any = make
    return uvicorn.Config(
        gateway.cold_app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=DRAIN_S,
    )


def listener(host: str, port: int) -> socket.socket:
    """Bind the front door."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
    found.setblocking(False)
    return found


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[tuple[Gateway, Follower, list[Coroutine[Any, Any, None]]]]:
    """Build the parts. Neither Postgres nor Valkey need be there; what misses is told by `/ready`."""
    loop, clock = asyncio.get_running_loop(), SystemClock()
    metrics, directory, replica = Metrics(), Directory(), replica_name(settings)
    engine = db.create_engine(settings.database)
    sessions = db.create_sessions(engine)
    returning = (settings.spool_dir / replica / IDENTITY_NAME).exists()
    spool = SpoolWriter(settings.spool_dir / replica, clock=clock, marks=settings.gateway.spool_marks)
    await asyncio.to_thread(spool.start, loop)
    valkey = await RespClient.connect(settings.valkey.url.get_secret_value(), required=False)
    register = SpoolRegister(valkey, settings.spool_dir / replica, started=clock.now(), returning=returning)
    admission = admission_of(settings, valkey, sessions, clock, register)
    states, proxy = StateFeed(valkey), ControlProxy(settings.control.socket)
    pool = UpstreamPool(loop, clock.monotonic, connections_max=settings.gateway.upstream_connections_max)
    tls = TlsClient(connections_max=settings.gateway.upstream_connections_max)
    peppers = peppers_of(settings.secrets)
    rehash = Rehash(sessions, peppers.ids[0], metrics)
    bearers = Bearers(directory, sessions, Clients(settings.oidc, clock), peppers.current)
    new_keys = NewKeys(directory, Reader(settings.database, name="tidegate-new-keys"), peppers, clock)
    gateway = Gateway(
        loop=loop,
        settings=settings.gateway,
        clock=clock,
        pepper=peppers.current,
        new_id=new_uuid,
        directory=directory,
        admission=admission,
        spool=spool,
        states=states,
        held=HeldEverywhere(valkey, replica),
        part_full=lambda deployment: read_part_full(valkey, deployment, clock.now_us()),
        pool=pool,
        upstream=UpstreamClient(pool, tls),
        metrics=metrics,
        log=AccessLog(_write_out, metrics.add),
        claims=Claims(valkey, replica, sealing_key(settings.secrets.sealing)),
        bearers=bearers,
        new_keys=new_keys,
        previous_peppers=peppers.previous,
        rehash=rehash.note,
        router=Router(zone=settings.zone),
    )
    gateway.cold_app = ColdApp(gateway, proxy, Readiness(gateway, admission))
    keeper = keeper_of(gateway, settings, admission, states)
    follower = follower_of(gateway, settings, sessions, peppers, partial(start_from_disk, settings, gateway))
    refusal_writer = RefusalWriter(gateway.refusals, sessions, new_uuid, metrics.add)
    post = RolloutPost(valkey, replica, directory, gateway.tally)
    try:
        await join(settings, clock, admission, states)
        feed = RoutingFeed(valkey, gateway.router, gateway=replica, clock=clock)
        work = [sweeper.run(gateway), register.run(), refusal_writer.run(), rehash.run(), bearers.run(), keeper.run()]
        work += [feed.run(), post.run()]
        yield gateway, follower, work
    finally:
        await shadow.close(gateway)
        for part in (keeper.close, bearers.close, new_keys.close, refusal_writer.close, states.close, admission.close):
            await part()
        await gateway.log.close(loop)
        await asyncio.to_thread(spool.close)
        for part in (pool.close, tls.close, proxy.close, valkey.close):
            await part()
        await engine.dispose()


def admission_of(
    settings: Settings, valkey: RespClient, sessions: db.Sessions, clock: Clock, register: SpoolRegister
) -> Admission:
    """The door; what it asks of money is read from the books."""
    return Admission(
        valkey,
        replica=replica_name(settings),
        clock=clock,
        global_inflight_max=settings.gateway.global_inflight_max,
        credit_loader=credit_figures.make_loader(sessions, valkey),
        budget_loader=budgets.make_loader(sessions, valkey),
        on_epoch=register.look,
        blocks=settings.gateway.blocks,
    )


def keeper_of(gateway: Gateway, settings: Settings, admission: Admission, states: StateFeed) -> PolicyKeeper:
    """What writes down what the gateway knows."""
    return PolicyKeeper(
        *(settings.policy_dir / replica_name(settings), sealing_key(settings.secrets.sealing)),
        *(gateway.directory, gateway.clock),
        shares=admission.shares,
        states=states.known,
    )


def start_from_disk(settings: Settings, gateway: Gateway) -> bool:
    """Go by what this replica's former life left on disk; tried once, as a file that is too old grows no younger."""
    directory, trust_s = gateway.directory, settings.gateway.policy_trust_s
    if directory.disk_note or not trust_s:
        return False
    folder = settings.policy_dir / replica_name(settings)
    return policy.take(folder, directory, gateway.clock, sealing=sealing_key(settings.secrets.sealing), trust_s=trust_s)


async def join(settings: Settings, clock: Clock, admission: Admission, states: StateFeed) -> None:
    """Take part; with Valkey away go by what callers had in this replica's former life, and where engines listened."""
    await admission.start()
    await states.start()
    if admission.ready:
        return
    folder = settings.policy_dir / replica_name(settings)
    pulse = policy.read_pulse(folder, sealing_key(settings.secrets.sealing))
    if pulse is not None and clock.now_us() - pulse.at_us <= settings.gateway.policy_trust_s * 1_000_000:
        admission.restore(pulse.shares)
        states.restore(pulse.states)


def follower_of(
    gateway: Gateway, settings: Settings, sessions: db.Sessions, peppers: Peppers, on_disk: Callable[[], bool]
) -> Follower:
    """What keeps the gateway's directory true."""
    return Follower(
        gateway.directory,
        sessions,
        settings.database.url.get_secret_value(),
        sealing=bytes.fromhex(settings.secrets.sealing.get_secret_value()),
        clock=gateway.clock,
        metrics=gateway.metrics,
        peppers=peppers.ids,
        end=partial(end_running_of, gateway),
        bearers=gateway.bearers,
        on_disk=on_disk,
    )


async def serve(settings: Settings, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then let running answers end, and write down what they used."""
    async with open_gateway(settings) as (gateway, follower, work):
        serving, loaded = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(coroutine) for coroutine in (follower.run(loaded.set), *work)]

        async def tell() -> None:
            await serving.wait()
            await loaded.wait()
            ready()

        tasks.append(asyncio.create_task(tell()))
        server = DrainingServer(server_config(gateway), gateway, serving.set)
        door = listener(settings.gateway.host, settings.gateway.port)
        try:
            await server.serve(sockets=[door])
        finally:
            door.close()
            await end_running(gateway)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    _log.error("task.failed", error=type(result).__name__, exc_info=result)


async def end_running(gateway: Gateway) -> None:
    """Cut what did not end by itself: its callers get an error and are charged nothing."""
    gateway.draining = True
    for relay in list(gateway.relays):
        relay.interrupt()
    running = [connection.task for connection in gateway.connections if connection.task is not None]
    if running:
        await asyncio.wait(running, timeout=LAST_S)
    for connection in list(gateway.connections):
        connection.transport.abort()
    await asyncio.sleep(0)


def _write_out(data: bytes) -> None:
    os.write(1, data)


def run(settings: Settings, ready: Callable[[], None]) -> None:
    """Be the gateway's process: blocks until told to end; `ready` is called once it serves with its keys loaded."""
    logging.configure(settings.log, "gateway")
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, ready))
