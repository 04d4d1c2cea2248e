"""Which usage a budget's counter counts."""

from datetime import UTC, datetime, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from billing.budgets import following, part_of, projected_pico, window_of
from billing.crossings import reached
from tenants.types import LimitMetric

OWNER, MODEL = UUID(int=1), UUID(int=2)
BERLIN = ZoneInfo("Europe/Berlin")


def period(counter: str, zone: ZoneInfo = BERLIN) -> tuple[datetime, datetime]:
    start, until, *_ = part_of(counter, zone)
    assert start is not None
    assert until is not None
    return start, until


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-03-30", 24), ("2026-10-25", 25)])
def test_a_day_is_as_long_as_in_the_tenants_zone(day: str, hours: int) -> None:
    start, until = period(f"tenant:{OWNER.hex}:spend:d:{day}")
    assert until - start == timedelta(hours=hours)
    assert start.astimezone(BERLIN).isoformat()[:16] == f"{day}T00:00"


def test_a_day_of_summer_begins_at_ten_in_the_evening_of_the_day_before_in_utc() -> None:
    assert period(f"tenant:{OWNER.hex}:spend:d:2026-07-01")[0] == datetime(2026, 6, 30, 22, tzinfo=UTC)


@pytest.mark.parametrize(
    ("month", "start", "until"),
    [
        ("2026-03", datetime(2026, 2, 28, 23, tzinfo=UTC), datetime(2026, 3, 31, 22, tzinfo=UTC)),
        ("2026-12", datetime(2026, 11, 30, 23, tzinfo=UTC), datetime(2026, 12, 31, 23, tzinfo=UTC)),
    ],
)
def test_a_month_runs_from_midnight_to_midnight_there(month: str, start: datetime, until: datetime) -> None:
    assert period(f"tenant:{OWNER.hex}:spend:m:{month}") == (start, until)


def test_where_clocks_go_forward_at_midnight_the_day_begins_with_its_first_instant() -> None:
    start, until = period(f"tenant:{OWNER.hex}:spend:d:2018-11-04", ZoneInfo("America/Sao_Paulo"))
    assert (start, until - start) == (datetime(2018, 11, 4, 3, tzinfo=UTC), timedelta(hours=23))


@pytest.mark.parametrize(
    ("counter", "expected"),
    [
        (f"tenant:{OWNER.hex}:spend:t", (None, None, None)),
        (f"project:{OWNER.hex}:spend:t:soft", (OWNER, None, None)),
        (f"key:{OWNER.hex}:m:{MODEL.hex}:spend:t:dark", (None, OWNER, MODEL)),
    ],
)
def test_whose_usage_and_of_which_model(counter: str, expected: tuple[UUID | None, ...]) -> None:
    start, until, *whose = part_of(counter, BERLIN)
    assert (start, until) == (None, None)
    assert tuple(whose) == expected


@pytest.mark.parametrize(
    ("counter", "next_", "ends"),
    [
        ("spend:d:2026-03-28", "spend:d:2026-03-29", datetime(2026, 3, 29, 22, tzinfo=UTC)),
        ("spend:d:2026-12-31:soft", "spend:d:2027-01-01:soft", datetime(2027, 1, 1, 23, tzinfo=UTC)),
        ("spend:m:2026-12", "spend:m:2027-01", datetime(2027, 1, 31, 23, tzinfo=UTC)),
        ("spend:m:2026-02", "spend:m:2026-03", datetime(2026, 3, 31, 22, tzinfo=UTC)),
    ],
)
def test_the_next_period(counter: str, next_: str, ends: datetime) -> None:
    owner = f"project:{OWNER.hex}:m:{MODEL.hex}:"
    assert following(owner + counter, BERLIN) == (owner + next_, int(ends.timestamp()) * 10**6)


def test_a_total_has_no_next_period() -> None:
    with pytest.raises(ValueError, match="no next period"):
        following(f"key:{OWNER.hex}:spend:t", BERLIN)


@pytest.mark.parametrize("counter", ["key:k:spend:t", f"key:{OWNER.hex}:rpm", f"key:{OWNER.hex}:spend:d:2026-3-1"])
def test_what_is_no_budget_is_refused(counter: str) -> None:
    with pytest.raises(ValueError, match="No budget"):
        part_of(counter, BERLIN)


@pytest.mark.parametrize(
    ("zone", "day", "noon", "spent", "projected"),
    [
        # LiteLLM issue 31934: $10 a day, $6 by noon: 12.00 today, and nothing about the month
        ("Asia/Shanghai", "2026-11-29T16:00Z", "2026-11-30T04:00Z", 6_000_000_000_000, 12_000_000_000_000),
        # the day has 23 hours, 11 are over: 6 x 23 / 11
        ("Europe/Berlin", "2026-03-28T23:00Z", "2026-03-29T10:00Z", 6_000_000_000_000, 12_545_454_545_454),
        # the day has 25 hours, 13 are over: 6 x 25 / 13
        ("Europe/Berlin", "2026-10-24T22:00Z", "2026-10-25T11:00Z", 6_000_000_000_000, 11_538_461_538_461),
        ("UTC", "2026-11-30T00:00Z", "2026-11-30T00:00Z", 5, 5),  # nothing is over yet
    ],
)
def test_what_a_day_comes_to_when_it_goes_on_as_it_went(
    zone: str, day: str, noon: str, spent: int, projected: int
) -> None:
    start, until = window_of(LimitMetric.SPEND_PER_DAY, ZoneInfo(zone), datetime.fromisoformat(noon))
    assert start == datetime.fromisoformat(day)
    assert until is not None
    assert projected_pico(spent, start, until, datetime.fromisoformat(noon)) == projected


def test_a_month_begins_where_its_first_day_does_and_a_total_never() -> None:
    at = datetime(2026, 10, 31, 23, 30, tzinfo=UTC)  # 00:30 of 1 November in Berlin
    assert window_of(LimitMetric.SPEND_PER_MONTH, BERLIN, at) == (
        datetime(2026, 10, 31, 23, tzinfo=UTC),
        datetime(2026, 11, 30, 23, tzinfo=UTC),
    )
    assert window_of(LimitMetric.SPEND_TOTAL, BERLIN, at) == (None, None)


@pytest.mark.parametrize(
    ("spent", "limit", "expected"),
    [
        (49, 100, []),
        (50, 100, [50]),
        (99, 100, [50, 80]),
        (100, 100, [50, 80, 100]),
        (2, 3, [50]),
        (0, 0, []),
        (1, 0, []),
    ],
)
def test_thresholds_are_reached_and_never_rounded(spent: int, limit: int, expected: list[int]) -> None:
    assert reached(spent, limit, (50, 80, 100)) == expected
