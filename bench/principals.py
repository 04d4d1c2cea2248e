"""What keys cost a gateway: 10,000 tenants and 100,000 keys in Postgres, a directory and its follower in this process.

`python -m bench.principals [--keys 100000] [--tenants 10000]` prints JSON: time to load all, bytes a key, the time of
one authentication, how soon a key that was just made is known, and how long the loop stood still while one key, and
then a tenant with ten thousand keys, changed.
"""

import argparse
import asyncio
import gc
import json
import secrets
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from api.inference.access import authenticate
from api.inference.directory import Directory
from api.inference.metrics import Metrics
from api.inference.new_keys import NewKeys
from api.inference.snapshot import Follower
from cli.embedded import postgres as pg
from core import db
from core.clock import SystemClock
from core.reader import Reader
from core.settings import Database
from tenants import api_keys, principals, tenants
from tenants.credentials import Peppers, digest
from tenants.types import Status

DATABASE = "tidegate"
CROWDED_KEYS = 10_000  # of one tenant
CALLS = 200_000
FRESH = 50  # keys made to see how soon they are known
WATCH_S = 0.001  # how often the loop is looked at
MICROSECONDS, MILLISECONDS = 1e6, 1e3
SEED = (
    """
    INSERT INTO tenant (id, name, currency, cache_seed)
    SELECT gen_random_uuid(), 't' || n, 'USD', sha256(n::text::bytea) FROM generate_series(1, %(tenants)s) n
    """,
    "INSERT INTO project (id, tenant_id, name) SELECT gen_random_uuid(), id, 'main' FROM tenant",
    """
    INSERT INTO api_key (id, tenant_id, project_id, name, scopes)
    SELECT gen_random_uuid(), p.tenant_id, p.id, 'k' || n, '{inference}' FROM generate_series(1, %(keys)s) n
    JOIN (SELECT id, tenant_id, row_number() OVER () AS r FROM project) p
    ON p.r = CASE WHEN n <= %(crowded)s THEN 1 ELSE n %% %(tenants)s + 1 END
    """,
    """
    INSERT INTO api_key_secret (digest, id, tenant_id, key_id, prefix, last4, pepper_id)
    SELECT sha256(id::text::bytea), id, tenant_id, id, 'tg_bnch', 'abcd', '' FROM api_key
    """,
    "ANALYZE",
)


