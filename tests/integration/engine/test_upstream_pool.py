"""Engines that misbehave, over real sockets: what the pool does with their connections."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from core.clock import ManualClock
from engine.client import IDLE_MAX_S, STALE_WITHIN_S, Failure, Target, UpstreamPool

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
Behaviour = Callable[["Engine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Engine:
    """A server that does what a test says, once for each connection."""

    behaviour: Behaviour
    connections: int = 0
    open: int = 0
    most: int = 0
    requests: int = 0
    pool: UpstreamPool = field(init=False)
    target: Target = field(init=False)
    clock: ManualClock = field(default_factory=ManualClock)

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """One whole request, or nothing at the end of the connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        self.requests += 1
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await reader.readexactly(length)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.behaviour(self, reader, writer)
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()

    async def call(self, body: bytes = b"{}") -> "Collected":
        found = Collected(asyncio.get_running_loop().create_future())
        found.call = self.pool.send(self.target, "/v1/x", (body,), found, request_id="gen_1")
        async with asyncio.timeout(30):
            await found.done
        return found


class Collected:
    """A sink that keeps everything."""

    def __init__(self, done: "asyncio.Future[None]") -> None:
        self.done = done
        self.status = 0
        self.content_type = b""
        self.retry_after = b""
        self.data = b""
        self.failure: Failure | None = None
        self.ends = 0
        self.call: object = None

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.status, self.content_type, self.retry_after = status, content_type, retry_after

    def on_data(self, block: bytes) -> None:
        self.data += block

    def on_end(self, failure: Failure | None) -> None:
        self.ends += 1
        self.failure = failure
        self.done.set_result(None)


@asynccontextmanager
async def engine(behaviour: Behaviour, *, connections_max: int = 8, waiting_max: int = 64) -> AsyncIterator[Engine]:
    made = Engine(behaviour)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0, limit=2**20)
    loop = asyncio.get_running_loop()
    made.pool = UpstreamPool(loop, made.clock.monotonic, connections_max=connections_max, waiting_max=waiting_max)
    port = server.sockets[0].getsockname()[1]
    made.target = made.pool.target(f"http://127.0.0.1:{port}")
    try:
        yield made
    finally:
        await made.pool.close()
        server.close()
        await server.wait_closed()


async def polite(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await made.request(reader):
        writer.write(OK)


async def test_a_connection_is_used_again_and_the_request_is_whole() -> None:
    seen = []

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await made.request(reader):
            seen.append(request)
            writer.write(OK)

    async with engine(behaviour) as made:
        for _ in range(3):
            found = await made.call(b'{"a":1}')
            assert (found.status, found.data, found.failure) == (200, b"{}", None)
        assert made.connections == 1
        assert seen[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"X-Request-Id: gen_1\r\nContent-Length: 7\r\n\r\n" in seen[0]
        assert made.target.inflight == 0


async def test_a_unix_socket_with_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    """The kernel answers EAGAIN at once where a tcp connect would wait: so does a herd at a new engine."""
    made = Engine(polite)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(tmp_path / "engine.sock"))
    door.listen(1)
    loop = asyncio.get_running_loop()
    made.pool = UpstreamPool(loop, made.clock.monotonic, connections_max=40)
    made.target = made.pool.target(f"unix:{tmp_path}/engine.sock")
    calls = [asyncio.create_task(made.call()) for _ in range(40)]
    await asyncio.sleep(0.1)  # nobody accepts yet: more than the backlog holds have been turned away
    server = await asyncio.start_unix_server(made.handle, sock=door, backlog=100)
    found = await asyncio.gather(*calls)
    assert {(one.status, one.failure) for one in found} == {(200, None)}
    await made.pool.close()
    server.close()
    await server.wait_closed()


async def test_closed_as_we_write_is_tried_once_more() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # the second request arrives and gets no byte

    async with engine(behaviour) as made:
        assert (await made.call()).failure is None
        again = await made.call()
        assert (again.failure, again.ends) == (None, 1)
        assert made.connections == 2
        assert made.pool.retries == 1


async def test_lost_at_work_is_not_tried_again() -> None:
    """After a while without a byte the engine was busy with the request: sending it again would do it twice."""

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)
        writer.write(OK)
        await made.request(reader)
        made.clock.advance(STALE_WITHIN_S + 0.1)

    async with engine(behaviour) as made:
        await made.call()
        assert (await made.call()).failure is Failure.LOST
        assert (made.connections, made.pool.retries) == (1, 0)


