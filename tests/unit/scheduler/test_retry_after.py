"""When those who were refused are told to come back."""

from collections import Counter

import pytest

from core.ids import new_uuid
from scheduler.refusals import retry_after_s


def test_those_who_are_refused_at_once_do_not_come_back_at_once() -> None:
    """An estimate of 20 s becomes 16 to 24, all about as often (the two ends half as often); the mean stays."""
    told = [retry_after_s(20, new_uuid()) for _ in range(8000)]
    counts = Counter(told)
    assert set(counts) == set(range(16, 25))
    assert all(800 < counts[seconds] < 1200 for seconds in range(17, 24))
    assert sum(told) / len(told) == pytest.approx(20, abs=0.2)


@pytest.mark.parametrize(("estimate_s", "least", "most"), [(0, 1, 1), (-3, 1, 1), (1, 1, 1), (5, 4, 6), (300, 60, 60)])
def test_it_is_between_one_second_and_a_minute(estimate_s: int, least: int, most: int) -> None:
    told = [retry_after_s(estimate_s, new_uuid()) for _ in range(500)]
    assert (min(told), max(told)) == (least, most)


def test_a_request_that_asks_again_is_told_the_same() -> None:
    request_id = new_uuid()
    assert len({retry_after_s(30, request_id) for _ in range(5)}) == 1
