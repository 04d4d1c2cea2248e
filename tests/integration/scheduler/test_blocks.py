"""Leased blocks (ADR 0032): who gets one, what Valkey counts meanwhile, and how it comes back."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand, Unit
from core.ids import new_uuid
from core.tiers import Tier
from scheduler import commands
from scheduler.admission import Admission
from scheduler.blocks import HOT
from scheduler.caps import Caps
from scheduler.types import Entitlement, Grant, Prepared
from tests.factories.scheduler import (
    NO_MONEY,
    Fleet,
    Money,
    ask,
    concurrency,
    money,
    rate,
    served_model,
    tokens,
    until_waiting,
)

ROOT = Path(__file__).resolve().parents[3]
START_US = 1_800_000_000_000_000
PLENTY = 10**6


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    await fleet.client.call("SET", commands.OFFSET, f"@{START_US}")
    yield fleet
    await fleet.close()


async def pass_time(fleet: Fleet, seconds: float) -> None:
    """Time passes for all alike; Valkey's stands still between."""
    fleet.clock.advance(seconds)
    await fleet.client.call("SET", commands.OFFSET, f"@{START_US + int(fleet.clock.monotonic() * 1_000_000)}")


async def settled(*replicas: Admission) -> None:
    for _ in range(3):
        for replica in replicas:
            await replica.heartbeat()


async def come_fast(
    replica: Admission, model: ServedModel, prepared: Prepared, money: Money = NO_MONEY, tier: Tier = Tier.STANDARD
) -> None:
    """So many requests of the caller, one after the other, that it is worth a block."""
    for _ in range(HOT):
        grant = await ask(replica, model, prepared=prepared, money=money, used=(10, 10), tier=tier)
        replica.release(grant, None, 10, 10)
    await settled(replica)


def take(replica: Admission, prepared: Prepared, hold: int = 0) -> Grant:
    grant = replica.take(new_uuid(), prepared, hold, 10, 10, Tier.STANDARD)
    assert grant is not None
    return grant


USUAL = (concurrency(PLENTY), rate(PLENTY), tokens(PLENTY * 100, Unit.INPUT_TOKEN))


async def with_block(
    fleet: Fleet, *, inflight_max: int = 50_000, demands: tuple[Demand, ...] = USUAL, money: Money = NO_MONEY
) -> tuple[Admission, ServedModel, Prepared]:
    replica, model = (
        await fleet.replica(blocks=True, global_inflight_max=PLENTY),
        served_model(inflight_max=inflight_max),
    )
    prepared = replica.prepare(demands, model, money.tenant)
    await come_fast(replica, model, prepared, money)
    assert len(replica.blocks) == 1
    return replica, model, prepared


async def test_what_is_admitted_from_a_block_is_held_before_and_not_told(fleet: Fleet) -> None:
    tenant = uuid4()
    await fleet.set_credit(tenant, 10**9)
    replica, model, prepared = await with_block(fleet, money=money(tenant, 1000))
    held = await fleet.load(model)
    asked = (await fleet.client.call("INFO", "commandstats")).count(b"calls=")
    grants = [take(replica, prepared, 1000) for _ in range(10)]
    assert await fleet.load(model) == held
    assert (await fleet.client.call("INFO", "commandstats")).count(b"calls=") == asked
    assert held[0] >= 10
    assert await fleet.running("key:k") == held[0] == await fleet.count("global")
    assert sum((await fleet.outstanding(tenant)).values()) >= 10_000
    assert all(grant.reply[0] == 1 and len(grant.reply) == prepared.reply_size for grant in grants)
    for grant in grants:
        replica.release(grant, 400, 5, 5)
    replica.blocks.turn()
    out = await fleet.outstanding(tenant)
    assert all(out[grant.key.decode()] == 400 for grant in grants)
    assert sum(out.values()) == 10**9 - await fleet.credit_left(tenant)


async def test_an_idle_block_is_given_back_with_all_that_was_not_used(fleet: Fleet) -> None:
    tenant = uuid4()
    await fleet.set_credit(tenant, 10**9)
    replica, model, prepared = await with_block(fleet, money=money(tenant, 1000))
    grant = take(replica, prepared, 1000)
    await pass_time(fleet, 1.1)
    replica.blocks.turn()
    await settled(replica)
    assert await fleet.load(model) == (1, 0)  # what runs keeps its place
    assert replica.take(new_uuid(), prepared, 0, 0, 0, Tier.STANDARD) is None
    replica.release(grant, 300, 4, 10)
    replica.blocks.turn()
    await settled(replica)
    assert len(replica.blocks) == 0
    assert await fleet.load(model) == (0, 0)
    assert await fleet.running("key:k") == 0
    assert await fleet.outstanding(tenant) == {grant.key.decode(): 300}
    assert sum((await fleet.rated("key:k:rpm")).values()) == HOT + 1
    assert sum((await fleet.rated("key:k:itpm")).values()) == 10 * HOT + 4
    assert await replica.recount(now=True) == []


