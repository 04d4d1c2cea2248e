"""A transport without sockets: what a protocol writes is kept, and a test says when the client is slow or gone."""

import asyncio
import re
from typing import Any


class MemoryTransport(asyncio.Transport):
    """Feed the protocol by `protocol.data_received`; read `written`."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.closed = False
        self.aborted = False
        self.eof = False
        self.reading = True
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 40000) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "written after close"
        assert not self.eof, "written after the end"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(None)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def is_reading(self) -> bool:
        return self.reading

    @property
    def ended(self) -> bool:
        """No more answers can come on this connection."""
        return self.closed or self.eof

    @property
    def statuses(self) -> list[int]:
        """The status of every answer so far."""
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", bytes(self.written))]
