"""How fast the poster drains a spool: real Postgres (fsync on) and Valkey on this machine, one poster.

    python -m bench.spool_drain [events] [tenants]

Prints events per second, and the CPU time per event of the poster's own process, of Postgres and of Valkey: with other
work on the machine these say more than the time that passed.
"""

import asyncio
import gc
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import psutil
import psycopg
from prometheus_client import CollectorRegistry
from psycopg import sql

from billing import ledger
from billing.credits import top_up
from billing.metrics import poster_metrics
from billing.poster import GC_THRESHOLDS, Poster
from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from core import db
from core.clock import SystemClock
from core.ids import new_uuid
from core.money import Currency, parse_pico
from core.resp import RespClient
from core.settings import Database
from tests.factories import billing as make
from tests.factories.billing_world import write

TENANTS_PER_TRANSACTION = 100


@contextmanager
def services(folder: Path, options: dict[str, str] | None = None) -> Iterator[tuple[Database, str]]:
    """A migrated database and a Valkey, both with their durable defaults, as children of this process.

    `options`: of Postgres, beside those it always has.
    """
    files = pg.PostgresFiles(folder / "pg", secrets.token_hex(16), secrets.token_hex(16))
    pg.initialise(files)
    port = pg.free_port()
    process = pg.start(files, port, options=options)
    valkey = vk.start(folder / "valkey", folder / "valkey.sock")
    try:
        pg.wait_ready(files, port, lambda: process.poll() is None)
        vk.wait_ready(folder / "valkey", folder / "valkey.sock", lambda: valkey.poll() is None)
        owner = pg.url(files, port, "owner", "postgres")
        with psycopg.connect(owner, autocommit=True) as connection:
            role = sql.SQL("CREATE ROLE tidegate_app LOGIN PASSWORD {}").format(sql.Literal(files.app_password))
            connection.execute(role)
        db.migrate(owner)
        url = pg.url(files, port, "app", "postgres")
        yield Database.model_validate({"url": url, "owner_url": owner}), f"unix://{folder / 'valkey.sock'}"
    finally:
        vk.stop(valkey)
        pg.stop(process)


async def drain(database: Database, valkey_url: str, spool_dir: Path, events: int, tenants: int) -> dict[str, float]:
    """Fill a spool with that many events of that many tenants, and time the poster until it is empty."""
    engine = db.create_engine(database)
    sessions = db.create_sessions(engine)
    client = await RespClient.connect(valkey_url)
    prices = await make.publish_prices(sessions)
    ids = await open_tenants(sessions, tenants)
    schedules = {tenant: make.schedule(prices, tenant) for tenant in ids}
    await write(
        spool_dir / "bench",
        [make.event(ids[n % tenants], schedules[ids[n % tenants]]) for n in range(events)],
        segment_bytes=8 * 1024 * 1024,
    )
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)  # as the process does
    poster = Poster(sessions, client, spool_dir, SystemClock(), poster_metrics(CollectorRegistry()))
    before, began, done = cpu_s(), time.perf_counter(), 0
    while count := await poster.step():
        done += count
    took_s, after = time.perf_counter() - began, cpu_s()
    await client.close()
    await engine.dispose()
    per_event = {f"{name}_cpu_us_per_event": (after[name] - before[name]) / done * 1e6 for name in after}
    return {"events_per_s": done / took_s, **per_event, "events": done}


async def open_tenants(sessions: db.Sessions, count: int) -> list[UUID]:
    """Tenants with credit, many in a transaction."""
    ids = [new_uuid() for _ in range(count)]
    for at in range(0, count, TENANTS_PER_TRANSACTION):
        async with db.transaction(sessions) as session:
            for tenant_id in ids[at : at + TENANTS_PER_TRANSACTION]:
                await ledger.open_tenant(session, tenant_id, Currency.USD)
                await top_up(session, tenant_id, parse_pico("100000"), idempotency_key="first", actor="bench")
    return ids


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of this process, and of the living processes of Postgres and of Valkey below it."""
    found = {"poster": time.process_time(), "postgres": 0.0, "valkey": 0.0}
    for child in psutil.Process().children(recursive=True):
        try:
            times, name = child.cpu_times(), child.name()
        except psutil.Error:
            continue
        found["postgres" if "postgres" in name else "valkey"] += times.user + times.system
    return found


def main() -> None:
    events = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    tenants = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with tempfile.TemporaryDirectory(prefix="tg-drain-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with services(folder) as (database, valkey_url):
            figures = asyncio.run(drain(database, valkey_url, folder / "spool", events, tenants))
    print(" ".join(f"{name}={value:,.1f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
