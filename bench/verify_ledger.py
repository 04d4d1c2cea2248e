"""How long `tidegate ledger seal` and `verify` take on a large book, and how much memory: real Postgres, fsync on.

`python -m bench.verify_ledger [--events 10000000] [--tenants 500] [--batch 25] [--days 3]` makes a book of that many
usage events, `batch` of one tenant to a transaction, with the tables, triggers, digests and sums that posting has, over
two connections; seals it; seals again what came since, one top-up; verifies it; prints JSON, progress on standard
error. Memory is the largest seen: this process, and all of Postgres without what it shares.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from sqlalchemy import text

from bench.spool_drain import services
from billing import posting_queries, seals, verify
from billing.posting_queries import DIGEST, EVENT_COLUMNS, TX_DIGEST
from core import db
from core.db import Sessions, transaction
from core.settings import Database
from tests.factories import billing as make

EVENTS_PER_STEP = 500_000
WRITERS = 2
LOADING = {"max_wal_size": "16GB"}  # at the default, pages are written whole again after each of many checkpoints
SAMPLE_S = 0.2
MIB = 1024 * 1024

PREPARE = (
    """
    CREATE TABLE fill_tenant AS
    SELECT row_number() OVER (ORDER BY p.tenant_id) - 1 AS place, p.tenant_id, p.revenue_account, l.account_id
    FROM billing_profile p JOIN credit_lot l USING (tenant_id)
    """,
    """
    CREATE TABLE fill_price AS
    SELECT version_id, min(model_id::text)::uuid AS model_id FROM price_item GROUP BY version_id
    """,
    # A UUIDv7 of that instant; its random part from the number.
    """
    CREATE FUNCTION fill_id(at timestamptz, n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
        SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3)
                || '8' || substr(md5(n::text), 4, 15))::uuid
    $$
    """,
)
# Event n belongs to batch n / 5000; a batch has 5000 / %(batch)s transactions of as many tenants.
# Types are the table's, since a digest is over bytes.
FILL = f"""
    INSERT INTO usage_event ({EVENT_COLUMNS}, posted_at, digest)
    SELECT *, {DIGEST} FROM (
    SELECT fill_id(at, n), t.tenant_id, (at AT TIME ZONE 'UTC')::date,
           fill_id(at - (n %% 5000) * %(gap)s::interval - interval '1 second',
                   (100000000000 + tx) * 100 + extract(day FROM at)::bigint),
           t.tenant_id, t.tenant_id, p.model_id, p.model_id, p.model_id, p.version_id, 'demo'::text, 'chat'::text,
           1::smallint, 'USD'::text, CASE WHEN n %% 50 = 0 THEN 'timeout' ELSE 'completed' END, 'engine'::text,
           n %% 2 = 0, 200::smallint, 100 + n %% 50, n %% 7, 0::bigint, 50 + n %% 13, n %% 3,
           CASE WHEN n %% 50 = 0 THEN 0
                ELSE (100 + n %% 50) * 2000000 + n %% 7 * 200000 + (50 + n %% 13 + n %% 3) * 6000000 END,
           0::bigint, at, at + interval '900 ms', 100::bigint, 20000::bigint, 'up-' || n, NULL::smallint, NULL::bigint,
           NULL::bigint, NULL::bigint[], statement_timestamp()
    FROM (SELECT n, %(start)s::timestamptz + n * %(gap)s::interval AS at,
                 n / 5000 * %(per_batch)s + n %% %(per_batch)s AS tx
          FROM generate_series(%(first)s::bigint, %(last)s::bigint) n) s
    JOIN fill_tenant t ON t.place = tx %% %(tenants)s CROSS JOIN fill_price p
    ORDER BY n) i ({EVENT_COLUMNS}, posted_at)
