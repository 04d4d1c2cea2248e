"""Replicas that die, stall, lose their connection or lose Valkey's data; Valkey that restarts or stays away."""

import asyncio
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from catalog.types import ServedModel
from cli.embedded import valkey as vk
from core import keyspace
from core.clock import SystemClock
from core.errors import PlatformError
from core.resp import RespClient
from core.tiers import Tier
from scheduler import commands
from scheduler.admission import Admission
from scheduler.types import Grant
from scheduler.upkeep import StaleEpoch
from tests.factories.scheduler import (
    Fleet,
    ask,
    concurrency,
    load_text,
    money,
    outcomes,
    rate,
    served_model,
    until_ready,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    yield fleet
    await fleet.close()


@pytest.fixture
def own_valkey(service_folder: Path) -> Iterator["OwnValkey"]:
    server = OwnValkey(service_folder / f"own-{uuid4().hex[:6]}")
    server.start()
    yield server
    server.kill()


class OwnValkey:
    """A Valkey that the test may kill and start again with its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "v.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        process = self.process = vk.start(self.folder, self.socket)
        vk.wait_ready(self.folder, self.socket, lambda: process.poll() is None)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)


class Holder:
    """The process of holder.py."""

    def __init__(self, fleet: Fleet, model: ServedModel, tenant: str, *, grants: int, waiters: int) -> None:
        arguments = [fleet.url, "victim", str(model.deployment_id), str(model.inflight_max), tenant]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.scheduler.holder", *arguments, str(grants), str(waiters)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )

    async def ready(self) -> None:
        assert self._process.stdout is not None
        assert await asyncio.to_thread(self._process.stdout.readline) == b"ready\n"

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


async def pass_time(fleet: Fleet, seconds: int) -> None:
    """Let time pass with every replica of the fleet sending its heartbeats."""
    for _ in range(seconds):
        await fleet.advance(1)
        for replica in fleet.replicas:
            await replica.heartbeat()


async def test_a_killed_replica_gives_its_slots_back_within_11_s_and_keeps_its_money(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(inflight_max=5), uuid4()
    await fleet.set_credit(tenant, 1000)
    victim = Holder(fleet, model, tenant.hex, grants=5, waiters=3)
    await victim.ready()
    assert await fleet.load(model) == (5, 3)
    mine = asyncio.create_task(ask(replica, model, money=money(tenant, 7), wait_s=30))
    victim.kill()
    await pass_time(fleet, 9)
    assert await replica.tick() == 0
    await pass_time(fleet, 2)
    assert await replica.tick() == 8
    assert isinstance(await mine, Grant)
    assert await fleet.load(model) == (1, 0)
    assert await fleet.running("key:k") == 0
    # what it served stays held until its spool is posted; what only waited was never served
    assert await fleet.credit_left(tenant) == 1000 - 5 * 10 - 7


async def test_a_grant_that_a_stalled_replica_does_not_claim_goes_to_the_next(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(inflight_max=1), uuid4()
    await fleet.set_credit(tenant, 1000)
    first = await ask(replica, model)
    victim = Holder(fleet, model, tenant.hex, grants=0, waiters=1)
    try:
        await victim.ready()
        mine = asyncio.create_task(ask(replica, model, wait_s=30))
        await replica.heartbeat()
        victim.stop()
        replica.release(first, None)
        await replica.tick()
        assert await fleet.load(model) == (1, 1)
        await fleet.advance(2.1)
        await replica.tick()
        assert isinstance(await mine, Grant)
        assert await fleet.load(model) == (1, 0)
        assert await fleet.credit_left(tenant) == 1000
    finally:
        victim.kill()


async def test_a_grant_in_the_post_to_a_dead_replica_gives_its_money_back(fleet: Fleet) -> None:
    """It dies with a waiter, which is granted before anybody knows; nothing was served, so nothing stays held."""
    replica, model, tenant = await fleet.replica(), served_model(inflight_max=1), uuid4()
    await fleet.set_credit(tenant, 1000)
    first = await ask(replica, model)
    victim = Holder(fleet, model, tenant.hex, grants=0, waiters=1)
    await victim.ready()
    victim.kill()
    await pass_time(fleet, 9)
    replica.release(first, None)
    await replica.heartbeat()
    assert await fleet.load(model) == (1, 0)
    assert await fleet.credit_left(tenant) == 990
    await fleet.advance(1.5)
    await replica.heartbeat()
    assert await replica.tick() == 1
    assert await fleet.load(model) == (0, 0)
    assert await fleet.credit_left(tenant) == 1000


async def test_a_replica_taken_for_dead_registers_what_still_runs(fleet: Fleet) -> None:
    asleep, other = await fleet.replica(), await fleet.replica()
    model, tenant = served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    grant = await ask(asleep, model, concurrency(2), money=money(tenant, 60))
    await fleet.advance(11)
    await other.heartbeat()
    assert await other.tick() == 1
    assert await fleet.load(model) == (0, 0)
    await asleep.heartbeat()
    await asleep.heartbeat()
    assert await fleet.load(model) == (1, 0)
    assert await fleet.running("key:k") == 1
    assert await fleet.credit_left(tenant) == 40
    asleep.release(grant, 5)
    await asleep.tick()
    assert await fleet.load(model) == (0, 0)
    assert await fleet.credit_left(tenant) == 95


async def test_a_replica_without_heartbeat_cannot_leak_for_ever(fleet: Fleet) -> None:
    asleep, other = await fleet.replica(), await fleet.replica()
    model = served_model()
    await fleet.advance(11)
    await other.heartbeat()
    await other.tick()
    await ask(asleep, model)
    assert await other.tick() == 1
    assert await fleet.load(model) == (0, 0)


async def test_a_clean_leave_gives_back_at_once(fleet: Fleet) -> None:
    leaving, other = await fleet.replica(), await fleet.replica()
    model = served_model()
    await ask(leaving, model)
    await leaving.close()
    assert await other.tick() == 1
    assert await fleet.load(model) == (0, 0)


async def test_a_release_without_connection_is_made_good(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    grant = await ask(replica, model, concurrency(1), money=money(tenant, 60))
    await fleet.client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until_ready(replica, ready=False)
    replica.release(grant, 13)
    await until_ready(replica)
    await replica.tick()
    assert await fleet.load(model) == (0, 0)
    assert await fleet.outstanding(tenant) == {grant.request_id.hex: 13}
    assert await fleet.credit_left(tenant) == 87


async def test_reconcile_gives_back_what_nobody_holds(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model, concurrency(1))
    lease = await fleet.client.call("HGET", "{tg}:lease:r0", grant.key)
    replica.release(grant, None)
    await replica.tick()
    await fleet.client.call("HSET", "{tg}:lease:r0", uuid4().hex, lease)
    await fleet.client.call("MSET", "{tg}:c:global", 1, "{tg}:o:key:k", struct.pack("<d", 1))
    await fleet.client.call("SET", f"{{tg}}:m:{model.deployment_id.hex}", load_text(inflight=1))
    await replica.reconcile()
    await replica.tick()
    assert await fleet.load(model) == (0, 0)
    assert await fleet.count("global") == await fleet.running("key:k") == 0
    assert await fleet.client.call("HLEN", "{tg}:lease:r0") == 0


async def test_lost_data_is_registered_anew_before_admission_resumes(fleet: Fleet) -> None:
    """Two replicas hold 40 of 100 each; after the loss nobody gets the third 40."""
    replicas = [await fleet.replica() for _ in range(2)]
    model, tenant = served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    grants = [await ask(replica, model, concurrency(3), money=money(tenant, 40)) for replica in replicas]
    await fleet.client.call("FLUSHALL")
    await fleet.set_credit(tenant, 100)
    fenced = asyncio.create_task(ask(replicas[0], model, concurrency(3), money=money(tenant, 40)))
    assert await outcomes(fenced) == ["SERVICE_UNAVAILABLE"]
    with pytest.raises(StaleEpoch):
        await replicas[1].heartbeat()
    await replicas[1].resync()
    assert await fleet.load(model) == (2, 0)
    assert await fleet.credit_left(tenant) == 20
    await pass_time(fleet, 5)
    third = asyncio.create_task(ask(replicas[1], model, concurrency(3), money=money(tenant, 40)))
    assert await outcomes(third) == ["INSUFFICIENT_CREDIT"]
    for replica, grant in zip(replicas, grants, strict=True):
        replica.release(grant, 1)
        await replica.tick()
    assert await fleet.load(model) == (0, 0)
    assert await fleet.running("key:k") == 0
    assert await fleet.credit_left(tenant) == 98


async def test_what_else_was_lost_is_entered_before_a_replica_counts_as_back(fleet: Fleet) -> None:
    seen: list[bool] = []

    async def enter() -> None:
        seen.append(replica.ready)

    client = await RespClient.connect(fleet.url)
    replica = Admission(client, replica="a", clock=fleet.clock, global_inflight_max=9, on_epoch=enter, background=False)
    await replica.start()
    await replica.resync()
    assert seen == [False]  # once per epoch
    await fleet.client.call("FLUSHALL")
    await replica.resync()
    assert seen == [False, False]
    assert replica.ready
    await replica.close()
    await client.close()


async def test_scripts_of_an_old_epoch_are_refused(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model()
    grant = await ask(replica, model)
    await fleet.client.call("SET", "{tg}:epoch", "another")
    old = commands.acquire_call(grant.packed.acquire, uuid4().hex.encode(), 1, 0, 0, 0, 0)
    assert await fleet.client.send(old) == [commands.Code.EPOCH]
    assert await fleet.load(model) == (1, 0)


async def test_a_release_that_lost_data_undid_is_said_again(fleet: Fleet) -> None:
    """A snapshot from before the release comes back: the release of the last seconds is repeated."""
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    grant = await ask(replica, model, concurrency(1), money=money(tenant, 60))
    keys = ["{tg}:lease:r0", "{tg}:c:global", "{tg}:o:key:k", f"{{tg}}:m:{model.deployment_id.hex}"]
    keys += [f"{{tg}}:credit:{tenant.hex}", f"{{tg}}:out:{tenant.hex}"]
    dumps = [await fleet.client.call("DUMP", key) for key in keys]
    replica.release(grant, 13)
    await replica.tick()
    assert await fleet.load(model) == (0, 0)
    for key, dump in zip(keys, dumps, strict=True):
        await fleet.client.call("RESTORE", key, 0, dump, "REPLACE")
    await fleet.client.call("SET", "{tg}:epoch", "runid-of-the-old-primary:s:1:x:L4")
    await replica.resync()
    await replica.tick()
    assert await fleet.load(model) == (0, 0)
    assert await fleet.credit_left(tenant) == 87


async def test_waiters_join_the_queue_again_after_a_restart_that_lost_them(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model(inflight_max=1)
    first = await ask(replica, model)
    waiter = asyncio.create_task(ask(replica, model, wait_s=30))
    while replica.waiting < 1:
        await replica.heartbeat()
    await fleet.client.call("FLUSHALL")
    await fleet.client.call("SET", "{tg}:epoch", "runid-of-the-old-primary:s:1:x:L4")
    await replica.resync()
    async with asyncio.timeout(30):
        while (await fleet.load(model))[1] == 0:
            await replica.heartbeat()
    replica.release(first, None)
    assert isinstance(await waiter, Grant)
    assert await fleet.load(model) == (1, 0)


async def test_valkey_killed_and_restarted_keeps_grants_and_fences_only_until_all_joined(own_valkey: OwnValkey) -> None:
    fleet = await Fleet.open(own_valkey.socket)
    try:
        replicas = [await fleet.replica() for _ in range(2)]
        model, tenant = served_model(), uuid4()
        await fleet.set_credit(tenant, 100)
        grants = [await ask(replica, model, concurrency(2), money=money(tenant, 40)) for replica in replicas]
        own_valkey.kill()
        for replica in replicas:
            await until_ready(replica, ready=False)
        own_valkey.start()
        for replica in replicas:
            await until_ready(replica)
        assert await fleet.load(model) == (2, 0)
        full = asyncio.create_task(ask(replicas[0], model, concurrency(2)))
        assert await outcomes(full) == ["CONCURRENCY_LIMITED"]
        for replica, grant in zip(replicas, grants, strict=True):
            replica.release(grant, 0)
            await replica.tick()
        assert await fleet.load(model) == (0, 0)
    finally:
        await fleet.close()


async def test_valkey_away_goes_on_with_the_share_of_the_last_minute(own_valkey: OwnValkey) -> None:
    fleet = await Fleet.open(own_valkey.socket)
    try:
        replica, model, tenant = await fleet.replica(), served_model(), uuid4()
        await fleet.set_credit(tenant, 1000)
        prepared = replica.prepare((rate(100),), model, tenant.hex)
        known = {"prepared": prepared, "money": money(tenant, 10)}
        for grant in [await ask(replica, model, **known) for _ in range(4)]:  # type: ignore[arg-type] # as given
            replica.release(grant, 10)
        kept, ended = [await ask(replica, model, **known) for _ in range(2)]  # type: ignore[arg-type] # as given
        own_valkey.kill()
        await until_ready(replica, ready=False)
        replica.release(ended, 10)
        blip = await ask(replica, model, **known)  # type: ignore[arg-type] # as given
        assert blip.local
        with pytest.raises(PlatformError, match="not available"):
            await ask(replica, model, rate(100, counter="key:unknown:rpm"), money=money(tenant, 10))
        fleet.clock.advance(3)
        with pytest.raises(PlatformError, match="not available"):
            await ask(replica, model, **known, tier=Tier.BATCH)  # type: ignore[arg-type] # as given
        own_valkey.start()
        await until_ready(replica)
        assert await fleet.load(model) == (2, 0)
        assert await fleet.credit_left(tenant) == 1000 - 7 * 10
        for grant in (blip, kept):
            replica.release(grant, 10)
        await replica.tick()
        assert await fleet.load(model) == (0, 0)
    finally:
        await fleet.close()


async def test_a_gateway_that_starts_without_valkey_joins_later(own_valkey: OwnValkey) -> None:
    own_valkey.kill()
    client = await RespClient.connect(f"unix://{own_valkey.socket}", required=False, jitter=lambda: 0.0)
    replica = Admission(client, replica="late", clock=SystemClock(), global_inflight_max=10)
    await replica.start()
    with pytest.raises(PlatformError, match="not available"):
        await ask(replica, served_model())
    own_valkey.start()
    await until_ready(replica)
    assert isinstance(await ask(replica, served_model()), Grant)
    await replica.close()
    await client.close()


async def test_versions_that_keep_their_keys_otherwise_do_not_meet(fleet: Fleet) -> None:
    """The newer one takes over at once; the older one does again when no newer one lives."""
    replica = await fleet.replica()
    epoch: bytes = await fleet.client.call("GET", keyspace.EPOCH)
    newer = epoch.rpartition(b":L")[0] + b":L99"
    await fleet.client.call("SET", keyspace.EPOCH, newer)
    await replica.resync()
    assert (replica.ready, await fleet.client.call("GET", keyspace.EPOCH)) == (False, newer)
    await fleet.advance(10.1)  # the last heartbeat is over
    await replica.resync()
    assert (replica.ready, await fleet.client.call("EXISTS", keyspace.EPOCH)) == (True, 1)
    older = epoch.rpartition(b":L")[0]
    await fleet.client.call("SET", keyspace.EPOCH, older)
    other = await fleet.replica()
    assert other.ready
    found = await fleet.client.call("GET", keyspace.EPOCH)
    assert found.split(b":")[1] == b"l"
    assert found.rpartition(b":L")[2] == epoch.rpartition(b":L")[2]
    assert await fleet.client.call("EXISTS", commands.SETTLE)


async def test_the_money_of_a_lease_whose_form_is_gone_is_told(fleet: Fleet) -> None:
    replica, model, tenant = await fleet.replica(), served_model(), uuid4()
    await fleet.set_credit(tenant, 100)
    grant = await ask(replica, model, money=money(tenant, 60))
    lease = await fleet.client.call("HGET", "{tg}:lease:r0", grant.key)
    await fleet.client.call("HSET", "{tg}:lease:gone", grant.key, lease.replace(grant.packed.form.encode(), b"f" * 32))
    await fleet.client.call("ZADD", keyspace.BEAT, 1, "gone")
    await replica.tick()
    assert await fleet.client.call("HGETALL", "{tg}:owed:gone") == [grant.key, tenant.hex.encode()]
