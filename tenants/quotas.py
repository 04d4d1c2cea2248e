"""Pure: a caller's limits as demands on shared counters."""

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from catalog.types import ServedModel
from core.demand import Demand, DemandKind, Unit
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode, Principal

WINDOW_S = 60
RATE_LIMITED = "RATE_LIMITED"
TOKENS_LIMITED = "TOKENS_LIMITED"
CONCURRENCY_LIMITED = "CONCURRENCY_LIMITED"
BUDGET_EXCEEDED = "BUDGET_EXCEEDED"
FAR_US = 2**63 - 1  # later than any instant that is asked about

_RATES = {  # name of the counter, what it counts, what one request takes when that is known, refusal
    LimitMetric.REQUESTS_PER_MINUTE: ("rpm", Unit.REQUEST, 1, RATE_LIMITED),
    LimitMetric.INPUT_TOKENS_PER_MINUTE: ("itpm", Unit.INPUT_TOKEN, 0, TOKENS_LIMITED),
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE: ("otpm", Unit.OUTPUT_TOKEN, 0, TOKENS_LIMITED),
}
_WORDS = {
    LimitMetric.REQUESTS_PER_MINUTE: "requests per minute",
    LimitMetric.INPUT_TOKENS_PER_MINUTE: "input tokens per minute",
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE: "output tokens per minute",
    LimitMetric.CONCURRENCY: "requests at once",
    LimitMetric.SPEND_PER_DAY: "spend per day",
    LimitMetric.SPEND_PER_MONTH: "spend per month",
    LimitMetric.SPEND_TOTAL: "spend in total",
}


def demands(principal: Principal, model: ServedModel, now: datetime) -> tuple[Demand, ...]:
    """Return what one request of `principal` to `model` takes: narrowest first, and only where there is a limit.

    Every mode counts on counters of its own, so that what one of them takes changes no other.

    Args:
        principal: with its limits merged.
        model: a limit of a model holds under every public name that leads to it.
        now: decides which day and month of the tenant's time zone a spend is counted in.
    """
    named = model.model_name or model.name
    suffix = f":m:{model.model_id.hex}"
    return tuple(
        _demand(principal, limit, suffix if limit.model else "", now)
        for limit in principal.limits
        if limit.model in ("", named)
    )


def limits(principal: Principal, now: datetime) -> tuple[Demand, ...]:
    """Return what a request takes whatever its model."""
    return tuple(_demand(principal, limit, "", now) for limit in principal.limits if not limit.model)


def until_us(principal: Principal, now: datetime) -> int:
    """Return when the demands change by themselves, Unix µs: a day or month of the tenant's time zone ends."""
    metrics = {limit.metric for limit in principal.limits}
    if LimitMetric.SPEND_PER_DAY in metrics:
        return day_of(principal.tz, now)[1]
    if LimitMetric.SPEND_PER_MONTH in metrics:
        return month_of(principal.tz, now)[1]
    return FAR_US


def day_of(tz: str, now: datetime) -> tuple[date, int]:
    """Return the day it is in a time zone, and when the next one begins, Unix µs."""
    zone = ZoneInfo(tz)
    today = now.astimezone(zone).date()
    return today, _begin_us(today + timedelta(days=1), zone)


def month_of(tz: str, now: datetime) -> tuple[date, int]:
    """Return the first day of the month it is in a time zone, and when the next month begins, Unix µs."""
    zone = ZoneInfo(tz)
    first = now.astimezone(zone).date().replace(day=1)
    following = (first + timedelta(days=31)).replace(day=1)
    return first, _begin_us(following, zone)


def _begin_us(day: date, zone: ZoneInfo) -> int:
    """The first instant of a day; where clocks go forward at midnight, the offset before that leads to it too."""
    begin = datetime.combine(day, time(), zone).astimezone(UTC)
    return (begin - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _owner(principal: Principal, level: LimitLevel) -> str:
    if level is LimitLevel.KEY:
        return f"key:{principal.key_id.hex}"
    if level is LimitLevel.PROJECT:
        return f"project:{principal.project_id.hex}"
    return f"tenant:{principal.tenant_id.hex}"


def _demand(principal: Principal, limit: Limit, of_model: str, now: datetime) -> Demand:
    owner = _owner(principal, limit.level) + of_model
    own = "" if limit.mode is LimitMode.HARD else f":{limit.mode.value}"
    enforced = limit.mode is LimitMode.HARD
    label = f"{_WORDS[limit.metric]} of this {limit.level.value}"
    if limit.model:
        label += f" for the model {limit.model}"
    if limit.metric in _RATES:
        name, unit, amount, refusal = _RATES[limit.metric]
        counter = f"{owner}:{name}{own}"
        return Demand(
            DemandKind.RATE, counter, amount, limit.amount, refusal, WINDOW_S, unit, enforced=enforced, label=label
        )
    if limit.metric is LimitMetric.CONCURRENCY:
        counter = f"{owner}:conc{own}"
        return Demand(
            DemandKind.CONCURRENCY, counter, 1, limit.amount, CONCURRENCY_LIMITED, enforced=enforced, label=label
        )
    period, until = _period(principal.tz, limit.metric, now)
    counter = f"{owner}:spend:{period}{own}"
    return Demand(
        DemandKind.SPEND,
        counter,
        0,
        limit.amount,
        BUDGET_EXCEEDED,
        enforced=enforced,
        until_us=until,
        label=label,
    )


def _period(tz: str, metric: LimitMetric, now: datetime) -> tuple[str, int]:
    if metric is LimitMetric.SPEND_PER_DAY:
        day, until = day_of(tz, now)
        return f"d:{day.isoformat()}", until
    if metric is LimitMetric.SPEND_PER_MONTH:
        month, until = month_of(tz, now)
        return f"m:{month.isoformat()[:7]}", until
    return "t", 0