@pytest.mark.parametrize(
    "demands",
    [
        (concurrency(2000),),  # of which a fiftieth over four replicas is ten, and half is in use
        (rate(1500),),  # a fiftieth over four is seven
        (tokens(15_000, Unit.INPUT_TOKEN),),
    ],
    ids=["half in use", "requests", "tokens"],
)
async def test_a_limit_that_is_not_far_away_is_left_to_the_script(fleet: Fleet, demands: tuple[Demand, ...]) -> None:
    replicas = [await fleet.replica(blocks=True, global_inflight_max=PLENTY) for _ in range(4)]
    model = served_model(inflight_max=50_000)
    prepared = replicas[0].prepare(demands, model, "")
    for _ in range(1000 if demands[0].counter == "key:k:conc" else 0):
        await ask(replicas[1], model, *demands)
    await come_fast(replicas[0], model, prepared)
    assert len(replicas[0].blocks) == 0
    assert await fleet.load(model) == (1000 if demands[0].counter == "key:k:conc" else 0, 0)


@pytest.mark.parametrize("kind", ["batch", "entitled", "off"])
async def test_who_gets_no_block(fleet: Fleet, kind: str) -> None:
    replica, model = await fleet.replica(blocks=kind != "off", global_inflight_max=PLENTY), served_model()
    entitlements = (Entitlement("t", 1, 2),) if kind == "entitled" else ()
    prepared = replica.prepare(USUAL, model, "", owner="t", entitlements=entitlements)
    await come_fast(replica, model, prepared, tier=Tier.BATCH if kind == "batch" else Tier.STANDARD)
    assert len(replica.blocks) == 0


