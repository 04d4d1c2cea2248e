"""Asking an engine whether it is well: bounded in time and size, never following a redirect."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from catalog.types import EngineKind

PROBE_BYTES_MAX = 65_536
_NO_LIST = frozenset({404, 405, 501})  # a server without that path is up all the same


class Health(msgspec.Struct, frozen=True):
    """Whether it may be sent work, and if not why, in words without secrets."""

    ok: bool
    reason: str = ""


def connector(url: str) -> tuple[aiohttp.BaseConnector, str]:
    """Return how to connect and the base URL to write, for ``unix:/path`` or ``http(s)://…``."""
    if url.startswith("unix:"):
        return aiohttp.UnixConnector(url.removeprefix("unix:"), limit=4), "http://engine"
    return aiohttp.TCPConnector(limit=4, use_dns_cache=False), url


async def probe(url: str, engine: EngineKind, *, timeout_s: float, credential: str = "") -> Health:
    """Ask once: ``/health`` of engines of ours, the list of models of other servers."""
    path = "/v1/models" if engine is EngineKind.OPENAI else "/health"
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    transport, base = connector(url)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    options: dict[str, Any] = {"headers": headers, "allow_redirects": False}
    try:
        async with (
            aiohttp.ClientSession(connector=transport, timeout=timeout) as session,
            session.get(base + path, **options) as response,
        ):
            await response.content.read(PROBE_BYTES_MAX)
            return judge(response.status, engine)
    except TimeoutError:
        return Health(ok=False, reason=f"no answer within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as problem:
        return Health(ok=False, reason=f"cannot be reached ({type(problem).__name__})")


def judge(status: int, engine: EngineKind) -> Health:
    """Return what a status says of a server. Pure."""
    if status == 200 or (engine is EngineKind.OPENAI and status in _NO_LIST):
        return Health(ok=True)
    if status in {401, 403}:
        return Health(ok=False, reason="the server refuses the credential")
    return Health(ok=False, reason=f"the server answers with status {status}")
