"""Codes are RFC 6238's, are good once, and tolerate a clock that is a little wrong."""

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tenants import totp

RFC_SECRET = b"12345678901234567890"  # RFC 6238, appendix B
NOW = datetime(2026, 11, 30, 12, 0, 15, tzinfo=UTC)
STEP = totp.step_of(NOW)


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        (59, "94287082"),
        (1111111109, "07081804"),
        (1111111111, "14050471"),
        (1234567890, "89005924"),
        (2000000000, "69279037"),
        (20000000000, "65353130"),
    ],
)
def test_the_vectors_of_rfc_6238(seconds: int, code: str) -> None:
    step = totp.step_of(datetime.fromtimestamp(seconds, UTC))
    assert totp.code_at(RFC_SECRET, step, digits=8) == code
    assert totp.code_at(RFC_SECRET, step) == code[2:]


@pytest.mark.parametrize(("offset", "accepted"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_one_step_of_drift_is_tolerated(offset: int, accepted: bool) -> None:
    code = totp.code_at(RFC_SECRET, STEP + offset)
    assert totp.matching_step(RFC_SECRET, code, NOW, 0) == (STEP + offset if accepted else None)


def test_a_used_step_and_those_before_it_are_refused() -> None:
    now_code, next_code = totp.code_at(RFC_SECRET, STEP), totp.code_at(RFC_SECRET, STEP + 1)
    assert totp.matching_step(RFC_SECRET, now_code, NOW, STEP) is None
    assert totp.matching_step(RFC_SECRET, totp.code_at(RFC_SECRET, STEP - 1), NOW, STEP) is None
    assert totp.matching_step(RFC_SECRET, next_code, NOW, STEP) == STEP + 1
    assert totp.matching_step(RFC_SECRET, now_code, NOW + timedelta(seconds=29), STEP) is None


@pytest.mark.parametrize("typed", ["", "12345", "1234567", "abcdef", "\udc80", "\uff11" * 6, "000000"])
def test_what_is_no_code_is_none(typed: str) -> None:
    assert totp.matching_step(RFC_SECRET, typed, NOW, 0) is None


def test_spaces_that_people_type_do_not_count() -> None:
    code = totp.code_at(RFC_SECRET, STEP)
    assert totp.matching_step(RFC_SECRET, f" {code[:3]} {code[3:]}", NOW, 0) == STEP


def test_the_address_is_what_apps_read() -> None:
    parts = urlsplit(totp.uri(RFC_SECRET, "ann+x@example.com"))
    assert (parts.scheme, parts.netloc) == ("otpauth", "totp")
    assert unquote(parts.path) == "/Tidegate:ann+x@example.com"
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert query == {
        "secret": "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ",  # base32 of the ASCII digits, as RFC 4648 has it
        "issuer": "Tidegate",
        "algorithm": "SHA1",
        "digits": "6",
        "period": "30",
    }


def test_recovery_codes_are_ten_different_and_forgiving_to_typists() -> None:
    codes = totp.recovery_codes()
    assert len(set(codes)) == 10
    assert all(len(code) == 11 and code[5] == "-" for code in codes)
    assert totp.recovery_text(" K3V9X 0A7FD\n") == totp.recovery_text("k3v9x-0a7fd") == "k3v9x0a7fd"
