"""Connecting to a unix socket whose listener is behind."""

import asyncio
import socket

FULL_BACKLOG_PAUSE_S = 0.02


async def connected_unix_socket(path: str) -> socket.socket:
    """Connect, waiting while the backlog is full: a unix socket says EAGAIN where tcp would send its SYN again.

    Both loops would have it otherwise: asyncio takes EAGAIN for connected, uvloop for an engine that is not there.
    """
    door = socket.socket(socket.AF_UNIX)
    door.setblocking(False)
    try:
        while True:  # until the caller's patience ends
            try:
                door.connect(path)
            except BlockingIOError:
                await asyncio.sleep(FULL_BACKLOG_PAUSE_S)
            else:
                return door
    except BaseException:
        door.close()
        raise
