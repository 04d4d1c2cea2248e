"""Money as integers. No float touches an amount anywhere.

One *pico* is 10^-12 of a currency unit. A price with at most six decimals per million tokens is a whole number of pico
per token, so rating is integer multiplication and never rounds. *Nano* (10^-9) is used only for the credit figures in
Valkey, where Lua's numbers are exact up to 2^53.
"""

from decimal import Decimal, InvalidOperation, localcontext
from enum import StrEnum

from core.errors import ErrorKind, PlatformError

PICO_PER_UNIT = 10**12
PICO_PER_NANO = 1000
NANO_PER_UNIT = 10**9
# Above this a balance in Valkey counts as this much: 9,000,000 units is below 2^53 nano.
MAX_BALANCE_NANO = 9_000_000 * NANO_PER_UNIT
MAX_EVENT_PICO = 9 * 10**18  # the amount column of an event is a BIGINT


class Currency(StrEnum):
    """A tenant is billed in exactly one of these."""

    USD = "USD"
    CNY = "CNY"


def parse_pico(text: str, *, param: str = "amount") -> int:
    """Return the pico in a plain decimal string such as ``"12.50"``.

    Raises:
        PlatformError: kind invalid, when it is not a plain decimal or finer than 12 decimals.
    """
    try:
        with localcontext() as context:
            context.prec = 60
            value = Decimal(text)
            pico = value * PICO_PER_UNIT
            whole = pico.to_integral_value()
    except (InvalidOperation, ValueError, TypeError):
        value, pico, whole = Decimal("NaN"), Decimal(0), Decimal(0)
    if not value.is_finite() or pico != whole or abs(whole) >= 10**38:
        raise PlatformError(
            "INVALID_AMOUNT",
            ErrorKind.INVALID,
            f'{text[:64]!r} is not an amount. Write a decimal with at most 12 decimals as a string, e.g. "12.50".',
            param=param,
        )
    return int(whole)


def format_pico(pico: int) -> str:
    """Return the amount with exactly 12 decimals, e.g. ``0.012258000000``."""
    digits = f"{pico:013d}" if pico >= 0 else f"{pico:014d}"  # of a negative one the sign takes a place
    return f"{digits[:-12]}.{digits[-12:]}"


def nano_up(pico: int) -> int:
    """Round up to nano: for what is taken (holds, usage)."""
    return -(-pico // PICO_PER_NANO)


def nano_down(pico: int) -> int:
    """Round down to nano, and cap: for what is there (balances)."""
    return min(pico // PICO_PER_NANO, MAX_BALANCE_NANO)
