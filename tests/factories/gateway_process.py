"""The gateway as its own process, on a seeded database and a real Valkey."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from billing import ledger
from billing.credits import top_up
from catalog import deployments, models
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from core import db
from core.clock import SystemClock
from core.money import Currency, parse_pico
from core.settings import Database
from core.tiers import Tier
from tests.factories import billing as billing_factory
from tests.factories.tenants import PEPPER, Customer, customer

ENDPOINTS = frozenset({"chat", "completions", "embeddings", "tokenize"})
SEALING = bytes(32)
METRICS_TOKEN = "for those who run it"
METRICS_HEADERS = {"Authorization": f"Bearer {METRICS_TOKEN}"}
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import os; from core.settings import Settings; from api.inference.app import run;"
    "run(Settings.load(), lambda: os.write(2, b'READY\\n'))"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Seeded:
    """What is in the database: one model of one external engine, priced, and a customer with credit."""

    customer: Customer
    model: str
    model_id: UUID
    deployment_id: UUID


async def seed(
    sessions: db.Sessions,
    engine_url: str,
    *,
    credit: str = "10",
    name: str = "sim",
    tiers: Iterable[Tier] = (Tier.STANDARD,),
) -> Seeded:
    """Without an `engine_url` the deployment is local: its engines are where the published state says."""
    now = SystemClock().now()
    found = await customer(sessions)
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name=name, now=now)
        version_id = await models.add_version(session, model_id, NewVersion(context_max=32768), now=now)
        deployment_id = await deployments.create(
            session,
            NewDeployment(
                name=name,
                version_id=version_id,
                kind=DeploymentKind.EXTERNAL if engine_url else DeploymentKind.LOCAL,
                engine=EngineKind.SIMULATOR,
                upstream_model="sim",
                endpoints=ENDPOINTS,
                base_url=engine_url,
            ),
            sealing_key=SEALING,
            now=now,
        )
        await ledger.open_tenant(session, found.tenant.id, Currency.USD)
        await top_up(session, found.tenant.id, parse_pico(credit), idempotency_key="first", actor="test")
    priced = [item for tier in tiers for item in billing_factory.items(billing_factory.PRICES, model_id, tier)]
    await billing_factory.publish_prices(sessions, priced)
    return Seeded(found, name, model_id, deployment_id)


@dataclass(frozen=True)
class Process:
    """A running gateway."""

    process: asyncio.subprocess.Process
    port: int
    home: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def gateway_process(
    database: Database,
    valkey: Path,
    home: Path,
    *,
    control_socket: Path | None = None,
    replica: str = "g1",
    settings: Mapping[str, str] | None = None,
    program: str = PROGRAM,
) -> AsyncIterator[Process]:
    """Start a gateway and wait until it serves; ended with SIGTERM when it still runs. `program` is what it runs."""
    port = free_port()
    environment = {
        **os.environ,
        "TIDEGATE_HOME": str(home),
        "TIDEGATE_SECRETS__PEPPER": PEPPER.hex(),
        "TIDEGATE_SECRETS__SIGNING": bytes(32).hex(),
        "TIDEGATE_SECRETS__SEALING": SEALING.hex(),
        "TIDEGATE_DATABASE__URL": database.url.get_secret_value(),
        "TIDEGATE_VALKEY__URL": f"unix://{valkey}",
        "TIDEGATE_VALKEY__BROKER_URL": f"unix://{valkey}?db=1",
        "TIDEGATE_GATEWAY__PORT": str(port),
        "TIDEGATE_GATEWAY__METRICS_TOKEN": METRICS_TOKEN,
        "TIDEGATE_GATEWAY__REPLICA_ID": replica,
        "TIDEGATE_GATEWAY__SPOOL_WAIT_MS": "2000",
        **(settings or {}),
    }
    if control_socket is not None:
        environment["TIDEGATE_CONTROL__SOCKET"] = str(control_socket)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        env=environment,
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines: list[bytes] = []
    async with asyncio.timeout(60):
        while (line := await process.stderr.readline()) != b"READY\n":
            lines.append(line)
            assert line, b"".join(lines).decode()
    drain = asyncio.create_task(process.stderr.read())
    try:
        yield Process(process, port, home)
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(30):
                await process.wait()
        await drain