async def test_who_comes_to_wait_gets_what_is_not_in_use(fleet: Fleet) -> None:
    """A block has spare places of a deployment that others then fill to its ceiling."""
    replica, model, prepared = await with_block(fleet, inflight_max=1000)
    running = [take(replica, prepared) for _ in range(3)]
    spare = (await fleet.load(model))[0] - 3
    assert spare > 0
    other = await fleet.replica(global_inflight_max=PLENTY)
    for _ in range(900 - 3 - spare):  # to what standard may fill
        await ask(other, model, tier=Tier.STANDARD)
    waiting = [asyncio.create_task(ask(other, model, tier=Tier.STANDARD, wait_s=30)) for _ in range(spare + 1)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    await until_waiting(other, 1)
    await settled(replica, other)
    assert sum(task.done() for task in waiting) == spare
    assert replica.take(new_uuid(), prepared, 0, 0, 0, Tier.STANDARD) is None
    assert await fleet.load(model) == (900, 1)
    replica.release(running[0], None)  # and so does a place that ends after that
    replica.blocks.turn()
    await asyncio.wait_for(waiting[-1], 10)
    await come_fast(replica, served_model(), replica.prepare(USUAL, served_model(), ""))  # elsewhere goes on
    assert len(replica.blocks) == 2


async def test_a_lowered_cap_calls_back_what_is_not_in_use(fleet: Fleet) -> None:
    replica, model, prepared = await with_block(fleet, inflight_max=1000)
    grant = take(replica, prepared)
    deployment = model.deployment_id.hex
    epoch = await fleet.client.call("GET", keyspace.EPOCH)
    await fleet.client.send(commands.caps_call(deployment, Caps(10, 0, 0.5), epoch=epoch))
    async with asyncio.timeout(10):
        while await fleet.load(model) != (1, 0):
            await settled(replica)
    replica.release(grant, None)


async def test_who_was_taken_for_dead_registers_what_runs(fleet: Fleet) -> None:
    tenant = uuid4()
    await fleet.set_credit(tenant, 10**9)
    replica, model, prepared = await with_block(fleet, money=money(tenant, 1000))
    grants = [take(replica, prepared, 1000) for _ in range(3)]
    replica.release(grants[0], 1)  # not told before it is taken for dead
    other = await fleet.replica()
    await pass_time(fleet, 11)
    await other.heartbeat()
    assert await other.tick() == 1
    assert await fleet.load(model) == (0, 0)
    await settled(replica)
    assert await fleet.load(model) == (2, 0)
    for grant in grants[1:]:
        replica.release(grant, 2)
    assert await fleet.load(model) == (0, 0)
    assert sorted((await fleet.outstanding(tenant)).values()) == [1, 2, 2]
    assert await fleet.client.call("HLEN", keyspace.owed("r0")) == 0
    assert await replica.recount(now=True) == []


async def test_after_data_loss_what_runs_is_registered_and_blocks_are_leased_anew(fleet: Fleet) -> None:
    tenant = uuid4()
    await fleet.set_credit(tenant, 10**9)
    replica, model, prepared = await with_block(fleet, money=money(tenant, 1000))
    grants = [take(replica, prepared, 1000) for _ in range(3)]
    await fleet.client.call("FLUSHALL")
    await pass_time(fleet, 0.1)
    await fleet.set_credit(tenant, 10**9)
    await replica.resync()
    assert len(replica.blocks) == 0
    assert await fleet.load(model) == (3, 0)
    assert await fleet.outstanding(tenant) == {grant.key.decode(): 1000 for grant in grants}
    await pass_time(fleet, 6)
    await settled(replica)
    await come_fast(replica, model, prepared, money(tenant, 1000))
    await pass_time(fleet, 0.2)
    await come_fast(replica, model, prepared, money(tenant, 1000))
    assert len(replica.blocks) == 1
    for grant in grants:
        replica.release(grant, None)
    assert await replica.recount(now=True) == []


async def test_more_charged_than_held_is_charged(fleet: Fleet) -> None:
    tenant = uuid4()
    await fleet.set_credit(tenant, 10**9)
    replica, _, prepared = await with_block(fleet, money=money(tenant, 1000))
    grant = take(replica, prepared, 1000)
    replica.release(grant, 5000, 10, 10)
    await replica.blocks.close()
    await settled(replica)
    assert await fleet.outstanding(tenant) == {grant.key.decode(): 5000}
    assert await fleet.credit_left(tenant) == 10**9 - 5000


def _run_until_ready_and_kill(command: list[str]) -> None:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"ready 20\n"
        finally:
            victim.kill()


async def test_a_killed_gateway_with_a_block_leaves_no_drift_after_11_s(fleet: Fleet) -> None:
    await fleet.client.call("DEL", commands.OFFSET)
    replica, model, tenant = (
        await fleet.replica(global_inflight_max=100_000),
        served_model(inflight_max=50_000),
        uuid4(),
    )
    await fleet.set_credit(tenant, 10**9)
    arguments = [fleet.url, "victim", str(model.deployment_id), tenant.hex]
    command = [sys.executable, "-m", "tests.integration.scheduler.block_holder", *arguments]
    await asyncio.to_thread(_run_until_ready_and_kill, command)
    assert (await fleet.load(model))[0] >= 20
    for _ in range(11):
        await fleet.advance(1)
        await replica.heartbeat()
    assert await replica.tick() >= 1
    assert await fleet.load(model) == (0, 0)
    assert (await fleet.count("global"), await fleet.running("key:k")) == (0, 0)
    assert await replica.recount(now=True) == []
    # its money stays: that of the block until the replica is back with its spool, what was charged until it is posted
    owed = await fleet.client.call("HGETALL", keyspace.owed("victim"))
    out = await fleet.outstanding(tenant)
    blocks = {key.decode() for key in owed[::2]} & out.keys()
    assert {UUID(bytes.fromhex(value.decode()).hex()) for value in owed[1::2]} == {tenant}
    assert sum(out[block] for block in blocks) >= 20 * 1000
    assert sum(out.values()) == 10**9 - await fleet.credit_left(tenant)


async def test_what_another_model_serves_is_counted_by_no_rate(fleet: Fleet) -> None:
    """Taken from a block, and given back as if it had never come."""
    replica, _, prepared = await with_block(fleet)
    grants = [take(replica, prepared) for _ in range(3)]
    for grant, charge in zip(grants, (None, commands.UNSERVED, commands.UNSERVED), strict=True):
        replica.release(grant, charge, 0, 0)
    await pass_time(fleet, 1.1)
    replica.blocks.turn()
    await settled(replica)
    assert len(replica.blocks) == 0
    assert sum((await fleet.rated("key:k:rpm")).values()) == HOT + 1
    assert sum((await fleet.rated("key:k:itpm")).values()) == 10 * HOT
    assert await fleet.running("key:k") == 0
