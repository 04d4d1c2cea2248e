"""Passwords: what may be one, and its slow salted hash (Argon2id). Work is done in few threads, never on the loop."""

import asyncio
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from zxcvbn import zxcvbn

from core.errors import ErrorKind, PlatformError
from tenants.errors import invalid

LENGTH_MIN = 12  # characters
LENGTH_MAX = 256
GUESSABLE_BELOW = 3  # zxcvbn's score: 3 stands 10^8 guesses and more
JUDGED_CHARACTERS = 64  # of these zxcvbn needs some 40 ms at worst; more only make a password better
THREADS = 2
WAITING_MAX = 64
OWN_WORD_MIN = 3  # shorter parts of a name or address may stand in a password by chance
OWN_REST_MIN = 6  # characters that must remain without them
RETRY_AFTER_S = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a hash costs. The default is OWASP's second choice for Argon2id: 19 MiB, two passes, one lane."""

    memory_kib: int = 19_456
    passes: int = 2
    lanes: int = 1


def check(password: str, *, email: str, name: str) -> None:
    """Refuse what is no good password for this person.

    Raises:
        PlatformError: invalid, saying why; the password is in no message.
    """
    text = _normal(password)
    if not LENGTH_MIN <= len(text) <= LENGTH_MAX:
        raise invalid("password", f"A password has {LENGTH_MIN} to {LENGTH_MAX} characters.")
    own = [email, *re.split(r"\W+", f"{email} {name} tidegate".casefold())]
    if len(_without(text.casefold(), own)) < OWN_REST_MIN:
        raise invalid("password", "A password may not be made of the email address and the name.")
    found = zxcvbn(text[:JUDGED_CHARACTERS], user_inputs=own)
    if found["score"] < GUESSABLE_BELOW:
        reason = found["feedback"]["warning"] or "It is too easy to guess."
        raise invalid("password", f"This password is easily guessed. {reason} Take a longer one, e.g. several words.")


def _without(text: str, words: Sequence[str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word.casefold(), " ") if len(word) >= OWN_WORD_MIN else text
    return "".join(text.split())


def _normal(password: str) -> str:
    """The same characters, typed on whatever keyboard (NFKC, as NIST SP 800-63B §3.1.1.2 asks)."""
    return unicodedata.normalize("NFKC", password)


@dataclass(slots=True)
class Hasher:
    """Hashes and compares. One per process: it bounds how many hashes are made at once, and how many wait."""

    cost: Cost = field(default_factory=Cost)
    _argon2: PasswordHasher = field(init=False)
    _decoy: str = ""
    _pool: ThreadPoolExecutor | None = None
    _waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._argon2 = PasswordHasher(self.cost.passes, self.cost.memory_kib, self.cost.lanes)

    async def new(self, password: str, *, email: str, name: str) -> str:
        """Return the hash of a password that `check` lets pass.

        Raises:
            PlatformError: invalid by `check`; unavailable when too many wait.
        """

        def checked() -> str:
            check(password, email=email, name=name)
            return self._argon2.hash(_normal(password))

        return await self._in_thread(checked)

    async def matches(self, stored: str, password: str) -> bool:
        """Say whether the password is the one of `stored`. Without one (empty) it is false, and takes as long.

        Raises:
            PlatformError: unavailable when too many wait.
        """
        if len(password) > LENGTH_MAX:
            password, stored = "", ""
        return await self._in_thread(lambda: self._compare(stored, password))

    def outdated(self, stored: str) -> bool:
        """Say whether `stored` was made with another cost than today's: hash the password anew while it is at hand."""
        return self._argon2.check_needs_rehash(stored)

    async def again(self, password: str) -> str:
        """Return a fresh hash of a password that was accepted before."""
        return await self._in_thread(lambda: self._argon2.hash(_normal(password)))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compare(self, stored: str, password: str) -> bool:
        try:
            self._argon2.verify(stored or self._some_hash(), _normal(password))
        except (VerificationError, InvalidHashError):
            return False
        return bool(stored)

    def _some_hash(self) -> str:
        """A hash that costs as much to compare with as anybody's."""
        with self._lock:
            if not self._decoy:
                self._decoy = self._argon2.hash("nobody has this password")
            return self._decoy

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING_MAX:
            raise PlatformError(
                "SERVICE_UNAVAILABLE",
                ErrorKind.UNAVAILABLE,
                "Too many people sign in at once. Try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="passwords")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
