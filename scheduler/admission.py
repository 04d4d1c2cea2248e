"""Admission: one atomic script decides each request. See README.md for what is promised."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import structlog

from catalog.types import ServedModel
from core import keyspace
from core.clock import Clock
from core.demand import Demand, DemandKind
from core.errors import PlatformError
from core.resp import RespClient, RespError, RespUnavailable
from core.tiers import Tier
from scheduler import commands, refusals
from scheduler.commands import KEEP, REMOVE, Code
from scheduler.fail_static import FailStatic
from scheduler.types import Grant, LimitState, Packed, Prepared
from scheduler.upkeep import Upkeep
from scheduler.waiting import Waiting, WaitResult

log = structlog.get_logger()

CreditLoader = Callable[[UUID], Awaitable[object]]
ATTEMPTS_MAX = 4
UNSETTLED_MAX = 100_000
RESYNC_WAIT_S = 1.0


class _Ask(msgspec.Struct, gc=False):
    """One call of `acquire`."""

    request_id: UUID
    key: str
    packed: Packed
    prepared: Prepared
    money: Demand | None
    hold: str
    tier: Tier
    wait_s: float
    started: float


GRANTED, CONCURRENCY = int(Code.GRANTED), DemandKind.CONCURRENCY  # looked up once: the hot path compares with them


class Admission:
    """The door of one gateway process.

    Args:
        client: the connection to Valkey, kept up by itself.
        replica: this process's name, unique among living replicas; no space.
        clock: its monotonic time rules the replica's own decisions; the script uses the server's time.
        global_inflight_max: requests in flight over all replicas.
        credit_loader: puts a tenant's credit into Valkey; awaited when the script does not find it.
        on_epoch: enters what else Valkey lost with its data; awaited before this replica counts as back.
        settle_s: how long admission is fenced after Valkey lost its data while replicas ran.
        background: keep heartbeat, reaper and reconciler running; tests call the steps themselves.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        replica: str,
        clock: Clock,
        global_inflight_max: int,
        credit_loader: CreditLoader | None = None,
        on_epoch: Callable[[], Awaitable[object]] | None = None,
        settle_s: float = 5.0,
        background: bool = True,
    ) -> None:
        if not replica or any(letter.isspace() for letter in replica):
            raise ValueError("A replica's name has no white space.")
        self._client = client
        self._replica = replica
        self._clock = clock
        self._cap = Demand(DemandKind.CAP, commands.GLOBAL, 1, global_inflight_max, "MODEL_BUSY")
        self._credit_loader = credit_loader
        self._background = background
        self._static = FailStatic(clock)
        self._waiting = Waiting(client, replica)
        self._upkeep = Upkeep(
            client,
            replica=replica,
            settle_s=settle_s,
            reconcile=self.reconcile,
            on_epoch=on_epoch,
            on_scripts=self._repeat_releases,
            on_ready=self._on_ready,
            on_beat=self._on_beat,
        )
        self._grants: dict[str, Grant] = {}
        self._asking: set[str] = set()
        self._loading: dict[str, asyncio.Task[object]] = {}
        # What was given back lately, key → (tenant, charge): said again when an answer may have been lost.
        self._recent: dict[str, tuple[str, str]] = {}
        self._recent_before: dict[str, tuple[str, str]] = {}

    @property
    def ready(self) -> bool:
        """True while Valkey decides, False while this replica decides alone."""
        return self._upkeep.ready

    @property
    def in_flight(self) -> int:
        return len(self._grants)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def start(self) -> None:
        """Join the replicas and listen for grants. With Valkey away it returns all the same and joins later."""
        self._client.on_post_error(self._on_post_error)
        await self._waiting.start()
        await self._upkeep.start(background=self._background)
        if not self._upkeep.ready:
            self._static.went_away()

    async def close(self) -> None:
        """Leave; requests still held count as ended for the others."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await self._upkeep.close()

    async def heartbeat(self) -> None:
        await self._upkeep.heartbeat()

    async def tick(self) -> int:
        return await self._upkeep.tick()

    async def resync(self) -> None:
        await self._upkeep.resync()

    def prepare(self, demands: tuple[Demand, ...]) -> Prepared:
        """Encode the demands that every request of one caller on one model has. Keep it as long as they hold."""
        for demand in demands:
            if any(letter in demand.counter for letter in " |=\r\n"):
                raise ValueError(f"A counter's name may not be {demand.counter!r}.")
            if demand.kind is DemandKind.MONEY:
                raise ValueError("Money differs from request to request; give it to acquire.")
            if demand.kind is DemandKind.RATE and demand.window_s < 1:
                raise ValueError("A rate has a window of at least 1 s.")
        return Prepared(demands)

    async def acquire(
        self,
        request_id: UUID,
        prepared: Prepared,
        money: Demand | None,
        *,
        model: ServedModel,
        tier: Tier,
        wait_s: float,
    ) -> Grant:
        """Take everything the request demands, or nothing; wait for a slot at most `wait_s` and the model's maximum.

        Cancelling the task takes the request out of the queue, or gives its grant back.

        Raises:
            PlatformError: RATE_LIMITED, CONCURRENCY_LIMITED (or the demand's own code), INSUFFICIENT_CREDIT,
                MODEL_BUSY, SERVICE_UNAVAILABLE.
        """
        packed = prepared.packed
        tenant = "" if money is None else money.counter
        if packed is None or packed.model is not model or packed.tenant != tenant or packed.epoch != self._upkeep.epoch:
            packed = self._pack(prepared, model, tenant)
        hold = "" if money is None else str(money.amount)
        ask = _Ask(request_id, request_id.hex, packed, prepared, money, hold, tier, min(wait_s, model.max_wait_s), 0.0)
        if not self._upkeep.ready:
            return self._decide_alone(ask)
        key = ask.key
        self._asking.add(key)
        try:
            call = self._encode(ask, ask.wait_s)
            try:
                reply = await self._client.send(call)
            except RespError as error:
                reply = await self._send_again(call, error)
            if reply[0] != GRANTED:
                reply = await self._insist(ask, reply)
        except RespUnavailable:
            return self._decide_alone(ask)
        except asyncio.CancelledError:
            self._give_back(key, tenant, REMOVE)
            raise
        finally:
            self._asking.discard(key)
        return self._granted(ask, reply)

    def release(self, grant: Grant, charge_nano: int | None) -> None:
        """Give back slots and money at once, without waiting; a second time does nothing.

        Args:
            grant: from `acquire`.
            charge_nano: what the request costs, held until its usage event is posted; None when no event will come,
                which frees the hold altogether.
        """
        if self._grants.pop(grant.key, None) is None:
            return
        packed = grant.packed
        now = self._clock.monotonic()
        packed.share.note_release(now)
        packed.deployment.note_release(now)
        if grant.local and packed.credit is not None:
            packed.credit.used += (charge_nano or 0) - int(grant.hold)
        charge = REMOVE if charge_nano is None else str(charge_nano)
        if self._upkeep.ready and packed.epoch == self._upkeep.epoch:
            self._recent[grant.key] = (packed.tenant, charge)
            self._client.post(commands.release_call(packed.release, grant.key, charge))
        else:
            self._give_back(grant.key, packed.tenant, charge)

    async def reconcile(self) -> None:
        """Make this replica's leases and what it holds agree: register what is missing, give back what is too much."""
        if not self._client.connected:
            return
        grants, waiting = list(self._grants.values()), self._waiting.keys()
        held = {key.decode() for key in await self._client.call("HKEYS", keyspace.lease(self._replica))}
        for grant in grants:
            # one granted here may stand in the queue there, when the answer that said so was lost
            if (grant.local or grant.key not in held) and grant.key in self._grants:
                self._register(grant)
        self._waiting.lost(waiting - held)
        known = self._grants.keys() | self._waiting.keys() | self._asking
        for key in held - known:
            self._send_release(key, *self._recent_release(key))
        self._static.forget_idle()

    def _pack(self, prepared: Prepared, model: ServedModel, tenant: str) -> Packed:
        epoch, static = self._upkeep.epoch, self._static
        caps = (self._cap, *prepared.caps)
        names = tuple(demand.counter for demand in prepared.named)
        packed = Packed(
            model=model,
            tenant=tenant,
            epoch=epoch,
            acquire=commands.acquire_prefix(prepared, caps, model, tenant=tenant, epoch=epoch, replica=self._replica),
            release=commands.release_prefix(prepared, caps, model, tenant=tenant, epoch=epoch, replica=self._replica),
            lease=commands.lease_text(prepared, caps, model, tenant),
            share=static.share(model.deployment_id, tenant, names),
            deployment=static.share(model.deployment_id),
            credit=static.credit(tenant) if tenant else None,
        )
        prepared.packed = packed
        return packed

    def _encode(self, ask: _Ask, wait_s: float) -> bytes:
        return commands.acquire_call(ask.packed.acquire, ask.key, ask.tier, ask.hold, max(0, int(wait_s * 1_000_000)))

    async def _send_again(self, call: bytes, error: RespError) -> list[Any]:
        """Load the scripts that the server has lost; whatever else keeps it from answering is `RespUnavailable`."""
        if not str(error).startswith("NOSCRIPT"):
            if not self._static.away:
                log.warning("admission.failed", error=str(error))
            raise RespUnavailable(str(error)) from error
        try:
            await self._upkeep.load_scripts()
            reply: list[Any] = await self._client.send(call)
        except RespError as again:
            raise RespUnavailable(str(again)) from again
        return reply

    async def _insist(self, ask: _Ask, reply: list[Any]) -> list[Any]:
        """Bring an answer other than a grant to its end; returns the grant's, its second place the µs waited."""
        waited = 0.0
        loaded = False
        for _ in range(ATTEMPTS_MAX):
            match reply[0]:
                case Code.GRANTED:
                    return [reply[0], int(waited * 1_000_000), *reply[2:]]
                case Code.QUEUED:
                    started = self._clock.monotonic()
                    result = await self._wait(ask, ask.wait_s - waited, reply[1])
                    waited += self._clock.monotonic() - started
                    if result is WaitResult.GRANTED:
                        return [reply[0], int(waited * 1_000_000), *reply[2:]]
                case Code.UNKNOWN_CREDIT if not loaded and ask.money is not None:
                    await self._load_credit(ask.money.counter)
                    loaded = True
                case Code.EPOCH:
                    await self._renew()
                case _:
                    raise self._refusal(ask, reply)
            if ask.packed.epoch != self._upkeep.epoch:
                ask.packed = self._pack(ask.prepared, ask.packed.model, ask.packed.tenant)
            call = self._encode(ask, ask.wait_s - waited)
            try:
                reply = await self._client.send(call)
            except RespError as error:
                reply = await self._send_again(call, error)
        raise RespUnavailable("no decision")

    async def _wait(self, ask: _Ask, wait_s: float, estimate_s: int) -> WaitResult:
        """Wait in the queue for a grant or for the queue's loss.

        Raises:
            PlatformError: MODEL_BUSY at the deadline or when taken out of the queue.
        """
        result = await self._waiting.wait(ask.key, wait_s)
        if result in (WaitResult.DEADLINE, WaitResult.DROPPED):
            self._give_back(ask.key, ask.packed.tenant, REMOVE)
            raise refusals.busy(ask.packed.model.name, int(estimate_s - max(0.0, wait_s)), "deadline")
        return result

    def _refusal(self, ask: _Ask, reply: list[Any]) -> Exception:
        if reply[0] == Code.REFUSED:
            if reply[1] == -1 and ask.money is not None:
                return refusals.no_credit(ask.money)
            return refusals.over_limit(ask.prepared.named[reply[1]], reply[2])
        if reply[0] == Code.BUSY:
            return refusals.busy(ask.packed.model.name, reply[1], "queue")
        if reply[0] == Code.UNKNOWN_CREDIT:
            return refusals.unavailable()
        return RespUnavailable("admission is fenced until the replicas have registered their requests")

    async def _renew(self) -> None:
        """Join the server's new life."""
        try:
            async with asyncio.timeout(RESYNC_WAIT_S):
                await self._upkeep.resync()
        except TimeoutError as error:
            raise RespUnavailable("no epoch") from error
        if not self._upkeep.ready:
            raise RespUnavailable("no epoch")

    async def _load_credit(self, tenant: str) -> None:
        """Have the tenant's credit put into Valkey, once however many wait for it."""
        if self._credit_loader is None:
            raise refusals.unavailable()
        task = self._loading.get(tenant)
        if task is None:
            task = asyncio.ensure_future(self._credit_loader(UUID(hex=tenant)))
            self._loading[tenant] = task
            task.add_done_callback(lambda _: self._loading.pop(tenant, None))
        try:
            await asyncio.shield(task)
        except PlatformError:
            raise
        except Exception as error:
            log.warning("credit.load_failed", error=type(error).__name__)
            raise refusals.unavailable() from error

    def _granted(self, ask: _Ask, reply: list[Any]) -> Grant:
        packed, static = ask.packed, self._static
        now = self._clock.monotonic()
        packed.share.note_grant(now)
        packed.deployment.note_grant(now)
        if packed.credit is not None and reply[2] >= 0:
            packed.credit.note(reply[2], now)
        if static.away:
            static.came_back()
        grant = Grant(ask.request_id, reply[1], _limits(ask.prepared, reply), ask.key, packed, ask.tier, ask.hold)
        self._grants[ask.key] = grant
        return grant

    def _decide_alone(self, ask: _Ask) -> Grant:
        """Decide without Valkey. The grant is registered there once it is back."""
        packed = ask.packed
        self._static.went_away()
        hold = int(ask.hold or 0)
        if not self._static.admits((packed.share, packed.deployment), packed.credit, hold, ask.tier):
            self._give_back(ask.key, packed.tenant, REMOVE)  # the script may have granted it before the silence
            raise refusals.unavailable()
        grant = Grant(ask.request_id, 0, (), ask.key, packed, ask.tier, ask.hold, local=True)
        self._grants[ask.key] = grant
        if self._upkeep.ready:
            self._register(grant)
        return grant

    def _give_back(self, key: str, tenant: str, charge: str) -> None:
        self._recent[key] = (tenant, charge)
        if self._upkeep.ready:
            self._send_release(key, tenant, charge)
        elif len(self._recent) > UNSETTLED_MAX:
            del self._recent[next(iter(self._recent))]

    def _send_release(self, key: str, tenant: str, charge: str) -> None:
        self._client.post(
            commands.bare_release_call(key, charge, tenant=tenant, epoch=self._upkeep.epoch, replica=self._replica)
        )

    def _repeat_releases(self) -> None:
        """Say the releases of the last seconds again: their answers may have been lost, or errors."""
        for key in [*self._recent_before, *self._recent]:
            self._send_release(key, *self._recent_release(key))

    def _recent_release(self, key: str) -> tuple[str, str]:
        return self._recent.get(key) or self._recent_before.get(key) or ("", KEEP)

    def _register(self, grant: Grant) -> None:
        packed = grant.packed
        call = commands.register_call(
            grant.key,
            f"G{grant.tier}{packed.lease}",
            grant.hold,
            model=packed.model,
            tenant=packed.tenant,
            epoch=self._upkeep.epoch,
            replica=self._replica,
        )
        self._client.post(call)

    def _on_post_error(self, error: RespError) -> None:
        """A release or registration failed. Without its script it is said again; else the next new start does that."""
        if str(error).startswith("NOSCRIPT"):
            self._upkeep.start_reload()
        else:
            log.warning("admission.post_failed", error=str(error))

    def _on_ready(self, ready: bool) -> None:
        if ready:
            self._static.came_back()
            self._repeat_releases()
        else:
            self._static.went_away()

    def _on_beat(self, replicas: int) -> None:
        self._static.replicas = replicas
        if self._upkeep.ready:
            self._recent_before, self._recent = self._recent, {}
            self._waiting.turn()


def _limits(prepared: Prepared, reply: list[Any]) -> tuple[LimitState, ...]:
    """Return the limits in the order of `Prepared.named`. See `Code.GRANTED` for the answer's layout."""
    if len(reply) == 3:
        return ()
    states = []
    at = 3
    for demand in prepared.concurrencies:
        states.append(LimitState(demand.counter, demand.limit, reply[at], 0, CONCURRENCY))
        at += 1
    for demand in prepared.rates:
        states.append(LimitState(demand.counter, demand.limit, reply[at], reply[at + 1]))
        at += 2
    return tuple(states)
