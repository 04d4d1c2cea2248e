"""What a provider's server may do to us: nothing but answer, in time and in measure."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from core.errors import PlatformError
from core.settings import Oidc
from tenants.oidc.fetch import ANSWER_MAX_BYTES, Fetcher


@dataclass
class Server:
    """Answers each path with trouble of its kind, and remembers what was asked for."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    never: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        match request.path:
            case "/redirect":
                raise web.HTTPFound(f"{self.url}/inside")
            case "/large":
                return web.json_response({"x": "y" * ANSWER_MAX_BYTES})
            case "/list":
                return web.json_response([1])
            case "/page":
                return web.Response(text="<html>", content_type="text/html")
            case "/missing":
                return web.json_response({"error": "x"}, status=404)
            case "/busy":
                return web.json_response({}, status=429)
            case "/silent":
                await self.never.wait()
        return web.json_response({"fine": True})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}"
    yield found
    found.never.set()
    await runner.cleanup()


async def code_of(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(PlatformError) as caught:
        await fetcher.get_json(url)
    return caught.value.code


async def test_only_a_json_object_in_time_and_in_measure_is_an_answer(server: Server) -> None:
    fetcher = Fetcher(Oidc(allow_loopback=True, fetch_timeout_s=5))
    try:
        assert await fetcher.get_json(f"{server.url}/") == {"fine": True}
        for path in ("redirect", "large", "list", "page", "missing"):
            assert await code_of(fetcher, f"{server.url}/{path}") == "IDENTITY_PROVIDER_INVALID", path
        assert await code_of(fetcher, f"{server.url}/busy") == "IDENTITY_PROVIDER_UNAVAILABLE"
        assert "/inside" not in server.asked
    finally:
        await fetcher.close()


async def test_a_server_that_says_nothing_is_given_up(server: Server) -> None:
    fetcher = Fetcher(Oidc(allow_loopback=True, fetch_timeout_s=0.05))
    try:
        assert await code_of(fetcher, f"{server.url}/silent") == "IDENTITY_PROVIDER_UNAVAILABLE"
    finally:
        await fetcher.close()


async def test_without_the_setting_this_machine_is_not_called_by_any_name(server: Server) -> None:
    fetcher = Fetcher(Oidc())
    port = server.url.rpartition(":")[2]
    try:
        for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1"):
            for scheme in ("http", "https"):
                assert (await code_of(fetcher, f"{scheme}://{host}:{port}/")).startswith("IDENTITY_PROVIDER_"), host
        assert server.asked == []
    finally:
        await fetcher.close()
