"""What a tenant sets about alerts: which thresholds of budgets, below which balance, how many days ahead."""

from collections.abc import Collection
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import alert_queries, errors

THRESHOLDS_DEFAULT = (50, 80, 100)
THRESHOLDS_MAX = 10
PERCENT_MAX = 1000  # a soft budget may be passed far
DAYS_LEFT_DEFAULT = 3
DAYS_LEFT_MAX = 365


class AlertSettings(msgspec.Struct, frozen=True):
    """Thresholds in percent of a budget; the prepaid balance and days of credit left below which people are told."""

    thresholds: tuple[int, ...] = THRESHOLDS_DEFAULT
    low_balance_pico: int | None = None  # None: no alert at a balance
    days_left: int | None = DAYS_LEFT_DEFAULT  # None: no forecast


async def of_many(session: AsyncSession, tenant_ids: Collection[UUID]) -> dict[UUID, AlertSettings]:
    """Return the settings of each of these tenants."""
    rows = await alert_queries.alert_settings(session, tenant_ids)
    return {tenant: _settings(rows[tenant]) if tenant in rows else AlertSettings() for tenant in tenant_ids}


async def get(session: AsyncSession, tenant_id: UUID) -> AlertSettings:
    return (await of_many(session, [tenant_id]))[tenant_id]


async def put(session: AsyncSession, tenant_id: UUID, wanted: AlertSettings) -> None:
    """Replace a tenant's settings.

    Raises:
        PlatformError: INVALID_AMOUNT, INVALID_ALERT_SETTINGS.
    """
    percents = wanted.thresholds
    if len(percents) > THRESHOLDS_MAX or any(not 1 <= percent <= PERCENT_MAX for percent in percents):
        raise errors.invalid_alert_settings(
            f"At most {THRESHOLDS_MAX} thresholds, each from 1 to {PERCENT_MAX} percent; none: no alerts of budgets.",
            "thresholds",
        )
    if wanted.low_balance_pico is not None and not 0 < wanted.low_balance_pico <= 10**21:
        raise errors.invalid_amount("A balance to be told at is more than 0 and at most 1,000,000,000.")
    if wanted.days_left is not None and not 1 <= wanted.days_left <= DAYS_LEFT_MAX:
        raise errors.invalid_alert_settings(f"From 1 to {DAYS_LEFT_MAX} days; null: no forecast.", "days_left")
    values = {
        "thresholds": sorted(set(percents)),
        "low_balance_pico": wanted.low_balance_pico,
        "days_left": wanted.days_left,
    }
    await alert_queries.put_alert_settings(session, tenant_id, values)


def _settings(row: Row[tuple[object, ...]]) -> AlertSettings:
    low = None if row.low_balance_pico is None else int(row.low_balance_pico)
    return AlertSettings(tuple(row.thresholds), low, row.days_left)
