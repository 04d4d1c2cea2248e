"""Keys that are not known here yet: made a moment ago, before the follower brought them. Postgres is asked, once each.

It is bounded, since anybody can write texts that look like keys: so many looks at once and in a second, and what was
not found is not looked for again for a second. A key that cannot be looked for, beyond that or with Postgres away, is
told to come back: nobody knows that it is wrong. The looks have a connection of their own, so that a flood of them
keeps nothing else waiting.
"""

import asyncio

import psycopg
import structlog

from api.inference import errors
from api.inference.directory import Directory
from core.clock import Clock
from core.errors import PlatformError
from core.reader import Reader
from tenants import principals
from tenants.credentials import Peppers

AT_ONCE_MAX = 16
PER_S_MAX = 200
LOOK_S = 1.0
ABSENT_S = 1.0
ABSENT_MAX = 10_000
RETRY_S = 2

_log = structlog.get_logger("gateway")


class NewKeys:
    """`find` is called by requests whose key is well formed and unknown."""

    def __init__(self, directory: Directory, reader: Reader, peppers: Peppers, clock: Clock) -> None:
        self._directory = directory
        self._reader = reader
        self._peppers = peppers
        self._clock = clock
        self._looks: dict[bytes, asyncio.Task[bytes]] = {}
        self._absent: dict[bytes, float] = {}  # digest → when it was not found, monotonic
        self._second, self._in_second = 0, 0

    async def find(self, key: str, digest: bytes) -> bytes:
        """Return the digest under which the directory has the key now; empty when it has none.

        Args:
            key: as it was sent.
            digest: its current one; a key that is stored under an old pepper's alone is entered by that, so that the
                follower finds it there when it ends.

        Raises:
            PlatformError: SERVICE_UNAVAILABLE, it cannot be looked for now.
        """
        look = self._looks.get(digest)
        if look is None:
            if self._clock.monotonic() - self._absent.get(digest, -ABSENT_S) < ABSENT_S:
                return b""
            if not self._may_look():
                raise _not_now()
            look = self._looks[digest] = asyncio.create_task(self._look(key, digest))
            look.add_done_callback(lambda done: self._looked(digest, done))
        return await asyncio.shield(look)

    def _looked(self, digest: bytes, look: "asyncio.Task[bytes]") -> None:
        self._looks.pop(digest, None)
        if not look.cancelled():
            look.exception()  # told to those who wait; with none left, to nobody

    def _may_look(self) -> bool:
        now = self._clock.monotonic()
        if len(self._looks) >= AT_ONCE_MAX:
            return False
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        return self._in_second <= PER_S_MAX

    async def _look(self, key: str, digest: bytes) -> bytes:
        """Read the key. What the follower applies meanwhile may be newer than what was read: then it is read again."""
        directory, digests = self._directory, self._peppers.digests(key)
        try:
            async with asyncio.timeout(LOOK_S):
                while True:
                    await directory.settled.wait()
                    known = next((kept for kept in digests if kept in directory.principals), None)
                    if known is not None:
                        return known
                    news = directory.news
                    found = await principals.look_up(self._reader, digests)
                    if found is None:
                        break
                    if news == directory.news and directory.settled.is_set():
                        directory.principals[found[0]] = found[1]
                        return found[0]
        except (psycopg.Error, OSError, TimeoutError) as error:
            _log.warning("key.unreadable", error=type(error).__name__)
            raise _not_now() from error
        if len(self._absent) >= ABSENT_MAX:
            self._absent.clear()
        self._absent[digest] = self._clock.monotonic()
        return b""

    async def close(self) -> None:
        """End the looks that run, and their connection."""
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await self._reader.close()


def _not_now() -> PlatformError:
    return errors.unavailable("This API key is new here and cannot be looked up now. Try again shortly.", RETRY_S)
