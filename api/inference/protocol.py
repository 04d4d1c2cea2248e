"""One client connection: HTTP/1.1 in, either an inference request for `serve` or any other path for the ASGI app.

Requests of one connection are answered one at a time: while one is being answered, what arrives behind it stays unread
by the parser, and beyond `STASH_MAX` unread by the socket. The parser is fed up to the end of one message and no
further (`_cut`), so nothing behind a request is looked at before its turn.
"""

import asyncio
from enum import IntEnum
from typing import Any, cast

import httptools

from api.inference import errors, jwt_bearer, wire
from api.inference.bridge import ColdExchange
from api.inference.door import DISCARD_MAX, learn, recall, request_of
from api.inference.gateway import Gateway
from api.inference.job import Request
from api.inference.pipeline import serve
from api.inference.wire import Head
from core.errors import PlatformError
from core.ids import IdKind, format_id

HOT = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "completions",
    b"/v1/embeddings": "embeddings",
    b"/tokenize": "tokenize",
}
NEW_S, HEAD_S, BODY_S, IDLE_S = 5.0, 10.0, 60.0, 75.0
LINGER_S = 2.0  # after a refusal: let the client read it before the connection goes
STALLED_S = 60.0  # a client that takes nothing for so long is gone
STASH_MAX = 64 * 1024
CUTS_MAX = 2000  # places in one chunked body that look like its end; each costs a call of the parser
NEVER = float("inf")
_END = b"\r\n\r\n"


class Phase(IntEnum):
    """What the connection waits for."""

    IDLE = 0  # the first byte of a request
    HEAD = 1
    BODY = 2
    BUSY = 3  # the answer
    LINGER = 4  # the client to leave


IDLE, HEAD, BODY, BUSY, LINGER = Phase  # as names of their own: a member of an enum is looked up anew each time


