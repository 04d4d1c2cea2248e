"""Time, injected: code takes a `Clock`, so that tests own the time."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations."""

    def now(self) -> datetime:
        """Return the wall time, aware, in UTC."""
        ...

    def now_us(self) -> int:
        """Return the wall time in microseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never step back; only differences mean something."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic = staticmethod(time.monotonic)  # read several times a request: no call in between


class ManualClock:
    """A clock that moves only when told, for tests."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._us = int(start.timestamp() * 1_000_000)
        self._monotonic_us = 0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._us / 1_000_000, UTC)

    def now_us(self) -> int:
        return self._us

    def monotonic(self) -> float:
        return self._monotonic_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds`."""
        step = int(seconds * 1_000_000)
        self._us += step
        self._monotonic_us += step
