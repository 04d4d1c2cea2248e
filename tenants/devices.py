"""Devices that somebody signed in on before: a signed cookie that strangers' wrong tries do not lock out.

It proves nothing about who is there now, and opens nothing: it says whose tries a try is counted with.
"""

import secrets
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from hmac import compare_digest

KNOWN_FOR = timedelta(days=180)
ID_BYTES = 16
TEXT_MAX = 200


def issue(signing: bytes, email: str, now: datetime, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Return what the device keeps, after a sign-in of this address on it."""
    device, at = random_bytes(ID_BYTES).hex(), str(int(now.timestamp()))
    return f"{device}.{at}.{_seal(signing, email, device, at)}"


def recognise(signing_keys: Sequence[bytes], email: str, text: str, now: datetime) -> str:
    """Return which device of this address's it is; empty when it is none, or was not signed in on for too long."""
    parts = text.split(".")
    if len(text) > TEXT_MAX or not text.isascii() or len(parts) != 3:
        return ""
    device, at, seal = parts
    if not any(compare_digest(_seal(key, email, device, at), seal) for key in signing_keys):
        return ""
    return device if now.timestamp() - int(at) <= KNOWN_FOR.total_seconds() else ""


def _seal(signing: bytes, email: str, device: str, at: str) -> str:
    text = f"{email.strip().lower()}|{device}|{at}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=24, key=signing, person=b"tg-device").hexdigest()
