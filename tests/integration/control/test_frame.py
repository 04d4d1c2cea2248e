"""What surrounds every request: time, the last catch, the request id."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.middleware import RequestFrame
from api.services import Services
from core import health

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""}


async def _call(app: ASGIApp, services: Services, timeout_s: float = 5.0) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await RequestFrame(app, services, timeout_s)({**SCOPE}, receive, send)
    return sent


async def _hang(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def _crash(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("secret detail")


async def _crash_late(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("secret detail")


async def test_a_request_beyond_its_time_is_a_504(services: Services) -> None:
    start, body = await _call(_hang, services, timeout_s=0.01)
    assert start["status"] == 504
    assert json.loads(body["body"])["code"] == "REQUEST_TIMEOUT"


async def test_a_crash_is_a_500_with_a_request_id_and_no_detail(services: Services) -> None:
    start, body = await _call(_crash, services)
    assert start["status"] == 500
    problem = json.loads(body["body"])
    assert (b"x-request-id", problem["request_id"].encode()) in start["headers"]
    assert b"secret detail" not in body["body"]


async def test_a_crash_after_the_answer_began_cuts_the_connection(services: Services) -> None:
    with pytest.raises(RuntimeError):
        await _call(_crash_late, services)


async def test_a_dependency_that_hangs_is_named_within_the_limit() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def answer() -> None:
        return None

    found = await health.ask({"slow": hang, "quick": answer}, timeout_s=0.01)
    assert (found.ready, found.dependencies) == (False, {"slow": "timeout", "quick": "ok"})
