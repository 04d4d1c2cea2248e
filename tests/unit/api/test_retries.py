"""How often a request may be sent to a second replica."""

import pytest

from api.inference.retries import RetryBudget
from core.ids import new_uuid

MODEL, OTHER = new_uuid(), new_uuid()


def spent(budget: RetryBudget, now_s: float, tries: int = 1000) -> int:
    return sum(budget.spend(MODEL, now_s) for _ in range(tries))


@pytest.mark.parametrize(("accepted", "allowed"), [(0, 3), (29, 3), (40, 4), (49, 4), (500, 50), (1000, 100)])
def test_a_tenth_of_what_was_accepted_in_ten_seconds(accepted: int, allowed: int) -> None:
    budget = RetryBudget()
    for number in range(accepted):
        budget.accept(MODEL, 100.0 + 10.0 * number / accepted)
    assert spent(budget, 109.9) == allowed
    assert spent(budget, 109.9) == 0


def test_both_sides_of_the_tenth_leave_the_window_together() -> None:
    budget = RetryBudget()
    for _ in range(400):
        budget.accept(MODEL, 100.0)
    assert spent(budget, 105.0) == 40
    assert spent(budget, 111.0) == 0  # what was accepted is forgotten, the 40 are not
    assert spent(budget, 114.9) == 0
    assert spent(budget, 115.0) == 3
    assert spent(budget, 10_000.0) == 3


def test_models_do_not_share_a_budget() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.accept(OTHER, 100.0)
    assert spent(budget, 100.0) == 3
    assert sum(budget.spend(OTHER, 100.0) for _ in range(50)) == 10


def test_a_clock_that_stands_still_or_goes_back_gives_nothing_away() -> None:
    budget = RetryBudget()
    assert spent(budget, 200.0) == 3
    assert spent(budget, 199.0) == 0
    budget.accept(MODEL, 199.0)
    assert spent(budget, 200.0) == 0
