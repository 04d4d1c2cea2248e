"""The x-ratelimit headers."""

import pytest

from api.inference.limits import KEYS_MAX, SeenLimits, limit_headers
from core.demand import DemandKind
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from tenants.types import LimitLevel
from tests.factories.gateway import Limit, principal, rpm


def shown(headers: bytes) -> dict[str, str]:
    pairs = (line.partition(": ") for line in headers.decode().splitlines())
    return {name.removeprefix("X-Ratelimit-"): value for name, _, value in pairs}


def test_of_several_limits_the_one_nearest_to_its_end_is_shown() -> None:
    limits = [
        Limit("key:a:conc", 4, 3, 0, DemandKind.CONCURRENCY),
        Limit("key:a:rpm", 60, 50, 2),
        Limit("project:b:rpm", 100, 7, 9),
    ]
    assert shown(limit_headers(limits)) == {
        "Limit-Concurrency": "4",
        "Remaining-Concurrency": "3",
        "Reset-Concurrency": "0s",
        "Limit-Requests": "100",
        "Remaining-Requests": "7",
        "Reset-Requests": "9s",
    }


@pytest.mark.parametrize(
    ("seconds_later", "remaining", "reset"),
    [(8.9, "7", "9s"), (9.1, "60", "60s")],  # the project's is whole again, so the key's is the nearest
)
def test_what_took_nothing_shows_what_was_last_seen_until_its_window_is_over(
    seconds_later: float, remaining: str, reset: str
) -> None:
    caller = principal(limits=rpm(60) + rpm(100, LimitLevel.PROJECT))
    seen = SeenLimits()
    limits = [
        Limit(f"key:{caller.key_id.hex}:rpm", 60, 50, 9),
        Limit(f"project:{caller.project_id.hex}:rpm", 100, 7, 9),
    ]
    seen.note(caller.key_id, limits, 1000.0)
    found = shown(seen.headers(caller, 1000.0 + seconds_later))
    assert (found["Remaining-Requests"], found["Reset-Requests"]) == (remaining, reset)


def test_a_key_that_was_not_seen_has_all_of_its_limit_and_one_without_limits_shows_none() -> None:
    assert shown(SeenLimits().headers(principal(limits=rpm(60)), 5.0)) == {
        "Limit-Requests": "60",
        "Remaining-Requests": "60",
        "Reset-Requests": "60s",
    }
    assert SeenLimits().headers(principal(), 5.0) == b""


@pytest.mark.parametrize(("code", "kind"), [("RATE_LIMITED", "Requests"), ("CONCURRENCY_LIMITED", "Concurrency")])
def test_the_limit_that_refuses_has_nothing_left(code: str, kind: str) -> None:
    error = PlatformError(code, ErrorKind.RATE_LIMITED, "Wait.", retry_after_s=17, fields={"limit": 3})
    found = shown(SeenLimits().headers(principal(limits=rpm(60)), 5.0, error))
    assert (found[f"Limit-{kind}"], found[f"Remaining-{kind}"], found[f"Reset-{kind}"]) == ("3", "0", "17s")
    assert found["Limit-Requests"] == ("3" if kind == "Requests" else "60")


def test_what_is_remembered_is_bounded() -> None:
    seen = SeenLimits()
    caller = principal(limits=rpm(60))
    seen.note(caller.key_id, [Limit(f"key:{caller.key_id.hex}:rpm", 60, 1, 50)], 0.0)
    for _ in range(KEYS_MAX):
        seen.note(new_uuid(), (), 0.0)
    assert shown(seen.headers(caller, 1.0))["Remaining-Requests"] == "60"