class InferenceProtocol(asyncio.Protocol):
    """Built by uvicorn's server for every connection; see `app.py`."""

    __slots__ = (
        "body",
        "body_size",
        "carry",
        "client_ip",
        "cold",
        "cuts",
        "deadline",
        "feeding",
        "flow",
        "gateway",
        "gone",
        "head",
        "head_bytes",
        "head_done",
        "keep_alive",
        "message_done",
        "parser",
        "pending_head",
        "phase",
        "refusal",
        "remaining",
        "request",
        "server",
        "settling",
        "stash",
        "task",
        "tasks",
        "transport",
        "writable",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(self, gateway: Gateway, connections: set[Any], tasks: set[Any]) -> None:
        self.gateway = gateway
        self.server = connections
        self.tasks = tasks
        self.parser = httptools.HttpRequestParser(self)
        self.phase = IDLE
        self.deadline = gateway.now + NEW_S
        self.gone = self.feeding = False
        self.stash = b""
        self.task: asyncio.Task[None] | None = None
        self.flow: Any = None
        self.write_paused = False
        self.writable: asyncio.Future[None] | None = None
        self.client_ip = ""
        self.request: Request | None = None
        self.cold: ColdExchange | None = None
        self._fresh()

    def _fresh(self) -> None:
        """Begin a new request."""
        self.head = Head()
        self.keep_alive = True
        self.refusal: PlatformError | None = None
        self.body: bytes | bytearray = b""
        self.body_size = self.head_bytes = self.remaining = self.cuts = 0
        self.head_done = self.message_done = self.settling = False
        self.pending_head: bytes | None = None
        self.carry = b""

    # ---- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.server.add(self)
        gateway = self.gateway
        gateway.connections.add(self)
        gateway.metrics.add("connections_total")
        peer = transport.get_extra_info("peername")
        self.client_ip = peer[0] if isinstance(peer, tuple) else ""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        self.gone = True
        self.server.discard(self)
        self.gateway.connections.discard(self)
        self.stash = b""
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        if self.cold is not None:
            self.cold.disconnect()
            if self.task is not None:
                self.task.cancel()
            return
        task = self.task
        if task is not None and not task.done():  # until now this connection has kept it alive
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            if not self.settling:
                task.cancel()

    def eof_received(self) -> None:
        return None  # a half-closed client has left: what is under way is aborted

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.phase is BUSY:
            self.deadline = self.gateway.now + STALLED_S
        if self.flow is not None:
            self.flow.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.phase is BUSY:
            self.deadline = NEVER
        if self.flow is not None:
            self.flow.resume()
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self.phase is BUSY or self.stash:
            self.stash += data
            if len(self.stash) > STASH_MAX:
                self.transport.pause_reading()
        elif self.phase is not LINGER and not (self.phase is IDLE and self._recall(data)):
            self._feed(data)

    def _recall(self, data: bytes) -> bool:
        """Serve a whole request like one that was let in before; False: it must be parsed."""
        found = recall(self.gateway, data, self.client_ip)
        if found is None:
            return False
        self.request, self.keep_alive = found
        self.head = self.request.head
        self.settling, self.message_done, self.refusal, self.pending_head = False, True, None, None
        self._serve(self.request)
        return True

    # ---- feeding the parser, never beyond one message

    def _feed(self, data: bytes) -> None:
        self.feeding = True
        at, size = 0, len(data)
        try:
            while at < size and not self.gone:
                phase = self.phase
                if phase is BUSY:
                    self.stash = data[at:]
                    return
                if phase is LINGER:
                    return
                if phase is IDLE:
                    self._fresh()
                    self.phase = HEAD
                    self.deadline = self.gateway.now + HEAD_S
                cut = self._cut(data, at)
                piece = data if cut - at == size else data[at:cut]
                at = cut
                if not self._feed_piece(piece):
                    return
        finally:
            self.feeding = False

    def _cut(self, data: bytes, at: int) -> int:
        """How far `data` from `at` surely is of this message: one without a length ends in an empty line."""
        if self.remaining > 0:
            cut = min(self.remaining, len(data) - at)
            self.remaining -= cut
            return at + cut
        carry, self.carry = self.carry, b""
        if carry:
            across = (carry + data[at : at + 3]).find(_END)
            if across >= 0:
                return at + across + 4 - len(carry)
        found = data.find(_END, at)
        if found < 0:
            self.carry = (carry + data[max(at, len(data) - 3) :])[-3:]
            return len(data)
        self.cuts += 1
        end, behind = found + 4, len(data) - found - 4
        if behind and not self.head_done and b"\r\nContent-Length: %d\r\n" % behind in data[at:end]:
            self.head_bytes -= behind
            return len(data)  # the usual request: head and body in one piece, and nothing behind them
        return end

    def _feed_piece(self, piece: bytes) -> bool:
        """Whether the connection can go on."""
        if not self.head_done:
            self.head_bytes += len(piece)
            if self.head_bytes > wire.HEAD_MAX:
                self._refuse(errors.headers_too_large())
                return False
        if self.cuts > CUTS_MAX:
            self._refuse(errors.invalid("The body is made of too many small pieces. Send it with a Content-Length."))
            return False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # seen by `should_upgrade` below, and refused
        except httptools.HttpParserError:
            self.gateway.metrics.add("bad_requests_total")
            self._refuse(self.refusal or errors.invalid("This is not a valid HTTP/1.1 request."))
            return False
        if self.head_done and self.phase is HEAD:
            if not self._head_complete():
                return False
            if self.message_done and self.request is not None:
                learn(self.gateway, piece, self.request, keep_alive=self.keep_alive)
        if self.message_done:
            self._dispatch()
        return not self.gone

    # ---- what the parser says

    def on_url(self, url: bytes) -> None:
        self.head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_done:  # trailers mean nothing here
            self.head.headers.append((name, value))

    def on_headers_complete(self) -> None:
        head, parser = self.head, self.parser  # the parser forgets these with the message
        head.method = parser.get_method()
        head.version = parser.get_http_version()
        self.keep_alive = parser.should_keep_alive() and head.version == "1.1"
        head.upgrade = parser.should_upgrade()
        self.head_done = True

    def on_body(self, part: bytes) -> None:
        self.body_size += len(part)
        if self.body_size > self.gateway.settings.body_max_bytes:
            self.refusal = errors.body_too_large(self.gateway.settings.body_max_bytes)
            raise ValueError("body too large")
        if self.cold is not None:
            self.cold.body(part)
        elif self.request is not None or self.phase is HEAD:  # it came in one piece with the head
            self._keep(part)

    def _keep(self, part: bytes) -> None:
        """Most bodies come in one part. Of many small ones no object each is kept: that is many times their size."""
        if not self.body:
            self.body = part
            return
        if type(self.body) is bytes:
            self.body = bytearray(self.body)
        self.body += part

    def on_message_complete(self) -> None:
        self.message_done = True

    # ---- a request's life

    def _head_complete(self) -> bool:
        """Check the head, and decide who answers. False when the connection ends here."""
        head, gateway = self.head, self.gateway
        try:
            wire.check(head, body_max=gateway.settings.body_max_bytes)
        except PlatformError as error:
            gateway.metrics.add("bad_requests_total")
            self._refuse(error)
            return False
        self.remaining = 0 if head.length < 0 else head.length - self.body_size
        self.phase = BODY
        self.deadline = gateway.now + BODY_S
        endpoint = HOT.get(head.path)
        if endpoint is None or head.method == b"OPTIONS":
            self._begin_cold()
            return not self.gone
        try:
            self.request = request_of(gateway, head, endpoint, self.client_ip)
        except PlatformError as error:
            if head.length < 0 or head.length > DISCARD_MAX or head.expects:
                self._refuse(error)
                return False
            self.refusal, self.body = error, b""
        if head.expects and not self.message_done:
            self.transport.write(wire.CONTINUE)
        return True

    def _begin_cold(self) -> None:
        gateway, head = self.gateway, self.head
        gateway.metrics.add("cold_requests_total")
        client_ip = wire.client_address(head, self.client_ip, gateway.settings.trusted_proxies)
        self.cold = cold = ColdExchange(self, head, client_ip, expect=head.expects)
        if self.body:
            cold.body(bytes(self.body))
            self.body = b""
        self.task = task = gateway.loop.create_task(cold.run(gateway.cold_app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _dispatch(self) -> None:
        """The whole message is here."""
        if self.request is not None and self.refusal is None:
            self.request.body = bytes(self.body)  # the same object when it is bytes
            self.body = b""
            self._serve(self.request)
            return
        self.phase = BUSY
        self.deadline = NEVER
        if self.cold is not None:
            self.cold.body_complete()
        elif self.refusal is not None:
            self._answer_refusal(self.refusal)

    def _serve(self, request: Request) -> None:
        self.phase, self.deadline = BUSY, NEVER
        run = serve if request.digest else jwt_bearer.find_caller_then_serve
        self.task = self.gateway.loop.create_task(run(self.gateway, request, self))

    def _answer_refusal(self, error: PlatformError) -> None:
        self.gateway.metrics.count("refused", errors.status_of(error))
        self.gateway.metrics.refusals[error.code] = self.gateway.metrics.refusals.get(error.code, 0) + 1
        retry_after = errors.retry_after_of(error)
        self.respond(
            errors.status_of(error),
            errors.body_of(error),
            b"X-Request-Id: %b\r\n%b"
            % (
                format_id(IdKind.GENERATION, self.gateway.new_id()).encode(),
                b"Retry-After: %d\r\n" % retry_after if retry_after else b"",
            ),
        )

    def _refuse(self, error: PlatformError) -> None:
        """Answer and end: what follows on this connection cannot be trusted, or is not wanted."""
        self.keep_alive = False
        if self.cold is not None:
            self.cold.disconnect()  # whatever the app may still say, this is the one answer
        self._answer_refusal(error)

    def refuse_cold(self, error: PlatformError) -> None:
        """The app gave no answer."""
        self._answer_refusal(error)

    def next_request(self) -> None:
        """An answer is complete: on to what the client sent meanwhile."""
        self.task = None
        if self.gone:
            return
        if not self.keep_alive or self.gateway.draining or not self.message_done:
            self._linger()
            return
        self.phase = IDLE
        self.deadline = self.gateway.now + IDLE_S
        self.request = None
        if self.stash and not self.feeding:
            data, self.stash = self.stash, b""
            if len(data) > STASH_MAX:
                self.transport.resume_reading()
            self._feed(data)

    def _linger(self) -> None:
        """Say that no more comes, and give the client a moment to read before the connection goes."""
        transport = self.transport
        if self.message_done and not self.stash:
            self.phase = LINGER
            transport.close()
            return
        self.phase = LINGER
        self.deadline = self.gateway.now + LINGER_S
        self.stash = b""
        if transport.can_write_eof():
            transport.write_eof()

    # ---- the answer, called by the stages and by the engine's connection

    @property
    def streaming(self) -> bool:
        return self.pending_head == b""

    def attach(self, flow: Any) -> None:
        """What to pause while the client does not read."""
        self.flow = flow
        if flow is not None and self.write_paused:
            flow.pause()

    def respond(self, status: int, body: bytes, extra: bytes) -> None:
        """A whole answer."""
        if self.gone:
            return
        gateway, head = self.gateway, self.head
        if gateway.settings.cors_origins:
            extra += wire.cors_lines(head, gateway.settings.cors_origins)
        keep_alive = self.keep_alive and not gateway.draining
        lines = wire.plain_head(status, len(body), gateway.date_line, extra, keep_alive=keep_alive)
        self.transport.write(lines if head.method == b"HEAD" else lines + body)
        self.next_request()

    def abandon(self) -> None:
        """No answer, or no end of one, will come."""
        self.transport.abort()

    def begin_stream(self, extra: bytes) -> None:
        """The head goes out with the first chunk, so that an error before it can still be a plain answer."""
        if self.gateway.settings.cors_origins:
            extra += wire.cors_lines(self.head, self.gateway.settings.cors_origins)
        head = self.head
        chunked = head.version == "1.1"
        self.keep_alive = self.keep_alive and chunked
        self.pending_head = wire.stream_head(
            self.gateway.date_line + extra, chunked=chunked, keep_alive=self.keep_alive
        )

    def stream(self, data: bytes) -> None:
        """Whole events, as they come."""
        if self.gone:
            return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self.head.version == "1.1" else data
        if self.pending_head:
            framed = self.pending_head + framed
            self.pending_head = b""
        self.transport.write(framed)

    def end_stream(self, data: bytes) -> None:
        """The last events; the connection is free for the next request."""
        if self.gone:
            return
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if self.head.version == "1.1" else data
        if self.pending_head:
            framed = self.pending_head + framed
        self.pending_head = None
        self.transport.write(framed)
        self.next_request()

    # ---- called by the sweeper and by uvicorn

    def sweep(self, now: float) -> None:
        """End what took too long."""
        if now < self.deadline:
            return
        self.gateway.metrics.add("timeouts_total")
        if (self.phase is HEAD or self.phase is BODY) and self.cold is None:
            self._refuse(errors.request_timeout())
            return
        if self.phase is BUSY or self.phase is LINGER:
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Uvicorn stops: an idle connection closes, a busy one after its answer."""
        self.keep_alive = False
        if self.phase is IDLE:
            self.transport.close()

    async def drained(self) -> None:
        """Return when the client can take more."""
        while self.write_paused and not self.gone:
            self.writable = self.gateway.loop.create_future()
            await self.writable
