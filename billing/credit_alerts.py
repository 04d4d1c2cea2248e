"""Alerts on credit: a prepaid balance is low or will be in some days, a postpaid limit is used up by 80 or 100 %.

Each fires once and stays open until the credit rose above its threshold again; then, and only then, it can fire again.
Alerts are raised beside the posting and by the worker, and end in the transaction that raises the credit, or by the
worker where a setting or the forecast changed. A change is decided under the lock of the tenant's money.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import alert_queries, alert_settings, posting_queries, queries
from billing.alert_settings import AlertSettings
from billing.types import Balance, BillingMode
from core import outbox
from core.clock import Clock
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.logging import get_logger

TELL = "billing.tell_credit_alert"
BURN_SPAN = timedelta(days=7)
DAY_S = 86_400
PAGE = queries.PAGE_MAX

_log = get_logger(__name__)


class AlertKind(StrEnum):
    """What an alert says."""

    LOW_BALANCE = "low_balance"
    DAYS_LEFT = "days_left"
    LIMIT_80 = "limit_80"
    LIMIT_100 = "limit_100"


class Burn(msgspec.Struct, frozen=True):
    """What was used in the last seven days, or since the first use within them, at least a day."""

    pico: int
    span_s: int

    def days_left(self, available_pico: int) -> int:
        """Return for how many whole days the credit lasts at this rate."""
        return max(0, available_pico) * self.span_s // (self.pico * DAY_S)


class Level(msgspec.Struct, frozen=True):
    """A threshold that the credit may fall to. Open, the alert ends only above `ends_pico`."""

    kind: AlertKind
    threshold_pico: int
    ends_pico: int
    days: int | None = None  # left, of a forecast


class Changes(msgspec.Struct, frozen=True):
    """Alerts to raise and to end now."""

    raised: tuple[Level, ...] = ()
    ended: tuple[AlertKind, ...] = ()


class CreditAlert(msgspec.Struct, frozen=True):
    """An alert as it was raised; open while `cleared_at` is None."""

    id: UUID
    tenant_id: UUID
    kind: AlertKind
    threshold_pico: int
    days: int | None
    available_pico: int
    raised_at: datetime
    cleared_at: datetime | None


def levels(balance: Balance, chosen: AlertSettings, burn: Burn | None) -> list[Level]:
    """Return the thresholds that hold for a tenant; without a burn there is no forecast."""
    if balance.mode is BillingMode.POSTPAID:
        limit = balance.credit_limit_pico
        if not limit:
            return []
        return [Level(AlertKind.LIMIT_80, limit * 20 // 100, limit * 20 // 100), Level(AlertKind.LIMIT_100, 0, 0)]
    found = []
    if chosen.low_balance_pico is not None:
        found.append(Level(AlertKind.LOW_BALANCE, chosen.low_balance_pico, chosen.low_balance_pico))
    if chosen.days_left is not None and burn is not None and burn.pico:
        per_day = burn.pico * DAY_S
        # a forecast floats: it ends a day above the one that raised it
        below, above = chosen.days_left * per_day // burn.span_s, (chosen.days_left + 1) * per_day // burn.span_s
        found.append(Level(AlertKind.DAYS_LEFT, below, above, burn.days_left(balance.available_pico)))
    return found


def changes(
    balance: Balance, chosen: AlertSettings, burn: Burn | None, opened: Collection[AlertKind], *, forecast: bool
) -> Changes:
    """Return what is to be raised and ended. Without `forecast` nothing is said about days left."""
    raised, ended = [], []
    found = {level.kind: level for level in levels(balance, chosen, burn)}
    for kind in AlertKind:
        level = found.get(kind)
        if kind is AlertKind.DAYS_LEFT and not forecast:
            continue
        if kind in opened and (level is None or balance.available_pico > level.ends_pico):
            ended.append(kind)
        elif kind not in opened and level is not None and balance.available_pico <= level.threshold_pico:
            raised.append(level)
    return Changes(tuple(raised), tuple(ended))


async def look(sessions: Sessions, tenant_ids: Sequence[UUID], clock: Clock, *, forecast: bool = False) -> int:
    """Raise and end alerts of these tenants; returns how many are raised.

    Args:
        sessions: makes transactions.
        tenant_ids: at most a page.
        clock: says when.
        forecast: also by what was used in seven days, which is a scan of that usage.
    """
    async with transaction(sessions) as session:
        due = await _due(session, tenant_ids, clock.now(), forecast=forecast)
    count = 0
    for tenant_id in due:
        async with transaction(sessions) as session:
            count += await settle(session, tenant_id, clock.now(), forecast=forecast)
    return count


async def settle(session: AsyncSession, tenant_id: UUID, now: datetime, *, forecast: bool = False) -> int:
    """Raise and end a tenant's alerts as its credit stands now; returns how many are raised. Takes its lock."""
    await posting_queries.lock_profiles(session, [tenant_id])
    due = await _due(session, [tenant_id], now, forecast=forecast)
    if tenant_id not in due:
        return 0
    balance, found = due[tenant_id]
    await alert_queries.end_alerts(session, tenant_id, found.ended, now)
    for level in found.raised:
        alert_id = new_uuid()
        values = {
            "id": alert_id,
            "kind": level.kind.value,
            "threshold": level.threshold_pico,
            "days": level.days,
            "available": balance.available_pico,
            "at": now,
        }
        await alert_queries.insert_alert(session, tenant_id, values)
        await outbox.add(session, TELL, {"tenant_id": tenant_id.hex, "alert": alert_id.hex})
        _log.info("credit.alert_raised", tenant_id=tenant_id.hex, kind=level.kind.value)
    return len(found.raised)


