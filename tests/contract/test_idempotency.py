"""One bill per idempotency key: real gateways that are killed, Valkey emptied, the poster, and the official SDK."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from api.inference.claims import Claims
from billing import verify
from billing.credits import balance
from billing.metrics import poster_metrics
from billing.poster import Poster
from billing.types import Outcome
from core import db
from core.clock import SystemClock
from core.errors import ErrorKind, PlatformError
from core.money import parse_pico
from core.resp import RespClient
from core.settings import Database
from engine import simulator
from engine.simulator import Options
from tenants.api_keys import digest
from tests.factories.gateway import PEPPER, Rig, rig, served_model
from tests.factories.gateway_process import PROGRAM, Process, Seeded, gateway_process, seed
from tests.factories.stack import until

CHAT = "/v1/chat/completions"
BODY: Any = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=200 p=2105]]"}]}
COST = 2105 * 2_000_000 + 200 * 6_000_000  # at 2.00 and 6.00 per million
FAR_US = 60_000_000
# Kills its process when the usage event is on the disk: after slots and key went back, or before.
DIES = """
import os, signal
from billing.spool import SpoolWriter
append = SpoolWriter.append
SpoolWriter.append = lambda self, event, _: append(self, event, lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""
KEEPS_ALL = """
from api.inference import claim
from scheduler.admission import Admission
claim.finish = Admission.release = lambda *_, **__: None
"""


@dataclass(frozen=True)
class Site:
    """One gateway that dies when it has generated, another that lives, and their books."""

    dying: Process
    living: Process
    seeded: Seeded
    sessions: db.Sessions
    valkey: RespClient
    spool_dir: Path

    async def send(self, gateway: Process, body: Any = BODY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.seeded.customer.secret}", "Idempotency-Key": "order 7"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client:
            return await client.post(CHAT, json=body)

    async def send_until_decided(self, body: Any = BODY) -> httpx.Response:
        """Repeat as a caller does, until the answer is no 'come back'."""
        while (answer := await self.send(self.living, body)).status_code in {409, 503}:
            if answer.status_code == 409 and answer.json()["error"]["code"] != "IDEMPOTENCY_IN_PROGRESS":
                break
        return answer

    async def posted(self, count: int) -> int:
        """Post all events, and return what they cost the customer, pico."""
        metrics = poster_metrics(CollectorRegistry())
        poster = Poster(self.sessions, self.valkey, self.spool_dir, SystemClock(), metrics)
        for _ in range(5):
            count -= await poster.step()
        assert count == 0
        async with db.transaction(self.sessions) as session:
            assert await verify.verify(session) is None
        async with db.transaction(self.sessions) as session:
            left = await balance(session, self.seeded.customer.tenant.id)
        return parse_pico("10") - left.available_pico

    async def outcomes(self) -> list[Outcome]:
        async with db.transaction(self.sessions) as session:
            rows = await session.execute(text("SELECT outcome FROM usage_event ORDER BY amount_pico DESC"))
            return [Outcome(row.outcome) for row in rows]


@pytest.fixture
async def site(
    request: pytest.FixtureRequest, database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> AsyncIterator[Site]:
    engine = await simulator.serve(Options(), SystemClock())
    client = await RespClient.connect(f"unix://{valkey}")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.cleanup)
        stack.push_async_callback(client.close)
        host, port = engine.addresses[0][:2]
        seeded = await seed(sessions, f"http://{host}:{port}")
        programs = (request.param + PROGRAM, PROGRAM)
        dying, living = [
            await stack.enter_async_context(
                gateway_process(database_settings, valkey, tmp_path, replica=f"g{number}", program=program)
            )
            for number, program in enumerate(programs)
        ]
        yield Site(dying, living, seeded, sessions, client, tmp_path / "spool")


@pytest.mark.parametrize("site", [KEEPS_ALL + DIES], indirect=True)
async def test_killed_between_the_engines_answer_and_the_release(site: Site) -> None:
    with pytest.raises(httpx.TransportError):
        await site.send(site.dying)
    assert (await site.send(site.living)).json()["error"]["code"] == "IDEMPOTENCY_IN_PROGRESS"
    await site.valkey.call("SET", "{tg}:offset_us", FAR_US)  # a minute later
    again = await site.send_until_decided()
    assert again.status_code == 200
    assert await site.posted(2) == COST
    assert await site.outcomes() == [Outcome.COMPLETED, Outcome.REPEAT]  # whichever is posted first


@pytest.mark.parametrize("site", [DIES], indirect=True)
async def test_killed_between_the_release_and_the_answer(site: Site) -> None:
    with pytest.raises(httpx.TransportError):
        await site.send(site.dying)
    again = await site.send_until_decided()
    assert (again.status_code, again.json()["error"]["code"]) == (409, "IDEMPOTENCY_KEY_USED")
    assert await site.posted(1) == COST


@pytest.mark.parametrize("site", [""], indirect=True)
async def test_valkey_emptied_between_two(site: Site) -> None:
    assert (await site.send(site.dying)).status_code == 200  # it does not, in this test
    await site.valkey.call("FLUSHALL")
    again = await site.send_until_decided()
    assert again.status_code == 200
    assert await site.posted(2) == COST
    assert await site.outcomes() == [Outcome.COMPLETED, Outcome.REPEAT]  # whichever is posted first


@pytest.mark.parametrize("site", [""], indirect=True)
async def test_valkey_emptied_between_two_of_which_the_second_is_another_request(site: Site) -> None:
    assert (await site.send(site.dying)).status_code == 200  # it does not, in this test
    await site.valkey.call("FLUSHALL")
    other = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=200 p=2105]] and more"}]}
    assert (await site.send_until_decided(other)).status_code == 200
    assert await site.posted(2) == 2 * COST
    assert await site.outcomes() == [Outcome.COMPLETED, Outcome.COMPLETED]


