"""Shapes of budgets as they stand, crossings and alerts on credit, for the routes of operators and of members."""

from collections.abc import Collection
from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import Query
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.deps import Paging
from api.schemas import CurrencyCode, Input, Output, PositiveAmount
from billing import alert_settings, credit_alerts, crossings
from billing.alert_settings import DAYS_LEFT_DEFAULT, THRESHOLDS_DEFAULT, AlertSettings
from billing.budgets import projected_pico
from billing.credit_alerts import CreditAlert
from billing.crossings import Crossing, Spending
from core.ids import IdKind, format_id
from core.money import format_pico, parse_pico
from core.pagination import LIMIT_DEFAULT, LIMIT_MAX, page_of
from tenants import tenants

BudgetsMax = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Most budgets to return.")]
BUDGETS_DEFAULT = LIMIT_DEFAULT
_OWNERS = {"tenant": IdKind.TENANT, "project": IdKind.PROJECT, "key": IdKind.API_KEY}


class BudgetOut(Output):
    """A budget in its present period. What is not posted yet, a second or so of usage, is not in it."""

    level: str = Field(description="tenant, project or key")
    owner_id: str
    metric: str
    mode: str = Field(description="A hard one refuses what does not fit, a soft one tells people.")
    model: str = Field(description="Empty: all models together.")
    limit: str
    spent: str
    percent: int = Field(description="Spent of the limit, rounded down.")
    period_start: datetime | None
    period_end: datetime | None
    projected: str | None = Field(
        description="Spent at the end of the period when it goes on as it went so far; null for a total."
    )


class BudgetsOut(Output):
    """Budgets in use, the nearest to its end first."""

    currency: CurrencyCode
    tz: str
    as_of: datetime
    total: int
    items: list[BudgetOut]


class CrossingOut(Output):
    """What is posted on a budget reached a threshold of it, in one of its periods."""

    id: str
    level: str
    owner_id: str
    project_id: str | None
    metric: str
    mode: str
    model: str
    period_start: datetime | None
    period_end: datetime | None
    threshold_percent: int
    limit: str
    spent: str = Field(description="When it was noticed, some seconds after.")
    crossed_at: datetime


class CrossingPage(Output):
    """Crossings, newest first."""

    items: list[CrossingOut]
    next_after: str | None


class CreditAlertOut(Output):
    """Credit that was low when the alert was raised; it ends when the credit rose above the threshold."""

    id: str
    kind: str = Field(description="low_balance, days_left, limit_80 or limit_100")
    threshold: str
    days_left: int | None
    available: str
    raised_at: datetime
    ended_at: datetime | None


class CreditAlertPage(Output):
    """Alerts on credit, newest first."""

    items: list[CreditAlertOut]
    next_after: str | None


class AlertSettingsIn(Input):
    """What people are told about; what is left out has its default."""

    thresholds_percent: list[Annotated[int, Field(ge=1, le=alert_settings.PERCENT_MAX)]] = Field(
        list(THRESHOLDS_DEFAULT),
        max_length=alert_settings.THRESHOLDS_MAX,
        description="Of every budget.",
    )
    low_balance: PositiveAmount | None = Field(None, description="Prepaid: tell when no more than this is left.")
    days_left: int | None = Field(
        DAYS_LEFT_DEFAULT,
        ge=1,
        le=alert_settings.DAYS_LEFT_MAX,
        description="Prepaid: tell when credit lasts no longer at the rate of the last seven days; null: do not tell.",
    )

    def settings(self) -> AlertSettings:
        low = None if self.low_balance is None else parse_pico(self.low_balance, param="low_balance")
        return AlertSettings(tuple(sorted(set(self.thresholds_percent))), low, self.days_left)


class AlertSettingsOut(Output):
    """What people are told about."""

    thresholds_percent: list[int]
    low_balance: str | None
    days_left: int | None


