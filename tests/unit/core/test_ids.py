"""Ids as users see them: one text for one thing."""

import pytest

from core.errors import PlatformError
from core.ids import IdKind, parse_any_id, parse_id

DIGITS = "019a0000000070008000000000000001"


@pytest.mark.parametrize(
    "odd", ["+" + DIGITS[1:], "\u0660" + DIGITS[1:], "0_9" + DIGITS[3:], " " + DIGITS[1:], DIGITS[1:] + " "]
)
def test_what_int_would_read_is_no_id(odd: str) -> None:
    """`int` takes signs, spaces, underscores and the digits of every script, and `UUID` takes what `int` takes."""
    assert parse_id(IdKind.TENANT, f"ten_{DIGITS}").hex == parse_any_id(DIGITS).hex == DIGITS
    with pytest.raises(PlatformError):
        parse_id(IdKind.TENANT, f"ten_{odd}")
    with pytest.raises(PlatformError):
        parse_any_id(odd)
