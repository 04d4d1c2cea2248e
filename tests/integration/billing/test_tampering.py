"""P19: whatever somebody who may do anything changes in the books, `ledger verify` finds, and names it.

What is tried is made of the database's own catalog, every column of every table of money, so that none is forgotten.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise

import msgspec
import psycopg
import pytest

from billing import seals, verify
from billing.seals import SealHead
from core.db import Sessions, transaction
from core.settings import Database
from tests.factories import whole_books
from tests.integration.billing.test_verify import owner_of

# No books: what the last day asked for twice (`usage_idempotency`) goes with time, and the application deletes it.
MONEY = "^(ledger|credit|usage(?!_idempotency)|price|rerating)_|^(billing_profile|rerating)$"
TABLES = """
    SELECT relname FROM pg_class
    WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace = 'public'::regnamespace AND relname ~ %s
    ORDER BY 1
"""
COLUMNS = """
    SELECT attname, format_type(atttypid, NULL), attnotnull FROM pg_attribute
    WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
LAST_KEY = """
    SELECT a.attname, format_type(a.atttypid, NULL) FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[i.indnkeyatts - 1]
    WHERE i.indrelid = %s::regclass AND i.indisprimary
"""
GUARDS = """
    SELECT c.conrelid::regclass::text, c.conname FROM pg_constraint c JOIN pg_class r ON r.oid = c.conrelid
    WHERE r.relname ~ %s AND c.contype IN ('c', 'f', 'u') AND c.coninhcount = 0 ORDER BY c.contype <> 'f'
"""
UNIQUE_INDEXES = """
    SELECT i.indexrelid::regclass::text FROM pg_index i JOIN pg_class r ON r.oid = i.indrelid
    WHERE i.indisunique AND NOT i.indisprimary AND NOT r.relispartition AND r.relname ~ %s
"""
# Rows that differ in one of these are of different kinds: one of each is tried.
KINDS = ("kind", "bounded", "credit_limit", "code", "source", "state", "outcome", "seq", "reverses_tx IS NULL")
NAMES = re.compile(r"[0-9a-f-]{36}|[0-9]+")
ANOTHER = {  # by type of the column: another value, of one that is set and of one that is not
    "uuid": ("gen_random_uuid()", "gen_random_uuid()"),
    "text": ("{0} || 'x'", "'x'"),
    "date": ("{0} + 1", "current_date"),
    "timestamp with time zone": ("{0} + interval '1 microsecond'", "now()"),
    "numeric": ("{0} + 1", "1"),
    "bigint": ("{0} + 1", "1"),
    "integer": ("{0} + 1", "1"),
    "smallint": ("{0} + 1", "1"),
    "boolean": ("NOT {0}", "true"),
    "bytea": ("set_byte({0}, 0, get_byte({0}, 0) # 1)", "sha256('x')"),
    "uuid[]": ("array_append({0}, gen_random_uuid())", "ARRAY[gen_random_uuid()]"),
    "text[]": ("array_append({0}, 'x')", "ARRAY['input']"),
    "jsonb": ("{0} || jsonb_build_object('x', 1)", "jsonb_build_object('x', 1)"),
    "bigint[]": ("array_append({0}, 1)", "ARRAY[4, 1, 0, 0, 0, 0, 0]::bigint[]"),
    "smallint[]": ("array_remove({0}, {0}[1])", "ARRAY[0]::smallint[]"),
}


# Nothing hangs on these, and nothing has them twice: when a seal was made, and the place in the queue of what is in
# quarantine.
UNJUDGED = {
    "ledger_seal": {"sealed_at"},
    "usage_quarantine": {"seq"},
}


class Change(msgspec.Struct, frozen=True):
    """A statement of somebody who may do anything, and the row it is about, or the two."""

    table: str
    statement: str
    row: str
    other: str = ""


def tables(owner: psycopg.Connection) -> list[str]:
    return [str(row[0]) for row in owner.execute(TABLES, [MONEY])]


