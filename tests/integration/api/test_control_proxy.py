"""Other paths on their way to the control plane's unix socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from api.inference.cold import ColdApp
from api.inference.control_proxy import CALLS_MAX, ControlProxy
from api.inference.readiness import Report
from tests.factories.gateway import Rig, rig


async def answer(request: web.Request) -> web.StreamResponse:
    """Say what arrived."""
    if request.path == "/slow":
        await asyncio.sleep(30)
    if request.path == "/die":
        assert request.transport is not None
        request.transport.abort()
    if request.path == "/stream":
        response = web.StreamResponse()
        await response.prepare(request)
        for place in range(5):
            await response.write(b"piece %d\n" % place)
        await response.write_eof()
        return response
    body = await request.read()
    return web.json_response(
        {
            "path": request.raw_path,
            "method": request.method,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "size": len(body),
        },
        status=418 if request.path == "/teapot" else 200,
        headers={"X-Own": "1", "Set-Cookie": "a=b"},
    )


@asynccontextmanager
async def proxied(folder: Path, *, up: bool = True) -> AsyncIterator[tuple[Rig, httpx.AsyncClient]]:
    path = folder / "control.sock"
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    if up:
        await web.UnixSite(runner, str(path)).start()
    proxy = ControlProxy(path)

    async def cold(scope: Any, receive: Any, send: Any) -> None:
        await proxy.forward(scope, receive, send)

    try:
        async with (
            rig({}, cold_app=cold) as made,
            httpx.AsyncClient(base_url=made.url, timeout=10) as client,
        ):
            yield made, client
    finally:
        await proxy.close()
        await runner.cleanup()
        path.unlink(missing_ok=True)


async def test_a_request_arrives_as_it_was_sent_but_for_who_we_say_it_is(service_folder: Path) -> None:
    async with proxied(service_folder) as (made, client):
        made.gateway.date_line = b"Date: Mon, 30 Nov 2026 12:00:00 GMT\r\n"
        found = await client.post(
            "/api/v1/a%2Fb?x=1&y=%20",
            content=b"z" * 300_000,
            headers={
                "X-Forwarded-For": "6.6.6.6",
                "Forwarded": "for=6.6.6.6",
                "X-Real-IP": "6.6.6.6",
                "X-Custom": "kept",
                "X-Hop": "dropped",
                "Connection": "keep-alive, x-hop",
                "Authorization": "Bearer tgo_x",
            },
        )
        seen = found.json()
        assert (seen["path"], seen["method"], seen["size"]) == ("/api/v1/a%2Fb?x=1&y=%20", "POST", 300_000)
        headers = seen["headers"]
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-custom"] == "kept"
        assert headers["authorization"] == "Bearer tgo_x"
        assert not {"forwarded", "x-real-ip", "x-hop", "transfer-encoding"} & headers.keys()
        assert headers["host"].startswith("127.0.0.1:")
        assert found.headers["x-own"] == "1"
        assert found.headers.get_list("date") == ["Mon, 30 Nov 2026 12:00:00 GMT"]


async def test_status_streams_and_bodiless_answers(service_folder: Path) -> None:
    async with proxied(service_folder) as (made, client):
        assert (await client.get("/teapot")).status_code == 418
        assert (await client.get("/stream")).text == "".join(f"piece {place}\n" for place in range(5))
        head = await client.head("/x")
        assert (head.status_code, head.content) == (200, b"")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"0123456789"

        assert (await client.put("/x", content=pieces())).json()["size"] == 100
        assert made.gateway.metrics.counters["connections_total"] == 1


async def test_only_receipts_of_v1_are_the_control_planes(service_folder: Path) -> None:
    """An OpenAI client reads ``error.code``; the control plane would answer problem+json."""
    async with proxied(service_folder) as (made, client):
        proxy = ControlProxy(service_folder / "control.sock")
        made.gateway.cold_app = ColdApp(made.gateway, proxy, lambda: Report(True, {}))
        try:
            for path in ("/v1/generations/gen_1", "/api/v1/balance"):
                assert (await client.get(path)).json()["path"] == path
            for method, path in (("POST", "/v1/responses"), ("GET", "/v1/files"), ("GET", "/v1/")):
                found = await client.request(method, path)
                assert (found.status_code, found.json()["error"]["code"]) == (404, "NOT_FOUND")
                assert path in found.json()["error"]["message"]
        finally:
            await proxy.close()


async def test_a_control_plane_that_is_away_is_503(service_folder: Path) -> None:
    async with proxied(service_folder, up=False) as (_, client):
        found = await client.get("/api/v1/projects", headers={"Authorization": "Bearer tg_x"})
        assert (found.status_code, found.json()["error"]["code"]) == (503, "SERVICE_UNAVAILABLE")
        assert int(found.headers["retry-after"]) >= 1
    async with proxied(service_folder) as (_, client):
        assert (await client.get("/die")).status_code == 503


async def test_calls_are_bounded_and_those_who_leave_give_their_places_back(service_folder: Path) -> None:
    async with proxied(service_folder) as (made, client):
        writers = []
        for _ in range(CALLS_MAX):
            _, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
            writers.append(writer)
        async with asyncio.timeout(10):
            while (await client.get("/x")).status_code == 200:
                pass
        for writer in writers:
            writer.close()
        async with asyncio.timeout(10):
            while (await client.get("/x")).status_code == 503:
                pass
