"""Pure: one-time codes of an authenticator app (RFC 6238: SHA-1, 30 s, 6 digits), and recovery codes."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from urllib.parse import quote, urlencode

SECRET_BYTES = 20
STEP_S = 30
DIGITS = 6
DRIFT_STEPS = 1  # a clock may be wrong by one step either way
ISSUER = "Tidegate"
RECOVERY_CODES = 10
RECOVERY_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i, l, o, u
RECOVERY_HALF = 5  # two halves of five characters: 50 bits


def new_secret(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> bytes:
    return random_bytes(SECRET_BYTES)


def step_of(now: datetime) -> int:
    """Return the number of the time step that `now` is in."""
    return int(now.timestamp()) // STEP_S


def code_at(secret: bytes, step: int, digits: int = DIGITS) -> str:
    """Return the code of a time step (RFC 4226 §5.3)."""
    mac = hmac.digest(secret, step.to_bytes(8, "big"), hashlib.sha1)
    offset = mac[-1] & 0x0F
    number = int.from_bytes(mac[offset : offset + 4], "big") & 0x7FFFFFFF
    return str(number % 10**digits).zfill(digits)


def matching_step(secret: bytes, code: str, now: datetime, last_step: int) -> int | None:
    """Return the step whose code this is, or None.

    Args:
        secret: the person's.
        code: as typed; spaces do not count.
        now: the present.
        last_step: the newest step whose code was used; that one and older ones are not accepted again.
    """
    typed = code.replace(" ", "").encode("utf-8", "replace")
    found = None
    for step in range(step_of(now) - DRIFT_STEPS, step_of(now) + DRIFT_STEPS + 1):
        if hmac.compare_digest(code_at(secret, step).encode(), typed) and step > last_step:
            found = step
    return found


def text_of(secret: bytes) -> str:
    """Return the secret as people type it into an app: base32 without padding."""
    return base64.b32encode(secret).decode().rstrip("=")


def uri(secret: bytes, account: str, issuer: str = ISSUER) -> str:
    """Return the ``otpauth`` address that a QR code shows to an app."""
    label = quote(f"{issuer}:{account}", safe="")
    parameters = {"secret": text_of(secret), "issuer": issuer, "algorithm": "SHA1", "digits": DIGITS, "period": STEP_S}
    return f"otpauth://totp/{label}?{urlencode(parameters, quote_via=quote)}"


def recovery_codes(choose: Callable[[Sequence[str]], str] = secrets.choice) -> tuple[str, ...]:
    """Return fresh codes such as ``k3v9x-0a7fd``, each good once instead of an app's code."""

    def half() -> str:
        return "".join(choose(RECOVERY_ALPHABET) for _ in range(RECOVERY_HALF))

    return tuple(f"{half()}-{half()}" for _ in range(RECOVERY_CODES))


def recovery_text(typed: str) -> str:
    """Return what is digested of a recovery code: letters small, neither spaces nor dashes."""
    return "".join(character for character in typed.casefold() if character.isalnum())
