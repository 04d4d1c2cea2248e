"""Recorded traffic under other limits, worked by hand."""

from datetime import UTC, datetime
from uuid import UUID

from tenants.recorded import Means, Sum, means_of, refused, spread
from tenants.types import Limit, LimitLevel, LimitMetric, LimitMode
from tenants.what_if import HOUR_US, Calendar, Outcome, Replay, Spent, Traffic, run

TENANT, PROJECT, KEY, OTHER = (UUID(int=number) for number in (1, 2, 3, 4))
RPM, ITPM, OTPM = (
    LimitMetric.REQUESTS_PER_MINUTE,
    LimitMetric.INPUT_TOKENS_PER_MINUTE,
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE,
)
START = int(datetime(2026, 11, 2, 10, tzinfo=UTC).timestamp()) * 1_000_000
S = 1_000_000


def at(seconds: float, **facts: object) -> Traffic:
    begin = START + round(seconds * S)
    run_us = int(facts.pop("run_us", 0))  # type: ignore[call-overload]
    values = {"project_id": PROJECT, "key_id": KEY, "model": "m"} | facts
    return Traffic(begin, begin + run_us, **values)  # type: ignore[arg-type]


def limit(metric: LimitMetric, amount: int, level: LimitLevel = LimitLevel.KEY, **more: str) -> Limit:
    return Limit(level, metric, amount, LimitMode(more.get("mode", "hard")), more.get("model", ""))


def replayed(
    traffic: list[Traffic], *limits: Limit, tz: str = "UTC", spent: Spent | None = None, since_us: int = START
) -> Outcome:
    begin_us = min(item.at_us for item in traffic)
    return run(Replay(TENANT, tz, lambda _project, _key: limits, spent or {}, begin_us), traffic, since_us)


def test_a_window_is_sixty_buckets_and_the_one_that_runs() -> None:
    """2 per minute, at 0.9, 30.0, 60.9, 61.0 s: the first leaves 61 buckets after second 0 began, at 61.0 s."""
    outcome = replayed([at(0.9), at(30), at(60.9), at(61.0), at(61.1)], limit(RPM, 2))
    assert outcome.passed == [1, 1, 0, 1, 0]
    assert outcome.refused_by == {limit(RPM, 2): 2}


def test_the_worked_example_of_the_issue() -> None:
    """3000/min on the key and 100/min on the tenant, 150 requests in 15 s: 100 pass, the tenant's limit stops 50."""
    key, tenant = limit(RPM, 3000), limit(RPM, 100, LimitLevel.TENANT)
    outcome = replayed([at(second / 10) for second in range(150)], key, tenant)
    assert sum(outcome.passed) == 100
    assert outcome.passed == [1] * 100 + [0] * 50
    assert outcome.refused_by == {tenant: 50}


def test_what_is_refused_takes_nothing() -> None:
    """Tokens 10 a minute: 6, then 6 (refused), then 4 fit; requests 3 a minute count only what passed."""
    traffic = [at(n, input_tokens=tokens) for n, tokens in enumerate((6, 6, 4, 0, 0))]
    outcome = replayed(traffic, limit(RPM, 3), limit(ITPM, 10))
    assert outcome.passed == [1, 0, 1, 1, 0]
    assert outcome.refused_by == {limit(ITPM, 10): 1, limit(RPM, 3): 1}


def test_a_request_larger_than_the_limit_never_passes() -> None:
    outcome = replayed([at(0, output_tokens=11), at(200, output_tokens=11)], limit(OTPM, 10))
    assert outcome.passed == [0, 0]


def test_at_once_is_from_admission_to_the_end() -> None:
    """Cap 2 with three of 10 s: the third passes when one has ended, which is at its end and not after it."""
    two = limit(LimitMetric.CONCURRENCY, 2)
    outcome = replayed([at(n, run_us=10 * S) for n in (0, 1, 2, 9.999, 10, 10.5, 11)], two)
    assert outcome.passed == [1, 1, 0, 0, 1, 0, 1]
    assert outcome.refused_by == {two: 3}


def test_each_key_and_model_has_its_own_counter() -> None:
    of_key, of_model = limit(RPM, 1), limit(RPM, 1, LimitLevel.TENANT, model="a")
    traffic = [at(0, model="a"), at(1, key_id=OTHER, model="a"), at(2, key_id=OTHER, model="b"), at(3, model="b")]
    outcome = replayed(traffic, of_key, of_model)
    assert outcome.passed == [1, 0, 1, 0]
    assert outcome.refused_by == {of_model: 1, of_key: 1}


def test_the_first_in_the_scripts_order_is_named() -> None:
    at_once, rate = limit(LimitMetric.CONCURRENCY, 0, LimitLevel.TENANT), limit(RPM, 0)
    budget = limit(LimitMetric.SPEND_TOTAL, 0)
    assert replayed([at(0, nano=1)], rate, budget, at_once).refused_by == {at_once: 1}
    assert replayed([at(0, nano=1)], budget, rate).refused_by == {rate: 1}


