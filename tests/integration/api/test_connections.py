"""One client connection over its life: inference and other paths in turn, slow readers, large streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from api.inference import sweeper
from core.clock import ManualClock, SystemClock
from core.settings import Gateway as GatewaySettings
from tests.factories.gateway import Rig, rig, served_model
from tests.factories.stack import Stack, chat, until


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers with what it got: the body in pieces, or by an announced length, or nothing."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body += message["body"]
        more = message["more_body"]
    headers = [(b"x-path", scope["raw_path"]), (b"x-query", scope["query_string"]), (b"connection", b"x-hop")]
    if scope["path"] == "/fail":
        raise RuntimeError("an app with a bug")
    if scope["path"] == "/short":
        headers.append((b"content-length", b"100"))
    if scope["path"] == "/length":
        headers.append((b"content-length", str(len(body)).encode()))
    status = 204 if scope["path"] == "/empty" else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for place in range(0, len(body), 7):
        await send({"type": "http.response.body", "body": body[place : place + 7], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Wire:
    """A raw HTTP/1.1 client on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader, self.writer, self.key = reader, writer, key

    def send(self, method: str, path: str, body: bytes = b"", *, chunked: bool = False) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {self.key}\r\n"
        if chunked:
            pieces = [body[place : place + 5] for place in range(0, len(body), 5)]
            framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            self.writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + framed)
        else:
            self.writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def answer(self, *, head_only: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        async with asyncio.timeout(10):
            raw = await self.reader.readuntil(b"\r\n\r\n")
            lines = raw[:-4].split(b"\r\n")
            headers = {k.lower(): v for k, v in (line.split(b": ", 1) for line in lines[1:])}
            status = int(lines[0].split()[1])
            if head_only or status == 204:
                return status, headers, b""
            if b"content-length" in headers:
                return status, headers, await self.reader.readexactly(int(headers[b"content-length"]))
            parts = []
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                parts.append((await self.reader.readexactly(size + 2))[:-2])
            await self.reader.readexactly(2)
            return status, headers, b"".join(parts)


@contextlib.asynccontextmanager
async def wire(made: Rig) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=2**20)
    try:
        yield Wire(reader, writer, made.key)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def echoing(stack: Stack) -> Stack:
    stack.rig.gateway.cold_app = echo
    return stack


HOT = orjson.dumps(chat("[[sim n=3]]"))
STREAM = orjson.dumps(chat("[[sim n=3]]", stream=True))


async def test_hot_and_cold_alternate_on_one_connection(echoing: Stack) -> None:
    async with wire(echoing.rig) as client:
        for turn in range(30):
            client.send("POST", "/v1/chat/completions", HOT)
            assert (await client.answer())[0] == 200
            client.send("POST", f"/api/v1/x%2Fy?turn={turn}", b"body " * turn, chunked=turn % 2 == 0)
            status, headers, body = await client.answer()
            assert (status, body) == (200, b"body " * turn)
            assert headers[b"x-query"] == b"turn=%d" % turn
            assert headers[b"x-path"] == b"/api/v1/x%2Fy"
            assert headers.get(b"connection") is None
            client.send("POST", "/v1/chat/completions", STREAM, chunked=turn % 2 == 1)
            assert (await client.answer())[2].endswith(b"data: [DONE]\n\n")
            client.send("HEAD", "/length")
            assert (await client.answer(head_only=True))[0] == 200
            client.send("GET", "/empty")
            assert (await client.answer())[0] == 204
        assert echoing.rig.gateway.metrics.counters["connections_total"] == 1


async def test_everything_pipelined_in_one_write(echoing: Stack) -> None:
    async with wire(echoing.rig) as client:
        for turn in range(20):
            client.send("POST", "/v1/chat/completions", STREAM if turn % 2 else HOT)
            client.send("POST", "/echo", b"%d" % turn, chunked=turn % 3 == 0)
        for turn in range(20):
            assert (await client.answer())[0] == 200
            assert (await client.answer())[2] == b"%d" % turn


async def test_a_large_cold_body_flows_both_ways(echoing: Stack) -> None:
    body = bytes(range(256)) * 4000
    async with wire(echoing.rig) as client:
        client.send("POST", "/length", body)
        assert (await client.answer())[2] == body
        client.send("POST", "/echo", body[:50_000], chunked=True)
        assert (await client.answer())[2] == body[:50_000]


async def test_an_app_that_fails_is_a_500_and_one_that_stops_short_is_cut(echoing: Stack) -> None:
    async with wire(echoing.rig) as client:
        client.send("POST", "/fail", b"x")
        status, _, body = await client.answer()
        assert (status, orjson.loads(body)["error"]["code"]) == (500, "INTERNAL")
        assert b"bug" not in body
        client.send("POST", "/short", b"x")
        with pytest.raises(asyncio.IncompleteReadError):
            await client.answer()


