"""Waiting for something that another task or process does."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Return as soon as the condition holds; TimeoutError when it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)