# ---- the official SDK


@pytest.fixture
async def gateway(service_folder: Path, valkey: Path) -> AsyncIterator[Rig]:
    uds = service_folder / "idem-sdk.sock"
    engine = await simulator.serve(Options(), SystemClock(), uds=str(uds))
    client = await RespClient.connect(f"unix://{valkey}")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.cleanup)
        stack.push_async_callback(client.close)
        made = await stack.enter_async_context(rig({"sim": served_model("sim", f"unix:{uds}")}, clock=SystemClock()))
        made.gateway.claims = Claims(client, "g1", bytes(32))
        yield made


async def _ask(url: str, key: str, **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2) as client:
        return await client.chat.completions.create(model="sim", messages=BODY["messages"], **options)


async def test_what_the_sdk_sends_on_its_own_retries() -> None:
    """Nothing by itself; a key that it is given, the same each time."""
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Idempotency-Key"))
        return web.Response(status=500, headers={"retry-after-ms": "1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    for headers in ({}, {"Idempotency-Key": "k"}):
        with pytest.raises(openai.InternalServerError):
            await _ask(f"http://{host}:{port}", "tg_x", extra_headers=headers)
    await runner.cleanup()
    assert seen == [None] * 3 + ["k"] * 3


async def test_the_sdks_own_retry_after_a_failure_is_served_and_billed_once(gateway: Rig) -> None:
    gateway.admission.refusal = PlatformError("UPSTREAM_ERROR", ErrorKind.UPSTREAM, "the first time")
    asking = asyncio.create_task(_ask(gateway.url, gateway.key, extra_headers={"Idempotency-Key": "k"}))
    await until(lambda: gateway.admission.calls)
    gateway.admission.refusal = None
    assert (await asking).usage.completion_tokens == 200
    assert len(gateway.admission.calls) == 2
    assert [event.amount_pico for event in gateway.spool.events] == [COST]


async def test_the_sdk_raises_a_conflict_at_once_with_the_receipt(gateway: Rig) -> None:
    first = await _ask(gateway.url, gateway.key, extra_headers={"Idempotency-Key": "k"})
    with pytest.raises(openai.ConflictError) as conflict:
        await _ask(gateway.url, gateway.key, extra_headers={"Idempotency-Key": "k"})
    assert conflict.value.code == "IDEMPOTENCY_KEY_USED"
    assert conflict.value.body["details"]["receipt"] == f"/v1/generations/{first._request_id}"  # type: ignore[index] # an object
    assert gateway.gateway.metrics.refusals["IDEMPOTENCY_KEY_USED"] == 1  # it did not try again


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdk_reads_a_kept_answer_like_the_first(gateway: Rig, stream: bool) -> None:
    keeping = msgspec.structs.replace(gateway.principal, keep_answers=True)
    gateway.gateway.directory.principals[digest(PEPPER, gateway.key)] = keeping

    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key) as client:
            asked: Any = {"model": "sim", "messages": BODY["messages"], "extra_headers": {"Idempotency-Key": "k"}}
            answer: Any = await client.chat.completions.create(**asked, stream=stream)
            if not stream:
                return str(answer.choices[0].message.content)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])

    first, again = await read(), await read()
    assert again == first != ""
    assert len(gateway.spool.events) == 1
