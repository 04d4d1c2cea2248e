"""The connections to engines: `send` starts a call, its `Sink` is called as the answer arrives.

Plain http and unix sockets go over own protocol objects (`Connection`), because a chunk must reach the client by one
direct call; https goes over aiohttp (`engine.tls_client`) behind the same two nouns. Nothing here awaits on the hot
path, and everything is bounded: connections and waiting calls per target, connects at once, time to connect.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from core.heads import remember, without_length
from engine.dial import connected_unix_socket

CONNECT_TIMEOUT_S = 3.0
CONNECTS_AT_ONCE = 32
IDLE_MAX_S = 55.0
STALE_WITHIN_S = 1.0  # a connection that was closed already shows it at once; one lost later was at work on the request
HEAD_MAX = 64 * 1024


Parts = tuple[bytes | memoryview, ...]
"""A body, put together once, as it goes out."""


class Failure(StrEnum):
    """Why a call ended without a whole answer."""

    CONNECT = "connect"  # no connection: nothing was sent
    QUEUE_FULL = "queue_full"  # every connection is busy and the queue is full: nothing was sent
    LOST = "lost"  # the connection ended in the middle
    PROTOCOL = "protocol"  # what came is not HTTP as we allow it


class Sink(Protocol):
    """Receives one answer: one head, any number of blocks, one end. Never called again after `on_end` or `abort`."""

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None: ...

    def on_data(self, block: bytes) -> None: ...

    def on_end(self, failure: Failure | None) -> None: ...


class Call(Protocol):
    """A call under way."""

    def abort(self) -> None:
        """Close the connection at once; the sink hears nothing more."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Target:
    """One engine's address, with what is known about it by this process."""

    __slots__ = (
        *("address", "authority", "connecting", "heads", "heard", "https", "idle", "inflight", "live", "silent_since"),
        *("url", "waiting"),
    )

    def __init__(self, url: str) -> None:
        """`url` is ``http://host:port``, ``https://…`` or ``unix:/path``, without /v1."""
        self.url = url.rstrip("/")
        self.https = False
        self.address: str | tuple[str, int]
        if url.startswith("unix:"):
            self.address = "/" + url.removeprefix("unix:").lstrip("/")
            self.authority = "localhost"
        else:
            parts = urlsplit(self.url)
            self.https = parts.scheme == "https"
            self.address = (parts.hostname or "", parts.port or (443 if self.https else 80))
            self.authority = parts.netloc.rpartition("@")[2]
        self.idle: list[Connection] = []
        self.live = 0
        self.connecting = 0
        self.inflight = 0
        self.waiting: deque[Flight] = deque()
        self.heard = False  # a byte came since `listen` was last asked
        self.silent_since = 0.0  # monotonic, while it owes answers; 0: it has said something lately
        self.heads: dict[tuple[str, str], bytes] = {}

    def listen(self, now: float) -> None:
        """Note whether it has said anything since this was last asked, while somebody waits for it."""
        if self.heard:
            self.heard, self.silent_since = False, 0.0
        elif self.inflight and not self.silent_since:
            self.silent_since = now

    def head(self, path: str, credential: str) -> bytes:
        """The request head up to the value of X-Request-Id."""
        key = (path, credential)
        head = self.heads.get(key)
        if head is None:
            base = "" if isinstance(self.address, str) else urlsplit(self.url).path.rstrip("/")
            authorization = f"Authorization: Bearer {credential}\r\n" if credential else ""
            head = (
                f"POST {base}{path} HTTP/1.1\r\nHost: {self.authority}\r\n{authorization}"
                "Content-Type: application/json\r\nAccept-Encoding: identity\r\nX-Request-Id: "
            ).encode("ascii")
            self.heads[key] = head
        return head


