"""Postgres is away and the spool's bound comes near: a real gateway refuses lower tiers first, and nothing is lost."""

from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from prometheus_client import CollectorRegistry
from psycopg import sql
from sqlalchemy import text

from billing.metrics import poster_metrics
from billing.poster import TROUBLE, Poster
from billing.verify import verify
from core import db
from core.clock import SystemClock
from core.money import parse_pico
from core.resp import RespClient
from core.settings import Database
from core.tiers import Tier
from engine import simulator
from engine.simulator import Options
from tests.conftest import PostgresService
from tests.factories import billing as make
from tests.factories.gateway_process import METRICS_HEADERS, gateway_process, seed
from tests.waiting import until

NAMES = {Tier.BATCH: "flex", Tier.STANDARD: "default", Tier.PRIORITY: "priority"}
BOUND = 12_000  # bytes: some fifty events
CALLS_MAX = 100


class Caller:
    """Keeps what each answered call cost."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.billed: dict[str, int] = {}

    async def chat(self, tier: Tier) -> httpx.Response:
        body: Any = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=3 p=5]]"}], "max_tokens": 5}
        answer = await self._client.post("/v1/chat/completions", json={**body, "service_tier": NAMES[tier]})
        if answer.status_code == 200:
            cost = answer.headers["x-tidegate-cost"].removesuffix(" USD")
            self.billed[answer.headers["x-request-id"].removeprefix("gen_")] = parse_pico(cost)
        return answer

    async def until_refused(self, tier: Tier) -> tuple[int, str]:
        """Call until there is a refusal; its status and Retry-After."""
        for _ in range(CALLS_MAX):
            answer = await self.chat(tier)
            if answer.status_code != 200:
                return answer.status_code, answer.headers["retry-after"]
        raise AssertionError(f"{CALLS_MAX} calls of tier {tier.label} were answered")

    async def spool(self) -> tuple[int, str]:
        answer = await self._client.get("/ready", headers=METRICS_HEADERS)
        return answer.status_code, answer.json()["parts"]["spool"]


async def name_of(sessions: db.Sessions) -> str:
    async with db.transaction(sessions) as session:
        return str((await session.execute(text("SELECT current_database()"))).scalar_one())


def allow_connections(owner_url: str, database: str, *, allowed: bool) -> None:
    with psycopg.connect(owner_url, autocommit=True) as connection:
        statement = sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}")
        connection.execute(statement.format(sql.Identifier(database), sql.Literal(allowed)))
        if not allowed:
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
            connection.execute(ended, [database])


async def test_lower_tiers_are_refused_first_and_the_replay_is_exact(
    postgres: PostgresService,
    database_settings: Database,
    sessions: db.Sessions,
    valkey: Path,
    tmp_path: Path,
) -> None:
    engine = await simulator.serve(Options(), SystemClock())
    host, port = engine.addresses[0][:2]
    seeded = await seed(sessions, f"http://{host}:{port}", tiers=Tier)
    resp = await RespClient.connect(f"unix://{valkey}")
    poster = Poster(sessions, resp, tmp_path / "spool", SystemClock(), poster_metrics(CollectorRegistry()))
    owner, database = postgres.url("owner", "postgres"), await name_of(sessions)
    settings = {"TIDEGATE_GATEWAY__SPOOL_MAX_BYTES": str(BOUND)}
    async with (
        gateway_process(database_settings, valkey, tmp_path, settings=settings) as gateway,
        httpx.AsyncClient(
            base_url=gateway.url, headers={"Authorization": f"Bearer {seeded.customer.secret}"}, timeout=20
        ) as client,
    ):
        caller = Caller(client)
        for tier in Tier:
            assert (await caller.chat(tier)).status_code == 200
        allow_connections(owner, database, allowed=False)

        assert await caller.until_refused(Tier.BATCH) == (503, "30")
        assert await caller.spool() == (200, "refuses batch")
        assert (await caller.chat(Tier.STANDARD)).status_code == 200
        assert await caller.until_refused(Tier.STANDARD) == (503, "10")
        assert await caller.spool() == (200, "refuses batch, standard")
        assert (await caller.chat(Tier.PRIORITY)).status_code == 200
        assert await caller.until_refused(Tier.PRIORITY) == (503, "5")
        assert await caller.spool() == (503, "full")
        metrics = (await client.get("/metrics", headers=METRICS_HEADERS)).text
        for tier in Tier:
            assert f'tidegate_gateway_spool_refuses{{tier="{tier.label}"}} 1\n' in metrics
            assert f'tidegate_gateway_spool_refusals_total{{tier="{tier.label}"}} 1\n' in metrics
        with pytest.raises(TROUBLE):
            await poster.step()

        allow_connections(owner, database, allowed=True)
        while await poster.step():
            pass
        async with db.transaction(sessions) as session:
            rows = await session.execute(text("SELECT id, amount_pico FROM usage_event"))
            assert {row.id.hex: row.amount_pico for row in rows} == caller.billed
            spent = parse_pico("10") - sum(caller.billed.values())
        assert await make.available(sessions, seeded.customer.tenant.id) == spent
        async with sessions() as session:
            assert await verify(session) is None

        async def taken_again() -> bool:
            return (await caller.chat(Tier.BATCH)).status_code == 200

        await until(taken_again)
    await resp.close()
    await engine.cleanup()
