"""The https engine behind the same two nouns."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from engine.client import Failure, Target
from engine.tls_client import TlsClient
from tests.factories.certificates import certificate


@dataclass
class Sinking:
    done: "asyncio.Future[None]"
    status: int = 0
    data: bytes = b""
    blocks: int = 0
    failure: Failure | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.status = status

    def on_data(self, block: bytes) -> None:
        self.data += block
        self.blocks += 1
        self.first.set()

    def on_end(self, failure: Failure | None) -> None:
        self.failure = failure
        self.done.set_result(None)


@dataclass(frozen=True)
class Secure:
    client: TlsClient
    target: Target
    seen: list[dict[str, str]]
    left: asyncio.Event

    def sink(self) -> Sinking:
        return Sinking(asyncio.get_running_loop().create_future())


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    seen: list[dict[str, str]] = []
    left = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        response = web.StreamResponse()
        if request.path == "/die":
            response.content_length = 100
        await response.prepare(request)
        try:
            for place in range(1_000_000 if request.path == "/endless" else 3):
                await response.write(b"%d;" % place if request.path != "/endless" else b"x" * 65536)
                # A write to a connection that is gone neither raises nor waits: without this turn of the loop the
                # server, which shares it with the test, would write on for ever and never learn that the client left.
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise
        if request.path == "/die":
            assert request.transport is not None
            request.transport.abort()
        return response

    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    app = web.Application()
    app.router.add_post("/{tail:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    client = TlsClient(connections_max=4, context=ssl.create_default_context(cafile=str(cert)))
    target = Target(f"https://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield Secure(client, target, seen, left)
    finally:
        await client.close()
        await runner.cleanup()


async def test_an_answer_and_what_was_sent(secure: Secure) -> None:
    sink = secure.sink()
    secure.client.send(secure.target, "/v1/x", (b"{}",), sink, request_id="gen_1", credential="sk-1")
    await sink.done
    assert (sink.status, sink.data, sink.failure) == (200, b"0;1;2;", None)
    assert secure.seen[0]["authorization"] == "Bearer sk-1"
    assert secure.seen[0]["x-request-id"] == "gen_1"
    assert secure.target.inflight == 0


async def test_cut_in_the_middle(secure: Secure) -> None:
    sink = secure.sink()
    secure.client.send(secure.target, "/die", (b"{}",), sink)
    await sink.done
    assert sink.failure is Failure.LOST


async def test_nobody_there_and_a_stranger(secure: Secure) -> None:
    sink = secure.sink()
    secure.client.send(Target("https://127.0.0.1:1"), "/", (b"{}",), sink)
    await sink.done
    assert sink.failure is Failure.CONNECT
    stranger, sink = TlsClient(connections_max=1), secure.sink()
    stranger.send(secure.target, "/", (b"{}",), sink)  # its certificate is signed by nobody the system trusts
    await sink.done
    assert sink.failure is Failure.CONNECT
    assert not secure.seen
    await stranger.close()


async def test_a_pause_reaches_the_engine_and_an_abort_too(secure: Secure) -> None:
    sink = secure.sink()
    call = secure.client.send(secure.target, "/endless", (b"{}",), sink)
    await sink.first.wait()
    call.pause()
    await asyncio.sleep(0.05)
    blocks = sink.blocks
    await asyncio.sleep(0.1)
    assert sink.blocks == blocks
    call.resume()
    async with asyncio.timeout(30):
        while sink.blocks == blocks:  # noqa: ASYNC110 - the sink is called, not awaited
            await asyncio.sleep(0.005)
    call.abort()
    async with asyncio.timeout(30):
        await secure.left.wait()
    assert not sink.done.done()
    assert secure.target.inflight == 0