def lift_guards(owner: psycopg.Connection) -> None:
    """Take away all that the tables refuse by themselves, but their primary keys; keep a copy of each."""
    for table, name in owner.execute(GUARDS, [MONEY]).fetchall():
        owner.execute(f'ALTER TABLE {table} DROP CONSTRAINT IF EXISTS "{name}" CASCADE')
    for (name,) in owner.execute(UNIQUE_INDEXES, [MONEY]).fetchall():
        owner.execute(f"DROP INDEX {name}")
    owner.execute("CREATE TABLE usage_event_other PARTITION OF usage_event DEFAULT")
    for table in tables(owner):
        owner.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")


def columns(owner: psycopg.Connection, table: str) -> list[tuple[str, str, bool]]:
    return owner.execute(COLUMNS, [table]).fetchall()


def rows(owner: psycopg.Connection, table: str) -> list[str]:
    """Two rows of each kind, as text; what is only drafted is no part of the books."""
    names = {name for name, *_ in columns(owner, table)}
    kinds = [kind for kind in KINDS if kind.split()[0] in names]
    grouped = f"GROUP BY {', '.join(kinds)}" if kinds else ""
    version = "version_id" if "version_id" in names and table != "usage_event" else "id"
    of_books = (
        f"WHERE {version} NOT IN (SELECT id FROM price_version WHERE state = 'draft')" if version in names else ""
    )
    found = owner.execute(f"SELECT min(k::text), max(k::text) FROM kept_{table} k {of_books} {grouped}").fetchall()
    some = sorted({str(row) for pair in found for row in pair if row is not None})
    assert some, f"the books that are tried have no row of {table}"
    return some


def edits(owner: psycopg.Connection, table: str) -> Iterator[Change]:
    """Every column in every one of these rows: another value, none, and one where there was none."""
    some = rows(owner, table)
    for column, kind, required in columns(owner, table):
        if column in UNJUDGED.get(table, ()):
            continue
        of_set, of_null = ANOTHER[kind]
        for row in some:
            for value, when in ((of_set.format(column), "IS NOT NULL"), (of_null, "IS NULL"), ("NULL", "IS NOT NULL")):
                if value != "NULL" or not required:
                    where = f"t::text = %s AND {column} {when}"
                    yield Change(table, f"UPDATE {table} t SET {column} = {value} WHERE {where}", row)


def deletions(owner: psycopg.Connection, table: str) -> Iterator[Change]:
    for row in rows(owner, table):
        yield Change(table, f"DELETE FROM {table} t WHERE t::text = %s", row)


def insertions(owner: psycopg.Connection, table: str) -> Iterator[Change]:
    """A copy of a row under another key. A price book more is not tried: without versions it prices nothing."""
    if table == "price_book":
        return
    names = [name for name, *_ in columns(owner, table)]
    key, kind = last_key(owner, table)
    another = {"uuid": "gen_random_uuid()", "text": "{0} || 'x'"}.get(
        kind, f"(SELECT max({key}) + 1 FROM kept_{table})"
    )
    values = ", ".join(another.format(f"k.{name}") if name == key else f"k.{name}" for name in names)
    for row in rows(owner, table):
        made = f"INSERT INTO {table} AS t SELECT {values} FROM kept_{table} k WHERE k::text = %s"
        yield Change(table, made, row)


def exchanges(owner: psycopg.Connection, table: str) -> Iterator[Change]:
    """Two rows under each other's key."""
    key, _ = last_key(owner, table)
    some = rows(owner, table)
    for row, other in pairwise(some):
        keys = f"SELECT count(DISTINCT {key}) FROM kept_{table} k WHERE k::text IN (%s, %s)"
        if owner.execute(keys, [row, other]).fetchone() != (2,):
            continue
        swapped = f"to_jsonb(g) || jsonb_build_object('{key}', o.{key})"
        yield Change(
            table,
            f"WITH gone AS MATERIALIZED (DELETE FROM {table} t WHERE t::text IN (%s, $${other}$$) RETURNING t.*)"
            f" INSERT INTO {table} AS t SELECT (jsonb_populate_record(NULL::{table}, {swapped})).*"
            f" FROM gone g JOIN gone o ON g.{key} <> o.{key} ORDER BY 1",
            row,
            other,
        )


