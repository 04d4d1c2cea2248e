"""What a backup asks the database: one instant held for a dump, and figures that a restored one must have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import IsolationLevel, sql

from cli.backup.archive import Figures, TableFacts

Connection = psycopg.Connection[tuple[Any, ...]]
# How values are written, so that checksums agree wherever they are computed.
_WRITING = ("TimeZone = 'UTC'", "DateStyle = 'ISO, YMD'", "IntervalStyle = 'iso_8601'", "bytea_output = 'hex'")


@contextmanager
def frozen(owner_url: str) -> Iterator[Connection]:
    """Yield a connection that sees one instant of the database for as long as it is open."""
    with psycopg.connect(owner_url) as connection:
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        connection.execute("SET LOCAL statement_timeout = 0")
        for setting in _WRITING:
            connection.execute(sql.SQL("SET LOCAL {}").format(sql.SQL(setting)))
        yield connection


def snapshot(connection: Connection) -> str:
    """Return the name by which another session sees the same instant."""
    return str(_one(connection, "SELECT pg_export_snapshot()"))


def instant(connection: Connection) -> str:
    return str(_one(connection, 'SELECT to_char(now(), \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\')'))


def revision(connection: Connection) -> str:
    """Return the revision of the schema."""
    return str(_one(connection, "SELECT string_agg(version_num, '+') FROM alembic_version"))


def _one(connection: Connection, statement: str) -> Any:
    row = connection.execute(statement).fetchone()
    return None if row is None else row[0]


def tables(connection: Connection) -> list[str]:
    """Return every table of ours; a partitioned one counts as one."""
    rows = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        " AND NOT relispartition ORDER BY relname"
    )
    return [row[0] for row in rows]


def facts(connection: Connection, table: str) -> TableFacts:
    """Count the table's rows, add up its columns of whole numbers, and sum a hash of each row."""
    columns = [
        row[0]
        for row in connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
            " AND atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype) ORDER BY attname",
            [f"public.{table}"],
        )
    ]
    sums = [sql.SQL("coalesce(sum(t.{}::numeric), 0)::text").format(sql.Identifier(name)) for name in columns]
    checksum = sql.SQL("coalesce(sum(('x' || left(md5(t::text), 15))::bit(60)::bigint::numeric), 0)::text")
    figures = sql.SQL(", ").join([sql.SQL("count(*)"), checksum, *sums])
    statement = sql.SQL("SELECT {} FROM {} t").format(figures, sql.Identifier("public", table))
    row = connection.execute(statement).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has one row
    return TableFacts(row[0], dict(zip(columns, row[2:], strict=True)), row[1])


def balances(connection: Connection) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sums of all accounts' debits and credits, by currency."""
    rows = connection.execute(
        "SELECT a.currency, sum(b.debit)::text, sum(b.credit)::text FROM ledger_balance b"
        " JOIN ledger_account a ON a.id = b.account_id GROUP BY a.currency ORDER BY a.currency"
    ).fetchall()
    return {row[0]: row[1] for row in rows}, {row[0]: row[2] for row in rows}


def figures(connection: Connection) -> Figures:
    """Return the figures of the whole database."""
    debit, credit = balances(connection)
    return Figures(debit, credit, {table: facts(connection, table) for table in tables(connection)})
