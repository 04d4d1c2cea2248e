"""Periods, seals, statements, reconciliation and write-offs on a real Postgres and Valkey."""

import hashlib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text

from billing import adjustments, anchors, credit_figures, periods, reconcile, seals, verify
from billing.statements import statement
from core import keyspace
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.ids import new_uuid
from core.money import parse_pico
from core.settings import Database
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.billing_world import World, write
from tests.factories.credit_figures import add_outstanding, figure_of, set_figure
from tests.integration.billing.test_lots import day, opened, w6
from tests.integration.billing.test_verify import owner_of

OCTOBER = date(2025, 10, 1)
NOVEMBER_3 = datetime(2025, 11, 3, tzinfo=UTC)


async def find(sessions: Sessions, anchor: seals.SealHead | None = None) -> verify.Finding | None:
    async with transaction(sessions) as session:
        return await verify.verify(session, anchor)


async def digest(sessions: Sessions, month: date) -> bytes:
    async with transaction(sessions) as session:
        return periods.digest(await periods.trial_balance(session, month))


async def test_w11_a_late_event_is_booked_in_the_open_period(sessions: Sessions) -> None:
    """October is closed; an event admitted 31 October 23:59:58 for 0.75 arrives on 3 November."""
    tenant_id, s, posting = await opened(sessions, "10.00")
    at = datetime(2025, 10, 31, 23, 59, 58, tzinfo=UTC)
    await posting.post([credit.event_at(tenant_id, s, at, "1.00")])
    closed = await periods.close(sessions, OCTOBER, NOVEMBER_3)
    await posting.post([credit.event_at(tenant_id, s, at, "0.75"), credit.event_at(tenant_id, s, NOVEMBER_3, "0.25")])
    assert await digest(sessions, OCTOBER) == closed.trial_balance_sha256
    assert await digest(sessions, date(2025, 11, 1)) != closed.trial_balance_sha256
    async with transaction(sessions) as session:
        rows = await session.execute(
            text(
                "SELECT period, effective_at, amount FROM ledger_tx JOIN ledger_transfer ON tx_id = id"
                " WHERE kind = 'usage' ORDER BY period, effective_at"
            )
        )
        minute = datetime(2025, 10, 31, 23, 59, tzinfo=UTC)
        assert [(row.period, row.effective_at, int(row.amount)) for row in rows] == [
            (OCTOBER, minute, parse_pico("1.00")),
            (date(2025, 11, 1), minute, parse_pico("0.75")),
            (date(2025, 11, 1), NOVEMBER_3, parse_pico("0.25")),
        ]
    assert await find(sessions) is None


async def test_months_close_when_over_in_order_and_for_good(sessions: Sessions, database_settings: Database) -> None:
    tenant_id, s, posting = await opened(sessions, "10.00")
    with pytest.raises(PlatformError) as refused:
        await periods.close(sessions, OCTOBER, datetime(2025, 10, 31, 23, 59, 59, tzinfo=UTC))
    assert refused.value.code == "PERIOD_NOT_OVER"
    await posting.post([credit.event_at(tenant_id, s, datetime(2025, 10, 5, tzinfo=UTC), "1.00")])
    closed = await periods.close(sessions, OCTOBER, NOVEMBER_3)
    assert await periods.close(sessions, OCTOBER, NOVEMBER_3 + timedelta(days=1)) == closed
    with pytest.raises(PlatformError) as refused:
        await periods.close(sessions, date(2025, 12, 1), NOVEMBER_3 + timedelta(days=90))
    assert (refused.value.code, "2025-11" in refused.value.message) == ("PERIOD_ORDER", True)
    with owner_of(database_settings) as owner:
        owner.execute("UPDATE ledger_period SET trial_balance_sha256 = sha256('x')")
    wrong = await find(sessions)
    assert wrong is not None
    assert (wrong.table, wrong.row) == ("ledger_period", "2025-10")


ALTERED = (
    "UPDATE ledger_tx SET actor = 'x' WHERE id = '{tx}'",
    "UPDATE ledger_tx SET booked_at = booked_at + interval '1 microsecond' WHERE id = '{tx}'",
    "UPDATE ledger_transfer SET amount = amount + 1 WHERE tx_id = '{tx}'",
    "UPDATE ledger_transfer SET debit_account = credit_account, credit_account = debit_account WHERE tx_id = '{tx}'",
    "DELETE FROM ledger_transfer WHERE tx_id = '{tx}'",
    "DELETE FROM ledger_tx WHERE id = '{tx}'",
)


