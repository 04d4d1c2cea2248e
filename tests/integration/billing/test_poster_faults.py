"""What must survive: the poster killed at any time, Postgres away in the middle."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.exc import DBAPIError

from billing import poster, verify
from core.db import transaction
from core.money import parse_pico
from core.settings import Database, Secrets, Settings, Valkey
from tests.conftest import PostgresService
from tests.factories import billing as make
from tests.factories.billing_world import World, write
from tests.waiting import until

COST = parse_pico("0.012258")

CHILD = """
import sys
from billing import poster
from core.settings import Settings

poster.BATCH_EVENTS = 40
poster.BUSY_WAIT_MS = poster.IDLE_WAIT_MS = 5
poster.run(Settings.model_validate_json(sys.stdin.read()), lambda: print("ready", flush=True))
"""


def settings_json(database: Database, valkey: Path, home: Path) -> bytes:
    """Settings with their secrets in the clear, for a child's stdin."""
    return (
        b'{"home": "%b", "secrets": {"pepper": "00", "signing": "00", "sealing": "00"},'
        b' "database": {"url": "%b"}, "valkey": {"url": "unix://%b", "broker_url": "unix://%b?db=1"},'
        b' "log": {"level": "error"}}'
    ) % (
        str(home).encode(),
        database.url.get_secret_value().encode(),
        str(valkey).encode(),
        str(valkey).encode(),
    )


def start(settings: bytes) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(settings)
    child.stdin.close()
    assert child.stdout.readline() == b"ready\n"
    return child


def reap(child: subprocess.Popen[bytes]) -> int:
    code = child.wait(20)
    if child.stdout is not None:
        child.stdout.close()
    return code


async def test_a_poster_killed_again_and_again_posts_every_event_once(
    world: World, database_settings: Database, valkey: Path, tmp_path: Path
) -> None:
    tenants = [await world.tenant("100") for _ in range(3)]
    total = 900
    for part in range(4):
        events = [make.event(*tenants[n % 3]) for n in range(total // 4)]
        await write(world.spool_dir / f"r{part}", events, segment_bytes=16 * 1024)
    settings = settings_json(database_settings, valkey, tmp_path)

    async def posted() -> int:
        rows = await world.rows("SELECT count(*) FROM usage_event")
        assert isinstance(rows[0][0], int)
        return rows[0][0]

    kills = []
    for goal in (1, 400):

        async def beyond(goal: int = goal) -> bool:
            return await posted() >= goal

        child = await asyncio.to_thread(start, settings)
        await until(beyond, 60)
        child.send_signal(signal.SIGKILL)
        assert reap(child) == -signal.SIGKILL
        kills.append(await posted())
    assert kills[0] < total  # killed in the midst of it

    async def all_posted() -> bool:
        return await posted() == total

    child = await asyncio.to_thread(start, settings)
    await until(all_posted, 60)
    child.send_signal(signal.SIGTERM)
    assert reap(child) == 0
    for tenant_id, _ in tenants:
        assert await world.available(tenant_id) == parse_pico("100") - total // 3 * COST
    async with transaction(world.sessions) as session:
        assert await verify.verify(session) is None


async def test_postgres_away_and_back_loses_and_doubles_nothing(
    world: World, postgres: PostgresService, database: str
) -> None:
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s) for _ in range(7)])
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as owner:
        name = sql.Identifier(database)
        owner.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        owner.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database])
        for _ in range(2):
            with pytest.raises(DBAPIError):
                await world.poster.step()
        await write(world.spool_dir / "r2", [make.event(tenant_id, s) for _ in range(3)])
        owner.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
    assert await world.poster.step() == 10
    assert await world.available(tenant_id) == parse_pico("1") - 10 * COST
    async with transaction(world.sessions) as session:
        assert await verify.verify(session) is None


async def test_the_process_waits_for_postgres_and_ends_when_told(
    world: World, valkey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Settings(
        home=tmp_path,
        secrets=Secrets.model_validate(dict.fromkeys(("pepper", "signing", "sealing"), "00")),
        database=Database.model_validate({"url": f"postgresql://nobody@/x?host={tmp_path}&port=5432"}),
        valkey=Valkey.model_validate({"url": f"unix://{valkey}", "broker_url": f"unix://{valkey}"}),
    )
    monkeypatch.setattr(poster, "BACKOFF_MIN_MS", 1)
    tenant_id, s = await world.tenant("1")
    await write(world.spool_dir / "r1", [make.event(tenant_id, s)])
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(poster.serve(nowhere, ready.set, stop))
    await asyncio.wait_for(ready.wait(), 10)
    await until((tmp_path / "metrics" / "poster.prom").exists)
    stop.set()
    await asyncio.wait_for(serving, 10)
    assert await world.poster.step() == 1  # what it could not post is still there
