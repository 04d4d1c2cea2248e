"""What is on disks is known to the books, and a month is not closed over it."""

import socket
from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import text

from billing import orphans, periods, spools
from billing.spools import SpoolReport
from core.clock import ManualClock
from core.db import transaction
from core.errors import PlatformError
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.billing_world import World, write

OCTOBER = date(2025, 10, 1)
END = datetime(2025, 11, 1, tzinfo=UTC)
GRACE = timedelta(hours=48)


async def reported(world: World, now: datetime = END) -> list[SpoolReport]:
    await spools.report(world.sessions, world.spool_dir, now)
    async with transaction(world.sessions) as session:
        return await spools.all_of(session)


async def close(world: World, now: datetime, reason: str = "") -> periods.Period:
    return await periods.close(world.sessions, OCTOBER, now, grace=GRACE, override_reason=reason)


async def refusal(world: World, now: datetime) -> PlatformError:
    with pytest.raises(PlatformError) as refused:
        await close(world, now)
    return refused.value


async def test_a_spool_is_reported_with_what_is_not_posted(world: World) -> None:
    (one, s), (two, _) = await world.tenant("1"), await world.tenant("1")
    at = datetime(2025, 10, 31, 23, 50, tzinfo=UTC)
    events = [credit.event_at(one, s, at + timedelta(minutes=n), "0.01") for n in range(3)]
    await write(world.spool_dir / "r1", [*reversed(events), make.event(two, s)])
    (found,) = await reported(world)
    assert (found.host, found.name, found.live, found.events, found.tenants, found.oldest_at) == (
        socket.gethostname(), "r1", False, 4, 2, at,
    )  # fmt: skip
    assert found.unposted_bytes > 0
    while await world.poster.step():
        pass
    (found,) = await reported(world)
    assert (found.events, found.tenants, found.oldest_at) == (0, 0, None)


async def test_looking_is_bounded_and_passes_over_what_it_cannot_read(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    folder = world.spool_dir / "r1"
    await write(folder, [make.event(tenant_id, s) for _ in range(30)])
    assert orphans.contents(folder, 10).events == 10
    segment = next(folder.glob("seg-*"))
    segment.write_bytes(segment.read_bytes()[:-40])  # torn
    assert orphans.contents(folder).events == 29
    assert orphans.contents(world.spool_dir / "none") == orphans.Contents()


async def test_a_month_is_closed_after_the_grace_and_when_its_usage_is_posted(world: World) -> None:
    tenant_id, s = await world.tenant("10")
    assert (await refusal(world, END + GRACE - timedelta(seconds=1))).code == "PERIOD_NOT_OVER"
    await write(world.spool_dir / "r1", [credit.event_at(tenant_id, s, END - timedelta(seconds=2), "1")])
    await reported(world)
    refused = await refusal(world, END + GRACE)
    assert refused.code == "SPOOLS_NOT_EMPTY"
    assert f"r1 of {socket.gethostname()}: 1 events are not posted, the oldest of 2025-10-31 23:59" in refused.message
    while await world.poster.step():
        pass
    await reported(world)
    assert (await close(world, END + GRACE)).state == "closed"


async def test_usage_of_the_next_month_keeps_no_month_open(world: World) -> None:
    tenant_id, s = await world.tenant("10")
    await write(world.spool_dir / "r1", [credit.event_at(tenant_id, s, END, "1")])
    await reported(world)
    assert (await close(world, END + GRACE)).state == "closed"


async def test_a_month_is_closed_over_a_lost_disk_with_a_reason_only(world: World) -> None:
    tenant_id, s = await world.tenant("10")
    await write(world.spool_dir / "r1", [credit.event_at(tenant_id, s, END - timedelta(days=1), "1")])
    await reported(world)
    assert (await refusal(world, END + GRACE)).code == "SPOOLS_NOT_EMPTY"
    assert (await close(world, END + GRACE, "the disk is lost, see incident 7")).state == "closed"
    async with transaction(world.sessions) as session:
        kept = await session.scalars(text("SELECT override_reason FROM ledger_period"))
        assert kept.all() == ["the disk is lost, see incident 7"]


def test_what_keeps_a_month_open() -> None:
    quiet = SpoolReport("h", "r", "r", False, 0, 0, 0, None, END - timedelta(days=9))
    changed = msgspec.structs.replace
    assert spools.blocking([quiet], END) == []
    assert spools.blocking([changed(quiet, live=True)], END) == [
        "r of h: a gateway wrote to it, and nothing was heard of it since 2025-10-23 00:00 UTC"
    ]
    assert spools.blocking([changed(quiet, live=True, reported_at=END)], END) == []
    unreadable = changed(quiet, events=1)
    assert spools.blocking([unreadable], END) == ["r of h: 1 events are not posted"]
    copy = changed(quiet, host="other", name="adopted-r-0123456789ab", reported_at=END)
    assert spools.blocking([unreadable, copy], END) == []
    assert spools.blocking([unreadable, changed(copy, events=2)], END) == [
        "adopted-r-0123456789ab of other: 2 events are not posted"
    ]


async def test_the_poster_reports_each_minute(world: World) -> None:
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s)])
    await world.poster.housekeep()
    async with transaction(world.sessions) as session:
        (found,) = await spools.all_of(session)
    assert (found.name, found.events) == ("r1", 1)
    assert ManualClock(END).now() < found.reported_at
