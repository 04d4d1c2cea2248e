"""Postgres and Valkey are away when a real gateway starts: it goes by what it left on its disk."""

from pathlib import Path
from typing import Any

import httpx

from core import db
from core.clock import SystemClock
from core.settings import Database
from core.tiers import Tier
from engine import simulator
from engine.simulator import Options
from tenants.api_keys import mint
from tests.factories.gateway_process import METRICS_HEADERS, gateway_process, seed

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


async def _call(client: httpx.AsyncClient, tier: str, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await client.post("/v1/chat/completions", json={**BODY, "service_tier": tier}, headers=headers)