"""  # noqa: S608 - built of constants
KEEP_BOOKS = (
    f"""
    CREATE TABLE fill_tx AS
    SELECT tx_id, tenant_id, date_trunc('minute', min(admitted_at), 'UTC') AS began, sum(amount_pico) AS amount,
           {TX_DIGEST} AS usage_sha256
    FROM usage_event GROUP BY tx_id, tenant_id
    """,  # noqa: S608 - built of constants
    """
    INSERT INTO ledger_tx (id, tenant_id, kind, effective_at, usage_sha256)
    SELECT tx_id, tenant_id, 'usage', began, usage_sha256 FROM fill_tx
    """,
    """
    INSERT INTO ledger_transfer (tx_id, seq, debit_account, credit_account, currency, amount)
    SELECT x.tx_id, 0, t.account_id, t.revenue_account, 'USD', x.amount
    FROM fill_tx x JOIN fill_tenant t USING (tenant_id) WHERE x.amount > 0
    """,
    """
    UPDATE ledger_balance b SET debit = b.debit + s.debit, credit = b.credit + s.credit
    FROM (SELECT account, sum(debit) AS debit, sum(credit) AS credit
          FROM (SELECT debit_account AS account, amount AS debit, 0 AS credit FROM ledger_transfer t
                JOIN ledger_tx x ON x.id = t.tx_id AND x.kind = 'usage'
                UNION ALL
                SELECT credit_account, 0, amount FROM ledger_transfer t
                JOIN ledger_tx x ON x.id = t.tx_id AND x.kind = 'usage') m GROUP BY account) s
    WHERE b.account_id = s.account
    """,
    "UPDATE billing_profile p SET version = 1 + (SELECT count(*) FROM ledger_tx x WHERE x.tenant_id = p.tenant_id)",
    "DROP TABLE fill_tx",
)


class Memory:
    """The most that a tree of processes held at one time, without what it shares."""

    def __init__(self, root: psutil.Process) -> None:
        self.peak = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            held = 0
            for process in (self._root, *self._root.children(recursive=True)):
                try:
                    memory = process.memory_info()
                except psutil.Error:
                    continue
                held += memory.rss - memory.shared
            self.peak = max(self.peak, held)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


async def open_tenants(sessions: Sessions, count: int) -> None:
    await make.publish_prices(sessions)
    for _ in range(count):
        await make.tenant(sessions, "1000000")


def fill(owner: psycopg.Connection, url: str, options: argparse.Namespace) -> None:
    """Make the events and all that the books say of them, as the owner: no trigger of the ledger is off."""
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=options.days)
    for day in range(options.days + 1):
        owner.execute("SELECT ensure_usage_partition(%s)", [(start + timedelta(days=day)).date()])
    for statement in PREPARE:
        owner.execute(statement)
    owner.execute("ANALYZE fill_tenant")
    values: dict[str, Any] = {
        "start": start,
        "gap": timedelta(days=options.days) / options.events,
        "per_batch": 5000 // options.batch,
        "tenants": options.tenants,
    }

    def make_step(first: int) -> None:
        last = min(first + EVENTS_PER_STEP, options.events) - 1
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET TimeZone = 'UTC'; SET work_mem = '256MB'")
            connection.execute(FILL, {**values, "first": first, "last": last})
        say(f"events up to {last + 1:,} made")

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(make_step, range(0, options.events, EVENTS_PER_STEP)))
    owner.execute("SET work_mem = '256MB'")
    owner.execute(posting_queries.ROLL_UP.format(source="usage_event"))
    say("rolled up")
    for statement in KEEP_BOOKS:
        owner.execute(statement)
    say("the books are kept")
    owner.execute("VACUUM ANALYZE")
    owner.execute("CHECKPOINT")


def postgres_cpu_s(postmaster: psutil.Process) -> float:
    """CPU seconds of all processes of Postgres there are or were: what to compare where other work goes on."""
    own = postmaster.cpu_times()
    children = [child.cpu_times() for child in postmaster.children()]
    ended = own.children_user + own.children_system
    return float(ended + sum(times.user + times.system for times in (own, *children)))


@contextmanager
def timed(figures: dict[str, Any], name: str, postmaster: psutil.Process) -> Iterator[None]:
    began, cpu_s = time.perf_counter(), postgres_cpu_s(postmaster)
    with Memory(postmaster) as memory:
        yield
    figures[f"{name}_postgres_cpu_s"] = round(postgres_cpu_s(postmaster) - cpu_s, 1)
    figures[f"{name}_s"] = round(time.perf_counter() - began, 1)
    figures[f"{name}_postgres_mib"] = round(memory.peak / MIB)
    figures[f"{name}_python_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    say(f"{name}: {figures[f'{name}_s']} s")


async def with_sessions(database: Database, work: Callable[[Sessions], Awaitable[Any]]) -> Any:
    engine = db.create_engine(database)
    try:
        return await work(db.create_sessions(engine))
    finally:
        await engine.dispose()


async def seal_all(sessions: Sessions) -> int:
    total = 0
    while True:
        async with transaction(sessions) as session:
            count = await seals.seal(session)
        total += count
        if not count:
            return total


def run(database: Database, options: argparse.Namespace) -> dict[str, Any]:
    if database.owner_url is None:
        raise ValueError("the bench needs the owner's role")
    figures: dict[str, Any] = {"events": options.events}
    asyncio.run(with_sessions(database, lambda sessions: open_tenants(sessions, options.tenants)))
    url = database.owner_url.get_secret_value()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("SET TimeZone = 'UTC'")
        backend = psutil.Process(owner.info.backend_pid).parent()
        with timed(figures, "load", backend):
            fill(owner, url, options)
        for table in ("usage_rollup", "ledger_tx"):
            figures[table] = owner.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # type: ignore[index]  # noqa: S608
    with timed(figures, "seal", backend):
        figures["sealed"] = asyncio.run(with_sessions(database, seal_all))
    asyncio.run(with_sessions(database, top_up_one))
    with timed(figures, "seal_one", backend):
        figures["sealed_since"] = asyncio.run(with_sessions(database, seal_all))
    with timed(figures, "verify", backend):
        figures["finding"] = str(asyncio.run(with_sessions(database, verified)))
    return figures


async def top_up_one(sessions: Sessions) -> None:
    async with transaction(sessions) as session:
        tenant_id = (await session.scalars(text("SELECT tenant_id FROM billing_profile LIMIT 1"))).one()
    await make.add_credit(sessions, tenant_id, "1", "once more")


async def verified(sessions: Sessions) -> verify.Finding | None:
    async with transaction(sessions) as session:
        return await verify.verify(session, tell=lambda line: say(f"verify: {line}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--batch", type=int, default=25, help="events of one transaction")
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the database is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-verify-", dir=options.folder) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with services(folder, LOADING) as (database, _):
            sys.stdout.write(json.dumps(run(database, options)) + "\n")


if __name__ == "__main__":
    main()
