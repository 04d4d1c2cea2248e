"""Streams other paths to the control plane's unix socket and back; nobody's word for who they are is passed on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from api.inference import errors
from api.inference.bridge import Message
from core.errors import PlatformError
from core.ids import IdKind, format_id, new_uuid

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CALLS_MAX = 256
READ_SIZE = 64 * 1024
TIMEOUT_S = 120.0
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"content-length"),
    }
)
# Only we may say who the client is.
_IDENTITY = frozenset(
    {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port", b"x-real-ip"}
)


class ControlProxy:
    """One aiohttp session on the control plane's socket; None: this gateway has no control plane beside it."""

    def __init__(self, socket: Path | None) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(CALLS_MAX)

    async def forward(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self._socket is None:
            await refuse(send, errors.not_found(scope["path"]))
            return
        if self._places.locked():
            await refuse(send, errors.unavailable("The control plane is busy. Try again shortly."))
            return
        async with self._places:
            try:
                await self._exchange(scope, receive, send)
            except _NotStartedError:
                await refuse(send, errors.unavailable("The control plane is not available. Try again shortly.", 2))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _session_now(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(self._socket), limit=CALLS_MAX),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=TIMEOUT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                max_field_size=32 * 1024,
            )
        return self._session

    async def _exchange(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers, has_body = _request_headers(scope)
        query: bytes = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost")
        url = URL("http://localhost" + target.decode("ascii", "replace"), encoded=True)
        headers.append(("Host", host.decode("latin-1")))
        request: Any = self._session_now().request(
            scope["method"],
            url,
            headers=headers,
            data=_body(receive) if has_body else None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        )
        try:
            response = await request
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _NotStartedError from error
        async with response:
            await send(
                {
                    "type": "http.response.start",
                    "status": response.status,
                    "headers": [
                        (name, value)
                        for name, value in response.raw_headers
                        if name.lower() not in _HOP_BY_HOP or name.lower() == b"content-length"
                    ],
                }
            )
            while block := await response.content.read(READ_SIZE):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _NotStartedError(Exception):
    """The control plane did not answer; the client has seen nothing yet."""


def _request_headers(scope: dict[str, Any]) -> tuple[list[tuple[str, str]], bool]:
    """The headers to pass on, and whether a body follows."""
    kept: list[tuple[str, str]] = []
    named: set[bytes] = set()
    has_body = False
    for name, value in scope["headers"]:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            has_body = True
    for name, value in scope["headers"]:
        if name not in _HOP_BY_HOP and name not in _IDENTITY and name not in named and name != b"host":
            kept.append((name.decode("latin-1"), value.decode("latin-1")))
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    if length is not None and has_body:
        kept.append(("Content-Length", length.decode("latin-1")))
    kept.append(("X-Forwarded-For", scope["client"][0] or "127.0.0.1"))
    return kept, has_body


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise aiohttp.ClientPayloadError("the client left")
        if message["body"]:
            yield message["body"]
        if not message["more_body"]:
            return


async def refuse(send: Send, error: PlatformError) -> None:
    """Send an error answer."""
    body = errors.body_of(error)
    request_id = format_id(IdKind.GENERATION, new_uuid()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id),
    ]
    retry_after = errors.retry_after_of(error)
    if retry_after:
        headers.append((b"retry-after", str(retry_after).encode()))
    await send({"type": "http.response.start", "status": errors.status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": body})
