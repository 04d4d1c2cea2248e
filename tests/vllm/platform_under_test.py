"""A gateway and a poster as processes of their own, in front of a real engine, with two tenants to call it."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

import httpx
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credits as billing_credits
from billing import ledger, price_book
from billing.types import Meter, PriceItem
from catalog import deployments, models
from catalog.types import DeploymentKind, EngineKind, NewDeployment, NewVersion
from core import db, sealing
from core.clock import SystemClock
from core.money import Currency
from core.settings import Settings
from core.tiers import Tier
from tenants import api_keys, credentials, projects, tenants
from tests.vllm.conftest import MODEL, ROOT

PICO = 10**12
# Pico per token: 2.00 for a million input tokens, 0.20 cached, 6.00 output
PRICES = {
    Meter.INPUT: 2_000_000,
    Meter.CACHED_INPUT: 200_000,
    Meter.CACHE_WRITE: 2_000_000,
    Meter.OUTPUT: 6_000_000,
    Meter.REASONING: 6_000_000,
}
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant and its key."""

    tenant_id: UUID
    secret: str


@dataclass(frozen=True, slots=True)
class Platform:
    """What the tests call."""

    base_url: str
    callers: tuple[Caller, Caller]


def environment(settings: Settings) -> dict[str, str]:
    """Return the settings as the environment of a process of its own."""
    assert settings.database.owner_url is not None
    return {
        "TIDEGATE_HOME": str(settings.home),
        "TIDEGATE_SECRETS__PEPPER": settings.secrets.pepper.get_secret_value(),
        "TIDEGATE_SECRETS__SIGNING": settings.secrets.signing.get_secret_value(),
        "TIDEGATE_SECRETS__SEALING": settings.secrets.sealing.get_secret_value(),
        "TIDEGATE_DATABASE__URL": settings.database.url.get_secret_value(),
        "TIDEGATE_DATABASE__OWNER_URL": settings.database.owner_url.get_secret_value(),
        "TIDEGATE_VALKEY__URL": settings.valkey.url.get_secret_value(),
        "TIDEGATE_VALKEY__BROKER_URL": settings.valkey.broker_url.get_secret_value(),
        "TIDEGATE_GATEWAY__PORT": str(settings.gateway.port),
        "TIDEGATE_GATEWAY__REPLICA_ID": "vllm",
    }


async def seed(settings: Settings, engine_url: str) -> tuple[Caller, Caller]:
    """Make the model with a deployment at `engine_url`, prices, and two tenants with credit."""
    engine = db.create_engine(settings.database)
    now = SystemClock().now()
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            await _model(session, settings, engine_url, now)
            return await _caller(session, settings, "red"), await _caller(session, settings, "blue")
    finally:
        await engine.dispose()


async def _model(session: AsyncSession, settings: Settings, engine_url: str, now: datetime) -> None:
    model = await models.create_model(session, name=MODEL, now=now)
    version = await models.add_version(
        session, model, NewVersion(source="vllm", context_max=4096, template_tokens=32), now=now
    )
    deployment = NewDeployment(
        name=MODEL,
        version_id=version,
        kind=DeploymentKind.EXTERNAL,
        engine=EngineKind.VLLM,
        upstream_model=MODEL,
        endpoints=frozenset({"chat", "completions", "tokenize"}),
        base_url=engine_url,
    )
    await deployments.create(session, deployment, sealing_key=sealing.sealing_key(settings.secrets.sealing), now=now)
    book = await price_book.create_book(session, "list", Currency.USD)
    items = [PriceItem(model, tier, meter, price) for tier in Tier for meter, price in PRICES.items()]
    draft = await price_book.create_draft(session, book, items)
    await price_book.publish(session, draft, now=now)


async def _caller(session: AsyncSession, settings: Settings, name: str) -> Caller:
    tenant = await tenants.create(session, name=name, currency=Currency.USD)
    await ledger.open_tenant(session, tenant.id, Currency.USD)
    await billing_credits.top_up(session, tenant.id, 10 * PICO, idempotency_key="first", actor="test")
    project = await projects.create(session, tenant.id, name="default")
    pepper = credentials.pepper_of(settings.secrets)
    _, secret = await api_keys.create(session, tenant.id, project.id, name="key", pepper=pepper)
    return Caller(tenant.id, secret)


@contextmanager
def _process(part: str, settings: Settings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", part],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | environment(settings),
            cwd=ROOT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


@contextmanager
def running(settings: Settings, engine_url: str) -> Iterator[Platform]:
    """Seed, start gateway and poster, and stop them at the end."""
    settings.home.mkdir(parents=True, exist_ok=True)
    callers = asyncio.run(seed(settings, engine_url))
    base_url = f"http://127.0.0.1:{settings.gateway.port}"
    gateway_log, poster_log = settings.home / "gateway.log", settings.home / "poster.log"
    with _process("gateway", settings, gateway_log) as gateway, _process("poster", settings, poster_log):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _ready(base_url):
            if gateway.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The gateway did not start:\n{gateway_log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield Platform(base_url, callers)


def _ready(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/ready", timeout=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
