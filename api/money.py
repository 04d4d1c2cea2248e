"""What a tenant sees of its own money and an operator of anybody's: balance and usage."""

from datetime import date, datetime, timedelta
from typing import Annotated
from uuid import UUID
from zoneinfo import ZoneInfo

from fastapi import Query
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.schemas import BalanceOut, CurrencyCode, Output, UsageOut, UsageRow
from billing import credits as billing_credits
from billing.statements import statement
from billing.usage import by_day_and_model
from core.clock import Clock
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.money import format_pico
from core.pagination import LIMIT_DEFAULT, LIMIT_MAX
from tenants import tenants
from tenants.types import BillingMode

DAYS_DEFAULT = 30
ENTRIES_DEFAULT = LIMIT_DEFAULT

FIRST_DAY = date(2020, 1, 1)
LAST_DAY = date(2999, 12, 31)
From = Annotated[
    datetime | None,
    Query(description="From this instant, included; by default 30 days.", examples=["2026-11-01T00:00:00Z"]),
]
Until = Annotated[
    datetime | None,
    Query(description="Until this instant, not included; by default now.", examples=["2026-12-01T00:00:00Z"]),
]
Offset = Annotated[int, Query(ge=0, le=1_000_000, description="`next_offset` of the page before.")]
PageSize = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most entries to return.")]
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
            min_charge=format_pico(row.min_charge_pico),
            rerated=format_pico(row.rerated_pico),
            effective_amount=format_pico(row.amount_pico + row.rerated_pico),
        )
        for row in found
    ]
    return UsageOut(start=first, end=last, tz=tenant.tz, currency=tenant.currency.value, rows=rows)


class StatementEntryOut(Output):
    """A transaction, or all usage of one day (UTC), where the last of it was booked."""

    at: datetime
    kind: str
    transaction_id: str | None
    note: str
    transactions: int
    change: str
    balance: str = Field(description="The balance after it.")


class StatementOut(Output):
    """Opening balance and all entries add up to the closing balance. Below 0: usage that is not invoiced yet."""

    currency: CurrencyCode
    opening: str
    closing: str
    entries: list[StatementEntryOut]
    next_offset: int | None = Field(description="Where the next page begins; null at the end.")


async def statement_of(
    session: AsyncSession,
    tenant_id: UUID,
    span: tuple[datetime | None, datetime | None],
    page: tuple[int, int],
    clock: Clock,
) -> StatementOut:
    """Return a tenant's statement from and until these instants; `page` is offset and size."""
    tenant = await tenants.get(session, tenant_id)
    until = span[1] or clock.now()
    since = span[0] or until - timedelta(days=DAYS_DEFAULT)
    if since.tzinfo is None or until.tzinfo is None:
        raise PlatformError("INVALID_RANGE", ErrorKind.INVALID, "Give instants with their zone.", param="start")
    found = await statement(session, tenant_id, since, until, offset=page[0], limit=page[1])
    return StatementOut(
        currency=tenant.currency.value,
        opening=format_pico(found.opening_pico),
        closing=format_pico(found.closing_pico),
        entries=[
            StatementEntryOut(
                at=entry.at,
                kind=entry.kind,
                transaction_id=None
                if entry.transaction_id is None
                else format_id(IdKind.TRANSACTION, entry.transaction_id),
                note=entry.note,
                transactions=entry.transactions,
                change=format_pico(entry.change_pico),
                balance=format_pico(entry.balance_pico),
            )
            for entry in found.entries
        ],
        next_offset=found.next_offset,
    )
