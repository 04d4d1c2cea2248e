"""A caller's limits as demands."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.types import DeploymentKind, EngineKind, ServedModel
from core.demand import Demand, DemandKind, Unit
from core.money import Currency
from core.tiers import Tier
from tenants.quotas import FAR_US, day_of, demands, month_of, until_us
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode, Principal

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
KEY, PROJECT, TENANT = (UUID(int=n).hex for n in (12, 11, 10))


def _model(name: str, model_name: str = "", model_id: int = 1) -> ServedModel:
    return ServedModel(
        name=name,
        model_id=UUID(int=model_id),
        version_id=UUID(int=2),
        deployment_id=UUID(int=3),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="m",
        context_max=4096,
        default_max_tokens=256,
        endpoints=frozenset({"chat"}),
        model_name=model_name,
    )


def _principal(*limits: Limit, tz: str = "UTC") -> Principal:
    return Principal(
        tenant_id=UUID(int=10),
        project_id=UUID(int=11),
        key_id=UUID(int=12),
        currency=Currency.USD,
        scopes=frozenset({"inference"}),
        tier_default=Tier.STANDARD,
        tier_max=Tier.PRIORITY,
        limits=limits,
        tz=tz,
    )


def test_no_limit_no_demand_and_a_limit_of_nothing_is_one() -> None:
    assert demands(_principal(), _model("m"), NOON) == ()
    (nothing,) = demands(_principal(Limit(LimitLevel.KEY, LimitMetric.CONCURRENCY, 0)), _model("m"), NOON)
    assert (nothing.limit, nothing.enforced) == (0, True)


def test_every_metric_is_a_demand_of_its_own_kind() -> None:
    limits = [Limit(LimitLevel.PROJECT, metric, place) for place, metric in enumerate(LimitMetric, 1)]
    december = 1_796_083_200_000_000  # 2026-12-01T00:00:00Z
    own, tokens, budget = f"project:{PROJECT}", "TOKENS_LIMITED", "BUDGET_EXCEEDED"
    rate, spend = DemandKind.RATE, DemandKind.SPEND
    words = {
        demand.label.removesuffix(" of this project"): demand
        for demand in demands(_principal(*limits), _model("m"), NOON)
    }
    assert {label: msgspec.structs.replace(demand, label="") for label, demand in words.items()} == {
        "requests per minute": Demand(rate, f"{own}:rpm", 1, 1, "RATE_LIMITED", 60),
        "input tokens per minute": Demand(rate, f"{own}:itpm", 0, 2, tokens, 60, Unit.INPUT_TOKEN),
        "output tokens per minute": Demand(rate, f"{own}:otpm", 0, 3, tokens, 60, Unit.OUTPUT_TOKEN),
        "requests at once": Demand(DemandKind.CONCURRENCY, f"{own}:conc", 1, 4, "CONCURRENCY_LIMITED"),
        "spend per day": Demand(spend, f"{own}:spend:d:2026-11-30", 0, 5, budget, until_us=december),
        "spend per month": Demand(spend, f"{own}:spend:m:2026-11", 0, 6, budget, until_us=december),
        "spend in total": Demand(spend, f"{own}:spend:t", 0, 7, budget),
    }


def test_soft_and_dark_limits_count_apart_and_refuse_nothing() -> None:
    modes = [Limit(LimitLevel.TENANT, LimitMetric.CONCURRENCY, 5, mode) for mode in LimitMode]
    found = demands(_principal(*modes), _model("m"), NOON)
    assert [(demand.counter, demand.enforced) for demand in found] == [
        (f"tenant:{TENANT}:conc", True),
        (f"tenant:{TENANT}:conc:soft", False),
        (f"tenant:{TENANT}:conc:dark", False),
    ]


def test_a_limit_of_a_model_holds_for_it_alone_and_under_every_name() -> None:
    """Whoever writes another public name of the model must not get round its limit."""
    caller = _principal(Limit(LimitLevel.KEY, LimitMetric.REQUESTS_PER_MINUTE, 5, model="smol"))
    counters = [
        [demand.counter for demand in demands(caller, model, NOON)]
        for model in (_model("smol", "smol"), _model("small", "smol"), _model("other", "other", 2))
    ]
    named = f"key:{KEY}:m:{UUID(int=1).hex}:rpm"
    assert counters == [[named], [named], []]
    (demand,) = demands(caller, _model("small", "smol"), NOON)
    assert demand.label == "requests per minute of this key for the model smol"


# Days begin: looked up with `date -u -d 'TZ="Zone" 2026-03-29 00:00'` (GNU coreutils).
DAYS = (
    ("UTC", "2026-11-30T23:59:59.999999", "2026-11-30", "2026-12-01T00:00:00"),
    ("UTC", "2026-12-01T00:00:00", "2026-12-01", "2026-12-02T00:00:00"),
    ("Asia/Shanghai", "2026-11-30T15:59:59", "2026-11-30", "2026-11-30T16:00:00"),
    ("Asia/Shanghai", "2026-11-30T16:00:00", "2026-12-01", "2026-12-01T16:00:00"),
    ("Europe/Berlin", "2026-03-28T23:30:00", "2026-03-29", "2026-03-29T22:00:00"),  # 23 hours long
    ("Europe/Berlin", "2026-10-25T12:00:00", "2026-10-25", "2026-10-25T23:00:00"),  # 25 hours long
    ("America/New_York", "2026-11-01T12:00:00", "2026-11-01", "2026-11-02T05:00:00"),  # 25 hours long
    ("Africa/Cairo", "2026-04-23T12:00:00", "2026-04-23", "2026-04-23T22:00:00"),  # midnight does not exist: 01:00
    ("America/Havana", "2026-11-01T04:30:00", "2026-11-01", "2026-11-02T05:00:00"),  # midnight comes twice
    ("Pacific/Kiritimati", "2026-11-30T10:00:00", "2026-12-01", "2026-12-01T10:00:00"),
)


@pytest.mark.parametrize(("tz", "now", "day", "end"), DAYS)
def test_days_are_those_of_the_tenants_time_zone(tz: str, now: str, day: str, end: str) -> None:
    today, until = day_of(tz, datetime.fromisoformat(now).replace(tzinfo=UTC))
    assert today.isoformat() == day
    assert until == int(datetime.fromisoformat(end).replace(tzinfo=UTC).timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("tz", "now", "month", "end"),
    [
        ("UTC", "2028-02-29T23:00:00", "2028-02-01", "2028-03-01T00:00:00"),
        ("Asia/Shanghai", "2026-12-31T16:00:00", "2027-01-01", "2027-01-31T16:00:00"),
        ("Europe/Berlin", "2026-03-31T21:59:59", "2026-03-01", "2026-03-31T22:00:00"),  # begun with winter time
        ("America/New_York", "2026-11-30T12:00:00", "2026-11-01", "2026-12-01T05:00:00"),
    ],
)
def test_months_are_those_of_the_tenants_time_zone(tz: str, now: str, month: str, end: str) -> None:
    first, until = month_of(tz, datetime.fromisoformat(now).replace(tzinfo=UTC))
    assert first.isoformat() == month
    assert until == int(datetime.fromisoformat(end).replace(tzinfo=UTC).timestamp()) * 1_000_000


def test_demands_change_by_themselves_when_a_budgets_period_ends() -> None:
    day = Limit(LimitLevel.KEY, LimitMetric.SPEND_PER_DAY, 5)
    month = Limit(LimitLevel.KEY, LimitMetric.SPEND_PER_MONTH, 5)
    total = Limit(LimitLevel.KEY, LimitMetric.SPEND_TOTAL, 5)
    now = datetime(2026, 11, 10, 12, tzinfo=UTC)
    eleventh, december = 1_794_355_200_000_000, 1_796_083_200_000_000  # 2026-11-11, 2026-12-01
    assert until_us(_principal(day, month), now) == eleventh
    assert until_us(_principal(month), now) == december
    assert until_us(_principal(total), now) == until_us(_principal(), now) == FAR_US


ZONES = sorted({row[0] for row in DAYS})
INSTANTS = st.datetimes(datetime(2024, 1, 1), datetime(2036, 1, 1)).map(lambda at: at.replace(tzinfo=UTC))


@given(st.sampled_from(ZONES), INSTANTS)
def test_a_day_ends_where_the_next_begins(tz: str, now: datetime) -> None:
    today, until = day_of(tz, now)
    end = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=until)
    assert now < end <= now + timedelta(hours=25)
    assert day_of(tz, end - timedelta(microseconds=1))[0] == today
    assert day_of(tz, end)[0] == today + timedelta(days=1)
