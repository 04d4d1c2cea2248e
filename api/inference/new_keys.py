"""Keys that are not known here yet: made a moment ago, before the follower brought them. Postgres is asked, once each.

It is bounded, since anybody can write texts that look like keys: so many looks at once and in a second, and what was
not found is not looked for again for a second. Beyond that such a key is refused until the follower brings it.
"""

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from api.inference.directory import Directory
from core.clock import Clock
from core.db import Sessions, transaction
from core.errors import PlatformError
from tenants import principals
from tenants.credentials import Peppers

AT_ONCE_MAX = 16
PER_S_MAX = 200
LOOK_S = 1.0
PAUSE_S = 0.02
ABSENT_S = 1.0
ABSENT_MAX = 10_000

_log = structlog.get_logger("gateway")


class NewKeys:
    """`find` is called by requests whose key is well formed and unknown."""

    def __init__(self, directory: Directory, sessions: Sessions, peppers: Peppers, clock: Clock) -> None:
        self._directory = directory
        self._sessions = sessions
        self._peppers = peppers
        self._clock = clock
        self._looks: dict[bytes, asyncio.Task[bool]] = {}
        self._absent: dict[bytes, float] = {}  # digest → when it was not found, monotonic
        self._second, self._in_second = 0, 0

    async def find(self, key: str, digest: bytes) -> bool:
        """Say whether the key is known by this digest now; not, when too many such keys are looked for."""
        look = self._looks.get(digest)
        if look is None:
            if not self._may_look(digest):
                return False
            look = self._looks[digest] = asyncio.create_task(self._look(key, digest))
            look.add_done_callback(lambda _: self._looks.pop(digest, None))
        return await asyncio.shield(look)

    def _may_look(self, digest: bytes) -> bool:
        now = self._clock.monotonic()
        if len(self._looks) >= AT_ONCE_MAX or now - self._absent.get(digest, -ABSENT_S) < ABSENT_S:
            return False
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        return self._in_second <= PER_S_MAX

    async def _look(self, key: str, digest: bytes) -> bool:
        """Read the key. What the follower applies meanwhile may be newer than what was read: then it is read again."""
        directory = self._directory
        try:
            async with asyncio.timeout(LOOK_S):
                while True:
                    news = directory.news
                    async with transaction(self._sessions) as session:
                        found = await principals.find(session, self._peppers, key)
                    if found is None:
                        break
                    if news == directory.news and not directory.following:
                        directory.principals[digest] = found
                        return True
                    await asyncio.sleep(PAUSE_S)
        except (SQLAlchemyError, OSError, TimeoutError, PlatformError) as error:
            _log.warning("key.unreadable", error=type(error).__name__)
            return False
        if len(self._absent) >= ABSENT_MAX:
            self._absent.clear()
        self._absent[digest] = self._clock.monotonic()
        return False

    async def close(self) -> None:
        """End the looks that run."""
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
