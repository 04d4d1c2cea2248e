"""Counters follow from leases: what is off is found and set right, and nothing else, whatever traffic runs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from core import keyspace
from core.load import LAYOUT
from core.tiers import Tier
from scheduler import commands
from scheduler.recount import DONE, KINDS, Drift
from tests.factories.scheduler import Fleet, ask, concurrency, money, served_model
from tests.integration.scheduler.traffic import CANCELS, MODELS, REPLICAS, TENANTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    yield fleet
    await fleet.close()


async def test_each_counter_that_is_off_is_named_and_set_right(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(inflight_max=2), uuid4()
    await fleet.set_credit(tenant, 1000)
    owners = [f"{level}:{tenant.hex}{of}" for level in ("tenant", "project", "key") for of in ("", ":m:a")]
    demands = [concurrency(9, counter=f"{owner}:conc") for owner in owners]

    async def one(tier: Tier, wait_s: float) -> None:
        await ask(replica, model, *demands, money=money(tenant, 1), used=(7, 5), tier=tier, wait_s=wait_s)

    await one(Tier.PRIORITY, 0)
    await one(Tier.PRIORITY, 0)
    waiters = [asyncio.create_task(one(tier, 30)) for tier in (Tier.STANDARD, Tier.BATCH)]
    while replica.waiting < 2:
        await replica.heartbeat()
    assert await replica.recount(now=True) == []

    load, names = keyspace.deployment(model.deployment_id), [keyspace.record(owner) for owner in owners]
    for key in (*names, keyspace.counter("global"), commands.WAITERS, keyspace.record("key:gone")):
        await fleet.corrupt(key, 3)
    raw = list(LAYOUT.unpack(await fleet.client.call("GET", load)))
    for place in (0, 1, 3, 8, 9):
        raw[place] += 1
    await fleet.client.call("SET", load, LAYOUT.pack(*raw))
    await fleet.client.call("SET", keyspace.deployment(uuid4()), LAYOUT.pack(4, *[0] * 9))

    found = await replica.recount(now=True)
    assert found is not None
    of_counters = {drift.name[2:]: (drift.value, drift.right) for drift in found if drift.name[0] in "co"}
    assert of_counters == {"global": (5, 2), "key:gone": (3, 0)} | dict.fromkeys(owners, (7, 4))
    assert Drift("waiters", 5, 2) in found
    assert replica.drift.last == dict.fromkeys(KINDS, 0) | dict.fromkeys(
        ("global", "tenant", "tenant_model", "project", "project_model", "key_model", "waiting"), 3
    ) | {"key": 6, "model_in_flight": 5, "model_waiting": 3, "model_tokens": 1}
    assert replica.drift.total == replica.drift.last
    assert await replica.recount(now=True) == []
    assert (replica.drift.rounds, set(replica.drift.last.values())) == (3, {0})
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_what_is_no_sum_of_leases_is_left_alone(fleet: Fleet) -> None:
    replica = await fleet.replica()
    kept = {keyspace.counter("key:k:spend:t"): b"77", keyspace.record("key:k"): bytes(8) + b"x" * 33}
    for key, value in kept.items():
        await fleet.client.call("SET", key, value)
    assert await replica.recount(now=True) == []
    assert [await fleet.client.call("GET", key) for key in kept] == list(kept.values())


async def test_one_replica_counts_at_a_time_every_30_s_and_another_takes_over_from_one_that_died(fleet: Fleet) -> None:
    first, second = await fleet.replica(), await fleet.replica()
    await first.tick()
    await second.tick()
    assert (first.drift.rounds, second.drift.rounds) == (1, 0)
    await fleet.advance(29)
    await first.heartbeat()
    await first.tick()
    assert first.drift.rounds == 1
    await fleet.advance(1)
    epoch = await fleet.client.call("GET", keyspace.EPOCH)
    begun = commands.call(commands.RECOUNT, [keyspace.EPOCH, commands.OFFSET], [epoch, "gone", 1, 1])
    assert (await fleet.client.send(begun))[1] == 1
    await second.tick()
    assert await second.recount(now=True) is None
    await fleet.advance(6)
    await second.tick()
    assert second.drift.rounds == 1


async def test_nobody_counts_while_replicas_of_another_version_take_part(fleet: Fleet) -> None:
    """Their calls would be missed, and what they grant taken for drift."""
    replica = await fleet.replica()
    await fleet.replica(name="older")
    await fleet.client.call("HSET", "{tg}:libraries", "older", "tg_recount_older")
    await fleet.client.call("SET", keyspace.counter("global"), 5)
    assert await replica.recount(now=True) is None
    assert await fleet.count("global") == 5
    await fleet.advance(71)  # it is gone for a minute
    await replica.heartbeat()
    assert await replica.recount(now=True) == [Drift("c:global", 5, 0)]


async def test_a_round_ends_however_many_callers_come_meanwhile(fleet: Fleet) -> None:
    """What it keeps and compares are the leases that it found, and not all who call while it goes on."""
    replica, model = await fleet.replica(), served_model()
    held = [await ask(replica, model, concurrency(9, counter=f"key:{n}:conc")) for n in range(30)]
    epoch = await fleet.client.call("GET", keyspace.EPOCH)
    step = commands.call(commands.RECOUNT, [keyspace.EPOCH, commands.OFFSET], [epoch, "counter", 50, 1])
    replies = []
    for turn in range(20):
        replies.append(await fleet.client.send(step))
        if replies[-1][1] == DONE:
            break
        for n in range(150):  # more than a step compares
            grant = await ask(replica, model, concurrency(9, counter=f"key:{turn}-{n}:conc"))
            replica.release(grant, None)
    assert [reply[1] for reply in replies] == [1] * (len(replies) - 1) + [DONE]
    assert all(len(reply) == 2 for reply in replies)  # nothing is off
    for grant in held:
        replica.release(grant, None)


@asynccontextmanager
async def traffic(fleet: Fleet, *, real: bool) -> AsyncIterator[dict[str, int]]:
    """Run the processes of traffic.py; gives their pids by replica. They are ended, and have to end well."""
    for tenant in TENANTS:
        await fleet.set_credit(tenant, 10**12)
    command = [sys.executable, "-m", "tests.integration.scheduler.traffic", fleet.url, "1" if real else "0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    pids: dict[str, int] = {}
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while len(pids) < REPLICAS:
                name, number = (await process.stdout.readline()).split()
                pids[name.decode()] = int(number)
        yield pids
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await process.wait() == 0


async def _kill_one_of_four(fleet: Fleet, *, cancels: int, real: bool) -> None:
    watcher = await fleet.replica(name="watcher", background=real)
    async with traffic(fleet, real=real) as pids:
        rounds = 0
        while int(await fleet.client.call("GET", CANCELS) or 0) < cancels:
            assert await watcher.recount(now=True, leases=5) in ([], None)
            rounds += 1
        assert rounds > 1
        os.kill(pids.pop("r2"), signal.SIGKILL)
        for _ in range(22):  # 11 s
            if real:
                await asyncio.sleep(0.5)
            else:
                await fleet.advance(0.5)
                await asyncio.sleep(0.06)  # real processes beat and tick meanwhile
                await watcher.heartbeat()
            assert await watcher.recount(now=True, leases=5) in ([], None)
        await watcher.tick()
        assert await fleet.client.call("HLEN", keyspace.lease("r2")) == 0
    await watcher.tick()
    assert await watcher.recount(now=True) == []
    for model in MODELS:
        assert await fleet.load(model) == (0, 0)
    assert await fleet.count("global") == 0
    for tenant in TENANTS:
        for owner in (f"tenant:{tenant.hex}", f"key:{tenant.hex}"):
            assert await fleet.running(owner) == 0


async def test_a_killed_replica_of_four_leaves_no_drift_and_is_gone_after_11_s(fleet: Fleet) -> None:
    await _kill_one_of_four(fleet, cancels=200, real=False)


@pytest.mark.soak
async def test_a_killed_replica_of_four_leaves_no_drift_after_5000_cancels(fleet: Fleet) -> None:
    await _kill_one_of_four(fleet, cancels=5000, real=True)
