"""The x-ratelimit headers."""

import msgspec
import pytest

from api.inference.limits import KEYS_MAX, LimitLines, SeenLimits
from core.demand import Demand, DemandKind, Unit
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from scheduler.types import Prepared
from tenants.types import Limit, LimitLevel, LimitMetric
from tests.factories.gateway import principal, rpm
from tests.factories.scheduler import concurrency, rate, served_model, tokens

INPUT, OUTPUT = LimitMetric.INPUT_TOKENS_PER_MINUTE, LimitMetric.OUTPUT_TOKENS_PER_MINUTE


def shown(headers: bytes) -> dict[str, str]:
    pairs = (line.partition(": ") for line in headers.decode().splitlines())
    return {name.removeprefix("X-Ratelimit-"): value for name, _, value in pairs}


def lines_of(*demands: Demand) -> LimitLines:
    return LimitLines(Prepared(demands, served_model(), "").named)


def test_what_is_left_of_requests_and_of_requests_at_once() -> None:
    lines = lines_of(rate(60), concurrency(4), rate(100, counter="project:b:rpm"))
    assert shown(lines.of([1, 0, -1, 0, -1, 3, 0, 7, 9, 2])) == {
        "Limit-Concurrency": "4",
        "Remaining-Concurrency": "3",
        "Reset-Concurrency": "0s",
        "Limit-Requests": "100",
        "Remaining-Requests": "7",
        "Reset-Requests": "9s",
    }


def test_tokens_are_shown_each_and_the_nearer_of_both_as_openai_names_them() -> None:
    lines = lines_of(tokens(1000, Unit.INPUT_TOKEN), tokens(500, Unit.OUTPUT_TOKEN))
    assert shown(lines.of([1, 0, -1, 0, -1, 400, 61, 0, 300, 12, 1])) == {
        "Limit-Input-Tokens": "1000",
        "Remaining-Input-Tokens": "400",
        "Reset-Input-Tokens": "61s",
        "Limit-Output-Tokens": "500",
        "Remaining-Output-Tokens": "300",
        "Reset-Output-Tokens": "12s",
        "Limit-Tokens": "500",
        "Remaining-Tokens": "300",
        "Reset-Tokens": "12s",
    }


def test_limits_that_never_refuse_are_not_shown() -> None:
    lines = lines_of(rate(60), tokens(5, Unit.INPUT_TOKEN, counter="key:k:itpm:soft", enforced=False))
    assert shown(lines.of([1, 0, -1, 0, -1, 59, 61, 0, 1])) == {
        "Limit-Requests": "60",
        "Remaining-Requests": "59",
        "Reset-Requests": "61s",
    }
    assert lines_of().of([1, 0, -1, 0, -1]) == b""
    assert lines.of([]) == b""  # decided without Valkey


@pytest.mark.parametrize(
    ("seconds_later", "remaining", "reset"),
    [(8.9, "7", "9s"), (9.1, "60", "60s")],  # the project's is whole again, so the key's is the nearest
)
def test_what_took_nothing_shows_what_was_last_seen_until_its_window_is_over(
    seconds_later: float, remaining: str, reset: str
) -> None:
    caller = principal(limits=rpm(60) + rpm(100, LimitLevel.PROJECT))
    lines = lines_of(
        rate(60, counter=f"key:{caller.key_id.hex}:rpm"), rate(100, counter=f"project:{caller.project_id.hex}:rpm")
    )
    seen = SeenLimits()
    seen.note(caller.key_id, [1, 0, -1, 0, -1, 7, 9, 1], lines, 1000.0)
    found = shown(seen.headers(caller, 1000.0 + seconds_later))
    assert (found["Remaining-Requests"], found["Reset-Requests"]) == (remaining, reset)


def test_a_key_that_was_not_seen_has_all_of_its_limit_and_one_without_limits_shows_none() -> None:
    assert shown(SeenLimits().headers(principal(limits=rpm(60)), 5.0)) == {
        "Limit-Requests": "60",
        "Remaining-Requests": "60",
        "Reset-Requests": "60s",
    }
    assert SeenLimits().headers(principal(), 5.0) == b""


def refused(metric: LimitMetric) -> PlatformError:
    fields: dict[str, object] = {"level": "key", "metric": metric.value, "limit": 3, "model": ""}
    return PlatformError("ANY", ErrorKind.RATE_LIMITED, "Wait.", retry_after_s=17, fields=fields)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (LimitMetric.REQUESTS_PER_MINUTE, "Requests"),
        (LimitMetric.CONCURRENCY, "Concurrency"),
        (INPUT, "Input-Tokens"),
        (OUTPUT, "Output-Tokens"),
    ],
)
def test_the_limit_that_refuses_has_nothing_left(metric: LimitMetric, name: str) -> None:
    limits = (*rpm(60), Limit(LimitLevel.KEY, INPUT, 900), Limit(LimitLevel.KEY, OUTPUT, 800))
    found = shown(SeenLimits().headers(principal(limits=limits), 5.0, refused(metric)))
    assert (found[f"Limit-{name}"], found[f"Remaining-{name}"], found[f"Reset-{name}"]) == ("3", "0", "17s")
    assert found["Limit-Requests"] == ("3" if name == "Requests" else "60")
    assert found["Remaining-Tokens"] == ("0" if "Tokens" in name else "800")


def test_other_errors_take_nothing() -> None:
    error = PlatformError("INSUFFICIENT_CREDIT", ErrorKind.PAYMENT, "Top up.")
    assert shown(SeenLimits().headers(principal(limits=rpm(60)), 5.0, error))["Remaining-Requests"] == "60"


def test_what_is_remembered_is_bounded() -> None:
    seen = SeenLimits()
    caller = principal(limits=rpm(60))
    lines = lines_of(Demand(DemandKind.RATE, f"key:{caller.key_id.hex}:rpm", 1, 60, "RATE_LIMITED", 60))
    seen.note(caller.key_id, [1, 0, -1, 0, -1, 1, 50, 0], lines, 0.0)
    assert shown(seen.headers(caller, 1.0))["Remaining-Requests"] == "1"
    for _ in range(KEYS_MAX):
        seen.note(new_uuid(), [], lines_of(), 0.0)
    assert shown(seen.headers(caller, 1.0))["Remaining-Requests"] == "60"


@pytest.mark.parametrize(("limit", "remaining"), [(60, "40"), (100, "80"), (30, "10"), (5, "0")])
def test_what_was_used_stays_used_when_the_limit_changes(limit: int, remaining: str) -> None:
    caller = principal(limits=rpm(60))
    lines = lines_of(Demand(DemandKind.RATE, f"key:{caller.key_id.hex}:rpm", 1, 60, "RATE_LIMITED", 60))
    seen = SeenLimits()
    seen.note(caller.key_id, [1, 0, -1, 0, -1, 40, 50, 0], lines, 0.0)
    found = shown(seen.headers(msgspec.structs.replace(caller, limits=rpm(limit)), 1.0))
    assert (found["Limit-Requests"], found["Remaining-Requests"]) == (str(limit), remaining)
