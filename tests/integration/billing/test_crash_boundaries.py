"""P7: the poster is killed before each thing it does to Postgres, Valkey and the disk; replayed, the state is the same.

One database for all: each run has tenants and spools of its own, whose rows are compared under names instead of ids.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credit_figures, spool_format, verify
from billing.types import PriceSchedule, UsageEvent
from core import keyspace
from core.credit_figure import read_figure
from core.db import transaction
from core.settings import Database
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.billing_world import World, write
from tests.fault.real_platform import ROOT
from tests.integration.billing.test_tampering import MONEY, TABLES

NOW = datetime.now(UTC).replace(second=0, microsecond=0)
# What differs between two runs that are right: when something was written, under which key, on which partition.
APART = (
    *("booked_at", "posted_at", "quarantined_at", "created_at", "requested_at", "effective_at"),
    *("digest", "usage_sha256"),  # over these; `verify` computes them again
    *("idempotency_key", "body_sha256", "day", "payload", "since", "seq"),
)
READS = ("GET", "HMGET", "HSCAN", "SELECT", "select", "show", "Composed", ";")
UUIDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Crasher:
    """The program that forks posters."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.factories.crashing_poster"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, database: str, valkey: Path, spool: Path, fatal: int) -> tuple[int, list[str]]:
        """Return how a poster ended that dies at that point (0: never), and what it did."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"database": database, "valkey": str(valkey), "spool": str(spool), "fatal": fatal}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["passed"]


@pytest.fixture
def crasher() -> Iterator[Crasher]:
    made = Crasher()
    yield made
    assert made.process.stdin is not None
    assert made.process.stdout is not None
    made.process.stdin.close()
    made.process.wait(20)
    made.process.stdout.close()


@dataclass
class Case:
    """One run's tenants and events, and names for their ids."""

    world: World
    spool_dir: Path
    number: int
    tenants: list[UUID] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def event(self, tenant_id: UUID, s: PriceSchedule, at: datetime, **more: Any) -> UsageEvent:
        """One whose id has this run's number in it, and is named by its place."""
        place = len(self.names)
        event_id = make.uuid7_at(int(at.timestamp()), self.number * 1000 + place)
        self.names[str(event_id)] = f"event {place}"
        us = int(NOW.timestamp()) * 1_000_000
        made = make.event(tenant_id, s, event_id=event_id, **more)
        return msgspec.structs.replace(made, admitted_at_us=us, ended_at_us=us + 9)

    async def prepare(self) -> None:
        """Spools with repeated events, one posted already, more than the credit, two months, a day without partition.

        In Valkey every request is outstanding, some with their hold and some with their charge.
        """
        sessions, prices = self.world.sessions, self.world.prices
        prepaid, postpaid = await make.tenant(sessions, "0.05"), await make.tenant(sessions, limit="0.02")
        self.tenants = [prepaid, postpaid]
        self.names |= {str(prepaid): "prepaid", str(postpaid): "postpaid"}
        await credit.give(sessions, prepaid, "0.03", NOW, expires_at=NOW + timedelta(days=1))
        events = []
        for tenant_id in self.tenants:
            s = make.schedule(prices, tenant_id)
            events += [self.event(tenant_id, s, NOW) for _ in range(7)]
            late = self.event(tenant_id, s, NOW)
            us = int((NOW.replace(day=1) - timedelta(days=3)).timestamp()) * 1_000_000
            events.append(msgspec.structs.replace(late, admitted_at_us=us))
        s = make.schedule(prices, prepaid)
        events.append(self.event(prepaid, s, NOW, amount_pico=1))
        events.append(self.event(prepaid, s, datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=self.number)))
        await self.world.new_poster()._posting.post(events[:1])
        await write(self.spool_dir / "r1", [*events[:9], *events[:3]], segment_bytes=16 * 1024)
        await write(self.spool_dir / "r2", [*events[5:], events[0]], segment_bytes=16 * 1024)
        for tenant_id in self.tenants:
            await credit_figures.refresh(self.world.client, sessions, tenant_id)
        await credit_figures.register(self.world.client, events[:5])
        held = [msgspec.structs.replace(event, amount_pico=10**12) for event in events[5:]]
        await credit_figures.register(self.world.client, held)

    async def state(self) -> dict[str, Any]:
        """Every row of money that is of this run, its figures, and what is left to post."""
        found: dict[str, Any] = {}
        async with transaction(self.world.sessions) as session:
            await self._name(session)
            for (table,) in await session.execute(text(TABLES.replace("%s", ":money")), {"money": MONEY}):
                rows = await session.scalars(
                    text(f"SELECT (to_jsonb(t) - CAST(:apart AS text[]))::text FROM {table} t"), {"apart": list(APART)}
                )
                found[table] = sorted(self._named(row) for row in rows if self.names.keys() & set(UUIDS.findall(row)))
        for tenant_id in self.tenants:
            name, client = self.names[str(tenant_id)], self.world.client
            found[f"figure of {name}"] = await read_figure(client, tenant_id)
            found[f"outstanding of {name}"] = await client.call("HGETALL", keyspace.outstanding(tenant_id))
        for folder in spool_format.spool_folders(self.spool_dir):
            found[folder.name] = (spool_format.read_checkpoint(folder), spool_format.segment_numbers(folder))
        return found

    async def _name(self, session: AsyncSession) -> None:
        accounts = await session.execute(
            text("SELECT id, tenant_id, code FROM ledger_account WHERE tenant_id = ANY(:t) ORDER BY id"),
            {"t": self.tenants},
        )
        for account, tenant_id, code in accounts:
            self.names[str(account)] = f"{code} of {self.names[str(tenant_id)]}"
        transactions = await session.execute(
            text("SELECT id, tenant_id, kind, period FROM ledger_tx WHERE tenant_id = ANY(:t)"), {"t": self.tenants}
        )
        for tx, tenant_id, kind, period in transactions:
            self.names[str(tx)] = f"{kind} of {self.names[str(tenant_id)]} in {period}"
        adjustments = await session.scalars(
            text("SELECT id FROM credit_adjustment WHERE tenant_id = ANY(:t)"), {"t": self.tenants}
        )
        self.names |= {str(adjustment): "adjustment" for adjustment in adjustments}
        terms = await session.execute(
            text("SELECT id, tenant_id, number FROM credit_terms WHERE tenant_id = ANY(:t)"), {"t": self.tenants}
        )
        for terms_id, tenant_id, number in terms:
            self.names[str(terms_id)] = f"terms {number} of {self.names[str(tenant_id)]}"

    def _named(self, row: str) -> str:
        return UUIDS.sub(lambda found: self.names.get(found[0], found[0]), row)


