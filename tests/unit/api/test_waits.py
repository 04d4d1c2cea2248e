"""How long a request waits for a place: by its tier, from its first try on, or as long as the caller says."""

import pytest

from api.inference.admit import named_patience, tries
from core.errors import PlatformError
from core.tiers import Tier
from scheduler.patience import of_retry


@pytest.mark.parametrize(
    ("header", "count"),
    [(b"0", 0), (b"1", 1), (b"12", 12), (b"", 0), (b"-1", 0), (b"x", 0), (b"1" * 5000, 0)],
)
def test_tries_are_read_where_they_are_a_number(header: bytes, count: int) -> None:
    assert tries(header) == count


def test_a_retry_of_priority_and_standard_waits_for_nobody() -> None:
    assert of_retry(10.0, Tier.STANDARD, 0) == 10.0
    assert of_retry(10.0, Tier.STANDARD, 1) == of_retry(2.0, Tier.PRIORITY, 3) == 0.0


@pytest.mark.parametrize(("before", "left"), [(0, 120), (1, 119), (2, 117), (3, 113), (999, 120 - 1023)])
def test_a_retry_of_batch_has_waited_its_pauses(before: int, left: float) -> None:
    assert of_retry(120.0, Tier.BATCH, before) == left


def test_the_caller_may_say_less_and_not_more() -> None:
    assert named_patience(b"1.5", 30.0) == 1.5
    assert named_patience(b"90", 30.0) == 30.0
    with pytest.raises(PlatformError):
        named_patience(b"soon", 30.0)
