"""How long a request waits for a place: by its tier, from its first try on, or as long as the caller says."""

import pytest

from api.inference.admit import patience, spent
from core.errors import PlatformError


@pytest.mark.parametrize(
    ("tries", "seconds"),
    [(b"0", 0), (b"1", 1), (b"2", 3), (b"3", 7), (b"99", 1023), (b"", 0), (b"-1", 0), (b"x", 0), (b"1" * 5000, 0)],
)
def test_a_later_try_has_waited_already(tries: bytes, seconds: float) -> None:
    """Pauses of 1, 2 and 4 seconds."""
    assert spent(tries) == seconds


def test_the_caller_may_say_less_and_not_more() -> None:
    assert patience(b"1.5", 30.0) == 1.5
    assert patience(b"90", 30.0) == 30.0
    with pytest.raises(PlatformError):
        patience(b"soon", 30.0)
