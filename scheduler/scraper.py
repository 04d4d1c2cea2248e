"""The one reader of the engines' figures: it sets the adaptive caps, and leaves the figures for all who route or show.

It runs beside the controller; of several the one with the lease reads. An engine is asked once a second by nobody else,
because engines have hung under more.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from catalog.hardware import batch_bound_mb
from core import keyspace
from core.clock import Clock
from core.load import parse_load
from core.logging import get_logger
from core.resp import RespClient, RespError, RespUnavailable
from core.tiers import Tier
from engine.figures import EngineFigures, read
from knative.types import DeploymentState, Endpoint
from scheduler import caps, commands, fairness

EVERY_S, PAUSE_MIN_S, TIMEOUT_S, LEASE_MS = 1.0, 0.05, 0.8, 3000
AT_ONCE = 64  # engines asked at a time
SEATS_AT_FIRST = 32  # of one engine of which nothing is known yet, if no more run: the cap grows within seconds
_STATE = msgspec.json.Decoder(DeploymentState)
log = get_logger(__name__)

Read = Callable[[str], Awaitable[EngineFigures | None]]


class Reading(msgspec.Struct, frozen=True):
    """What stands in `{tg}:figures` of a deployment: when it was read (Unix µs), by replica."""

    at_us: int
    replicas: dict[str, EngineFigures]


class _Followed:
    """One deployment: its caps, and what its engines said last."""

    def __init__(self, requests: float, bound: int) -> None:
        self.caps = caps.Caps(requests=requests)
        self.bound = bound  # of one pod by its memory; 0: unknown
        self.before: dict[str, EngineFigures] = {}
        self.preemptions = 0
        self.looked_at_s = -math.inf
        self.looks: dict[Tier, deque[dict[bytes, float]]] = {tier: deque(maxlen=fairness.LOOKS) for tier in Tier}

    def rebound(self, bound: int, pods: int) -> None:
        """Begin at the batch bound again when it was stated anew."""
        if bound and bound != self.bound:
            self.caps = msgspec.structs.replace(self.caps, requests=float(pods * bound))
        self.bound = bound

    def sample(self, figures: dict[str, EngineFigures], *, inflight: int, tokens: float, now_s: float) -> caps.Sample:
        """Put the readings of all replicas together. A replica that started anew counts from 0."""
        itl_s, itl_count = 0.0, 0
        for replica, said in figures.items():
            before = self.before.get(replica, said)
            anew = said.itl_count < before.itl_count or said.preemptions < before.preemptions
            since = EngineFigures() if anew else before
            itl_s += said.itl_sum_s - since.itl_sum_s
            itl_count += said.itl_count - since.itl_count
            self.preemptions += said.preemptions - since.preemptions
        self.before = figures
        return caps.Sample(
            at_s=now_s,
            pods=len(figures),
            waiting=sum(said.waiting for said in figures.values()),
            kv_used=sum(said.kv_used for said in figures.values()) / len(figures),
            preemptions=self.preemptions,
            itl_s=itl_s / itl_count if itl_count else 0.0,
            inflight=inflight,
            tokens=tokens,
        )


class Scraper:
    """Reads every engine that answers, each second.

    Args:
        client: the connection to Valkey.
        holder: this process's name.
        clock: its monotonic time dates samples.
        seats: the most requests one engine is given where its batch bound is unknown, until its own figures say less.
        registry: for the gauges of caps and saturation.
        ask: how an engine is asked.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        holder: str,
        clock: Clock,
        seats: int,
        registry: CollectorRegistry,
        ask: Read = lambda url: read(url, timeout_s=TIMEOUT_S),
    ) -> None:
        self._client = client
        self._holder = holder
        self._clock = clock
        self._seats = seats
        self._ask = ask
        self._followed: dict[str, _Followed] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        labels = ("deployment",)
        self._requests = Gauge("tidegate_admission_cap_requests", "The adaptive cap", labels, registry=registry)
        self._tokens = Gauge("tidegate_admission_cap_tokens", "Tokens as estimated; 0: none", labels, registry=registry)
        self._saturation = Gauge("tidegate_engine_saturation", "1 is full", labels, registry=registry)
        of_tier = ("deployment", "tier")
        self._queued = Gauge(
            "tidegate_admission_queued", "Requests in our queue, of all gateways", of_tier, registry=registry
        )
        self._moves = Counter(
            "tidegate_admission_cap_moves", "Moves of the cap by rule", ("deployment", "cause"), registry=registry
        )
        self._unfair = Gauge(
            "tidegate_admission_fairness_error",
            "Of tenants that waited for a minute; 0: fair",
            of_tier,
            registry=registry,
        )
        self._waiting = Gauge("tidegate_engine_waiting", "Requests in the engines' queues", labels, registry=registry)

    async def run(self) -> None:
        """Read until cancelled. With Valkey away nothing is read."""
        while True:
            begun = self._clock.monotonic()
            with suppress(RespError, RespUnavailable):
                if await self._leads():
                    await self.turn()
                else:
                    self._followed.clear()
            # an engine that does not answer takes all of its time, and must not make the figures of the others older
            await asyncio.sleep(max(PAUSE_MIN_S, EVERY_S - (self._clock.monotonic() - begun)))

    async def _leads(self) -> bool:
        key = keyspace.SCRAPER
        if await self._client.call("SET", key, self._holder, "NX", "PX", LEASE_MS):
            return True
        if await self._client.call("GET", key) != self._holder.encode():
            return False
        return bool(await self._client.call("PEXPIRE", key, LEASE_MS))

    async def turn(self) -> None:
        """Read all engines once, and set what follows."""
        flat, epoch = await self._client.call("HGETALL", keyspace.STATE), await self._client.call("GET", keyspace.EPOCH)
        states = [_STATE.decode(raw) for raw in flat[1::2]]
        live = {state.deployment: state for state in states if state.endpoints}
        for gone in self._followed.keys() - live.keys():
            self._forget(gone)
        if epoch is not None:
            await asyncio.gather(*(self._follow(state, epoch) for state in live.values()))

    def _forget(self, deployment: str) -> None:
        del self._followed[deployment]
        for gauge in (self._requests, self._tokens, self._saturation, self._waiting):
            with suppress(KeyError):
                gauge.remove(deployment)
        for tier in Tier:
            for gauge in (self._queued, self._unfair):
                with suppress(KeyError):
                    gauge.remove(deployment, tier.label)
        for cause in caps.Cause:
            with suppress(KeyError):
                self._moves.remove(deployment, cause.value)

    async def _follow(self, state: DeploymentState, epoch: bytes) -> None:
        figures = await self._read(state.endpoints)
        now_s, deployment = self._clock.monotonic(), state.deployment
        pods, bound = len(state.endpoints), batch_bound_mb(state.gpu_memory_mb, state.kv_request_mb)
        per_pod = bound or self._seats * caps.HEADROOM
        followed = self._followed.get(deployment)
        if not figures:
            if followed is None:  # it has never said anything of itself: an external server, say
                return
            followed.caps = caps.unseen(followed.caps, now_s, pods=pods, per_pod=per_pod)
        else:
            load = parse_load(await self._client.call("GET", keyspace.PREFIX + "m:" + deployment))
            if followed is None:
                runs = load.inflight - sum(said.waiting for said in figures.values())
                followed = self._followed[deployment] = _Followed(self._at_first(pods, bound, runs), bound)
            followed.rebound(bound, pods)
            sample = followed.sample(figures, inflight=load.inflight, tokens=load.tokens, now_s=now_s)
            followed.caps = caps.after(followed.caps, sample, per_pod=per_pod)
            self._waiting.labels(deployment).set(sample.waiting)
            queued = {Tier.BATCH: load.waiting_batch, Tier.STANDARD: load.waiting_standard}
            queued[Tier.PRIORITY] = load.waiting - sum(queued.values())
            for tier, count in queued.items():
                self._queued.labels(deployment, tier.label).set(count)
            if now_s - followed.looked_at_s >= fairness.LOOK_EVERY_S:
                followed.looked_at_s = now_s
                await self._look(deployment, followed, queued)
            reading = msgspec.json.encode(Reading(self._clock.now_us(), figures))
            self._client.call("HSET", keyspace.FIGURES, deployment, reading)
        if followed.caps.cause is not None:
            self._moves.labels(deployment, followed.caps.cause.value).inc()
        self._requests.labels(deployment).set(followed.caps.most)
        self._tokens.labels(deployment).set(followed.caps.tokens)
        self._saturation.labels(deployment).set(followed.caps.saturation)
        await self._client.send(commands.caps_call(deployment, followed.caps, epoch=epoch))

    def _at_first(self, pods: int, bound: int, runs: int) -> float:
        """Return the cap to begin with: by memory where that is stated, else few seats, or as many as are taken."""
        if bound:
            return float(pods * bound)
        return float(min(pods * self._seats, max(pods * SEATS_AT_FIRST, runs)))

    async def _look(self, deployment: str, followed: _Followed, queued: dict[Tier, int]) -> None:
        """Note how far the tenants that wait have been served, and show how evenly."""
        for tier, looks in followed.looks.items():
            times: dict[bytes, float] = {}
            if queued[tier] > 0:
                key = f"{keyspace.PREFIX}q:{deployment}:{int(tier)}"
                flat = await self._client.call("ZRANGE", key, 0, fairness.TENANTS_MAX - 1, "WITHSCORES")
                times = {owner: float(score) for owner, score in zip(flat[::2], flat[1::2], strict=True)}
            looks.append(times)
            off = fairness.error(looks)
            if off is not None:
                self._unfair.labels(deployment, tier.label).set(off)
            else:
                with suppress(KeyError):  # what is not known is not shown
                    self._unfair.remove(deployment, tier.label)

    async def _read(self, endpoints: tuple[Endpoint, ...]) -> dict[str, EngineFigures]:
        async def one(endpoint: Endpoint) -> EngineFigures | None:
            async with self._places:
                return await self._ask(endpoint.url)

        said = await asyncio.gather(*(one(endpoint) for endpoint in endpoints))
        return {e.replica: figures for e, figures in zip(endpoints, said, strict=True) if figures is not None}