async def end_risen(session: AsyncSession, tenant_id: UUID) -> None:
    """End what the tenant's credit rose above, in the transaction that raised it; the caller holds its lock.

    The forecast is left to the worker: it needs a scan of usage.
    """
    opened = {AlertKind(row.kind) for row in await alert_queries.open_alerts(session, [tenant_id])}
    if not opened:
        return
    chosen = await alert_settings.get(session, tenant_id)
    for balance in await queries.balances(session, [tenant_id]):
        ended = changes(balance, chosen, None, opened, forecast=False).ended
        await alert_queries.end_alerts(session, tenant_id, ended, None)


async def _due(
    session: AsyncSession, tenant_ids: Sequence[UUID], now: datetime, *, forecast: bool
) -> dict[UUID, tuple[Balance, Changes]]:
    balances = await queries.balances(session, tenant_ids)
    chosen = await alert_settings.of_many(session, tenant_ids)
    opened: dict[UUID, set[AlertKind]] = {}
    for row in await alert_queries.open_alerts(session, tenant_ids):
        opened.setdefault(row.tenant_id, set()).add(AlertKind(row.kind))
    burns = await _burns(session, tenant_ids, now) if forecast else {}
    found = {
        balance.tenant_id: (
            balance,
            changes(
                balance,
                chosen[balance.tenant_id],
                burns.get(balance.tenant_id),
                opened.get(balance.tenant_id, ()),
                forecast=forecast,
            ),
        )
        for balance in balances
    }
    return {tenant: due for tenant, due in found.items() if due[1].raised or due[1].ended}


async def _burns(session: AsyncSession, tenant_ids: Sequence[UUID], now: datetime) -> dict[UUID, Burn]:
    rows = await alert_queries.burn(session, tenant_ids, now - BURN_SPAN, now)
    return {
        row.tenant_id: Burn(int(row.pico), max(DAY_S, (now - row.first) // timedelta(seconds=1)))
        for row in rows
        if row.pico
    }


async def sweep(sessions: Sessions, clock: Clock, *, forecast: bool = False) -> int:
    """Look at all tenants; returns how many alerts are raised."""
    raised, last = 0, UUID(int=0)
    while True:
        async with transaction(sessions) as session:
            page = [balance.tenant_id for balance in await queries.balances_after(session, last)]
        if page:
            last = page[-1]
            raised += await look(sessions, page, clock, forecast=forecast)
        if len(page) < PAGE:
            return raised


async def search(session: AsyncSession, tenant_id: UUID, *, after: UUID | None, limit: int) -> list[CreditAlert]:
    """Return a tenant's alerts, newest first."""
    return [_alert(row) for row in await alert_queries.alerts(session, tenant_id, after, limit)]


async def get(session: AsyncSession, tenant_id: UUID, alert_id: UUID) -> CreditAlert | None:
    row = await alert_queries.alert(session, tenant_id, alert_id)
    return None if row is None else _alert(row)


def _alert(row: Row[tuple[object, ...]]) -> CreditAlert:
    return CreditAlert(
        row.id,
        row.tenant_id,
        AlertKind(row.kind),
        int(row.threshold_pico),
        row.days,
        int(row.available_pico),
        row.raised_at,
        row.cleared_at,
    )