async def test_an_answer_that_does_not_wait_for_the_body_says_that_the_connection_ends() -> None:
    """Else a client sends its next request on a connection that is being closed."""
    async with rig({}) as made, wire(made) as client:
        client.writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers[b"connection"]) == (404, b"close")
        client.writer.write(b"{}")
        assert await client.reader.read() == b""
    async with rig({}) as made, wire(made) as client:
        for _ in range(2):
            client.send("POST", "/v1/responses", b"{}")
            status, headers, _ = await client.answer()
            assert status == 404
            assert b"connection" not in headers


async def test_cold_bodies_have_the_same_limit() -> None:
    async with rig({}, settings=GatewaySettings(body_max_bytes=1000), cold_app=echo) as made:
        async with wire(made) as client:
            client.send("POST", "/x", b"a" * 1001)
            assert (await client.answer())[0] == 413
        async with wire(made) as client:
            client.send("POST", "/x", b"a" * 1001, chunked=True)
            assert (await client.answer())[0] == 413


async def big_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: list[int], megabytes: int
) -> None:
    """An engine that streams as fast as it is read."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    event = b'data: {"id":"a","model":"big","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65_400)
    framed = b"%x\r\n%b\r\n" % (len(event), event)
    with contextlib.suppress(ConnectionError):
        for _ in range(megabytes * 16):
            writer.write(framed)
            await writer.drain()
            sent[0] += len(framed)
        usage = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(usage), usage))
        await writer.drain()
    writer.close()


async def test_a_client_that_does_not_read_holds_the_engine_back() -> None:
    """40 MB wait in the engine, not in us: what left it fits into socket buffers."""
    sent = [0]
    server = await asyncio.start_server(lambda r, w: big_stream(r, w, sent, 40), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with rig({"big": served_model("big", f"http://127.0.0.1:{port}")}, clock=SystemClock()) as made:
        async with wire(made) as client:
            client.send("POST", "/v1/chat/completions", orjson.dumps(chat("x", model="big", stream=True)))
            before = -1
            while sent[0] != before or not sent[0]:
                before = sent[0]
                await asyncio.sleep(0.15)
            assert sent[0] < 20_000_000
            (connection,) = made.gateway.connections
            assert connection.transport.get_write_buffer_size() < 1_000_000
            status, _, body = await client.answer()
            assert status == 200
            assert len(body) > 40 * 16 * 65_000
            assert body.endswith(b"data: [DONE]\n\n")
            assert sent[0] > 40_000_000
        assert made.event.usage.output == 2
    server.close()
    await server.wait_closed()


async def test_a_client_that_never_reads_is_left_after_a_while() -> None:
    sent = [0]
    clock = ManualClock()
    server = await asyncio.start_server(lambda r, w: big_stream(r, w, sent, 40), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with rig({"big": served_model("big", f"http://127.0.0.1:{port}")}, clock=clock) as made:
        async with wire(made) as client:
            client.send("POST", "/v1/chat/completions", orjson.dumps(chat("x", model="big", stream=True)))
            await until(lambda: any(connection.write_paused for connection in made.gateway.connections))
            clock.advance(59)
            sweeper.sweep(made.gateway, clock.monotonic())
            assert made.gateway.connections
            clock.advance(2)
            sweeper.sweep(made.gateway, clock.monotonic())
            await until(lambda: made.spool.events)
        assert made.event.outcome.value == "client_abort"
        assert not made.admission.held
    server.close()
    await server.wait_closed()


async def test_the_sweeper_ends_an_engine_call_that_takes_too_long(stack: Stack) -> None:
    clock = ManualClock()
    stack.rig.gateway.clock = clock
    call = asyncio.create_task(stack.chat("[[sim fault=stall at=0]]"))
    await until(lambda: stack.rig.gateway.relays)
    clock.advance(stack.rig.gateway.settings.request_timeout_s * 2)
    sweeper.sweep(stack.rig.gateway, stack.rig.gateway.now + stack.rig.gateway.settings.request_timeout_s + 1)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "UPSTREAM_TIMEOUT")


async def test_an_http_1_0_client_gets_a_stream_until_the_end(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.rig.port)
    head = f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {stack.rig.key}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
    answer = await reader.read()
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_draining_answers_and_closes(stack: Stack) -> None:
    stack.rig.gateway.draining = True
    answer = await stack.chat("x")
    assert answer.status_code == 503
    assert answer.headers["connection"] == "close"
