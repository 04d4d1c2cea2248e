"""What a tenant sees of its own money and an operator of anybody's: balance and usage."""

from datetime import date, timedelta
from typing import Annotated
from uuid import UUID
from zoneinfo import ZoneInfo

from fastapi import Query
from sqlalchemy.ext.asyncio import AsyncSession

from api.schemas import BalanceOut, UsageOut, UsageRow
from billing import credits as billing_credits
from billing.usage import by_day_and_model
from core.clock import Clock
from core.money import format_pico
from tenants import tenants
from tenants.types import BillingMode

DAYS_DEFAULT = 30

FIRST_DAY = date(2020, 1, 1)
LAST_DAY = date(2999, 12, 31)
Day = Annotated[
    date | None,
    Query(ge=FIRST_DAY, le=LAST_DAY, description="A day of the tenant's time zone, as 2026-11-30."),
]


async def balance_of(session: AsyncSession, tenant_id: UUID) -> BalanceOut:
    found = await billing_credits.balance(session, tenant_id)
    return BalanceOut(
        currency=found.currency.value,
        billing_mode=BillingMode(found.mode.value),
        available=format_pico(found.available_pico),
        credit_limit=format_pico(found.credit_limit_pico),
    )


async def usage_of(
    session: AsyncSession, tenant_id: UUID, start: date | None, end: date | None, clock: Clock
) -> UsageOut:
    """Return usage from `start` to `end`, both included; without them the last 30 days of the tenant's time zone."""
    tenant = await tenants.get(session, tenant_id)
    last = end or clock.now().astimezone(ZoneInfo(tenant.tz)).date()
    first = start or max(FIRST_DAY, last - timedelta(days=DAYS_DEFAULT - 1))
    found = await by_day_and_model(session, tenant_id, first, last, time_zone=tenant.tz)
    rows = [
        UsageRow(
            day=row.day,
            model=row.model,
            requests=row.requests,
            completed=row.completed,
            input_uncached=row.input_uncached,
            input_cached=row.input_cached,
            input_cache_write=row.input_cache_write,
            output=row.output,
            reasoning=row.reasoning,
            amount=format_pico(row.amount_pico),
        )
        for row in found
    ]
    return UsageOut(start=first, end=last, tz=tenant.tz, currency=tenant.currency.value, rows=rows)
