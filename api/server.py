"""uvicorn's server as both planes run it: it says when it serves, and a signal ends it by returning."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn


class Server(uvicorn.Server):
    """`serving` is called once the sockets listen."""

    def __init__(self, config: uvicorn.Config, serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._serving()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on SIGTERM and SIGINT by returning; uvicorn's own way raises the signal again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
