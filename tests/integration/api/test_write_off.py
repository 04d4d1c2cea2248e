"""A killed gateway that comes back frees what it held for requests that left no usage event, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from api.inference.spool_register import SpoolRegister
from billing.spool import SpoolWriter
from billing.types import Outcome, UsageEvent
from core import keyspace
from core.clock import SystemClock
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories.credit_figures import add_outstanding
from tests.factories.scheduler import Fleet, ask, money, served_model

HOLD = 10


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    yield fleet
    await fleet.close()


async def spooled(folder: Path, request: UUID, tenant: UUID) -> None:
    """Write one event as the gateway does just before it is killed."""
    some, loop = UUID(int=1), asyncio.get_running_loop()
    spool, durable = SpoolWriter(folder, clock=SystemClock()), loop.create_future()
    spool.start(loop)
    spool.append(
        UsageEvent(
            request, tenant, some, some, some, some, some,
            "demo", "chat", Tier.STANDARD, Currency.USD, some, Outcome.COMPLETED, 200, 5, 1, 2, TokenUsage(1),
        ),
        durable.set_result,
    )  # fmt: skip
    assert await asyncio.wait_for(durable, 20)
    await asyncio.to_thread(spool.close)


async def killed(fleet: Fleet, tenant: UUID, *, reaped: bool) -> list[UUID]:
    """Three requests of a replica that then dies; it is back before the others notice, or after."""
    await fleet.set_credit(tenant, 1000)
    replica, model = await fleet.replica("victim"), served_model()
    requests = [new_uuid() for _ in range(3)]
    for request in requests:
        await ask(replica, model, money=money(tenant, HOLD), request_id=request)
    if reaped:
        other = await fleet.replica("other")
        await fleet.advance(11)
        await other.heartbeat()
        assert await other.tick() == 3
    await fleet.replica("victim")  # its next life
    assert await fleet.load(model) == (0, 0)
    assert await fleet.credit_left(tenant) == 1000 - 3 * HOLD
    return requests


def register(fleet: Fleet, folder: Path, *, started: datetime, returning: bool = True) -> SpoolRegister:
    return SpoolRegister(fleet.client, folder, started=started, returning=returning)


@pytest.mark.parametrize("reaped", [False, True])
async def test_holds_without_an_event_are_freed_and_the_others_left(fleet: Fleet, tmp_path: Path, reaped: bool) -> None:
    tenant, folder = uuid4(), tmp_path / "victim"
    first, *lost = await killed(fleet, tenant, reaped=reaped)
    await spooled(folder, first, tenant)
    now = datetime.now(UTC) + timedelta(milliseconds=2)
    assert await register(fleet, folder, started=now).write_off() == len(lost)
    assert await fleet.outstanding(tenant) == {first.hex: HOLD}
    assert await fleet.credit_left(tenant) == 1000 - HOLD
    assert await register(fleet, folder, started=now).write_off() == 0
    assert not await fleet.client.call("EXISTS", keyspace.owed("victim"))


async def test_on_a_new_volume_the_money_stays_held(fleet: Fleet, tmp_path: Path) -> None:
    """The old one may still be adopted elsewhere, and posted."""
    tenant = uuid4()
    await killed(fleet, tenant, reaped=True)
    folder, now = tmp_path / "victim", datetime.now(UTC) + timedelta(milliseconds=2)
    assert await register(fleet, folder, started=now, returning=False).write_off() == 0
    assert await fleet.credit_left(tenant) == 1000 - 3 * HOLD


async def test_requests_of_this_life_are_never_written_off(fleet: Fleet, tmp_path: Path) -> None:
    """A stalled replica may be taken for dead while its requests run on."""
    tenant = uuid4()
    await killed(fleet, tenant, reaped=True)
    started = datetime.now(UTC) - timedelta(minutes=1)
    assert await register(fleet, tmp_path / "victim", started=started).write_off() == 0
    assert await fleet.credit_left(tenant) == 1000 - 3 * HOLD


async def test_of_a_block_what_its_requests_used_stays_held(fleet: Fleet, tmp_path: Path) -> None:
    """Of those nobody but the spool knows: an event is entered before the block's money is freed."""
    tenant, block, request, folder = uuid4(), new_uuid(), new_uuid(), tmp_path / "victim"
    await fleet.replica("victim")
    await fleet.set_credit(tenant, 1000)
    await fleet.client.call("HSET", keyspace.outstanding(tenant), block.hex, 500)
    await add_outstanding(fleet.client, tenant, 500)
    await fleet.client.call("HSET", keyspace.owed("victim"), block.hex, tenant.hex)
    await spooled(folder, request, tenant)
    now = datetime.now(UTC) + timedelta(milliseconds=2)
    assert await register(fleet, folder, started=now).write_off() == 1
    assert await fleet.outstanding(tenant) == {request.hex: 1}  # 5 pico, as nano rounded up
    assert await fleet.credit_left(tenant) == 999
