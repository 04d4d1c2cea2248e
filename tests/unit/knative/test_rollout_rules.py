"""When a new version is worse: figures worked by hand, and how seldom two equal ones are told apart."""

import random

import pytest

from catalog.rollout_types import Rules
from knative.arm_figures import BOUNDS_S, GROWTH, Arm, Figures, percentile, total
from knative.rollout_rules import judge


def arm(requests: int = 200, *, tokens: int = 50, cost: int = 600, ttft_s: float = 0.2, errors: int = 0) -> Arm:
    made = Arm(requests, errors, 0, requests - errors)
    made.output_tokens, made.cost_pico = tokens * made.answers, cost * made.answers
    for _ in range(made.answers):
        made.time(made.ttft, ttft_s)
        made.time(made.tpot, ttft_s / 10)
    return made


def rule(canary: Arm, stable: Arm | None = None, rules: Rules = Rules()) -> str:  # noqa: B008 - frozen
    found = judge(rules, Figures(1, stable or arm(2000), canary))
    return found.rule if found is not None else ""


def test_an_equal_version_is_left_alone() -> None:
    assert rule(arm()) == ""


@pytest.mark.parametrize(
    ("canary", "expected"),
    [
        (arm(errors=7), "errors"),  # 2 were expected: more than twice that, and by 5, above 3 times the root of 2
        (arm(errors=6), ""),  # by 4, below it
        (arm(1000, errors=10), ""),  # 1 %: within the floor
        (arm(ttft_s=0.5), "ttft"),
        (arm(ttft_s=0.22), ""),
        (arm(tokens=101, cost=600), "tokens"),  # twice the tokens
        (arm(tokens=30), "tokens"),  # cut short
        (arm(tokens=60), ""),
        (arm(cost=1000), "cost"),
        (arm(99, errors=50), ""),  # too few
    ],
)
def test_each_rule(canary: Arm, expected: str) -> None:
    assert rule(canary) == expected


def test_errors_of_the_old_version_are_no_fault_of_the_new_one() -> None:
    assert rule(arm(errors=40), arm(2000, errors=300)) == ""
    assert rule(arm(errors=70), arm(2000, errors=300)) == "errors"


def test_a_rule_can_be_switched_off() -> None:
    off = Rules(errors=0, ttft=0, tpot=0, cost=0, tokens=0)
    assert rule(arm(errors=100, tokens=500, cost=9000, ttft_s=9.0), rules=off) == ""


def test_refusals_that_only_the_new_version_gives_count() -> None:
    broken = arm()
    broken.refused, broken.answers = 150, 50
    assert rule(broken) == "refused"


def test_percentiles_are_exact_to_a_bucket() -> None:
    times: dict[int, int] = {}
    made = Arm(ttft=times)
    values = sorted(random.Random(5).lognormvariate(-1.5, 0.7) for _ in range(5000))
    for value in values:
        made.time(times, value)
    for part in (0.5, 0.95, 0.99):
        exact = values[int(part * 5000) - 1]
        assert exact <= percentile(times, part) <= exact * GROWTH * 1.001
    assert BOUNDS_S[-1] > 500


def test_gateways_add_up_and_other_windows_are_left_out() -> None:
    found = total(2, [Figures(2, canary=arm(3)), Figures(2, canary=arm(4)), Figures(1, canary=arm(100))])
    assert (found.canary.requests, sum(found.canary.ttft.values())) == (7, 7)


def test_two_equal_versions_are_seldom_told_apart() -> None:
    """Tokens and times with a coefficient of variation of 1, looked at every 10 requests of the new one, up to 500."""
    chance, wrong, runs = random.Random(11), 0, 100
    for _ in range(runs):
        figures = Figures(1)
        told = False
        for number in range(5000):
            one = figures.canary if number % 10 == 0 else figures.stable
            tokens = max(1, round(chance.lognormvariate(3.5, 0.83)))
            one.requests += 1
            one.errors += chance.random() < 0.01
            one.answers += 1
            one.output_tokens += tokens
            one.cost_pico += 100 + tokens
            one.time(one.ttft, chance.lognormvariate(-1.6, 0.83))
            one.time(one.tpot, chance.lognormvariate(-4, 0.3))
            if number % 100 == 99:
                told = told or judge(Rules(), figures) is not None
        wrong += told
    assert wrong <= 10, wrong