async def sealed(sessions: Sessions) -> tuple[list[UUID], seals.SealHead]:
    """Five top-ups in two seals."""
    tenant_id = await make.tenant(sessions, "1")
    for key, count in (("a", 3), ("b", 2)):
        for number in range(count - (key == "a")):
            await make.add_credit(sessions, tenant_id, "1", f"{key}{number}")
        async with transaction(sessions) as session:
            assert await seals.seal(session) >= count  # its accounts too
    async with transaction(sessions) as session:
        assert await seals.seal(session) == 0
        ids = list((await session.scalars(text("SELECT id FROM ledger_tx ORDER BY id"))).all())
        return ids, await seals.head(session)


async def test_any_altered_field_names_its_transaction(sessions: Sessions, database_settings: Database) -> None:
    """By a superuser with triggers off: edits, deletes; each taken back."""
    ids, newest = await sealed(sessions)
    assert await find(sessions, newest) is None
    with owner_of(database_settings) as owner:
        for table in ("ledger_tx", "ledger_transfer"):
            owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")
        for statement_ in ALTERED:
            for tx_id in (ids[1], ids[4]):
                assert owner.execute(statement_.format(tx=tx_id)).rowcount == 1
                wrong = await find(sessions, newest)
                assert wrong is not None
                assert (wrong.table, wrong.row) == ("ledger_seal", str(tx_id)), statement_
                for table in ("ledger_transfer", "ledger_tx"):
                    owner.execute(f"DELETE FROM {table}")
                    owner.execute(f"INSERT INTO {table} TABLE kept_{table}")
        assert await find(sessions, newest) is None


async def test_a_chain_made_anew_is_found_by_the_anchor(
    sessions: Sessions, database_settings: Database, tmp_path: Path
) -> None:
    _, newest = await sealed(sessions)
    assert anchors.save(tmp_path, newest)
    assert anchors.load(tmp_path) == newest
    with owner_of(database_settings) as owner:
        owner.execute("DELETE FROM ledger_leaf WHERE seal_seq = 2")
        owner.execute("DELETE FROM ledger_seal WHERE seq = 2")
        wrong = await find(sessions, newest)
        assert wrong is not None
        assert "anchored" in wrong.problem
        owner.execute(
            "UPDATE ledger_tx SET note = 'forged' WHERE id = (SELECT id FROM ledger_tx ORDER BY id DESC LIMIT 1)"
        )
    async with transaction(sessions) as session:
        await seals.seal(session)
    wrong = await find(sessions, newest)
    assert wrong is not None
    assert (wrong.table, wrong.row) == ("ledger_seal", "seal 2")


def test_the_tree_is_that_of_rfc_6962() -> None:
    def node(left: bytes, right: bytes) -> bytes:
        return hashlib.sha256(b"\x01" + left + right).digest()

    a, b, c = (seals.leaf_hash(name) for name in "abc")
    assert a.hex() == hashlib.sha256(b"\x00a").hexdigest()
    assert seals.merkle_root([a, b, c]) == node(node(a, b), c)
    assert seals.merkle_root([a, b, c, a, b]) == node(node(node(a, b), node(c, a)), b)


async def test_a_statement_adds_up_page_by_page(sessions: Sessions) -> None:
    tenant_id, s, posting = await opened(sessions, "20.00")
    async with transaction(sessions) as session:
        now = (await session.execute(text("SELECT clock_timestamp()"))).scalar_one()
    for _ in range(3):
        await posting.post([credit.event_at(tenant_id, s, datetime(2025, 11, 5, tzinfo=UTC), "3.20")])
    given = await credit.give(sessions, tenant_id, "8.000000000001", NOVEMBER_3)
    until = now + timedelta(hours=1)
    async with transaction(sessions) as session:
        whole = await statement(session, tenant_id, now - timedelta(days=2), until, offset=0, limit=50)
        first = await statement(session, tenant_id, now - timedelta(days=2), until, offset=0, limit=1)
        rest = await statement(session, tenant_id, now - timedelta(days=2), until, offset=1, limit=50)
        later = await statement(session, tenant_id, until, until + timedelta(days=1), offset=0, limit=50)
    assert (whole.opening_pico, whole.closing_pico) == (0, parse_pico("18.400000000001"))
    assert sorted((entry.kind, entry.transactions, entry.change_pico) for entry in whole.entries) == [
        ("grant", 1, parse_pico("8.000000000001")),
        ("top_up", 1, parse_pico("20.00")),
        ("usage", 3, -parse_pico("9.60")),
    ]
    assert given.transaction_id in {entry.transaction_id for entry in whole.entries}
    assert whole.entries[-1].balance_pico == whole.closing_pico == later.opening_pico == later.closing_pico
    assert (first.next_offset, whole.next_offset) == (1, None)
    assert [*first.entries, *rest.entries] == whole.entries


