"""Access lines, gathered in memory and written together, off the loop. Never a prompt, an answer or a key."""

import asyncio
from collections.abc import Callable

BUFFER_MAX = 4 * 1024 * 1024


class AccessLog:
    """`line` is cheap; `flush`, called by the sweeper, hands all lines to `write` on a thread, one batch at a time."""

    def __init__(self, write: Callable[[bytes], object] | None, dropped: Callable[[str, int], None]) -> None:
        self._write = write
        self._dropped = dropped
        self._lines: list[str] = []
        self._writing: asyncio.Future[None] | None = None

    def line(self, text: str) -> None:
        if self._write is not None:
            self._lines.append(text)

    def flush(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._lines:
            return
        if self._writing is not None and not self._writing.done():
            if len(self._lines) > BUFFER_MAX // 256:  # nobody reads our log: keep serving, and say how much is lost
                self._dropped("log_lines_dropped_total", len(self._lines))
                self._lines.clear()
            return
        lines, self._lines = self._lines, []
        self._writing = loop.run_in_executor(None, self._put, "\n".join(lines).encode() + b"\n")

    async def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writing is not None:
            await self._writing
        self.flush(loop)
        if self._writing is not None:
            await self._writing

    def _put(self, data: bytes) -> None:
        if self._write is not None:
            try:
                self._write(data)
            except OSError:
                self._dropped("log_lines_dropped_total", data.count(b"\n"))
