"""A thread beside the worker's own loop, for the few tasks that may take minutes: the others go on meanwhile.

One such task at a time, so that the database reads through its largest tables once at a time. Loop and connections are
the lane's own; they belong to their thread.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from core.db import Sessions, create_engine, create_sessions
from core.settings import Settings
from core.tasks import TaskContext

Work = Callable[[TaskContext], Awaitable[None]]


class Lane:
    """Runs what it is given, one after the other, from the first `start` until `stop`."""

    def __init__(self, settings: Settings, make_context: Callable[[Sessions], TaskContext]) -> None:
        self._settings = settings
        self._make_context = make_context
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="lane", daemon=True)
        self._ready = threading.Event()
        self._names: set[str] = set()  # that run or wait

    def start(self, name: str, work: Work) -> bool:
        """Run this when those before it have ended; False when one of this name runs or waits already."""
        if name in self._names:
            return False
        if not self._ready.is_set():
            self._thread.start()
            self._ready.wait()
        self._names.add(name)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (name, work))
        return True

    def stop(self, timeout_s: float) -> None:
        """End what runs, its statements too. What does not end in that time ends with the process."""
        if self._ready.is_set():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(timeout_s)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[str, Work]] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._work())
        self._ready.set()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        engine = create_engine(self._settings.database)
        context = self._make_context(create_sessions(engine))
        try:
            while True:
                name, work = await self._queue.get()
                try:
                    await work(context)
                finally:
                    self._names.discard(name)
        finally:
            await engine.dispose()
