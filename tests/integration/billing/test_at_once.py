"""All that happens to money from many tasks at once while connections are cut: each thing once, and right books."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from billing import adjustments, lots, periods, reconcile, seals, verify
from billing.credits import top_up
from billing.lots import Grant, LotSource
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.types import UsageEvent
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.errors import PlatformError
from tests.conftest import PostgresService
from tests.factories import billing as make
from tests.factories import lots as credit

NOW = datetime(2025, 11, 5, 12, tzinfo=UTC)
TRIES_MAX = 100
CUTS = 30
UNIT = 10**9  # pico


class Tenant:
    """What was asked for, once each however often it was tried."""

    def __init__(self, tenant_id: UUID, events: list[UsageEvent]) -> None:
        self.id = tenant_id
        self.events = events
        self.paid = self.given = 0
        self.reversed = 0


async def persistently(work: Callable[[], Awaitable[object]]) -> None:
    """Try again whenever the database is lost, as callers do: with the same key."""
    for _ in range(TRIES_MAX):
        try:
            await work()
        except (DBAPIError, psycopg.Error, OSError):
            await asyncio.sleep(0)
        else:
            return
    raise TimeoutError("the database did not come back")


async def pay(sessions: Sessions, tenant: Tenant, key: str, amount: int) -> None:
    async def work() -> None:
        async with transaction(sessions) as session:
            await top_up(session, tenant.id, amount, idempotency_key=key, actor="test")

    await asyncio.gather(persistently(work), persistently(work))  # the same call twice
    tenant.paid += amount


async def give_and_reverse(sessions: Sessions, tenant: Tenant, key: str, amount: int) -> None:
    """Promo, taken back at once; where usage was quicker, it stays."""
    grant = Grant(amount, LotSource.PROMO)
    found: list[UUID] = []

    async def give() -> None:
        async with transaction(sessions) as session:
            done = await adjustments.give(session, tenant.id, grant, credit.asked(NOW, f"give {key}"))
        assert done.transaction_id is not None
        found.append(done.transaction_id)

    async def reverse() -> None:
        try:
            async with transaction(sessions) as session:
                await adjustments.reverse(session, tenant.id, found[0], credit.asked(NOW, f"reverse {key}"))
        except PlatformError as error:
            assert error.code == "CREDIT_SPENT"  # noqa: PT017 - one of two right endings
            return
        tenant.reversed += amount

    await persistently(give)
    assert len(set(found)) == 1
    tenant.given += amount
    await persistently(reverse)


async def post(sessions: Sessions, chance: random.Random, events: list[UsageEvent]) -> None:
    """A poster of its own gets all events, in an order and in batches of its own."""
    posting = Posting(sessions, ManualClock(NOW), poster_metrics(CollectorRegistry()))
    mine = chance.sample(events, len(events))
    while mine:
        batch, mine = mine[:9], mine[9:]
        await persistently(lambda batch=batch: posting.post(batch))  # type: ignore[misc]


async def keep_books(sessions: Sessions, tenants: list[Tenant]) -> None:
    """Expiry, seals and the close of a month, beside all else."""

    async def seal() -> None:
        async with transaction(sessions) as session:
            await seals.seal(session)

    async def expire() -> None:
        for tenant in tenants:
            async with transaction(sessions) as session:
                await lots.expire(session, tenant.id, NOW)

    for _ in range(4):
        await persistently(expire)
        await persistently(seal)
    await persistently(lambda: periods.close(sessions, date(2025, 10, 1), NOW))


async def cut_connections(postgres: PostgresService, database: str, chance: random.Random, stop: asyncio.Event) -> int:
    """End some of the application's connections, again and again, in whatever they do."""
    cut = 0
    async with await psycopg.AsyncConnection.connect(postgres.url("owner", "postgres"), autocommit=True) as owner:
        while not stop.is_set() and cut < CUTS:
            rows = await owner.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = %s AND usename = 'tidegate_app' AND state <> 'idle'",
                [database],
            )
            pids = [row[0] for row in await rows.fetchall()]
            if pids and chance.random() < 0.2:
                await owner.execute("SELECT pg_terminate_backend(%s)", [chance.choice(pids)])
                cut += 1
            await asyncio.sleep(0)
    return cut


@pytest.fixture
async def tenants(sessions: Sessions) -> list[Tenant]:
    """Three, whose usage spans a month's end and is more than their credit now and then."""
    prices = await make.publish_prices(sessions)
    made = []
    for n in range(3):
        tenant_id = await (make.tenant(sessions) if n else make.tenant(sessions, limit="0.05"))
        await credit.give(sessions, tenant_id, "0.02", NOW - timedelta(days=9), expires_at=NOW - timedelta(hours=1))
        s = make.schedule(prices, tenant_id)
        instants = [NOW - timedelta(hours=7 * k) for k in range(36)]
        made.append(Tenant(tenant_id, [credit.event_at(tenant_id, s, at, "0.004") for at in instants]))
    return made


@pytest.mark.parametrize("number", range(2))
async def test_everything_at_once_with_connections_cut(
    number: int, sessions: Sessions, tenants: list[Tenant], postgres: PostgresService, database: str
) -> None:
    chance = random.Random(number)
    events = [event for tenant in tenants for event in tenant.events]
    stop = asyncio.Event()
    cutting = asyncio.create_task(cut_connections(postgres, database, random.Random(number), stop))
    work: list[Coroutine[Any, Any, None]] = [keep_books(sessions, tenants)]
    for tenant in tenants:
        work += [give_and_reverse(sessions, tenant, f"g{n}", chance.randint(1, 30) * UNIT) for n in range(3)]
        if tenant is not tenants[0]:
            work += [pay(sessions, tenant, f"p{n}", chance.randint(1, 30) * UNIT) for n in range(3)]
    work += [post(sessions, random.Random(number + n), events) for n in range(3)]
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    finally:
        stop.set()
    assert await cutting > 5
    await settled(sessions, tenants)


async def settled(sessions: Sessions, tenants: list[Tenant]) -> None:
    """Each thing was done once: every amount stands where it must, whatever the order was."""
    async with transaction(sessions) as session:
        assert await verify.verify(session) is None
        rows = await session.execute(
            text(
                "SELECT a.tenant_id, a.code, sum(b.debit) AS debit, sum(b.credit) AS credit FROM ledger_account a"
                " JOIN ledger_balance b ON b.account_id = a.id WHERE a.tenant_id IS NOT NULL GROUP BY 1, 2"
            )
        )
        sums = {(row.tenant_id, row.code): (int(row.debit), int(row.credit)) for row in rows}
        counts = await session.execute(text("SELECT tenant_id, sum(requests) FROM usage_rollup GROUP BY 1"))
        assert {row[0]: row[1] for row in counts} == {tenant.id: len(tenant.events) for tenant in tenants}
    for tenant in tenants:
        used = sum(event.amount_pico for event in tenant.events)
        assert sums[tenant.id, "revenue.usage"] == (0, used)
        assert sums.get((tenant.id, "liability.credit_paid"), (0, 0))[1] == tenant.paid
        promo = sums[tenant.id, "liability.credit_promo"]
        assert promo[1] == tenant.given + 20 * UNIT
        unearned, spent = sums[tenant.id, "contra.promo_unearned"], sums[tenant.id, "contra.promo_used"][0]
        assert unearned[0] - unearned[1] == promo[1] - promo[0]
        expired = promo[0] - tenant.reversed - spent
        assert 0 <= expired <= 20 * UNIT
    assert (await reconcile.books(sessions))[1] == []
