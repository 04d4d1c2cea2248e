"""What one gateway process is made of, handed to every stage. Built in `app.run`, or by a test."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from api.inference.access_log import AccessLog
from api.inference.admission_metrics import AdmissionMetrics
from api.inference.bearers import Bearers
from api.inference.claims import Claims
from api.inference.directory import Directory
from api.inference.limits import SeenLimits
from api.inference.metrics import Metrics
from api.inference.new_keys import NewKeys
from api.inference.ports import Admission, Spool, States
from api.inference.refusals import Refusals
from api.inference.request import Call
from api.inference.retries import RetryBudget
from api.inference.shadow_copies import Copies
from api.inference.tally import Tally
from api.inference.wire import Head
from core.clock import Clock
from core.settings import Gateway as GatewaySettings
from engine.client import UpstreamPool
from engine.tls_client import UpstreamClient
from scheduler.held import Held, HeldHere
from scheduler.router.router import Router
from tenants.types import Principal


def _rehash_nothing(older: bytes, digest: bytes) -> None:
    """Without previous peppers no key is met under one."""


async def _none_full(_: UUID) -> float:
    """Nobody says how full engines are."""
    return 0.0


Inspector = Callable[[Principal, Call], Awaitable[None]]
"""Looks at a prompt before it is admitted; raises PlatformError to refuse it."""


class Waiters:
    """Futures with one common patience, kept by the quarter of it in which they came, and at most one timer."""

    QUARTERS = 4

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self._loop = loop
        self._quarter_s = patience_s / self.QUARTERS
        self._newest: list[asyncio.Future[Any]] = []
        self._older: deque[list[asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiter: "asyncio.Future[Any]") -> None:
        """`waiter` gets None when the patience is over, or up to a quarter later, unless it is done by then."""
        self._newest.append(waiter)
        if self._timer is None:
            self._timer = self._loop.call_later(self._quarter_s, self._turn)

    def _turn(self) -> None:
        older, newest = self._older, self._newest
        if len(older) == self.QUARTERS:
            for waiter in older.popleft():
                if not waiter.done():
                    waiter.set_result(None)
        self._newest = []
        older.append(newest)
        self._timer = self._loop.call_later(self._quarter_s, self._turn) if any(older) else None
        if self._timer is None:
            older.clear()


@dataclass(slots=True)
class Gateway:
    """The parts, and what is shared between connections."""

    loop: asyncio.AbstractEventLoop
    settings: GatewaySettings
    clock: Clock
    pepper: bytes
    new_id: Callable[[], UUID]
    directory: Directory
    admission: Admission
    spool: Spool
    states: States
    pool: UpstreamPool
    upstream: UpstreamClient
    metrics: Metrics
    log: AccessLog
    cold_app: Any = None  # ASGI
    claims: Claims | None = None  # idempotency keys; None: a request with one is refused
    bearers: Bearers | None = None  # OIDC tokens; None: none is taken
    new_keys: NewKeys | None = None  # looks for keys that the follower has not brought yet; None: nobody looks
    inspectors: Mapping[UUID, Inspector] = field(default_factory=dict)  # by project; none is the usual case
    connections: set[Any] = field(default_factory=set)
    relays: set[Any] = field(default_factory=set)
    previous_peppers: tuple[bytes, ...] = ()
    rehash: Callable[[bytes, bytes], None] = _rehash_nothing  # a key known by the first digest gets the second as well
    held: Held = field(default_factory=HeldHere)  # callers that wait for a wake
    retries: RetryBudget = field(default_factory=RetryBudget)
    part_full: Callable[[UUID], Awaitable[float]] = _none_full  # of a deployment's replicas, by their own figures
    router: Router = field(default_factory=Router)  # among replicas, where a deployment has several
    seen_limits: SeenLimits = field(default_factory=SeenLimits)
    admission_metrics: AdmissionMetrics = field(default_factory=AdmissionMetrics)
    tally: Tally = field(default_factory=Tally)
    shadows: Copies = field(default_factory=Copies)
    heads: dict[bytes, tuple[Head, str, bool]] = field(default_factory=dict)  # by shape: endpoint, kept alive
    durable: Waiters = field(init=False)
    refusals: Refusals = field(init=False)
    tier_waits: tuple[float, float, float] = field(init=False)  # by tier, seconds
    date_line: bytes = b""
    now: float = 0.0  # monotonic, as coarse as the sweeper's step
    draining: bool = False
    spool_late_until: float = 0.0  # monotonic; until then new work is refused, where the policy says so

    def __post_init__(self) -> None:
        settings = self.settings
        self.durable = Waiters(self.loop, settings.spool_wait_ms / 1000)
        self.tier_waits = (settings.batch_wait_s, settings.standard_wait_s, settings.priority_wait_s)
        self.refusals = Refusals(self.clock, self.new_id, self.metrics.add)
        self.now = self.clock.monotonic()
