"""Health that tells the truth: each dependency is asked, now, with a time limit, and named in the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import text

from core.db import Sessions
from core.resp import RespClient

CHECK_TIMEOUT_S = 2.0
Check = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Health:
    """`dependencies` says ``ok`` or what sort of trouble, by name; ready means all are ok."""

    dependencies: Mapping[str, str]

    @property
    def ready(self) -> bool:
        return all(state == "ok" for state in self.dependencies.values())


def postgres_check(sessions: Sessions) -> Check:
    async def check() -> None:
        async with sessions() as session:
            await session.execute(text("SELECT 1"))

    return check


def valkey_check(client: RespClient) -> Check:
    async def check() -> None:
        await client.call("PING")

    return check


async def _ask(check: Check, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            await check()
    except TimeoutError:
        return "timeout"
    except Exception as error:  # noqa: BLE001 - whatever it is, the dependency does not work; its name is the answer
        return type(error).__name__
    return "ok"


async def ask(checks: Mapping[str, Check], timeout_s: float = CHECK_TIMEOUT_S) -> Health:
    """Ask all dependencies at once; takes at most `timeout_s`."""
    states = await asyncio.gather(*(_ask(check, timeout_s) for check in checks.values()))
    return Health(dict(zip(checks, states, strict=True)))
