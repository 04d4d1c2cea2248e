"""A gateway in this process, with doubles of its neighbours, real engines (the simulator) and real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import msgspec

from api.inference.access_log import AccessLog
from api.inference.cold import ColdApp
from api.inference.control_proxy import ControlProxy
from api.inference.directory import Directory
from api.inference.gateway import Gateway
from api.inference.metrics import Metrics
from api.inference.protocol import InferenceProtocol
from api.inference.readiness import Report
from billing.price_table import NEVER_US
from billing.types import PriceSchedule, UsageEvent
from catalog.rollout_types import Arms
from catalog.types import DeploymentKind, EngineKind, ServedModel
from core.clock import Clock, ManualClock
from core.demand import Demand
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import Currency
from core.settings import Gateway as GatewaySettings
from core.tiers import Tier
from core.waits import Wait
from engine.client import UpstreamPool
from engine.tls_client import TlsClient, UpstreamClient
from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler import recount
from scheduler.router.router import Router
from scheduler.types import Entitlement, Prepared
from tenants.api_keys import digest, mint
from tenants.types import Limit, LimitLevel, LimitMetric, Principal

PEPPER = b"p" * 32
MILLION = 1_000_000


class FakeGrant(msgspec.Struct):
    """See `scheduler.types.Grant`."""

    request_id: UUID
    hold: int
    reply: list[int]
    queue_us: int = 0
    over: tuple[Demand, ...] = ()
    preempted: int = 0
    asked_for: Tier | None = None
    on_asked: Callable[[], bool] | None = None
    wait: Wait | None = None


class NoBlocks:
    """Of an admission that leases none."""

    granted = 0

    def __len__(self) -> int:
        return 0


class FakeAdmission:
    """Grants everything unless told otherwise, and remembers who holds what."""

    def __init__(self) -> None:
        self.held: dict[UUID, FakeGrant] = {}
        self.charges: dict[UUID, int | None] = {}
        self.estimates: list[tuple[int, int]] = []  # input and output tokens
        self.used: dict[UUID, tuple[int, int]] = {}
        self.cached: dict[UUID, int] = {}
        self.refusal: PlatformError | None = None
        self.refused: dict[str, PlatformError] = {}  # by the model's name
        self.alone = False  # without Valkey nothing is known of limits
        self.gate: asyncio.Event | None = None  # when set, acquire waits for it
        self.calls: list[tuple[Any, float, Tier]] = []
        self.ready = True  # False: Valkey is away
        self.drift = recount.Figures()
        self.waiting = 0
        self.queue_us = 0  # how long every request waited
        self.wait: Wait | None = None  # and why
        self.over: tuple[Demand, ...] = ()  # soft and dark limits that every request passes
        self.blocks = NoBlocks()

    def prepare(
        self,
        demands: tuple[Demand, ...],
        model: ServedModel,
        tenant: str,
        *,
        owner: str = "",
        weight: float = 1.0,
        entitlements: tuple[Entitlement, ...] = (),
    ) -> Prepared:
        return Prepared(demands, model, tenant, owner=owner, weight=weight, entitlements=entitlements)

    def take(  # noqa: PLR0917 - as of admission
        self, request_id: UUID, prepared: Prepared, hold: int, input_tokens: int, output_tokens: int, tier: Tier
    ) -> None:
        raise AssertionError("nobody has a block")

    async def acquire(
        self,
        request_id: UUID,
        prepared: Prepared,
        *,
        hold: int,
        input_tokens: int,
        output_tokens: int,
        tier: Tier,
        wait_s: float,
    ) -> FakeGrant:
        self.calls.append((prepared, wait_s, tier))
        self.estimates.append((input_tokens, output_tokens))
        if self.refusal is not None:
            raise self.refusal
        if (refusal := self.refused.get(prepared.model.name)) is not None:
            raise refusal
        if self.gate is not None:
            await self.gate.wait()
        reply = [] if self.alone else reply_of(prepared)
        grant = FakeGrant(request_id, hold, reply, self.queue_us, over=self.over, wait=self.wait)
        self.held[request_id] = grant
        return grant

    def release(
        self,
        grant: FakeGrant,
        charge_nano: int | None,
        input_tokens: int = -1,
        output_tokens: int = -1,
        cached_tokens: int = 0,
    ) -> None:
        self.charges.setdefault(grant.request_id, charge_nano)
        self.used.setdefault(grant.request_id, (input_tokens, output_tokens))
        self.cached.setdefault(grant.request_id, cached_tokens)
        self.held.pop(grant.request_id, None)

    async def wait_again(self, grant: FakeGrant, wait_s: float) -> FakeGrant:
        """Another place is there at once."""
        grant.preempted, grant.asked_for = grant.preempted + 1, None
        return grant


def reply_of(prepared: Prepared, *, taken: int = 1) -> list[int]:
    """What the script says when so much of every limit is taken."""
    reply = [1, 0, -1, 0, -1]
    if prepared.concurrencies:
        least = min(prepared.concurrencies, key=lambda demand: demand.limit)
        reply += [least.limit - taken, prepared.named.index(least)]
    for unit in sorted({demand.unit for demand in prepared.rates}):
        least = min((demand for demand in prepared.rates if demand.unit is unit), key=lambda demand: demand.limit)
        reply += [least.limit - taken, 9, prepared.named.index(least)]
    return reply


class FakeSpool:
    """Keeps events; durable at once, or when a test says so."""

    def __init__(self) -> None:
        self.events: list[UsageEvent] = []
        self.waiting: list[Callable[[bool], None]] = []
        self.manual = False
        self.refused: set[Tier] = set()

    def refuses(self, tier: Tier) -> bool:
        return tier in self.refused

    def append(self, event: UsageEvent, on_durable: Callable[[bool], None]) -> None:
        self.events.append(event)
        if self.manual:
            self.waiting.append(on_durable)
        else:
            asyncio.get_running_loop().call_soon(on_durable, True)


class FixedPrices:
    """One schedule for every model at the tiers given."""

    def __init__(self, tiers: tuple[Tier, ...], *, input_: int, cached: int, output: int) -> None:
        self.version = new_uuid()
        self._tiers = tiers
        self._prices = (input_, cached, output)

    def schedule(
        self,
        model_id: UUID,
        tier: Tier,
        currency: Currency,
        tenant_id: UUID,
        at_us: int | None = None,
        *,
        plan_book: UUID | None = None,
    ) -> PriceSchedule | None:
        if tier not in self._tiers:
            return None
        price, cached, output = self._prices
        return PriceSchedule(self.version, currency, tier, price, cached, price, output, output)

    def next_change_us(self, currency: Currency, at_us: int, plan_book: UUID | None = None) -> int:
        return NEVER_US


class FakeStates:
    """Deployments as the controller would publish them."""

    def __init__(self) -> None:
        self.states: dict[UUID, DeploymentState] = {}
        self.wakes: list[UUID] = []
        self.changed = asyncio.Event()
        self.opening: set[UUID] = set()
        self.first_tokens: list[tuple[UUID, int, int]] = []

    def note_first_token(self, deployment_id: UUID, ready_us: int, first_token_ms: int) -> None:
        self.first_tokens.append((deployment_id, ready_us, first_token_ms))

    def request_wake(self, deployment_id: UUID) -> None:
        self.wakes.append(deployment_id)

    def current(self, deployment_id: UUID) -> DeploymentState | None:
        return self.states.get(deployment_id)

    async def wait_ready(self, deployment_id: UUID, timeout_s: float) -> DeploymentState:
        self.wakes.append(deployment_id)
        async with asyncio.timeout(timeout_s):
            while (state := self.states.get(deployment_id)) is None or state.state is not ReplicaState.READY:
                self.changed.clear()
                await self.changed.wait()
        return state


def usd_per_million(text: str) -> int:
    """Pico per token of a price in dollars per million tokens, e.g. ``"0.20"``."""
    whole, _, fraction = text.partition(".")
    return int(whole + fraction.ljust(6, "0"))


def served_model(name: str, url: str, **changes: Any) -> ServedModel:
    """An external deployment of an engine at `url`."""
    values: dict[str, Any] = {
        "name": name,
        "model_id": new_uuid(),
        "version_id": new_uuid(),
        "deployment_id": new_uuid(),
        "kind": DeploymentKind.EXTERNAL,
        "engine": EngineKind.SIMULATOR,
        "upstream_model": name,
        "context_max": 32768,
        "default_max_tokens": 256,
        "endpoints": frozenset({"chat", "completions", "embeddings", "tokenize"}),
        "base_url": url,
    }
    return ServedModel(**(values | changes))


def principal(**changes: Any) -> Principal:
    values: dict[str, Any] = {
        "tenant_id": new_uuid(),
        "project_id": new_uuid(),
        "key_id": new_uuid(),
        "currency": Currency.USD,
        "scopes": frozenset({"inference"}),
        "tier_default": Tier.STANDARD,
        "tier_max": Tier.PRIORITY,
        "cache_salt": "salt",
    }
    return Principal(**(values | changes))


def rpm(amount: int, level: LimitLevel = LimitLevel.KEY) -> tuple[Limit, ...]:
    """A hard limit of requests per minute."""
    return (Limit(level, LimitMetric.REQUESTS_PER_MINUTE, amount),)


@dataclass
class Rig:
    """A gateway and what a test turns on it."""

    gateway: Gateway
    admission: FakeAdmission
    spool: FakeSpool
    states: FakeStates
    key: str
    principal: Principal
    tasks: set[Any] = field(default_factory=set)
    port: int = 0
    server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def event(self) -> UsageEvent:
        """The only usage event so far."""
        (event,) = self.spool.events
        return event

    def connection(self) -> InferenceProtocol:
        return InferenceProtocol(self.gateway, set(), self.tasks)

    def add_key(self, **changes: Any) -> tuple[str, Principal]:
        key, found = mint(), principal(**changes)
        self.gateway.directory.principals[digest(PEPPER, key)] = found
        return key, found

    def sleeping(self, name: str, **changes: Any) -> ServedModel:
        """Add a local deployment that is absent."""
        model = served_model(name, "", kind=DeploymentKind.LOCAL, **changes)
        self.models[name] = model
        return model

    def wake(self, model: ServedModel, *urls: str) -> None:
        endpoints = tuple(Endpoint(f"r{index}", url) for index, url in enumerate(urls))
        self.states.states[model.deployment_id] = DeploymentState(
            model.deployment_id.hex, ReplicaState.READY, endpoints
        )
        self.states.changed.set()

    @property
    def models(self) -> dict[str, ServedModel]:
        return cast("dict[str, ServedModel]", self.gateway.directory.models)

    def roll_out(self, name: str, canary: ServedModel, *, percent: int = 0, shadow_percent: int = 0) -> Arms:
        """Let another version serve a part of the conversations, and get copies of a part of the requests."""
        arms = Arms(
            rollout_id=new_uuid(),
            window=1,
            seed=bytes(32),
            parts=percent * 100,
            shadow_parts=shadow_percent * 100,
            stable_version_id=self.models[name].version_id,
            canary=canary,
        )
        self.gateway.directory.rollouts = {name: arms}
        return arms

    async def settled(self) -> None:
        """Return when no request is under way."""
        while tasks := [
            *self.tasks,
            *(c.task for c in self.gateway.connections if c.task is not None and not c.task.done()),
        ]:
            await asyncio.wait(tasks, timeout=5)
            await asyncio.sleep(0)


@asynccontextmanager
async def rig(
    models: Mapping[str, ServedModel],
    *,
    clock: Clock | None = None,
    settings: GatewaySettings | None = None,
    prices: tuple[str, str, str] = ("2.00", "0.20", "6.00"),
    cold_app: Any = None,
    listen: bool = True,
) -> AsyncIterator[Rig]:
    """Build a gateway; with `listen` it serves on a free port of loopback."""
    loop = asyncio.get_running_loop()
    clock = clock or ManualClock()
    settings = settings or GatewaySettings(spool_wait_ms=2000)
    directory = Directory()
    directory.models = dict(models)
    directory.loaded = True
    directory.prices = FixedPrices(
        (Tier.STANDARD, Tier.PRIORITY),
        input_=usd_per_million(prices[0]),
        cached=usd_per_million(prices[1]),
        output=usd_per_million(prices[2]),
    )
    admission, spool, states, metrics = FakeAdmission(), FakeSpool(), FakeStates(), Metrics()
    pool = UpstreamPool(loop, clock.monotonic, connections_max=settings.upstream_connections_max)
    tls = TlsClient(connections_max=settings.upstream_connections_max)
    gateway = Gateway(
        loop=loop,
        settings=settings,
        clock=clock,
        pepper=PEPPER,
        new_id=new_uuid,
        directory=directory,
        admission=admission,
        spool=spool,
        states=states,
        pool=pool,
        upstream=UpstreamClient(pool, tls),
        metrics=metrics,
        log=AccessLog(None, metrics.add),
        router=Router(random=lambda: 0.0),  # of equals always the first
    )
    proxy = ControlProxy(None)

    gateway.cold_app = cold_app or ColdApp(gateway, proxy, lambda: Report(True, {"config": "ok"}))
    made = Rig(gateway, admission, spool, states, "", principal())
    made.key, made.principal = made.add_key(limits=rpm(600))
    if listen:
        made.server = await loop.create_server(made.connection, "127.0.0.1", 0)
        made.port = made.server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        if made.server is not None:
            made.server.close()
        for connection in list(gateway.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        await made.settled()
        await pool.close()
        await tls.close()
        await proxy.close()
