"""Pure: the text of API keys and operator tokens, their check and their digest.

A secret is a prefix, 40 random base62 characters (238 bits) and 6 base62 characters of the CRC-32 of those 40, so
that a typo is known without a look-up and scanners can find leaks.
"""

import hashlib
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.settings import Secrets

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
API_KEY_PREFIX = "tg_"
OPERATOR_PREFIX = "tgo_"
RANDOM_CHARACTERS = 40
CHECK_CHARACTERS = 6
_VALUES = frozenset(ALPHABET)


def _check(body: str) -> str:
    value = zlib.crc32(body.encode("ascii"))
    characters = []
    for _ in range(CHECK_CHARACTERS):
        value, index = divmod(value, len(ALPHABET))
        characters.append(ALPHABET[index])
    return "".join(reversed(characters))


def mint(prefix: str, choose: Callable[[Sequence[str]], str] = secrets.choice) -> str:
    """Return a fresh secret text; `choose` picks one character and must be unpredictable."""
    body = "".join(choose(ALPHABET) for _ in range(RANDOM_CHARACTERS))
    return f"{prefix}{body}{_check(body)}"


def well_formed(prefix: str, text: str) -> bool:
    """Say whether `text` could have been minted with `prefix`: shape and check characters, nothing looked up."""
    rest = text.removeprefix(prefix)
    if len(rest) != RANDOM_CHARACTERS + CHECK_CHARACTERS or len(text) == len(rest) or not _VALUES.issuperset(rest):
        return False
    return _check(rest[:RANDOM_CHARACTERS]) == rest[RANDOM_CHARACTERS:]


def digest(pepper: bytes, text: str) -> bytes:
    """Return what is stored instead of the secret: keyed BLAKE2b, 32 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32, key=pepper).digest()


def pepper_id(pepper: bytes) -> str:
    """Return the public name of a pepper, 12 hex digits: stored beside a digest, it says which pepper made it."""
    return hashlib.blake2b(digest_size=6, key=pepper, person=b"tg-pepper-id").hexdigest()


@dataclass(frozen=True, slots=True)
class Peppers:
    """The keys of all digests: new digests are made with `current`, older ones are found under `previous`."""

    current: bytes
    previous: tuple[bytes, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the peppers under which digests are believed, the current one first."""
        return tuple(pepper_id(pepper) for pepper in (self.current, *self.previous))

    def digests(self, text: str) -> tuple[bytes, ...]:
        """Return the digests under which `text` may be stored, the current one first."""
        return tuple(digest(pepper, text) for pepper in (self.current, *self.previous))


def peppers_of(settings: Secrets) -> Peppers:
    """Return the installation's keys of all digests."""
    previous = tuple(bytes.fromhex(pepper.get_secret_value()) for pepper in settings.previous_peppers)
    return Peppers(bytes.fromhex(settings.pepper.get_secret_value()), previous)


def pepper_of(settings: Secrets) -> bytes:
    """Return the key of all new digests."""
    return peppers_of(settings).current


def signing_keys_of(settings: Secrets) -> tuple[bytes, ...]:
    """Return the keys of what we sign for ourselves (tokens of forms): the first one signs, all are believed."""
    keys = (settings.signing, *settings.previous_signing)
    return tuple(bytes.fromhex(key.get_secret_value()) for key in keys)


def cache_salt(seed: bytes, tenant: bytes) -> str:
    """Return the prefix-cache salt of a tenant, 32 hex digits, from its secret seed."""
    return hashlib.blake2b(tenant, digest_size=16, key=seed, person=b"tg-cache-salt").hexdigest()