def last_key(owner: psycopg.Connection, table: str) -> tuple[str, str]:
    """The last column of the table's primary key, or of the table, and its type."""
    found = owner.execute(LAST_KEY, [table]).fetchone()
    return (found[0], found[1]) if found else columns(owner, table)[-1][:2]


async def unfound(
    owner: psycopg.Connection, sessions: Sessions, anchor: SealHead, changes: Iterator[Change]
) -> list[str]:
    """Do each change, verify, take it back; return those that were not found, or not named by anything of their row."""
    missed = []
    for change in changes:
        try:
            changed = owner.execute(f"{change.statement} RETURNING t::text", [change.row]).fetchone()
        except psycopg.errors.UniqueViolation:
            continue  # the table's primary key has found it
        if changed is None:
            continue  # nothing to change there
        async with transaction(sessions) as session:
            finding = await verify.verify(session, anchor)
        owner.execute(f"DELETE FROM {change.table}")
        owner.execute(f"INSERT INTO {change.table} TABLE kept_{change.table}")
        about = change.row + change.other + changed[0]
        if finding is None or not any(name in about for name in NAMES.findall(finding.row)):
            missed.append(f"{change.statement} ({change.row}): {finding}")
    return missed


@pytest.fixture
async def books(sessions: Sessions, database_settings: Database) -> AsyncIterator[tuple[psycopg.Connection, SealHead]]:
    """The owner's connection to whole books without guards, and their newest seal."""
    await whole_books.write(sessions)
    async with transaction(sessions) as session:
        anchor = await seals.head(session)
    async with transaction(sessions) as session:
        assert await verify.verify(session, anchor) is None
    with owner_of(database_settings) as owner:
        lift_guards(owner)
        yield owner, anchor


def every(owner: psycopg.Connection, changes: Callable[[psycopg.Connection, str], Iterator[Change]]) -> list[Change]:
    return [change for table in tables(owner) for change in changes(owner, table)]


def one_of_each(changes: list[Change]) -> list[Change]:
    """For each statement one row, another one each time."""
    by_statement: dict[str, list[Change]] = {}
    for change in changes:
        by_statement.setdefault(change.statement, []).append(change)
    return [some[n % len(some)] for n, some in enumerate(by_statement.values())]


async def test_an_edit_of_any_column_is_found_and_named(
    books: tuple[psycopg.Connection, SealHead], sessions: Sessions
) -> None:
    owner, anchor = books
    changes = one_of_each(every(owner, edits))
    assert len(changes) > 200
    assert await unfound(owner, sessions, anchor, iter(changes)) == []


async def test_a_deletion_of_any_row_is_found_and_named(
    books: tuple[psycopg.Connection, SealHead], sessions: Sessions
) -> None:
    owner, anchor = books
    assert await unfound(owner, sessions, anchor, iter(every(owner, deletions))) == []


async def test_a_row_more_is_found_and_named(books: tuple[psycopg.Connection, SealHead], sessions: Sessions) -> None:
    owner, anchor = books
    assert await unfound(owner, sessions, anchor, iter(every(owner, insertions))) == []


async def test_rows_that_changed_places_are_found_and_named(
    books: tuple[psycopg.Connection, SealHead], sessions: Sessions
) -> None:
    owner, anchor = books
    assert await unfound(owner, sessions, anchor, iter(every(owner, exchanges))) == []


@pytest.mark.soak
async def test_an_edit_of_any_column_in_any_kind_of_row_is_found_and_named(
    books: tuple[psycopg.Connection, SealHead], sessions: Sessions
) -> None:
    owner, anchor = books
    assert await unfound(owner, sessions, anchor, iter(every(owner, edits))) == []
