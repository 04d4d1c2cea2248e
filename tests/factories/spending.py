"""Posted usage and budgets, for tests about what is spent."""

from datetime import datetime
from uuid import UUID, uuid4

import msgspec
from sqlalchemy import text

from billing import ledger
from billing.credits import top_up
from billing.types import UsageEvent
from core.db import Sessions, transaction
from core.money import Currency, parse_pico
from tenants import api_keys, projects, tenants
from tenants.types import ApiKey, LimitLevel, LimitMetric, LimitMode, LimitSlot, Project, Tenant
from tests.factories import billing as make
from tests.factories.limits import limited
from tests.factories.tenants import PEPPER


class Spender(msgspec.Struct, frozen=True):
    """A tenant with a project, a key, and money."""

    tenant: Tenant
    project: Project
    key: ApiKey

    @property
    def whose(self) -> dict[str, UUID]:
        return {"project": self.project.id, "key": self.key.id}


async def spender(sessions: Sessions, tz: str = "UTC", credit: str = "1000") -> Spender:
    async with transaction(sessions) as session:
        tenant = await tenants.create(session, name=f"tenant {uuid4().hex}", currency=Currency.USD, tz=tz)
        project = await projects.create(session, tenant.id, name="main")
        key, _ = await api_keys.create(session, tenant.id, project.id, name="first", pepper=PEPPER)
        await ledger.open_tenant(session, tenant.id, Currency.USD)
        await top_up(session, tenant.id, parse_pico(credit), idempotency_key="first", actor="test")
    return Spender(tenant, project, key)


async def budget(
    sessions: Sessions,
    who: Spender,
    amount: str,
    metric: LimitMetric = LimitMetric.SPEND_PER_DAY,
    level: LimitLevel = LimitLevel.TENANT,
    *,
    mode: LimitMode = LimitMode.SOFT,
    model: str = "",
) -> None:
    """Set a budget of the tenant, or for each of its projects or keys."""
    slot = LimitSlot(level, metric, mode=mode, model=model, tenant_id=who.tenant.id)
    await limited(sessions, slot, parse_pico(amount))


def event_of(who: Spender, at: datetime) -> UsageEvent:
    """What the poster notes of usage admitted at that instant: whose it was, and when."""
    made = make.event(who.tenant.id, make.schedule(make.a_version(), who.tenant.id))
    us = int(at.timestamp()) * 1_000_000
    return msgspec.structs.replace(made, project_id=who.project.id, key_id=who.key.id, admitted_at_us=us)


async def used(sessions: Sessions, tenant_id: UUID, minute: str, amount: str, **whose: UUID) -> None:
    """Enter posted usage of a minute."""
    statement = """
        INSERT INTO usage_rollup (tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome,
                                  price_version_id, currency, requests, input_uncached, input_cached,
                                  input_cache_write, output, reasoning, amount_pico)
        VALUES (:tenant, :minute, :project, :key, :model, 'demo', 'chat', 1, 'completed', :tenant, 'USD', 1,
                0, 0, 0, 0, 0, :amount)
        ON CONFLICT (tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome, price_version_id)
        DO UPDATE SET requests = usage_rollup.requests + 1, amount_pico = usage_rollup.amount_pico + :amount
    """
    values = {"project": make.PROJECT, "key": make.KEY, "model": make.MODEL} | whose
    values |= {"tenant": tenant_id, "minute": datetime.fromisoformat(minute), "amount": parse_pico(amount)}  # type: ignore[dict-item] # of several types
    async with transaction(sessions) as session:
        await session.execute(text(statement), values)