def test_soft_and_dark_limits_count_and_stop_nothing() -> None:
    hard, dark = limit(RPM, 4), limit(RPM, 2, mode="dark")
    outcome = replayed([at(n) for n in range(6)], hard, dark)
    assert outcome.passed == [1, 1, 1, 1, 0, 0]
    assert outcome.refused_by == {hard: 2}
    assert outcome.over == {dark: 2}


def test_a_day_is_the_tenants_and_what_was_spent_before_counts() -> None:
    """Los Angeles is 8 h behind: its 2 November ends at 08:00 UTC of the 3rd. 5 left of 10, then a new day."""
    zone, budget = "America/Los_Angeles", limit(LimitMetric.SPEND_PER_DAY, 10)
    midnight = 22 * 3600  # after START, which is 10:00 UTC on the 2nd
    traffic = [at(0, nano=5), at(midnight - 1, nano=1), at(midnight, nano=10), at(midnight + 1, nano=1)]
    outcome = replayed(traffic, budget, tz=zone, spent={(KEY, "", LimitMetric.SPEND_PER_DAY): 5})
    assert outcome.passed == [1, 0, 1, 0]
    month = limit(LimitMetric.SPEND_PER_MONTH, 20, LimitLevel.TENANT)
    assert replayed(traffic, month, tz=zone).passed == [1, 1, 1, 1]
    spent = {(TENANT, "", LimitMetric.SPEND_PER_MONTH): 5}
    assert replayed(traffic, month, tz=zone, spent=spent).passed == [1, 1, 0, 1]


def test_a_day_with_a_change_of_clocks_has_25_hours() -> None:
    """Berlin, 25 October 2026: from 22:00 UTC of the 24th to 23:00 UTC of the 25th."""
    begin = int(datetime(2026, 10, 24, 22, tzinfo=UTC).timestamp()) * S
    calendar = Calendar("Europe/Berlin")
    days = [calendar.period(LimitMetric.SPEND_PER_DAY, begin + hours * HOUR_US) for hours in (0, 24, 25)]
    assert [day and day.isoformat() for day in days] == ["2026-10-25", "2026-10-25", "2026-10-26"]


def test_hours_compare_what_was_with_what_would_have_been() -> None:
    """Two hours under 2 a minute: of 3 served one would not be; of 4 refused in the next hour two would be served."""
    traffic = [*(at(n) for n in range(3)), at(3600, requests=4, refused=True), at(3601, model="n")]
    outcome = replayed(traffic, limit(RPM, 2, model="m"))
    assert {key: (t.requests, t.refused_in_fact, t.refused, t.newly_refused, t.newly_served) for key, t in
            outcome.by_hour.items()} == {
        (START, "m"): (3, 0, 1, 1, 0),
        (START + HOUR_US, "m"): (4, 4, 2, 0, 2),
        (START + HOUR_US, "n"): (1, 0, 0, 0, 0),
    }  # fmt: skip
    assert (outcome.total.requests, outcome.total.refused, outcome.total.newly_served) == (8, 3, 2)


def test_what_came_before_fills_the_window_and_is_not_told() -> None:
    outcome = replayed([at(-30), at(-29), at(0), at(40)], limit(RPM, 2))
    assert outcome.passed == [1, 1, 0, 1]
    assert (outcome.total.requests, outcome.refused_by) == (2, {limit(RPM, 2): 1})


def test_a_sum_passes_as_far_as_there_is_room() -> None:
    """10 requests with 103 input tokens are 11 each at most: 4 of them fit into 50."""
    item = at(0, requests=10, input_tokens=103)
    assert replayed([item], limit(ITPM, 50)).passed == [4]
    assert replayed([item], limit(ITPM, 110)).passed == [10]
    assert replayed([item], limit(ITPM, 110), limit(RPM, 7)).passed == [7]


def test_a_minute_is_spread_evenly() -> None:
    minute = Sum(START, 60 * S, PROJECT, KEY, "m", 7, 70, 14, 700)
    parts = list(spread(minute))
    assert [(item.at_us - START) // S for item in parts] == [0, 8, 17, 25, 34, 42, 51]
    assert {(item.requests, item.input_tokens, item.output_tokens, item.nano) for item in parts} == {(1, 10, 2, 100)}
    many = list(spread(Sum(START, 60 * S, PROJECT, KEY, "m", 150, 151, 1, 0)))
    assert len(many) == 60
    assert (sum(i.requests for i in many), sum(i.input_tokens for i in many), sum(i.output_tokens for i in many)) == (
        150,
        151,
        1,
    )


def test_refused_requests_are_taken_to_be_like_those_served() -> None:
    served = [at(0, run_us=2 * S, input_tokens=10, output_tokens=4, nano=8), at(1, input_tokens=20, output_tokens=8)]
    means = means_of(served)
    assert means == {"m": Means(15, 6, 4, S)}
    known, unknown = (Sum(START, S, PROJECT, KEY, model, 3, 300, 900) for model in "mn")
    assert list(refused(known, means)) == [
        at(0.999999, run_us=S, requests=3, input_tokens=45, output_tokens=18, nano=12, refused=True)
    ]
    assert list(refused(unknown, means)) == [
        at(0.999999, model="n", requests=3, input_tokens=300, output_tokens=900, refused=True)
    ]
