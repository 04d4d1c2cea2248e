"""What is sealed next is what waits in `seal_queue`: nothing is left out, in whatever order it was committed."""

from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from billing import adjustments, seal_queries, seals, verify
from billing.credits import top_up
from billing.lots import Grant, LotSource
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.money import parse_pico
from core.settings import Database
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.integration.billing.test_verify import owner_of

NOW = SystemClock().now()
TRIGGERS = "SELECT tgargs, tgtype & 16 <> 0 FROM pg_trigger WHERE tgfoid = 'queue_record'::regproc"


async def seal_all(sessions: Sessions) -> set[UUID]:
    """Seal what waits; returns the transactions that are sealed."""
    async with transaction(sessions) as session:
        await seals.seal(session)
    async with transaction(sessions) as session:
        return set((await session.scalars(text("SELECT tx_id FROM ledger_leaf WHERE tx_id IS NOT NULL"))).all())


async def verified(sessions: Sessions) -> verify.Finding | None:
    async with transaction(sessions) as session:
        return await verify.verify(session)


async def test_a_lower_id_that_commits_later_is_sealed_later(sessions: Sessions) -> None:
    """Two transactions at once: the one whose id came first commits after the other one was sealed."""
    slow, quick = [await make.tenant(sessions) for _ in range(2)]
    grant = Grant(parse_pico("1"), LotSource.PROMO)
    await seal_all(sessions)
    async with transaction(sessions) as late:
        first = await adjustments.give(late, slow, grant, credit.asked(NOW))
        async with transaction(sessions) as session:
            second = await adjustments.give(session, quick, grant, credit.asked(NOW))
        assert first.transaction_id is not None
        assert second.transaction_id is not None
        assert first.transaction_id < second.transaction_id
        assert await seal_all(sessions) == {second.transaction_id}
        assert await verified(sessions) is None
    assert await verified(sessions) is None
    async with transaction(sessions) as session:
        assert await seal_queries.waiting(session) > 0
    assert await seal_all(sessions) == {first.transaction_id, second.transaction_id}
    async with transaction(sessions) as session:
        assert await seal_queries.waiting(session) == 0


async def test_what_is_rolled_back_does_not_wait(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions)
    await seal_all(sessions)
    async with sessions() as session:
        await top_up(session, tenant_id, parse_pico("1"), idempotency_key="a", actor="test")
        await session.rollback()
    async with transaction(sessions) as session:
        assert await seal_queries.waiting(session) == 0


async def test_each_record_is_queued_by_its_table(sessions: Sessions) -> None:
    """Also by a change of the row, where it does not stay as it is from its beginning."""
    async with transaction(sessions) as session:
        found = {bytes(row[0]): row[1] for row in await session.execute(text(TRIGGERS))}
    expected = {
        b"".join(one.encode() + b"\0" for one in (record, *(column for column, _ in rows.key))): rows.when != "true"
        for record, rows in seal_queries.RECORDS.items()
    }
    assert found == expected


async def test_nothing_leaves_the_queue_without_a_seal(sessions: Sessions, database_settings: Database) -> None:
    tenant_id = await make.tenant(sessions)
    await make.add_credit(sessions, tenant_id, "1", "a")
    with psycopg.connect(database_settings.url.get_secret_value(), autocommit=True) as application:
        for which in ("tx_id IS NOT NULL", "record = 'credit_lot'"):
            with pytest.raises(psycopg.errors.RestrictViolation, match="no seal covers"):
                application.execute(f"DELETE FROM seal_queue WHERE {which}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            application.execute("UPDATE seal_queue SET key = 'x' WHERE key IS NOT NULL")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            application.execute("INSERT INTO seal_queue (record, key) VALUES ('credit_lot', 'x')")
    assert await verified(sessions) is None


@pytest.mark.parametrize(
    ("table", "where", "row"),
    [
        ("ledger_tx", "tx_id IS NOT NULL", "SELECT id::text FROM ledger_tx"),
        ("credit_lot", "record = 'credit_lot'", "SELECT 'credit_lot ' || account_id FROM credit_lot"),
        ("price_version", "record = 'price_version'", "SELECT 'price_version ' || id FROM price_version"),
    ],
)
async def test_verify_finds_what_sealing_would_leave_out(
    sessions: Sessions, database_settings: Database, table: str, where: str, row: str
) -> None:
    """Taken out of the queue by somebody who may do anything, who then could alter it: the sealed rest stays right."""
    await make.publish_prices(sessions)
    tenant_id = await make.tenant(sessions)
    await make.add_credit(sessions, tenant_id, "1", "a")
    with owner_of(database_settings) as owner:
        expected = owner.execute(row).fetchone()
        assert owner.execute(f"DELETE FROM seal_queue WHERE {where}").rowcount == 1, table
    await seal_all(sessions)
    assert expected is not None
    found = await verified(sessions)
    assert found is not None
    assert (found.table, found.row) == ("seal_queue", expected[0])
