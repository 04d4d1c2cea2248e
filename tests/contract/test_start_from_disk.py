"""Postgres and Valkey are away when a real gateway starts: it goes by what it left on its disk."""

from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import text

from core import db
from core.clock import SystemClock
from core.settings import Database
from core.tiers import Tier
from engine import simulator
from engine.simulator import Options
from tenants.api_keys import mint
from tests.factories.gateway_process import METRICS_HEADERS, gateway_process, seed
from tests.factories.stack import until

BODY: Any = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=3 p=5]]"}], "max_tokens": 5}


async def test_a_start_without_postgres_and_valkey(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    engine = await simulator.serve(Options(), SystemClock())
    try:
        host, port = engine.addresses[0][:2]
        seeded = await seed(sessions, f"http://{host}:{port}", tiers=Tier)
        headers = {"Authorization": f"Bearer {seeded.customer.secret}"}
        before = gateway_process(database_settings, valkey, tmp_path)
        async with before as gateway, httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
            for tier in ("priority", "priority", "default"):
                assert (await _call(client, tier)).status_code == 200
        away = {
            "TIDEGATE_DATABASE__URL": "postgresql://nobody@127.0.0.1:1/none",
            "TIDEGATE_VALKEY__URL": f"unix://{tmp_path}/none.sock",
            "TIDEGATE_GATEWAY__CACHE_TRUST_S": "900",  # on a slow machine a start takes long
        }
        after = gateway_process(database_settings, valkey, tmp_path, settings=away)
        async with after as gateway, httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
            assert (await _call(client, "priority")).status_code == 200  # 80 % of what it had
            refused = await _call(client, "default")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "SERVICE_UNAVAILABLE")
            unknown = await _call(client, "priority", mint())
            assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "2")
            assert (await _call(client, "priority", "typo")).status_code == 401
            ready = await client.get("/ready", headers=METRICS_HEADERS)
        parts = ready.json()["parts"]
        assert (ready.status_code, parts["postgres"], parts["valkey"]) == (200, "away", "away")
        assert parts["config"].startswith("from disk, ")
    finally:
        await engine.cleanup()


async def test_a_revoked_key_does_not_come_back_with_a_crash(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> None:
    """Killed as soon as the revocation is in the file, and started without Postgres."""
    engine = await simulator.serve(Options(), SystemClock())
    try:
        host, port = engine.addresses[0][:2]
        seeded = await seed(sessions, f"http://{host}:{port}", tiers=Tier)
        headers = {"Authorization": f"Bearer {seeded.customer.secret}"}
        file = tmp_path / "policy" / "g1" / "policy"
        before = gateway_process(database_settings, valkey, tmp_path)
        async with before as gateway, httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
            assert (await _call(client, "priority")).status_code == 200
            await until(file.exists)
            first = file.read_bytes()
            async with db.transaction(sessions) as session:
                key_id = seeded.customer.key.id
                await session.execute(text("UPDATE api_key SET revoked_at = now() WHERE id = :id"), {"id": key_id})
                await db.record_config_change(session, "api_key", key_id)
            await until(lambda: file.read_bytes() != first, seconds=10)  # else it is written after 15 s
            gateway.process.kill()
            await gateway.process.wait()
        away = {"TIDEGATE_DATABASE__URL": "postgresql://nobody@127.0.0.1:1/none"}
        after = gateway_process(database_settings, valkey, tmp_path, settings=away)
        async with after as gateway, httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
            assert (await _call(client, "priority")).status_code in {401, 503}
            ready = await client.get("/ready", headers=METRICS_HEADERS)
        assert ready.json()["parts"]["config"].startswith("from disk, ")
    finally:
        await engine.cleanup()


async def _call(client: httpx.AsyncClient, tier: str, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await client.post("/v1/chat/completions", json={**BODY, "service_tier": tier}, headers=headers)
