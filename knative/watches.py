"""Asking the engines of this host, each by a task of its own: is it well, and while it drains, does it still work."""

import asyncio
from collections.abc import Callable

from catalog.types import EngineKind
from engine import figures, health
from knative.types import Seat

PROBE_LOADING_S = 0.1
PROBE_SERVING_S = 2.0
PROBE_DRAINING_S = 0.2
PROBE_TIMEOUT_S = 5.0


class Watches:
    """One watch a seat, from the start of its engine to its end."""

    def __init__(self, nudge: asyncio.Event, now_us: Callable[[], int]) -> None:
        self._nudge = nudge
        self._now_us = now_us
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._well: dict[Seat, bool] = {}
        self._draining: dict[Seat, asyncio.Event] = {}
        self._working: dict[Seat, tuple[int, int]] = {}  # when it was asked, and how many requests it had

    def begin(self, seat: Seat, url: str, engine: EngineKind) -> None:
        """Watch an engine that was started or taken over; the one before is not watched any more."""
        self.end(seat)
        self._draining[seat] = asyncio.Event()
        self._tasks[seat] = asyncio.create_task(self._keep_asking(seat, url, engine))

    def end(self, seat: Seat) -> None:
        if (task := self._tasks.pop(seat, None)) is not None:
            task.cancel()
        for known in (self._well, self._working, self._draining):
            known.pop(seat, None)

    def take_health(self, seat: Seat) -> bool | None:
        """Return whether it was well when it was asked since the last call; None when it was not."""
        return self._well.pop(seat, None)

    def drain(self, seat: Seat, *, draining: bool) -> None:
        """Say whether it is to be asked for its work, too."""
        if (event := self._draining.get(seat)) is not None and event.is_set() is not draining:
            event.set() if draining else event.clear()
            self._working.pop(seat, None)

    def working(self, seat: Seat, since_us: int) -> int | None:
        """Return how many requests it had when it was asked after `since_us`; None when it has not said."""
        asked_us, count = self._working.get(seat, (0, 0))
        return count if asked_us >= since_us > 0 else None

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for seat in list(self._tasks):
            self.end(seat)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_asking(self, seat: Seat, url: str, engine: EngineKind) -> None:
        was_well, draining = False, self._draining[seat]
        while True:
            seen = await health.probe(url, engine, timeout_s=PROBE_TIMEOUT_S)
            self._well[seat] = seen.ok
            if seen.ok and not was_well:
                self._nudge.set()
            was_well = was_well or seen.ok
            if draining.is_set():
                await self._ask_for_work(seat, url)
                await asyncio.sleep(PROBE_DRAINING_S)
            elif not was_well:
                await asyncio.sleep(PROBE_LOADING_S)
            else:
                await _wait(draining, PROBE_SERVING_S)

    async def _ask_for_work(self, seat: Seat, url: str) -> None:
        asked_us = self._now_us()
        said = await figures.read(url, timeout_s=PROBE_TIMEOUT_S)
        if said is not None and self._draining[seat].is_set():
            self._working[seat] = (asked_us, said.running + said.waiting)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
