"""Spools of gateways that do not come back."""

import asyncio
import shutil
from pathlib import Path

import pytest

from billing import orphans
from billing.spool import SpoolWriter
from billing.spool_reader import SpoolReader
from core.clock import SystemClock
from core.errors import PlatformError
from core.money import parse_pico
from tests.factories import billing as make
from tests.factories.billing_world import World, write

COST = parse_pico("0.012258")


async def test_a_spool_of_another_host_is_adopted_and_posted_once(world: World, tmp_path: Path) -> None:
    tenant_id, s = await world.tenant("1")
    elsewhere = tmp_path / "volume" / "gateway-7"
    await write(elsewhere, [make.event(tenant_id, s) for _ in range(5)])
    first = orphans.adopt(world.spool_dir, elsewhere)
    assert (first.replica, first.live, first.segments) == ("gateway-7", False, 1)
    assert first.unposted_bytes > 0
    again = orphans.adopt(world.spool_dir, elsewhere)  # by mistake: a second copy
    assert [spool.name for spool in orphans.list_spools(world.spool_dir)] == sorted((first.name, again.name))
    while await world.poster.step():
        pass
    assert await world.available(tenant_id) == parse_pico("1") - 5 * COST
    await world.poster.housekeep()
    assert [(spool.unposted_bytes, spool.segments) for spool in orphans.list_spools(world.spool_dir)] == [(0, 0)] * 2


async def test_what_was_posted_to_a_lost_database_is_offered_on_request(world: World, tmp_path: Path) -> None:
    tenant_id, s = await world.tenant("1")
    elsewhere = tmp_path / "volume" / "gateway-7"
    await write(elsewhere, [make.event(tenant_id, s) for _ in range(5)])
    reader = SpoolReader(elsewhere)
    reader.read(5)
    reader.acknowledge()
    assert orphans.adopt(world.spool_dir, elsewhere).unposted_bytes == 0
    assert await world.poster.step() == 0
    for _ in range(2):
        assert orphans.adopt(world.spool_dir, elsewhere, posted_too=True).unposted_bytes > 0
        while await world.poster.step():
            pass
        assert await world.available(tenant_id) == parse_pico("1") - 5 * COST


async def test_what_cannot_be_adopted(world: World, tmp_path: Path) -> None:
    tenant_id, s = await world.tenant("1")
    here, live = world.spool_dir / "gateway-1", tmp_path / "volume" / "gateway-2"
    await write(here, [make.event(tenant_id, s)])
    writer = SpoolWriter(live, clock=SystemClock(), segment_bytes=4096)
    writer.start(asyncio.get_running_loop())
    for source, says in ((here, "already"), (live, "lives"), (tmp_path, "no spool segments")):
        with pytest.raises(PlatformError, match=says):
            orphans.adopt(world.spool_dir, source)
    writer.close()
    shutil.rmtree(live)
    assert [spool.name for spool in orphans.list_spools(world.spool_dir)] == ["gateway-1"]


async def test_a_folder_that_was_taken_away_stops_nothing(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s)])
    await world.poster.step()
    shutil.rmtree(world.spool_dir / "r1")
    await write(world.spool_dir / "r2", [make.event(tenant_id, s)])
    assert await world.poster.step() == 1
    assert await world.available(tenant_id) == parse_pico("1") - 2 * COST