def settings_shown(found: AlertSettings) -> AlertSettingsOut:
    return AlertSettingsOut(
        thresholds_percent=list(found.thresholds),
        low_balance=None if found.low_balance_pico is None else format_pico(found.low_balance_pico),
        days_left=found.days_left,
    )


async def settings_of(session: AsyncSession, tenant_id: UUID) -> AlertSettingsOut:
    await tenants.get(session, tenant_id)
    return settings_shown(await alert_settings.get(session, tenant_id))


async def put_settings(
    session: AsyncSession, tenant_id: UUID, body: AlertSettingsIn
) -> tuple[AlertSettingsOut, AlertSettingsOut]:
    """Replace them; return how they were and how they are."""
    before = await settings_of(session, tenant_id)
    await alert_settings.put(session, tenant_id, body.settings())
    return before, await settings_of(session, tenant_id)


def _budget(one: Spending, now: datetime) -> BudgetOut:
    budget, (start, until) = one.budget, one.window
    projected = None
    if start is not None and until is not None:
        projected = format_pico(projected_pico(one.spent_pico, start, until, now))
    return BudgetOut(
        level=budget.level.value,
        owner_id=format_id(_OWNERS[budget.level.value], budget.owner_id),
        metric=budget.metric.value,
        mode=budget.mode.value,
        model=budget.model,
        limit=format_pico(budget.limit_pico),
        spent=format_pico(one.spent_pico),
        percent=100 * one.spent_pico // budget.limit_pico if budget.limit_pico else 100,
        period_start=start,
        period_end=until,
        projected=projected,
    )


async def budgets_of(
    session: AsyncSession, tenant_id: UUID, projects: Collection[UUID] | None, limit: int, now: datetime
) -> BudgetsOut:
    tenant = await tenants.get(session, tenant_id)
    found = await crossings.status(session, tenant_id, projects, now)
    return BudgetsOut(
        currency=tenant.currency.value,
        tz=tenant.tz,
        as_of=now,
        total=len(found),
        items=[_budget(one, now) for one in found[:limit]],
    )


def _crossing(one: Crossing) -> CrossingOut:
    return CrossingOut(
        id=format_id(IdKind.CROSSING, one.id),
        level=one.level,
        owner_id=format_id(_OWNERS[one.level], one.owner_id),
        project_id=None if one.project_id is None else format_id(IdKind.PROJECT, one.project_id),
        metric=one.metric,
        mode=one.mode,
        model=one.model,
        period_start=one.window[0],
        period_end=one.window[1],
        threshold_percent=one.threshold,
        limit=format_pico(one.limit_pico),
        spent=format_pico(one.spent_pico),
        crossed_at=one.crossed_at,
    )


async def crossings_of(
    session: AsyncSession, tenant_id: UUID, projects: Collection[UUID] | None, paging: Paging
) -> CrossingPage:
    await tenants.get(session, tenant_id)
    found = await crossings.search(session, tenant_id, projects, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda one: one.id)
    after = None if page.next_after is None else format_id(IdKind.CROSSING, page.next_after)
    return CrossingPage(items=[_crossing(one) for one in page.items], next_after=after)


def _alert(one: CreditAlert) -> CreditAlertOut:
    return CreditAlertOut(
        id=format_id(IdKind.CREDIT_ALERT, one.id),
        kind=one.kind.value,
        threshold=format_pico(one.threshold_pico),
        days_left=one.days,
        available=format_pico(one.available_pico),
        raised_at=one.raised_at,
        ended_at=one.cleared_at,
    )


async def credit_alerts_of(session: AsyncSession, tenant_id: UUID, paging: Paging) -> CreditAlertPage:
    await tenants.get(session, tenant_id)
    found = await credit_alerts.search(session, tenant_id, after=paging.after, limit=paging.limit_probe)
    page = page_of(found, paging.limit, lambda one: one.id)
    after = None if page.next_after is None else format_id(IdKind.CREDIT_ALERT, page.next_after)
    return CreditAlertPage(items=[_alert(one) for one in page.items], next_after=after)