async def test_a_fresh_connection_that_gives_nothing_is_not_tried_again() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)

    async with engine(behaviour) as made:
        assert (await made.call()).failure is Failure.LOST
        assert made.connections == 1


async def test_a_byte_that_came_back_forbids_another_try() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)
        writer.write(OK)
        await made.request(reader)
        writer.write(OK[:9])

    async with engine(behaviour) as made:
        await made.call()
        found = await made.call()
        assert (found.failure, found.ends) == (Failure.LOST, 1)
        assert (made.connections, made.requests) == (1, 2)


async def test_bytes_on_an_idle_connection_end_it() -> None:
    spoken = asyncio.Event()

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await made.request(reader):
            writer.write(OK)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(OK)
            spoken.set()

    async with engine(behaviour) as made:
        await made.call()
        await spoken.wait()
        async with asyncio.timeout(30):
            while made.target.live:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.005)
        assert not made.target.idle
        assert (await made.call()).data == b"{}"
        assert made.connections == 2


async def test_a_second_answer_in_the_same_read_is_no_answer_to_the_next_request() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await made.request(reader):
            writer.write(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")

    async with engine(behaviour) as made:
        for _ in range(2):
            assert (await made.call()).data == b"{}"
        assert made.connections == 2


async def test_an_answer_with_the_head_of_an_earlier_one_needs_no_parser() -> None:
    bodies = [b"{}", b'{"a":1}', b"[]", b"{}", b"x"]
    heads = [OK.partition(b"Content-Length")[0]] * 3 + [b"HTTP/1.1 200 OK\r\nX: y\r\n"] * 2

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for head, body in zip(heads, bodies, strict=True):
            await made.request(reader)
            writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        await made.request(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\nContent-Length: %d\r\n\r\n%b" % (len(OK), OK))
        await made.request(reader)
        writer.write(OK + OK)

    async with engine(behaviour) as made:
        for number, body in enumerate(bodies):
            found = await made.call()
            types = [b"application/json"] * 3 + [b""] * 2
            assert (found.status, found.data, found.content_type) == (200, body, types[number])
            if number == 0:
                parser, made.target.idle[0].parser = made.target.idle[0].parser, cast("Any", None)
            if number == 2:
                made.target.idle[0].parser = parser
        assert len(made.pool.heads) == 2
        for _ in range(2):
            assert (await made.call()).data == b"{}"
        assert (len(made.pool.heads), made.connections) == (2, 1)


@pytest.mark.parametrize(
    ("answer", "failure", "data"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nuntil the end", None, b"until the end", id="ended by its connection"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", Failure.LOST, b"short", id="shorter than said"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
            Failure.LOST,
            b"abc",
            id="chunks cut off",
        ),
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", Failure.PROTOCOL, b"", id="no HTTP"),
        pytest.param(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
            Failure.PROTOCOL,
            b"",
            id="an upgrade nobody asked for",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, Failure.PROTOCOL, b"", id="a head without end"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
            Failure.PROTOCOL,
            b"",
            id="gzip",
        ),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, None, b"{}", id="100 first"),
        pytest.param(b"HTTP/1.1 102 Processing\r\n\r\n" + OK, None, b"{}", id="102 first"),
    ],
)
async def test_answers(answer: bytes, failure: Failure | None, data: bytes) -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)
        writer.write(answer)
        await writer.drain()

    async with engine(behaviour) as made:
        found = await made.call()
        assert (found.failure, found.data, found.ends) == (failure, data, 1)
        if failure is None:
            assert found.status == 200


