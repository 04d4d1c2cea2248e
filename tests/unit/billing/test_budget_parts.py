"""Which usage a budget's counter counts."""

from datetime import UTC, datetime, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

from billing.budgets import following, part_of

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