class Flight:
    """One call over the pool. `inflight` of its target counts it until it ends."""

    __slots__ = ("connection", "ended", "paused", "payload", "pool", "sink", "target")

    def __init__(self, pool: "UpstreamPool", target: Target, payload: bytes, sink: Sink) -> None:
        self.pool = pool
        self.target = target
        self.payload = payload
        self.sink = sink
        self.connection: Connection | None = None
        self.ended = False
        self.paused = False
        target.inflight += 1

    def finish(self, failure: Failure | None) -> None:
        if not self.ended:
            self.ended = True
            self.connection = None
            self.target.inflight -= 1
            self.sink.on_end(failure)

    def abort(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.target.inflight -= 1
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.flight = None
            connection.close()

    def pause(self) -> None:
        self.paused = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        if self.connection is not None:
            self.connection.transport.resume_reading()


class Connection(asyncio.Protocol):
    """One keep-alive connection, at most one call at a time, never used again after anything odd."""

    __slots__ = (
        "closing",
        "content_type",
        "encoded",
        "flight",
        "framed",
        "head_bytes",
        "idle_since",
        "in_body",
        "keep_alive",
        "parser",
        "parts",
        "pool",
        "retry_after",
        "reused",
        "sent_at",
        "silent",
        "target",
        "transport",
        "whole",
    )

    transport: asyncio.Transport

    def __init__(self, pool: "UpstreamPool", target: Target) -> None:
        self.pool = pool
        self.target = target
        self.parser = httptools.HttpResponseParser(self)
        self.flight: Flight | None = None
        self.parts: list[bytes] = []
        self.closing = False
        self.reused = False
        self.idle_since = self.sent_at = 0.0
        self.silent = True  # no byte of the answer has come
        self._reset()

    def _reset(self) -> None:
        """Begin a new answer."""
        self.content_type = self.retry_after = b""
        self.encoded = self.framed = self.in_body = self.keep_alive = self.whole = False
        self.head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.target.live += 1

    def send(self, flight: Flight) -> None:
        """Write the whole request at once."""
        self.flight = flight
        self.silent = True
        self.sent_at = self.pool.now()
        flight.connection = self
        if flight.paused:
            self.transport.pause_reading()
        self.transport.write(flight.payload)

    def close(self) -> None:
        """Leave at once, so that the engine notices and stops generating."""
        if not self.closing:
            self.closing = True
            self.transport.abort()

    # ---- what the transport says

    def data_received(self, data: bytes) -> None:
        flight = self.flight
        if flight is None:  # an engine that speaks unasked cannot be trusted with the next request
            self.close()
            return
        self.target.heard = True
        first, self.silent = self.silent, False
        if first:
            if self._recall(flight, data):
                return
            self._reset()
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(Failure.PROTOCOL)
            return
        if not self.in_body and not self.whole:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_MAX:
                self._fail(Failure.PROTOCOL)
                return
        parts = self.parts
        if parts:
            self.parts = []
            flight.sink.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self.whole and self.flight is flight:
            if first:
                self._learn(data)
            self._complete(flight)

    def _recall(self, flight: Flight, data: bytes) -> bool:
        """Take an answer that came in one piece with a head that the parser has seen before."""
        head, begin = without_length(data)
        known = self.pool.heads.get(head)
        if known is None:
            return False
        self.keep_alive = True
        sink = flight.sink
        sink.on_head(*known)
        sink.on_data(data[begin:])
        if self.flight is flight:
            self._complete(flight)
        return True

    def _learn(self, data: bytes) -> None:
        head, _ = without_length(data)
        if self.keep_alive and head.startswith(b"HTTP/1.1 200 "):
            remember(self.pool.heads, head, (200, self.content_type, self.retry_after))

    def eof_received(self) -> None:
        return None  # close: half-open engines are of no use

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.target.live -= 1
        if self.flight is None:
            if self in self.target.idle:
                self.target.idle.remove(self)
            self.pool.refill(self.target)
            return
        flight, self.flight = self.flight, None
        if self.silent and self.reused and self.pool.now() - self.sent_at < STALE_WITHIN_S:
            flight.connection = None
            self.pool.retry(flight)  # it closed as we wrote, and no byte came back
        elif exc is None and self.in_body and not self.framed:
            flight.finish(None)  # an answer without a length ends with its connection
        else:
            flight.finish(Failure.LOST)
        self.pool.refill(self.target)

    # ---- what the parser says

    def on_message_begin(self) -> None:
        if self.whole:  # a second answer nobody asked for
            self.closing = True

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self.content_type = value
        elif lower in {b"content-length", b"transfer-encoding"}:
            self.framed = True
        elif lower == b"retry-after":
            self.retry_after = value
        elif lower == b"content-encoding" and value.lower() != b"identity":
            self.encoded = True

    def on_headers_complete(self) -> None:
        if self.whole:
            return
        status = self.parser.get_status_code()
        if status < 200:
            return
        if self.encoded or status == 204:
            raise ValueError("not an answer we asked for")
        self.in_body = True
        self.keep_alive = self.parser.should_keep_alive()  # the parser forgets it with the message
        if self.flight is not None:
            self.flight.sink.on_head(status, self.content_type, self.retry_after)

    def on_body(self, part: bytes) -> None:
        if not self.whole:
            self.parts.append(part)

    def on_message_complete(self) -> None:
        if self.in_body:
            self.whole = True

    # ---- ends

    def _fail(self, failure: Failure) -> None:
        flight, self.flight = self.flight, None
        self.parts = []
        self.close()
        if flight is not None:
            flight.finish(failure)

    def _complete(self, flight: Flight) -> None:
        """Give the connection back before the sink hears the end, so that its next call may use it."""
        self.flight = None
        transport = self.transport
        early = transport.get_write_buffer_size() > 0  # it answered before our request was out
        if self.closing or early or not self.keep_alive or transport.is_closing():
            self.close()
        else:
            if flight.paused:
                transport.resume_reading()
            self.pool.give_back(self)
        flight.finish(None)


class UpstreamPool:
    """All plain connections of one process. Takes and gives back without awaiting."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monotonic: Callable[[], float],
        *,
        connections_max: int,
        waiting_max: int = 1024,
    ) -> None:
        self._loop = loop
        self.now = monotonic
        self._connections_max = connections_max
        self._waiting_max = waiting_max
        self._targets: dict[str, Target] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.retries = 0
        self.heads: dict[bytes, tuple[int, bytes, bytes]] = {}  # of answers to keep a connection for: for `on_head`

    def target(self, url: str) -> Target:
        """The one `Target` of this address."""
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = Target(url)
        return target

    def send(
        self, target: Target, path: str, body: Parts, sink: Sink, *, request_id: str = "", credential: str = ""
    ) -> Call:
        """Start ``POST path``. Every later word comes through `sink`, a failure to connect too."""
        head, size = target.head(path, credential), sum(map(len, body))
        payload = b"".join((head, b"%b\r\nContent-Length: %d\r\n\r\n" % (request_id.encode(), size), *body))
        flight = Flight(self, target, payload, sink)
        idle = target.idle
        while idle:
            connection = idle.pop()
            if not connection.closing and not connection.transport.is_closing():
                connection.reused = True
                connection.send(flight)
                return flight
        self._enqueue(flight)
        return flight

    def retry(self, flight: Flight) -> None:
        """Once more on a fresh connection; a fresh one is never `reused`, so this cannot repeat."""
        self.retries += 1
        for connection in flight.target.idle:
            connection.close()  # they are as old as the one that failed
        flight.target.idle.clear()
        self._enqueue(flight)

    def give_back(self, connection: Connection) -> None:
        waiting = connection.target.waiting
        while waiting:
            flight = waiting.popleft()
            if not flight.ended:
                connection.reused = True
                connection.send(flight)
                return
        connection.idle_since = self.now()
        connection.target.idle.append(connection)

    def refill(self, target: Target) -> None:
        """Connect for those who wait, after a connection went."""
        while target.waiting and target.waiting[0].ended:
            target.waiting.popleft()
        if target.waiting:
            self._maybe_connect(target)

    def listen(self, now: float) -> None:
        """Note which targets say nothing to those who wait for them."""
        for target in self._targets.values():
            target.listen(now)

    def sweep(self, now: float) -> None:
        """Close what was idle for long, and forget targets that nobody uses."""
        for url, target in list(self._targets.items()):
            for connection in list(target.idle):
                if now - connection.idle_since > IDLE_MAX_S:
                    target.idle.remove(connection)
                    connection.close()
            if not (target.live or target.connecting or target.inflight or target.waiting):
                del self._targets[url]

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for target in self._targets.values():
            for connection in list(target.idle):
                connection.close()
            target.idle.clear()

    def _enqueue(self, flight: Flight) -> None:
        target = flight.target
        connectable = max(0, self._connections_max - target.live)
        if len(target.waiting) >= self._waiting_max + connectable:
            self._loop.call_soon(flight.finish, Failure.QUEUE_FULL)
            return
        target.waiting.append(flight)
        self._maybe_connect(target)

    def _maybe_connect(self, target: Target) -> None:
        if (
            target.connecting < min(CONNECTS_AT_ONCE, len(target.waiting))
            and target.live + target.connecting < self._connections_max
        ):
            target.connecting += 1
            task = self._loop.create_task(self._connect(target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, target: Target) -> None:
        failed = True
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._dial(target)
            failed = False
        except (OSError, TimeoutError):
            pass
        finally:
            target.connecting -= 1
            if failed and target.waiting:
                target.waiting.popleft().finish(Failure.CONNECT)
        if not failed and not connection.closing:
            self.give_back(connection)
            connection.reused = False  # fresh: its first call is not retried
        self.refill(target)

    async def _dial(self, target: Target) -> Connection:
        def make() -> Connection:
            return Connection(self, target)

        made: Any
        if not isinstance(target.address, str):
            _, made = await self._loop.create_connection(make, *target.address)
            return cast("Connection", made)
        door = await connected_unix_socket(target.address)
        try:
            _, made = await self._loop.create_unix_connection(make, sock=door)
        except BaseException:
            door.close()
            raise
        return cast("Connection", made)