async def test_connection_close_is_heeded_and_retry_after_told() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await made.request(reader):
            writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    async with engine(behaviour) as made:
        for _ in range(2):
            found = await made.call()
            assert (found.status, found.retry_after) == (503, b"7")
        assert made.connections == 2


async def test_an_answer_before_our_request_was_out_ends_the_connection() -> None:
    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.2)

    async with engine(behaviour) as made:
        found = await made.call(b"x" * 30_000_000)
        assert found.failure is None
        assert not made.target.idle


async def test_nobody_there() -> None:
    async with engine(polite) as made:
        loop = asyncio.get_running_loop()
        found = Collected(loop.create_future())
        made.pool.send(made.pool.target("unix:/nonexistent"), "/", (b"",), found)
        await found.done
        assert found.failure is Failure.CONNECT


async def test_connections_and_queue_are_bounded() -> None:
    release = asyncio.Event()

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await made.request(reader):
            await release.wait()
            writer.write(OK)

    async with engine(behaviour, connections_max=3, waiting_max=5) as made:
        calls = [asyncio.create_task(made.call()) for _ in range(8)]
        async with asyncio.timeout(30):
            while made.requests < 3:  # noqa: ASYNC110 - counted by the other end
                await asyncio.sleep(0.005)
        assert len(made.target.waiting) == 5
        assert (await made.call()).failure is Failure.QUEUE_FULL
        assert made.most == 3
        release.set()
        assert [found.failure for found in await asyncio.gather(*calls)] == [None] * 8
        assert made.connections == 3


async def test_abort_closes_the_connection_and_the_sink_hears_nothing() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def behaviour(made: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await made.request(reader)
        arrived.set()
        await reader.read()
        left.set()

    async with engine(behaviour) as made:
        found = Collected(asyncio.get_running_loop().create_future())
        call = made.pool.send(made.target, "/", (b"",), found)
        await arrived.wait()
        call.abort()
        async with asyncio.timeout(30):
            await left.wait()
        assert found.ends == 0
        assert made.target.inflight == 0


async def test_aborted_while_it_waits_for_a_connection() -> None:
    async with engine(polite, connections_max=1) as made:
        loop = asyncio.get_running_loop()
        first, second = Collected(loop.create_future()), Collected(loop.create_future())
        made.pool.send(made.target, "/", (b"",), first)
        made.pool.send(made.target, "/", (b"",), second).abort()
        await first.done
        assert (await made.call()).failure is None
        assert (second.ends, made.target.inflight) == (0, 0)


async def test_a_pause_is_undone_before_the_connection_goes_back() -> None:
    async with engine(polite, connections_max=1) as made:
        loop = asyncio.get_running_loop()
        found = Collected(loop.create_future())
        call = made.pool.send(made.target, "/", (b"",), found)
        call.pause()  # before it has a connection
        call.resume()
        await found.done
        again = Collected(loop.create_future())
        call = made.pool.send(made.target, "/", (b"",), again)
        call.pause()
        await asyncio.sleep(0.05)
        assert not again.done.done()
        call.resume()
        await again.done
        assert (await made.call()).failure is None
        assert made.connections == 1


async def test_idle_connections_and_unused_targets_go() -> None:
    async with engine(polite) as made:
        await made.call()
        assert len(made.target.idle) == 1
        made.pool.sweep(made.clock.monotonic())
        assert len(made.target.idle) == 1
        made.clock.advance(IDLE_MAX_S + 1)
        made.pool.sweep(made.clock.monotonic())
        assert not made.target.idle
        async with asyncio.timeout(30):
            while made.target.live:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.005)
        made.pool.sweep(made.clock.monotonic())
        assert made.pool.target(made.target.url) is not made.target
