"""The application's role cannot change or delete what is posted: every table of money, by the database's catalog."""

import re
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import errors

from core.db import Sessions
from core.settings import Database
from tests.factories import whole_books
from tests.integration.billing.test_tampering import MONEY

REFUSED = (errors.InsufficientPrivilege, errors.RestrictViolation)
# Partitions too: each is a table that can be named.
TABLES = """
    SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace
    AND (relname ~ %s) ORDER BY 1
"""
COLUMNS = """
    SELECT attname FROM pg_attribute
    WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""
# Sums, which every posting moves and `verify` adds up again, and what a tenant's newest terms say, as `verify` sees.
SUMS = {
    "ledger_balance": {"debit", "credit", "credit_limit"},
    "billing_profile": {"version", "mode", "unbilled_account", "prepaid_since"},
    "usage_rollup": {"*"},
    "rerating_tenant": {"*"},
}
# Of tables in which something is prepared first: what is posted there.
POSTED = {
    "credit_adjustment": "state <> 'pending'",
    "price_version": "state = 'published'",
    "price_item": "version_id IN (SELECT id FROM price_version WHERE state = 'published')",
    "price_discount": "version_id IN (SELECT id FROM price_version WHERE state = 'published')",
    "ledger_period": "state = 'closed'",
}
DEFINERS = """
    SELECT p.oid::regprocedure::text, p.prosrc FROM pg_proc p
    WHERE p.pronamespace = 'public'::regnamespace AND p.prosecdef AND p.prokind = 'f'
    AND p.prorettype <> 'trigger'::regtype AND has_function_privilege(current_user, p.oid, 'EXECUTE')
"""

CHANGES_MONEY = re.compile(
    r"\b(UPDATE|DELETE\s+FROM|TRUNCATE(\s+TABLE)?|DROP\s+TABLE|MERGE\s+INTO)\s+(ONLY\s+)?(public\.)?"
    r"(ledger|credit|usage|price|billing)_",
    re.IGNORECASE,
)


@pytest.fixture
async def app(sessions: Sessions, database_settings: Database) -> AsyncIterator[psycopg.Connection]:
    """The application's own connection to books that have every kind of row."""
    await whole_books.write(sessions)
    with psycopg.connect(database_settings.url.get_secret_value(), autocommit=True) as connection:
        yield connection


def attempts(app: psycopg.Connection, table: str) -> list[str]:
    where = POSTED.get(table, "true")
    columns = [row[0] for row in app.execute(COLUMNS, [table])]
    sums = SUMS.get(table, set())
    changes = [
        f"UPDATE {table} SET {column} = {column} WHERE {where}"
        for column in columns
        if column not in sums and "*" not in sums
    ]
    return [*changes, f"DELETE FROM {table} WHERE {where}", f"TRUNCATE {table}", f"TRUNCATE {table} CASCADE"]


async def test_no_posted_row_is_changed_or_deleted(app: psycopg.Connection) -> None:
    tables = [row[0] for row in app.execute(TABLES, [MONEY])]
    assert {"usage_event", "usage_event_20251005", "ledger_leaf", "price_discount"} <= set(tables)
    done = []
    for table in tables:
        if not table.startswith("usage_event_"):  # of these it may not even read one by its name
            some = f"SELECT EXISTS (SELECT FROM {table} WHERE {POSTED.get(table, 'true')})"
            assert app.execute(some).fetchone() == (True,), table
        for statement in attempts(app, table):
            try:
                app.execute(statement)
            except REFUSED:
                continue
            done.append(statement)
    assert done == []


async def test_no_guard_is_lifted_and_nobody_else_is_become(app: psycopg.Connection) -> None:
    for statement in (
        "SET session_replication_role = replica",
        "SET ROLE tidegate_owner",
        "ALTER TABLE ledger_tx DISABLE TRIGGER ALL",
        "DROP TRIGGER ledger_tx_append_only ON ledger_tx",
        "ALTER TABLE ledger_balance DROP CONSTRAINT ledger_balance_limit_check",
        "CREATE TABLE public.ledger_other (id int)",
        "CREATE FUNCTION public.refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "DROP TABLE usage_event_20251005",
        "ALTER TABLE usage_event DETACH PARTITION usage_event_20251005",
        "ALTER ROLE tidegate_app SUPERUSER",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            app.execute(statement)


async def test_functions_that_run_as_the_owner_change_no_money(app: psycopg.Connection) -> None:
    found: dict[str, str] = dict(app.execute(DEFINERS).fetchall())
    assert "ensure_usage_partition(date)" in found
    assert [name for name, body in found.items() if CHANGES_MONEY.search(body)] == []
