"""What Valkey executed, in its own order, commands of scripts included: the log that a model of the scripts replays."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

_LINE = re.compile(rb'^\+[0-9.]+ \[\d+ (\S+)\] ("([A-Z]+)".*)$')
_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_LUA = b"lua"
_READ = 1 << 20
_END = b"test:end-of-log"


class Call(NamedTuple):
    """A command of a client and what it made the scripts do."""

    parts: list[bytes]
    inner: list[list[bytes]]


def _parts(text: bytes) -> list[bytes]:
    return [
        part.decode("unicode_escape").encode("latin-1") if b"\\" in part else part for part in _ARGUMENT.findall(text)
    ]


class ServerLog:
    """MONITOR on a connection of its own: every command from `open` to `close` in the order of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._chunks: list[bytes] = []
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, valkey: Path) -> Self:
        reader, writer = await asyncio.open_unix_connection(str(valkey))
        writer.write(b"MONITOR\r\n")
        assert await reader.readexactly(5) == b"+OK\r\n"
        return cls(reader, writer)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        tail = b""
        while _END not in tail:
            chunk = await reader.read(_READ)
            assert chunk, "Valkey closed the log"
            self._chunks.append(chunk)
            tail = tail[-len(_END) :] + chunk

    async def close(self, valkey: Path) -> None:
        """Return once all that was executed until now is here."""
        _, writer = await asyncio.open_unix_connection(str(valkey))
        writer.write(b"ECHO %b\r\n" % _END)
        await self._reading
        for one in (writer, self._writer):
            one.close()
            await one.wait_closed()

    def calls(self, names: frozenset[bytes]) -> Iterator[Call]:
        """Yield the commands of clients, each with what scripts did in it; of all only those of these names."""
        last: Call | None = None
        for line in b"".join(self._chunks).split(b"\r\n"):
            found = _LINE.match(line)
            if found is None or found[3] not in names:
                continue
            parts = _parts(found[2])
            if found[1] != _LUA:
                if last is not None:
                    yield last
                last = Call(parts, [])
            elif last is not None:
                last.inner.append(parts)
        if last is not None:
            yield last
