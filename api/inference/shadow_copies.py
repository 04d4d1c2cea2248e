"""The copies of requests that wait to be sent to a version to come, and those that run: few, and dropped when not."""

import asyncio
from collections import deque
from typing import Any

WAITING_MAX = 16
AT_ONCE = 2
BODY_MAX = 256 * 1024


class Copies:
    """Bounded in number and size; whoever does not fit is not copied."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.tasks: set[asyncio.Task[None]] = set()

    def take(self, copy: Any) -> bool:
        """Let it wait; False when too many do."""
        if len(self.waiting) >= WAITING_MAX:
            return False
        self.waiting.append(copy)
        return True

    def next(self) -> Any | None:
        """Return what may be sent now, or None."""
        return self.waiting.popleft() if self.waiting and len(self.tasks) < AT_ONCE else None
