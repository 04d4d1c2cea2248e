"""When an alert on credit is raised, and when it ends."""

from uuid import UUID

import pytest

from billing.alert_settings import AlertSettings
from billing.credit_alerts import AlertKind, Burn, changes
from billing.types import Balance, BillingMode
from core.money import Currency, parse_pico

LOW = AlertSettings(low_balance_pico=parse_pico("20"), days_left=3)
DAY_S = 86_400


def balance(available: str, limit: str = "") -> Balance:
    mode = BillingMode.POSTPAID if limit else BillingMode.PREPAID
    return Balance(UUID(int=1), Currency.USD, mode, parse_pico(available), parse_pico(limit or "0"), 1)


def raised(found: Balance, *opened: AlertKind, burn: Burn | None = None) -> tuple[list[AlertKind], list[AlertKind]]:
    due = changes(found, LOW, burn, opened, forecast=True)
    return [level.kind for level in due.raised], list(due.ended)


@pytest.mark.parametrize(
    ("available", "opened", "expected"),
    [
        ("20.000000000001", False, ([], [])),
        ("20", False, ([AlertKind.LOW_BALANCE], [])),
        ("-1", True, ([], [])),  # told already
        ("20", True, ([], [])),  # it has not risen above
        ("20.000000000001", True, ([], [AlertKind.LOW_BALANCE])),
    ],
)
def test_a_low_balance(available: str, *, opened: bool, expected: tuple[list[AlertKind], list[AlertKind]]) -> None:
    assert raised(balance(available), *([AlertKind.LOW_BALANCE] if opened else [])) == expected


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        ("100.000000000001", []),
        ("100", [AlertKind.LIMIT_80]),  # of 500, 400 are used
        ("0.000000000001", [AlertKind.LIMIT_80]),
        ("0", [AlertKind.LIMIT_80, AlertKind.LIMIT_100]),
    ],
)
def test_a_postpaid_limit_at_80_and_100_percent(available: str, expected: list[AlertKind]) -> None:
    assert raised(balance(available, "500")) == (expected, [])
    assert raised(balance(available, "500"), AlertKind.LIMIT_80, AlertKind.LIMIT_100) == (
        [],
        [kind for kind in (AlertKind.LIMIT_80, AlertKind.LIMIT_100) if kind not in expected],
    )


def test_how_long_credit_lasts() -> None:
    """70.00 used in seven days are 10.00 a day: 30.00 last for 3 days, and from above 40.00 the forecast is over."""
    week = Burn(parse_pico("70"), 7 * DAY_S)
    assert [week.days_left(parse_pico(units)) for units in ("30", "39.99", "40", "-5")] == [3, 3, 4, 0]
    assert raised(balance("30.000000000001"), burn=week) == ([], [])
    assert raised(balance("30"), burn=week) == ([AlertKind.DAYS_LEFT], [])
    assert raised(balance("40"), AlertKind.DAYS_LEFT, burn=week) == ([], [])
    assert raised(balance("40.000000000001"), AlertKind.DAYS_LEFT, burn=week) == ([], [AlertKind.DAYS_LEFT])


def test_a_tenant_who_began_yesterday_is_not_taken_for_thrifty() -> None:
    """10.00 in the one day there is: 25.00 last for 2 days, not for 17."""
    assert Burn(parse_pico("10"), DAY_S).days_left(parse_pico("25")) == 2


def test_what_is_no_longer_asked_for_ends() -> None:
    assert raised(balance("5", "500"), AlertKind.LOW_BALANCE, AlertKind.DAYS_LEFT)[1] == [
        AlertKind.LOW_BALANCE,
        AlertKind.DAYS_LEFT,
    ]
    nothing = AlertSettings(low_balance_pico=None, days_left=None)
    due = changes(balance("5"), nothing, Burn(10**15, DAY_S), (AlertKind.LOW_BALANCE,), forecast=True)
    assert (due.raised, due.ended) == ((), (AlertKind.LOW_BALANCE,))


def test_without_a_forecast_nothing_is_said_about_days() -> None:
    due = changes(balance("25"), LOW, None, (AlertKind.DAYS_LEFT,), forecast=False)
    assert (due.raised, due.ended) == ((), ())