async def test_a_statement_of_lots_expiry_and_a_reversal_as_worked_by_hand(sessions: Sessions) -> None:
    """W6: paid 20.00, promo B 8.00, promo A 5.00 until the 10th; 3.20 and 6.00 used, the latter reversed."""
    tenant_id, s, posting = await w6(sessions)
    await posting.post([credit.event_at(tenant_id, s, day(5), "3.20")])
    assert await credit.expire(sessions, tenant_id, day(10, 1)) == parse_pico("1.80")
    await posting.post([credit.event_at(tenant_id, s, day(12), "6.00")])
    async with transaction(sessions) as session:
        used = (await session.scalars(text("SELECT id FROM ledger_tx WHERE kind = 'usage' ORDER BY booked_at"))).all()
        await adjustments.reverse(session, tenant_id, used[-1], credit.asked(day(13)))
    async with transaction(sessions) as session:
        now = (await session.execute(text("SELECT clock_timestamp()"))).scalar_one()
        found = await statement(session, tenant_id, now - timedelta(days=2), now, offset=0, limit=50)
    right = (
        ("top_up", 1, "20.00", "20.00"),
        ("grant", 1, "8.00", "28.00"),
        ("grant", 1, "5.00", "33.00"),
        ("expiry", 1, "-1.80", "31.20"),
        ("usage", 2, "-9.20", "22.00"),  # in one, where its last was booked: no balance is below what there was
        ("reversal", 1, "6.00", "28.00"),
    )
    assert [(one.kind, one.transactions, one.change_pico, one.balance_pico) for one in found.entries] == [
        (kind, count, parse_pico(change), parse_pico(after)) for kind, count, change, after in right
    ]
    assert (found.opening_pico, found.closing_pico) == (0, parse_pico("28.00"))
    assert sum(await credit.left(sessions, tenant_id)) == found.closing_pico


async def test_reconciliation_finds_one_pico_and_a_wrong_figure(world: World, database_settings: Database) -> None:
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s)])
    await world.poster.step()
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    assert await reconcile.books(world.sessions) == (1, [])
    assert await reconcile.figures(world.sessions, world.client) == (1, [])
    right = (await figure_of(world.client, tenant_id)).available
    await set_figure(world.client, tenant_id, available=right + 1)
    assert await reconcile.figures(world.sessions, world.client) == (1, [])
    await set_figure(world.client, tenant_id, available=right + 2)
    assert [one.tenant_id for one in (await reconcile.figures(world.sessions, world.client))[1]] == [tenant_id]
    for table in ("usage_event", "usage_rollup"):
        with owner_of(database_settings) as owner:
            owner.execute(f"UPDATE {table} SET amount_pico = amount_pico + 1")
            (wrong,) = (await reconcile.books(world.sessions))[1]
            assert "0.012258000001" in wrong.problem
            owner.execute(f"UPDATE {table} SET amount_pico = amount_pico - 1")


async def test_holds_of_a_lost_replica_are_written_off(world: World) -> None:
    tenant_id, _ = await world.tenant("1")
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    lost, other = new_uuid(), new_uuid()
    out = keyspace.outstanding(tenant_id)
    for request, nano in ((lost, 40), (other, 2)):
        await world.client.call("HSET", out, request.hex, nano)
        await add_outstanding(world.client, tenant_id, nano)
    await world.client.call("HSET", keyspace.owed("gone"), lost.hex, tenant_id.hex)
    assert await reconcile.write_off(world.client, "gone") == {tenant_id: [lost]}
    assert (await figure_of(world.client, tenant_id)).outstanding == 2
    assert await world.client.call("HKEYS", out) == [other.hex.encode()]
    assert await reconcile.write_off(world.client, "gone") == {}
