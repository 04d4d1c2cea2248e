"""Admission: one atomic script decides each request. See README.md for what is promised."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import structlog

from catalog.types import ServedModel
from core import keyspace, waits
from core.clock import Clock
from core.demand import Demand, DemandKind
from core.resp import RespClient, RespError, RespUnavailable
from core.tiers import Tier
from core.waits import Wait
from scheduler import commands, packing, refusals
from scheduler.blocks import HOT, Blocks
from scheduler.commands import AS_ESTIMATED, COUNT_MAX, KEEP, REMOVE, Code, acquire_call, release_call
from scheduler.fail_static import FailStatic
from scheduler.loading import BudgetLoader, CreditLoader, Loading
from scheduler.types import NOBODY, Entitlement, Grant, Packed, Prepared
from scheduler.upkeep import Upkeep
from scheduler.waiting import Waiting, WaitResult

log = structlog.get_logger()

ATTEMPTS_MAX = 8
UNSETTLED_MAX = 100_000
GRANTED = int(Code.GRANTED)  # looked up once: the hot path compares with it
YIELDED = 1
UNUSED = (REMOVE, 0, 0, 0)
MICRO = 1_000_000

_ENDED = {WaitResult.DEADLINE: "deadline", WaitResult.DROPPED: "deadline", WaitResult.EVICTED: "evicted"}

Release = tuple[str, int, int, int, int]  # tenant, charge, input and output tokens used, of the input those cached


class Admission:
    """The door of one gateway process.

    Args:
        client: the connection to Valkey, kept up by itself.
        replica: this process's name, unique among living replicas; no space.
        clock: its monotonic time rules the replica's own decisions; the script uses the server's time.
        global_inflight_max: requests in flight over all replicas.
        credit_loader: puts a tenant's credit into Valkey; awaited when the script does not find it.
        budget_loader: puts what a tenant spent on these budgets into Valkey; awaited when the script misses one.
        on_epoch: enters what else Valkey lost with its data; awaited before this replica counts as back.
        settle_s: how long admission is fenced after Valkey lost its data while replicas ran.
        blocks: admit from leased blocks where they are worth while (ADR 0032).
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
        budget_loader: BudgetLoader | None = None,
        on_epoch: Callable[[], Awaitable[object]] | None = None,
        settle_s: float = 5.0,
        blocks: bool = False,
        background: bool = True,
    ) -> None:
        if not replica or any(letter.isspace() for letter in replica):
            raise ValueError("A replica's name has no white space.")
        self._client = client
        self._replica = replica
        self._clock = clock
        self._cap = Demand(DemandKind.CAP, commands.GLOBAL, 1, global_inflight_max, "MODEL_BUSY")
        self._loading = Loading(credit_loader, budget_loader)
        self._background = background
        self._static = FailStatic(clock)
        self._waiting = Waiting(client, replica, self._on_asked, self._on_recalled)
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
        upkeep = self._upkeep
        self.heartbeat, self.tick, self.resync = upkeep.heartbeat, upkeep.tick, upkeep.resync
        self.recount, self.drift = upkeep.recount, upkeep.drift
        self.shares, self.restore = self._static.export, self._static.restore  # for a start without Valkey
        self._grants: dict[bytes, Grant] = {}
        self._asking: set[bytes] = set()
        self.blocks = Blocks(
            client,
            replica=replica,
            clock=clock,
            upkeep=upkeep,
            grants=self._grants,
            register=self._register,
            enabled=blocks,
            background=background,
        )
        # What was given back lately: said again when an answer may have been lost.
        self._recent: dict[bytes, Release] = {}
        self._recent_before: dict[bytes, Release] = {}

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
        await self._loading.close()
        await self.blocks.close()
        await self._upkeep.close()

    @staticmethod
    def prepare(
        demands: tuple[Demand, ...],
        model: ServedModel,
        tenant: str,
        *,
        owner: str = "",
        weight: float = 1.0,
        entitlements: tuple[Entitlement, ...] = (),
    ) -> Prepared:
        """Take down what every request of one caller on one model demands. Keep it as long as all of it holds.

        Args:
            demands: the limits.
            model: with its caps.
            tenant: who pays, in hex; empty where nothing costs money.
            owner: whose turn it is when a request waits; the tenant where none is given.
            weight: of two owners that wait, one with twice the weight is served twice as much.
            entitlements: of all tenants on the model's deployment.
        """
        packing.check(demands, owner, weight)
        whose = owner or tenant or NOBODY
        return Prepared(demands, model, tenant, owner=whose, weight=weight, entitlements=entitlements)

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
    ) -> Grant:
        """Take everything the request demands, or nothing; wait for a slot at most `wait_s`.

        `hold` (nano) is the most it can cost, the tokens are the most it can use; `release` corrects both. Cancelling
        the task takes the request out of the queue, or gives its grant back.

        Raises:
            PlatformError: RATE_LIMITED, TOKENS_LIMITED, CONCURRENCY_LIMITED, BUDGET_EXCEEDED (or the demand's own
                code), INSUFFICIENT_CREDIT, MODEL_BUSY, SERVICE_UNAVAILABLE.
        """
        upkeep, packed = self._upkeep, prepared.packed
        if packed is None or packed.epoch != upkeep.epoch:
            packed = self._pack(prepared)
        key = request_id.hex.encode()
        grant = Grant(request_id, [], key, packed, prepared, tier, min(hold, COUNT_MAX), input_tokens, output_tokens)
        if not upkeep.ready:
            return self._decide_alone(grant)
        self._asking.add(key)
        try:
            if packed.known:
                call = acquire_call(packed.acquire, key, tier, grant.hold, wait_s * MICRO, input_tokens, output_tokens)
            else:
                call = packing.encode(grant, wait_s)
            try:
                reply = await self._client.send(call)
            except RespError as error:
                reply = await self._send_again(call, error)
            if reply[0] != GRANTED:
                reply = await self._insist(grant, wait_s, reply)
        except RespUnavailable:
            return self._decide_alone(grant)
        except asyncio.CancelledError:
            self._give_back(key, (prepared.tenant, *UNUSED))
            raise
        finally:
            self._asking.discard(key)
        packed = grant.packed
        packed.known = True
        now = self._clock.monotonic()
        packed.share.note_grant(now, input_tokens + output_tokens, reply)
        packed.asked += 1
        if self._static.away:
            self._static.came_back()
        grant.reply, grant.queue_us = reply, reply[1]
        self._grants[key] = grant
        if len(reply) > prepared.reply_size or packed.asked == HOT:
            self._note_rare(grant, now)
        return grant

    def _note_rare(self, grant: Grant, now: float) -> None:
        prepared = grant.prepared
        grant.over = tuple(prepared.named[place] for place in grant.reply[prepared.reply_size :])
        if grant.packed.asked == HOT:
            self.blocks.consider(grant, now)

    def take(  # noqa: PLR0917 - as `acquire`, by place because that is quicker
        self, request_id: UUID, prepared: Prepared, hold: int, input_tokens: int, output_tokens: int, tier: Tier
    ) -> Grant | None:
        """Admit at once from the caller's block, without Valkey, which then knows nothing of the request.

        Returns None where there is none or it does not suffice: then `acquire` decides. Arguments as there.
        """
        block = prepared.block
        if block is None or block.tier is not tier:
            return None
        now = self._clock.monotonic()
        if not block.take(now, hold, input_tokens, output_tokens):
            self.blocks.short(block, now)
            return None
        packed, key, tokens = block.packed, request_id.hex.encode(), (input_tokens, output_tokens)
        grant = Grant(request_id, block.reply, key, packed, prepared, tier, hold, *tokens, block=block)
        packed.share.note_grant(now, input_tokens + output_tokens, block.reply)
        self.blocks.granted += 1
        self._grants[key] = grant
        return grant

    def release(
        self,
        grant: Grant,
        charge_nano: int | None,
        input_tokens: int = AS_ESTIMATED,
        output_tokens: int = AS_ESTIMATED,
        cached_tokens: int = 0,
    ) -> None:
        """Give back slots, money and tokens at once, without waiting; a second time does nothing.

        Args:
            grant: from `acquire`.
            charge_nano: what the request costs, held until its usage event is posted; None when no event will come,
                which frees the hold altogether; `commands.UNSERVED` when, beside that, no rate is to count it.
            input_tokens: what it used of them; -1 when nobody knows, which leaves the estimate.
            output_tokens: likewise.
            cached_tokens: of the input, what an engine had in its prefix cache: it weighs a tenth in turns.
        """
        key = grant.key
        if self._grants.pop(key, None) is None:
            return
        packed = grant.packed
        packed.share.note_release(self._clock.monotonic())
        charge = REMOVE if charge_nano is None else min(charge_nano, COUNT_MAX)
        if self._static.away:
            self._static.note_release(packed.share, max(0, charge) - grant.hold if grant.local else None)
        if grant.block is not None and self.blocks.give(grant, charge, input_tokens, output_tokens):
            return
        given = (grant.prepared.tenant, charge, input_tokens, output_tokens, cached_tokens)
        if self._upkeep.ready and packed.epoch == self._upkeep.epoch:
            self._recent[key] = given
            self._client.post(release_call(packed.release, *(key, charge, input_tokens, output_tokens, cached_tokens)))
        else:
            self._give_back(key, given)

    async def wait_again(self, grant: Grant, wait_s: float) -> Grant:
        """Give the request's place to the one that asked for it; return once it has another.

        Nothing of the request may run any more. It keeps its age, and what it took of limits and money. While Valkey
        is away nobody needs the place, so it keeps that as well.

        Raises:
            PlatformError: PREEMPTED when there was no other place within `wait_s`; all that it held is given back.
        """
        key, started = grant.key, self._clock.monotonic()
        grant.preempted, grant.asked_for, grant.on_asked = grant.preempted + 1, None, None
        if wait_s <= 0:
            raise refusals.preempted(grant.prepared.model.name, 0)
        if not self._upkeep.ready or grant.local:
            return grant
        epoch = self._upkeep.epoch
        call = commands.yield_call(key, int(wait_s * MICRO), epoch=epoch, replica=self._replica)
        try:
            reply = await self._client.send(call)
        except (RespUnavailable, RespError):
            grant.local = True  # whether it waits there is not known: it is registered as one that runs
            return grant
        if reply[0] != YIELDED:
            return grant
        share, result = grant.packed.share, WaitResult.LOST
        del self._grants[key]
        share.note_release(started)
        try:
            result, _ = await self._waiting.wait(key, wait_s, packing.press(grant))
        finally:
            if result is not WaitResult.GRANTED:
                self._give_back(key, (grant.prepared.tenant, *UNUSED))
        now = self._clock.monotonic()
        if result is not WaitResult.GRANTED:
            raise refusals.preempted(grant.prepared.model.name, int(now - started))
        share.note_grant(now, 0, grant.reply)
        grant.queue_us += int((now - started) * MICRO)
        self._grants[key] = grant
        return grant

    async def reconcile(self) -> None:
        """Make this replica's leases and what it holds agree: register what is missing, give back what is too much."""
        if not self._client.connected:
            return
        grants, waiting = list(self._grants.values()), self._waiting.keys()
        held = set(await self._client.call("HKEYS", keyspace.lease(self._replica)))
        self.blocks.dissolve_lost(held)
        for grant in grants:
            # one granted here may stand in the queue there, when the answer that said so was lost
            if grant.block is None and (grant.local or grant.key not in held) and grant.key in self._grants:
                self._register(grant)
        self.blocks.settle_left()
        self._waiting.lost(waiting - held)
        known = {*self._grants, *self._waiting.keys(), *self._asking, *self.blocks.keys()}
        for key in held - known:
            self._send_release(key, self._recent_release(key))
        self._static.forget_idle()

    def _pack(self, prepared: Prepared) -> Packed:
        return packing.pack(prepared, self._cap, self._static, epoch=self._upkeep.epoch, replica=self._replica)

    async def _send_again(self, call: bytes, error: RespError) -> list[Any]:
        """Load the scripts that the server has lost; whatever else keeps it from answering is `RespUnavailable`."""
        if not str(error).startswith(commands.NO_FUNCTION):
            if not self._static.away:
                log.warning("admission.failed", error=str(error))
            raise RespUnavailable(str(error)) from error
        try:
            await self._upkeep.load_scripts()
            reply: list[Any] = await self._client.send(call)
        except RespError as again:
            raise RespUnavailable(str(again)) from again
        return reply

    async def _insist(self, grant: Grant, wait_s: float, reply: list[Any]) -> list[Any]:
        """Bring an answer other than a grant to its end; returns the grant's, its second place the µs waited."""
        waited = 0.0
        loaded: set[int] = set()
        for _ in range(ATTEMPTS_MAX):
            code, packed = reply[0], grant.packed
            if code == Code.QUEUED:
                started = self._clock.monotonic()
                result = await self._wait(grant, wait_s - waited, reply[1])
                waited += self._clock.monotonic() - started
            if code == Code.GRANTED or (code == Code.QUEUED and result is WaitResult.GRANTED):
                return [GRANTED, int(waited * 1_000_000), *reply[2:]]
            if code in {Code.UNKNOWN_CREDIT, Code.UNKNOWN_BUDGET} and code not in loaded:
                loaded.add(code)
                await self._load(code, grant)
            elif code == Code.UNKNOWN_FORM:
                packed.known = False
            elif code == Code.EPOCH:
                await self._upkeep.renew()
            elif code != Code.QUEUED:
                raise refusals.of_reply(grant, reply)
            if packed.epoch != self._upkeep.epoch:
                grant.packed = self._pack(grant.prepared)
            call = packing.encode(grant, wait_s - waited)
            try:
                reply = await self._client.send(call)
            except RespError as error:
                reply = await self._send_again(call, error)
        raise RespUnavailable("no decision")

    async def _load(self, code: int, grant: Grant) -> None:
        if code == Code.UNKNOWN_CREDIT:
            await self._loading.credit(grant.prepared.tenant)
        else:
            await self._loading.budgets(grant.prepared.tenant, grant.prepared.spends)

    async def _wait(self, grant: Grant, wait_s: float, told: list[int]) -> WaitResult:
        """Wait in the queue for a grant or for the queue's loss. `told`: the second place of the answer.

        Raises:
            PlatformError: MODEL_BUSY at the deadline or when taken out of the queue.
        """
        estimate_us, full, limit, ahead, *before = told
        self.blocks.recall(grant.prepared.model.deployment_id.hex)  # the message says so too, a moment later
        result, grants = await self._waiting.wait(grant.key, wait_s, packing.press(grant))
        reason = _ENDED.get(result)
        if reason is not None:
            self._give_back(grant.key, (grant.prepared.tenant, *UNUSED))
            rest_s = int(estimate_us / MICRO - max(0.0, wait_s))
            raise refusals.too_busy(grant, rest_s, reason, Wait(full, limit, estimate_us, ahead))
        if result is WaitResult.GRANTED and full:  # what an answer that was lost had said is not known
            grant.wait = Wait(full, limit, estimate_us, ahead, *waits.passed(before, grants, grant.tier))
        return result

    def _on_asked(self, key: bytes, tier: int) -> None:
        """Pass on that a place is needed. A request that cannot give it says so; one that has ended says nothing."""
        grant = self._grants.get(key)
        if grant is None:
            return
        grant.asked_for = Tier(tier)
        if grant.on_asked is not None and not grant.on_asked():
            self.keep_place(grant)

    def _on_recalled(self, deployment: str) -> None:
        self.blocks.recall(deployment)

    def keep_place(self, grant: Grant) -> None:
        """Say that a request which was asked for its place cannot give it: its caller has had a part of the answer."""
        grant.asked_for = None
        epoch = self._upkeep.epoch
        self._client.post(commands.yield_call(grant.key, commands.KEEP_PLACE, epoch=epoch, replica=self._replica))

    def _decide_alone(self, grant: Grant) -> Grant:
        """Decide without Valkey. The grant is registered there once it is back."""
        prepared = grant.prepared
        self._static.went_away()
        tokens = grant.input_tokens + grant.output_tokens if prepared.tokens else 0
        if not self._static.admits(grant.packed.share, grant.hold, grant.tier, tokens):
            # it may have been granted before the silence
            self._give_back(grant.key, (prepared.tenant, *UNUSED))
            raise refusals.unavailable()
        grant.local = True
        self._grants[grant.key] = grant
        if self._upkeep.ready:
            self._register(grant)
        return grant

    def _give_back(self, key: bytes, release: Release) -> None:
        self._recent[key] = release
        if self._upkeep.ready:
            self._send_release(key, release)
        elif len(self._recent) > UNSETTLED_MAX:
            del self._recent[next(iter(self._recent))]

    def _send_release(self, key: bytes, release: Release) -> None:
        tenant, *used = release
        prefix = commands.release_prefix(tenant, [], epoch=self._upkeep.epoch, replica=self._replica)
        self._client.post(release_call(prefix, key, *used))

    def _repeat_releases(self) -> None:
        """Say the releases of the last seconds again: their answers may have been lost, or errors."""
        for key in [*self._recent_before, *self._recent]:
            self._send_release(key, self._recent_release(key))

    def _recent_release(self, key: bytes) -> Release:
        unknown = ("", KEEP, AS_ESTIMATED, AS_ESTIMATED, 0)
        return self._recent.get(key) or self._recent_before.get(key) or unknown

    def _register(self, grant: Grant) -> None:
        packed = grant.packed
        lease = commands.lease_text(
            packed,
            grant.prepared.owner,
            tier=grant.tier,
            at_us=grant.reply[3] if grant.reply and packed.epoch == self._upkeep.epoch else 0,
            hold=grant.hold,
            tokens=(grant.input_tokens, grant.output_tokens),
            preempted=grant.preempted,
        )
        epoch, replica = self._upkeep.epoch, self._replica
        self._client.post(commands.register_call(grant.key, lease, packed.text, epoch=epoch, replica=replica))

    def _on_post_error(self, error: RespError) -> None:
        """A release or registration failed. Without its script it is said again; else the next new start does that."""
        if str(error).startswith(commands.NO_FUNCTION):
            self._upkeep.start_reload()
        else:
            log.warning("admission.post_failed", error=str(error))

    def _on_ready(self, ready: bool) -> None:
        if ready:
            self._static.came_back()
            self._repeat_releases()
        else:
            self.blocks.dissolve_all()
            self._static.went_away()

    def _on_beat(self, replicas: int) -> None:
        self._static.replicas = replicas
        if self._upkeep.ready:
            self._recent_before, self._recent = self._recent, {}
            self._waiting.turn()
