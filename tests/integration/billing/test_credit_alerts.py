"""Alerts on credit on a real Postgres: one a crossing, raised by whoever looks, ended by what raises the credit."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from sqlalchemy import text

from billing import alert_settings, credit_alerts
from billing.adjustment_kinds import Adjustment
from billing.alert_settings import AlertSettings
from billing.credit_alerts import AlertKind, CreditAlert
from core.clock import ManualClock
from core.db import Sessions, transaction
from core.money import parse_pico
from core.settings import Database
from tenants.types import Role
from tests.factories import billing as make
from tests.factories import lots as credit
from tests.factories.people import member
from tests.factories.spending import Spender, spender, used
from tests.integration.billing.test_crossings import context_of, deliver

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


async def told_at(sessions: Sessions, who: Spender, low: str, days_left: int | None = None) -> None:
    async with transaction(sessions) as session:
        wanted = AlertSettings(low_balance_pico=parse_pico(low), days_left=days_left)
        await alert_settings.put(session, who.tenant.id, wanted)


async def spend(sessions: Sessions, who: Spender, amount: str) -> None:
    """Take paid credit, as the books do when usage is posted."""
    async with transaction(sessions) as session:
        await session.execute(
            text(
                "UPDATE ledger_balance SET debit = debit + :pico WHERE account_id ="
                " (SELECT account_id FROM credit_lot WHERE tenant_id = :tenant AND source = 'paid')"
            ),
            {"pico": parse_pico(amount), "tenant": who.tenant.id},
        )


async def alerts(sessions: Sessions, tenant_id: UUID) -> list[CreditAlert]:
    async with transaction(sessions) as session:
        return await credit_alerts.search(session, tenant_id, after=None, limit=50)


async def tick(sessions: Sessions, minutes: int = 0, *, forecast: bool = False) -> int:
    return await credit_alerts.sweep(sessions, ManualClock(NOW + timedelta(minutes=minutes)), forecast=forecast)


async def test_three_ticks_before_the_payment_are_one_alert(sessions: Sessions) -> None:
    """Lago PR 1962: what follows a crossing was done again every five minutes while the first one was under way."""
    who = await spender(sessions, credit="25")
    await told_at(sessions, who, "20")
    assert await tick(sessions) == 0
    await spend(sessions, who, "5")
    assert [await tick(sessions, minutes) for minutes in (5, 10, 15)] == [1, 0, 0]
    (open_,) = await alerts(sessions, who.tenant.id)
    assert (open_.kind, open_.available_pico, open_.cleared_at) == (AlertKind.LOW_BALANCE, parse_pico("20"), None)
    await make.add_credit(sessions, who.tenant.id, "0.000000000001", "paid")
    (ended,) = await alerts(sessions, who.tenant.id)
    assert ended.cleared_at is not None
    await spend(sessions, who, "0.000000000001")
    assert [await tick(sessions, minutes) for minutes in (20, 25)] == [1, 0]


async def test_a_payment_that_does_not_reach_the_threshold_ends_nothing(sessions: Sessions) -> None:
    who = await spender(sessions, credit="5")
    await told_at(sessions, who, "20")
    assert await tick(sessions) == 1
    await make.add_credit(sessions, who.tenant.id, "15", "paid")
    assert await tick(sessions, 5) == 0
    given: Adjustment = await credit.give(sessions, who.tenant.id, "1", NOW)
    assert given.state == "posted"
    assert [alert.cleared_at is None for alert in await alerts(sessions, who.tenant.id)] == [False]


async def test_credit_that_rises_and_falls_between_two_looks_is_told_of_twice(sessions: Sessions) -> None:
    who = await spender(sessions, credit="20")
    await told_at(sessions, who, "20")
    assert await tick(sessions) == 1
    await make.add_credit(sessions, who.tenant.id, "10", "paid")
    await spend(sessions, who, "10")
    assert await tick(sessions, 5) == 1


async def test_many_who_look_at_once_raise_one(sessions: Sessions) -> None:
    who = await spender(sessions, credit="20")
    await told_at(sessions, who, "20")
    looks = [credit_alerts.look(sessions, [who.tenant.id], ManualClock(NOW)) for _ in range(8)]
    assert sum(await asyncio.gather(*looks)) == 1


async def test_a_postpaid_limit(sessions: Sessions) -> None:
    tenant_id = await make.tenant(sessions, limit="10")

    async def use(amount: str) -> int:
        async with transaction(sessions) as session:
            await session.execute(
                text(
                    "UPDATE ledger_balance SET debit = debit + :pico WHERE account_id ="
                    " (SELECT unbilled_account FROM billing_profile WHERE tenant_id = :tenant)"
                ),
                {"pico": parse_pico(amount), "tenant": tenant_id},
            )
        return await tick(sessions)

    assert [await use(amount) for amount in ("7.99", "0.01", "1.99", "0.01")] == [0, 1, 0, 1]
    assert [alert.kind for alert in await alerts(sessions, tenant_id)] == [AlertKind.LIMIT_100, AlertKind.LIMIT_80]


async def test_the_forecast_is_told_in_the_persons_language(
    sessions: Sessions, database_settings: Database, tmp_path: Path
) -> None:
    """1.00 was used a week ago, 13.00 a day later: 14.00 in 7 days are 2.00 a day; 6.00 are left, 3 days."""
    who = await spender(sessions, credit="20")
    for at, amount in (("2026-11-23T12:00Z", "1"), ("2026-11-24T12:00Z", "13")):
        await used(sessions, who.tenant.id, at, amount, **who.whose)
    await used(sessions, who.tenant.id, "2026-11-23T11:59Z", "1000", **who.whose)  # longer ago
    await spend(sessions, who, "14")
    finance = await member(sessions, who.tenant.id, Role.FINANCE)
    await member(sessions, who.tenant.id, Role.DEVELOPER)
    async with transaction(sessions) as session:
        await session.execute(text("UPDATE person SET language = 'zh-CN' WHERE id = :id"), {"id": finance.person.id})
    assert await tick(sessions) == 0
    assert await tick(sessions, forecast=True) == 1
    assert await tick(sessions, 15, forecast=True) == 0
    context = context_of(sessions, database_settings, tmp_path, ManualClock(NOW))
    ((to, subject, words),) = await deliver(context)
    assert (to, subject) == (finance.person.email, "余额还可使用 3 天")
    assert "剩余 6.00 USD" in words
    await make.add_credit(sessions, who.tenant.id, "3", "paid")
    assert await tick(sessions, 30, forecast=True) == 0
    (alert,) = await alerts(sessions, who.tenant.id)
    assert (alert.days, alert.cleared_at is None) == (3, False)
