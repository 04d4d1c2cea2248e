"""Drives a request of any other path into the ASGI app, on the same connection and under the same limits."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import structlog

from api.inference import errors, wire
from api.inference.wire import Head

if TYPE_CHECKING:
    from api.inference.protocol import InferenceProtocol

Message = MutableMapping[str, Any]
ASGIApp = Callable[[dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

UNREAD_MAX = 64 * 1024  # of a request body the app has not taken yet; beyond it the socket is not read
# Of the app's headers: those of a connection, and the date, which is ours.
_NOT_PASSED_ON = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"date"})

_log = structlog.get_logger("gateway")


class ColdExchange:
    """One request and its answer, between the connection and the app."""

    def __init__(self, connection: "InferenceProtocol", head: Head, client_ip: str, *, expect: bool) -> None:
        self._connection = connection
        self._head = head
        self._client_ip = client_ip
        self._expect = expect
        self._parts: list[bytes] = []
        self._unread = 0
        self._complete = False
        self._arrived = asyncio.Event()
        self._gone = False
        self._told = False  # the app knows that the body is complete
        self._pending = b""  # the answer's head, until its first bytes
        self._paused = False
        self._started = False
        self._ended = False
        self._chunked = False
        self._bodyless = head.method == b"HEAD"
        self._left = -1  # bytes of the announced length still to come

    # ---- from the connection

    def body(self, part: bytes) -> None:
        self._parts.append(part)
        self._unread += len(part)
        self._arrived.set()
        if self._unread > UNREAD_MAX and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()

    def body_complete(self) -> None:
        self._complete = True
        self._arrived.set()

    def disconnect(self) -> None:
        self._gone = True
        self._arrived.set()

    # ---- the app

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(), self.receive, self.send)
        except Exception as bug:  # noqa: BLE001 - the edge of the app: the client gets a 500, the log the reason
            self._connection.gateway.metrics.add("internal_errors_total")
            _log.error(
                "request.failed",
                path=self._head.path[:200].decode("ascii", "replace"),
                error=type(bug).__name__,
                exc_info=bug,
            )
        if self._gone:
            return
        if not self._started:
            self._connection.cold = None
            self._connection.refuse_cold(errors.internal())
        elif not self._ended:
            self._connection.transport.abort()  # a cut answer must not look whole

    def _scope(self) -> dict[str, Any]:
        head = self._head
        path = head.path.decode("ascii", "replace")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": head.version,
            "method": head.method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii", "replace"),
            "query_string": head.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in head.headers],
            "client": (self._client_ip, 0),
            "server": None,
            "state": {},
        }

    async def receive(self) -> Message:
        if self._expect and not self._complete:
            self._expect = False
            self._connection.transport.write(wire.CONTINUE)
        while not self._parts and not self._complete and not self._gone:
            self._arrived.clear()
            await self._arrived.wait()
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._unread = 0
            if self._paused and not self._gone:
                self._paused = False
                self._connection.transport.resume_reading()
            self._told = self._complete
            return {"type": "http.request", "body": data, "more_body": not self._complete}
        if self._complete and not self._told and not self._gone:
            self._told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while not self._gone and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._gone or self._ended:
            return
        if message["type"] == "http.response.start":
            self._start(message)
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        self._write(body, more=more)
        if more:
            await self._connection.drained()
            return
        self._ended = True
        self._arrived.set()
        if self._paused:
            self._connection.transport.resume_reading()
        self._connection.cold = None
        self._connection.next_request()

    def _start(self, message: Message) -> None:
        self._started = True
        connection, head = self._connection, self._head
        status: int = message["status"]
        bodyless = self._bodyless = self._bodyless or status in {204, 304}
        headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in _NOT_PASSED_ON]
        length = next((value for name, value in headers if name.lower() == b"content-length"), None)
        self._left = int(length) if length is not None and not bodyless else -1
        if not self._complete:
            connection.keep_alive = False  # the rest of the request's body is not waited for, and the answer says so
        lines = [wire.status_line(status), connection.gateway.date_line]
        lines.extend(b"%b: %b\r\n" % (name, value) for name, value in headers)
        if length is None and not bodyless:
            self._chunked = head.version == "1.1"
            if self._chunked:
                lines.append(b"Transfer-Encoding: chunked\r\n")
            else:
                connection.keep_alive = False
        if not connection.keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(b"\r\n")
        self._pending = b"".join(lines)

    def _write(self, body: bytes, *, more: bool) -> None:
        out, self._pending = self._pending, b""
        if self._bodyless:
            body = b""
        if self._left >= 0:
            body = body[: self._left]
            self._left -= len(body)
            if not more and self._left:
                self._connection.keep_alive = False  # shorter than announced: only the end of the connection can say so
        if self._chunked:
            if body:
                out += b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                out += b"0\r\n\r\n"
        else:
            out += body
        if out:
            self._connection.transport.write(out)
