"""The error of fairness: of those that wait all the time, how far the worst is from the mean."""

import pytest

from scheduler.fairness import LOOKS, error


def looks(*tenants: tuple[bytes, float], missing: tuple[bytes, int] = (b"", 0)) -> list[dict[bytes, float]]:
    """Virtual times that run at these speeds from 1000; one tenant does not wait at one of the looks."""
    found = [{name: 1000.0 + speed * n for name, speed in tenants} for n in range(LOOKS)]
    found[missing[1]].pop(missing[0], None)
    return found


def test_equal_progress_is_fair_and_the_worst_counts() -> None:
    assert error(looks((b"a", 50), (b"b", 50))) == 0
    assert error(looks((b"a", 60), (b"b", 45), (b"c", 45))) == pytest.approx(0.2)
    assert error(looks((b"a", 100), (b"b", 0))) == 1


def test_who_did_not_wait_all_the_time_does_not_count() -> None:
    """Who sleeps through a turn is owed none."""
    assert error(looks((b"a", 50), (b"b", 50), (b"c", 5), missing=(b"c", 3))) == 0
    assert error(looks((b"a", 50), (b"c", 5), missing=(b"c", 0))) is None


def test_nothing_is_said_before_a_minute_or_when_nobody_was_served() -> None:
    assert error(looks((b"a", 50), (b"b", 50))[1:]) is None
    assert error(looks((b"a", 0), (b"b", 0))) is None
