"""The data of a measured gateway: tenants, keys, credit, prices, and models that the simulated engine answers.

Keys come from a seeded generator, so that `peer.toml` can name one. They are worth nothing outside `bench/build`.
"""

import asyncio
import random
from datetime import datetime
from pathlib import Path
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from bench.models import MODELS, UPSTREAM_PORT
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
from tenants import api_keys, credentials, limits, plans, projects, tenants
from tenants.types import LimitLevel, LimitMetric, LimitSlot

KEYS = 10_000
SEED = 20260
PICO = 10**12
PRICE_PICO = 2_000_000  # 2.00 for a million tokens
METERS = (Meter.INPUT, Meter.CACHED_INPUT, Meter.CACHE_WRITE, Meter.OUTPUT, Meter.REASONING)
CREDIT_UNITS = 1_000_000
RPM = 10_000_000  # limits that are checked and never reached
CONCURRENCY = 100_000


def keys() -> tuple[str, str, list[str]]:
    """Return the key with every limit, the key without limits, and the many keys with every limit."""
    choose = random.Random(SEED).choice
    minted = [credentials.mint(credentials.API_KEY_PREFIX, choose) for _ in range(KEYS + 2)]
    return minted[0], minted[1], minted[2:]


def run(settings: Settings, build: Path) -> None:
    """Seed in one transaction, unless it is done; write the keys to `build`."""
    full, unlimited, many = keys()
    for name, lines in (("one", [full]), ("unlimited", [unlimited]), ("many", many)):
        path = build / f"keys-{name}.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    asyncio.run(_seed(settings))


async def _seed(settings: Settings) -> None:
    engine = db.create_engine(settings.database)
    try:
        async with db.transaction(db.create_sessions(engine)) as session:
            if await tenants.list_tenants(session, after=None, limit=1):
                return
            now = SystemClock().now()
            await _models(session, settings, now)
            await _callers(session, settings)
    finally:
        await engine.dispose()


async def _models(session: AsyncSession, settings: Settings, now: datetime) -> None:
    sealing_key = sealing.sealing_key(settings.secrets.sealing)
    book = await price_book.create_book(session, "bench", Currency.USD)
    items: list[PriceItem] = []
    for name in MODELS:
        model = await models.create_model(session, name=name, now=now)
        version = await models.add_version(session, model, NewVersion(source="bench", context_max=32768), now=now)
        deployment = NewDeployment(
            name=name,
            version_id=version,
            kind=DeploymentKind.EXTERNAL,
            engine=EngineKind.OPENAI,
            upstream_model=name,
            endpoints=frozenset({"chat", "completions"}),
            base_url=f"http://127.0.0.1:{UPSTREAM_PORT}",
            inflight_max=50_000,
            waiting_max=10_000,
        )
        await deployments.create(session, deployment, sealing_key=sealing_key, now=now)
        items += [PriceItem(model, tier, meter, PRICE_PICO) for tier in Tier for meter in METERS]
    draft = await price_book.create_draft(session, book, items)
    await price_book.publish(session, draft, now=now)


async def _callers(session: AsyncSession, settings: Settings) -> None:
    pepper = credentials.pepper_of(settings.secrets)
    full, unlimited, many = keys()
    tenant = await _tenant(session, "limited")
    await _limit(session, LimitSlot(LimitLevel.TENANT, LimitMetric.CONCURRENCY, tenant_id=tenant))
    for level in (LimitLevel.PROJECT, LimitLevel.KEY):
        for metric in (LimitMetric.REQUESTS_PER_MINUTE, LimitMetric.CONCURRENCY):
            await _limit(session, LimitSlot(level, metric, tenant_id=tenant))
    project = await projects.create(session, tenant, name="bench")
    for number, secret in enumerate([full, *many]):
        name = f"key {number}"
        await api_keys.create(session, tenant, project.id, name=name, pepper=pepper, secret=secret)
    free = await _tenant(session, "unlimited")
    await plans.put_tenant(session, free, (await plans.create(session, name="without limits")).id)
    project = await projects.create(session, free, name="bench")
    await api_keys.create(session, free, project.id, name="key", pepper=pepper, secret=unlimited)


async def _limit(session: AsyncSession, slot: LimitSlot) -> None:
    amount = CONCURRENCY if slot.metric is LimitMetric.CONCURRENCY else RPM
    await limits.set_limit(session, slot, amount, limits.system_why("bench", SystemClock()))


async def _tenant(session: AsyncSession, name: str) -> UUID:
    tenant = await tenants.create(session, name=name, currency=Currency.USD)
    await ledger.open_tenant(session, tenant.id, Currency.USD)
    await billing_credits.top_up(session, tenant.id, CREDIT_UNITS * PICO, idempotency_key="bench", actor="bench")
    return tenant.id