@pytest.fixture
async def cases(world: World, tmp_path: Path) -> Iterator[Case]:
    await world.client.call("SET", keyspace.EPOCH, "e1")
    return (Case(world, tmp_path / f"spool{number}", number) for number in range(1000))


Run = Callable[[int], Awaitable[tuple[Case, int, list[str]]]]


@pytest.fixture
def run(cases: Iterator[Case], crasher: Crasher, database_settings: Database, valkey: Path) -> Run:
    """Return a function that lets a poster die at that point in a case of its own."""

    async def run(fatal: int) -> tuple[Case, int, list[str]]:
        case = next(cases)
        await case.prepare()
        url = database_settings.url.get_secret_value()
        return case, *(await asyncio.to_thread(crasher.run, url, valkey, case.spool_dir, fatal))

    return run


async def same_after_replay(run: Run, chosen: Callable[[list[str]], list[int]]) -> None:
    """Die at each chosen point, replay, compare with the run that did not die."""
    unharmed, status, points = await run(0)
    assert status == 0, points
    assert points.count("COMMIT") >= 4
    assert points.count("the checkpoint") == 2
    right = await unharmed.state()
    assert len(right["usage_event"]) == 17
    assert len(right["usage_quarantine"]) == 1
    for fatal in chosen(points):
        case, status, _ = await run(fatal)
        assert status == -signal.SIGKILL, points[fatal - 1]
        world = case.world
        await World(world.sessions, world.client, world.prices, case.spool_dir).post_all()
        assert await case.state() == right, f"killed before {points[fatal - 1]}"
    async with transaction(unharmed.world.sessions) as session:
        assert await verify.verify(session) is None


def around_writes(points: list[str]) -> list[int]:
    """Before and after each thing that changes something; between two reads the world is as it was."""
    writes = [not point.startswith(READS) or "ensure_" in point for point in points]
    return [n + 1 for n in range(len(points)) if writes[n] or (n and writes[n - 1])]


async def test_killed_around_each_write_and_replayed_is_the_same(run: Run) -> None:
    await same_after_replay(run, around_writes)


@pytest.mark.soak
async def test_killed_before_each_statement_and_replayed_is_the_same(run: Run) -> None:
    await same_after_replay(run, lambda points: list(range(1, len(points) + 1)))
