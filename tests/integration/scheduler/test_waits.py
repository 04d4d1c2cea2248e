"""What a grant, or a refusal, says of a wait: on real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.errors import PlatformError
from core.tiers import Tier
from core.waits import Full, Wait
from scheduler.types import Entitlement
from tests.factories.scheduler import Fleet, ask, served_model, until_waiting

P, S = Tier.PRIORITY, Tier.STANDARD


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    await fleet.client.call("FLUSHALL")
    yield fleet
    await fleet.close()


async def test_a_grant_says_what_was_full_and_who_went_before(fleet: Fleet) -> None:
    """Ten places: standard may fill nine. One of standard waits; two of priority that come later go first."""
    replica, model, used = await fleet.replica(), served_model(inflight_max=10), (10, 10)
    held = [await ask(replica, model, used=used, tier=P) for _ in range(9)]
    assert [one.wait for one in held] == [None] * 9
    waiting = asyncio.create_task(ask(replica, model, used=used, tier=S, wait_s=30))
    await until_waiting(replica, 1)
    passing = await ask(replica, model, used=used, tier=P)  # there is room for its tier, and nobody of it waits
    later = asyncio.create_task(ask(replica, model, used=used, tier=P, wait_s=30))
    await until_waiting(replica, 2)
    replica.release(held[0], 0)
    assert (await later).wait == Wait(Full.MODEL_PLACES, 10, 0, 0)
    for one in (passing, held[1]):
        replica.release(one, 0)
    granted = await waiting
    assert granted.wait == Wait(Full.MODEL_PLACES, 9, 0, 0, 0, 0, 2)


async def test_the_cap_of_all_is_told_from_the_models(fleet: Fleet) -> None:
    replica = await fleet.replica(global_inflight_max=2)
    one, other = served_model(), served_model()
    held = [await ask(replica, one), await ask(replica, one)]
    task = asyncio.create_task(ask(replica, other, wait_s=30))
    await until_waiting(replica, 1)
    replica.release(held[0], 0)
    assert (await task).wait == Wait(Full.PLATFORM_PLACES, 2, 0, 0)


async def test_who_is_at_its_capability_is_told_so(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model(inflight_max=10)
    tenant = "a" * 32
    prepared = replica.prepare((), model, "", owner=tenant, entitlements=(Entitlement(tenant, capability=1),))
    first = await ask(replica, model, prepared=prepared)
    task = asyncio.create_task(ask(replica, model, prepared=prepared, wait_s=30))
    await until_waiting(replica, 1)
    replica.release(first, 0)
    assert (await task).wait == Wait(Full.CAPABILITY, 1, 0, 0)


async def test_a_refusal_says_what_was_full_and_how_many_waited(fleet: Fleet) -> None:
    replica, model = await fleet.replica(), served_model(inflight_max=1, waiting_max=1)
    await ask(replica, model)
    task = asyncio.create_task(ask(replica, model, wait_s=0.05))
    await until_waiting(replica, 1)
    with pytest.raises(PlatformError) as at_the_door:
        await ask(replica, model, wait_s=30)
    assert at_the_door.value.fields == {"reason": "queue", "waits_for": "model_places", "limit": 1, "ahead": 1}
    with pytest.raises(PlatformError) as waited:
        await task
    assert waited.value.fields == {"reason": "deadline", "waits_for": "model_places", "limit": 1, "ahead": 0}