class Watch:
    """How long the loop was held up at most since the last look."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(WATCH_S)
            self.worst_s = max(self.worst_s, time.perf_counter() - before - WATCH_S)

    async def during(self, work: Callable[[], Awaitable[object]]) -> float:
        """Return the longest stall while `work` runs, in milliseconds."""
        await asyncio.sleep(0.05)
        self.worst_s = 0.0
        await work()
        return round(self.worst_s * MILLISECONDS, 1)

    def stop(self) -> None:
        self._task.cancel()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - what is watched knows no benchmark
        await asyncio.sleep(0.0005)


def _cached_us(directory: Directory) -> dict[str, float]:
    """The time of one authentication, digest and all, and of what follows the digest."""
    pepper, now_us = secrets.token_bytes(32), SystemClock().now_us()
    known = list(directory.principals)[:: max(1, len(directory.principals) // 10_000)]
    calls = CALLS // len(known) * len(known)
    text = "tg_" + "0" * 46
    began = time.perf_counter()
    for _ in range(CALLS // len(known)):
        for digest_ in known:
            authenticate(directory, digest_, now_us, "10.0.0.1")
    looked = time.perf_counter()
    for _ in range(calls):
        digest(pepper, text)
    hashed = time.perf_counter()
    each = [(looked - began) / calls * MICROSECONDS, (hashed - looked) / calls * MICROSECONDS]
    return {"authenticate_us": round(each[0], 2), "digest_us": round(each[1], 2), "sum_us": round(sum(each), 2)}


async def _fresh_ms(sessions: db.Sessions, directory: Directory, tenant_id: UUID, project_id: UUID) -> list[float]:
    """From the commit of a new key to its being known, each."""
    pepper, took = secrets.token_bytes(32), []
    for _ in range(FRESH):
        async with db.transaction(sessions) as session:
            _, secret = await api_keys.create(session, tenant_id, project_id, name="fresh", pepper=pepper)
        committed, wanted = time.perf_counter(), digest(pepper, secret)
        while wanted not in directory.principals:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.0005)
        took.append((time.perf_counter() - committed) * MILLISECONDS)
    return sorted(took)


def _spread(took: list[float]) -> dict[str, float]:
    return {"least": round(took[0], 2), "p50": round(took[len(took) // 2], 2), "worst": round(took[-1], 2)}


async def _looked_up_ms(
    sessions: db.Sessions, reader: Reader, directory: Directory, tenant_id: UUID, project_id: UUID
) -> list[float]:
    """Authenticating a key that is not in memory, each, while the follower has nothing to do."""
    pepper, took = secrets.token_bytes(32), []
    keys = NewKeys(Directory(), reader, Peppers(pepper), SystemClock())
    for _ in range(FRESH):
        async with db.transaction(sessions) as session:
            _, secret = await api_keys.create(session, tenant_id, project_id, name="fresh", pepper=pepper)
        wanted = digest(pepper, secret)
        await until(partial(directory.principals.__contains__, wanted))
        began = time.perf_counter()
        if not await keys.find(secret, wanted):
            raise RuntimeError("a key that was made is not found")
        took.append((time.perf_counter() - began) * MILLISECONDS)
    return sorted(took)


async def _first_use_ms(
    sessions: db.Sessions, reader: Reader, directory: Directory, tenant_id: UUID, project_id: UUID
) -> list[float]:
    """From the commit of a new key to its first request being let in, each: looked up or brought by the follower."""
    pepper, took = secrets.token_bytes(32), []
    keys = NewKeys(directory, reader, Peppers(pepper), SystemClock())
    for _ in range(FRESH):
        async with db.transaction(sessions) as session:
            _, secret = await api_keys.create(session, tenant_id, project_id, name="fresh", pepper=pepper)
        committed, wanted = time.perf_counter(), digest(pepper, secret)
        if wanted not in directory.principals and not await keys.find(secret, wanted):
            raise RuntimeError("a key that was made is not found")
        took.append((time.perf_counter() - committed) * MILLISECONDS)
    return sorted(took)


async def _bytes_a_key(sessions: db.Sessions) -> float:
    gc.collect()
    tracemalloc.start()
    async with db.transaction(sessions) as session:
        found = await principals.load_all(session)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(found)


async def measure(url: str) -> dict[str, Any]:
    settings = Database.model_validate({"url": url})
    engine = db.create_engine(settings)
    sessions = db.create_sessions(engine)
    reader = Reader(settings, name="bench")
    directory, metrics, loaded = Directory(), Metrics(), asyncio.Event()
    follower = Follower(directory, sessions, url, sealing=bytes(32), clock=SystemClock(), metrics=metrics)
    began = time.perf_counter()
    watch = Watch()
    task = asyncio.create_task(follower.run(loaded.set))
    try:
        found: dict[str, Any] = {}
        loading_ms = await watch.during(loaded.wait)
        found["load_s"] = round(time.perf_counter() - began, 2)
        found["keys"] = len(directory.principals)
        found["stall_while_loading_ms"] = loading_ms  # the collection at its end, before anything is served
        gc_began = time.perf_counter()
        gc.collect()
        found["full_collection_ms"] = round((time.perf_counter() - gc_began) * MILLISECONDS, 1)
        found |= _cached_us(directory)
        crowded = _crowded(directory)
        tenant_id, project_id, key_id = crowded[0].tenant_id, crowded[0].project_id, crowded[0].key_id

        async def one_key() -> None:
            before = directory.revision
            async with db.transaction(sessions) as session:
                await api_keys.revoke(session, tenant_id, key_id, clock=SystemClock())
            await until(lambda: directory.revision > before)

        async def whole_tenant() -> None:
            began, before = time.perf_counter(), directory.revision
            async with db.transaction(sessions) as session:
                await tenants.update(session, tenant_id, status=Status.SUSPENDED)
            await until(lambda: directory.revision > before)
            found["tenant_of_10000_refused_after_ms"] = round((time.perf_counter() - began) * MILLISECONDS)

        fresh = await _fresh_ms(sessions, directory, tenant_id, project_id)
        found["new_key_known_ms"] = _spread(fresh)
        found["new_key_looked_up_ms"] = _spread(await _looked_up_ms(sessions, reader, directory, tenant_id, project_id))
        first_use = await _first_use_ms(sessions, reader, directory, tenant_id, project_id)
        found["new_key_first_use_ms"] = _spread(first_use)
        found["stall_one_key_ms"] = await watch.during(one_key)
        found["stall_tenant_of_10000_ms"] = await watch.during(whole_tenant)
    finally:
        watch.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    found["bytes_a_key"] = round(await _bytes_a_key(sessions))
    await reader.close()
    await engine.dispose()
    return found


def _crowded(directory: Directory) -> list[Any]:
    count: dict[UUID, list[Any]] = {}
    for principal in directory.principals.values():
        count.setdefault(principal.tenant_id, []).append(principal)
    return max(count.values(), key=len)


def _seeded(files: pg.PostgresFiles, port: int, counts: dict[str, int]) -> None:
    with psycopg.connect(pg.url(files, port, "owner", "postgres"), autocommit=True) as connection:
        role = sql.SQL("CREATE ROLE tidegate_app LOGIN PASSWORD {}").format(sql.Literal(files.app_password))
        connection.execute(role)
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    db.migrate(pg.url(files, port, "owner", DATABASE))
    with psycopg.connect(pg.url(files, port, "owner", DATABASE), autocommit=True) as connection:
        for statement in SEED:
            connection.execute(statement, counts if "%(" in statement else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tgp-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        files = pg.PostgresFiles(folder / "postgres", secrets.token_hex(16), secrets.token_hex(16), folder / "pg")
        pg.initialise(files)
        port = pg.free_port()
        postgres = pg.start(files, port)
        try:
            pg.wait_ready(files, port, lambda: postgres.poll() is None)
            counts = {"keys": options.keys, "tenants": options.tenants, "crowded": min(CROWDED_KEYS, options.keys // 2)}
            _seeded(files, port, counts)
            report = asyncio.run(measure(pg.url(files, port, "app", DATABASE)))
        finally:
            pg.stop(postgres)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
