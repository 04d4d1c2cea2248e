"""The blocks of one replica: who gets one, when it is renewed, lessened and given back. See ADR 0032.

A caller whose requests come fast gets a block, and its requests are admitted from that without a call. Every block is
renewed at least once a second, and whatever the answer, nothing is taken from it while one is awaited. It is given back
when it is hardly used, when somebody comes to wait for its deployment, and with every doubt about the connection: then
its requests become ordinary grants (`dissolve`), which admission registers.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import structlog

from core.clock import Clock
from core.ids import new_uuid
from core.resp import RespClient
from core.tiers import Tier
from scheduler import commands
from scheduler.block import NOTHING, Block, wanted_of
from scheduler.commands import MINUTE_S, UNSERVED
from scheduler.types import Grant, Prepared
from scheduler.upkeep import Upkeep

log = structlog.get_logger()

HOT = 50  # grants of one caller by script within a second that make a block worth while
KEPT = 25  # requests a second from a block for which it is kept
BLOCKS_MAX = 16
TURN_S = 0.005  # charges wait so long, so that many go in one call
APART_S = 0.02  # between two calls for more
PAUSE_S = 1.0  # after there was none
MICRO = 1_000_000


class Blocks:
    """Those of one admission.

    Args:
        client: the connection of admission.
        replica: this replica's name.
        clock: its monotonic time is how long a block is good.
        upkeep: the standing with Valkey.
        grants: all that run here, by request.
        register: enters one that runs in Valkey.
        enabled: without it nobody gets a block.
        background: call `turn` by itself; tests do that.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        replica: str,
        clock: Clock,
        upkeep: Upkeep,
        grants: Mapping[bytes, Grant],
        register: Callable[[Grant], None],
        enabled: bool,
        background: bool,
    ) -> None:
        self._client = client
        self._replica = replica
        self._clock = clock
        self._upkeep = upkeep
        self._grants = grants
        self._register = register
        self._enabled = enabled
        self._background = background
        self._blocks: dict[bytes, Block] = {}
        self._left: dict[bytes, Block] = {}  # dissolved, and Valkey may still hold them
        self._turning: asyncio.TimerHandle | None = None
        self.granted = 0  # requests admitted from blocks, ever

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> Iterator[bytes]:
        """The leases that are blocks of ours."""
        yield from self._blocks
        yield from self._left

    # who gets one

    def consider(self, grant: Grant, now: float) -> None:
        """Ask for a block for the caller of this grant, the `HOT`-th since the last look, if it comes fast enough."""
        packed = grant.packed
        took_s, packed.asked, packed.asked_since = now - packed.asked_since, 0, now
        if took_s > 1.0 or now < packed.blocks_after or not self._enabled or not may_have(grant.prepared, grant.tier):
            return
        block = grant.prepared.block
        requests = int(1.25 * HOT / max(took_s, 0.02))
        wanted = wanted_of(
            self._running(grant) // 2 + 16, requests, grant.input_tokens, grant.output_tokens, grant.hold
        )
        if block is not None:
            if not block.calling and not block.until and block.tier == grant.tier:
                self._ask(block, wanted)
        elif len(self._blocks) < BLOCKS_MAX and self._upkeep.ready and packed.epoch == self._upkeep.epoch:
            block = Block(new_uuid().hex.encode(), grant.prepared, packed, grant.tier)
            self._blocks[block.key] = grant.prepared.block = block
            self._ask(block, wanted)
            self._turn_later()

    @staticmethod
    def _running(grant: Grant) -> int:
        return grant.packed.share.inflight

    def short(self, block: Block, now: float) -> None:
        """A request did not fit: ask for more, unless that was done a moment ago."""
        if now < block.until and now >= block.again_at and not block.calling:
            self._ask(block, block.wanted(now))

    # what ends

    def give(self, grant: Grant, charge: int, input_tokens: int, output_tokens: int) -> bool:
        """Take back what a request had; False when it has to be released like any other."""
        block = grant.block
        assert block is not None  # noqa: S101 - the caller looked
        if charge > grant.hold:  # which is more than the block took for it
            self._register(grant)
            block.give(grant, 0, -1, -1, event=False)
            grant.block = None
            return False
        unserved = charge == UNSERVED
        block.give(grant, max(0, charge), input_tokens, output_tokens, event=charge >= 0, unserved=unserved)
        return True

    def recall(self, deployment: str) -> None:
        """Somebody waits for this deployment, or (``*``) for any: give back what is not in use."""
        now = self._clock.monotonic()
        for block in self._blocks.values():
            if deployment in ("*", block.prepared.model.deployment_id.hex):
                block.packed.blocks_after = now + PAUSE_S
                if block.calling:
                    block.recalled = True
                elif block.until:
                    self._ask(block, NOTHING)

    def turn(self) -> None:
        """Renew or give back blocks that are good no longer, and tell Valkey what was charged."""
        now = self._clock.monotonic()
        for block in list(self._blocks.values()):
            if block.calling:
                continue
            if now < block.until:
                self._charge(block)
            elif block.until:
                lively = block.taken >= KEPT * max(0.02, now - block.made_at)
                self._ask(block, block.wanted(now) if lively and now >= block.packed.blocks_after else NOTHING)
            elif block.places or block.charges:
                self._ask(block, NOTHING)

    def _turn_later(self) -> None:
        if self._background and self._turning is None:
            self._turning = asyncio.get_running_loop().call_later(TURN_S, self._turn_again)

    def _turn_again(self) -> None:
        self._turning = None
        self.turn()
        if self._blocks:
            self._turn_later()

    # the calls

    def _charge(self, block: Block) -> None:
        if not block.charges:
            return
        charges, block.charges = block.charges, []
        block.unsure.append(charges)
        epoch, tenant = self._upkeep.epoch, block.prepared.tenant
        call = commands.charge_call(block.key, tenant, block.total, charges, epoch=epoch, replica=self._replica)
        self._client.send(call).add_done_callback(partial(self._charged, block))

    def _charged(self, block: Block, done: "asyncio.Future[Any]") -> None:
        if not block.gone and (done.cancelled() or done.exception() is not None or done.result() != [1]):
            self._doubt(block)
        elif not block.gone:
            del block.unsure[0]

    def _ask(self, block: Block, wanted: tuple[int, ...]) -> None:
        """Make, renew or (`NOTHING`) lessen it to what its requests have; without any it is gone."""
        self._charge(block)
        now, unused = self._clock.monotonic(), block.returned()
        used = block.begin_call()
        call = commands.block_call(
            block.key,
            block.packed,
            block.prepared.owner,
            epoch=self._upkeep.epoch,
            replica=self._replica,
            tier=block.tier,
            blocks=len(self._blocks),
            used=used,
            wanted=wanted,
            unused=unused,
            text=block.packed.text,
        )
        self._client.send(call).add_done_callback(partial(self._answered, block, now))

    def _answered(self, block: Block, asked_at: float, done: "asyncio.Future[Any]") -> None:
        if block.gone:
            return
        if done.cancelled() or done.exception() is not None or len(done.result()) == 1:
            self._doubt(block)
            return
        more, places, tokens, nano, requests, input_tokens, output_tokens, good_us, reply = done.result()
        block.answered((places, tokens, nano), (requests, input_tokens, output_tokens), reply)
        if more:
            # the server's time went on since it answered no longer than ours since we asked
            block.until, block.made_at = asked_at + good_us / MICRO, asked_at
            block.again_at = self._clock.monotonic() + APART_S
            if block.recalled:
                self._ask(block, NOTHING)
        else:
            block.packed.blocks_after = asked_at + PAUSE_S
        block.recalled = False
        if not places:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        self._blocks.pop(block.key, None)
        if block.prepared.block is block:
            block.prepared.block = None

    # doubts

    def _doubt(self, block: Block) -> None:
        """What Valkey holds of it is not known: take part anew, which settles that."""
        log.warning("block.in_doubt", replica=self._replica)
        self.dissolve(block)
        if self._upkeep.ready:
            self._upkeep.start_resync()

    def dissolve(self, block: Block) -> None:
        """Make ordinary grants of its requests; what Valkey holds of it is given back by `settle_left`."""
        self._forget(block)
        block.gone, block.until = True, 0.0
        for grant in self._grants.values():
            if grant.block is block:
                grant.block = None
        self._left[block.key] = block

    def dissolve_all(self) -> None:
        """The connection is lost, or Valkey's data may be."""
        for block in list(self._blocks.values()):
            self.dissolve(block)

    def dissolve_lost(self, held: set[bytes]) -> None:
        """Dissolve those that Valkey does not hold: this replica was taken for dead."""
        for block in list(self._blocks.values()):
            if not block.calling and block.key not in held:
                self.dissolve(block)

    def settle_left(self) -> None:
        """Give back what Valkey holds of dissolved blocks, after their requests were registered."""
        for block in list(self._left.values()):
            charges = [part for told in [*block.unsure, block.charges] for part in told]
            epoch, replica, tenant = self._upkeep.epoch, self._replica, block.prepared.tenant
            if charges:
                call = commands.charge_call(block.key, tenant, block.total, charges, epoch=epoch, replica=replica)
                self._client.send(call)
            call = commands.block_call(
                block.key,
                block.packed,
                block.prepared.owner,
                epoch=epoch,
                replica=replica,
                tier=block.tier,
                blocks=1,
                used=(0, 0, 0),
                wanted=NOTHING,
                text=block.packed.text,
            )
            self._client.send(call).add_done_callback(partial(self._settled, block))

    def _settled(self, block: Block, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled() and done.exception() is None and len(done.result()) > 1:
            self._left.pop(block.key, None)

    async def close(self) -> None:
        """Give back what is not in use."""
        if self._turning is not None:
            self._turning.cancel()
        self._enabled = False
        for block in self._blocks.values():
            if not block.calling:
                self._ask(block, NOTHING)


def may_have(prepared: Prepared, tier: Tier) -> bool:
    """Whether requests of this tier may be admitted from a block, as far as that does not change.

    Batch gives its place to others, and guarantees are counted request by request. Rates are taken second by second.
    """
    if tier is Tier.BATCH or prepared.entitlements:
        return False
    return all(rate.window_s % MINUTE_S == 0 for rate in prepared.rates)
