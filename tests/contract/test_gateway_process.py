"""The gateway as it runs: own process, Postgres, Valkey, an engine, and the official SDK in front."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from billing.spool_reader import SpoolReader
from billing.types import Outcome
from core import db
from core.clock import SystemClock
from core.settings import Database
from engine import simulator
from engine.simulator import SIMULATOR, Options, Simulator
from tenants import api_keys
from tests.factories.gateway_process import (
    METRICS_HEADERS,
    METRICS_TOKEN,
    Process,
    Seeded,
    gateway_process,
    seed,
)
from tests.factories.stack import until

HELLO: Any = [{"role": "user", "content": "[[sim n=12 p=30]] hello"}]


@dataclass(frozen=True)
class Running:
    gateway: Process
    seeded: Seeded
    engine: Simulator
    sessions: db.Sessions
    client: httpx.AsyncClient

    @property
    def base_url(self) -> str:
        return self.gateway.url + "/v1"

    @property
    def key(self) -> str:
        return self.seeded.customer.secret


@pytest.fixture
async def running(
    database_settings: Database, sessions: db.Sessions, valkey: Path, tmp_path: Path
) -> AsyncIterator[Running]:
    engine = await simulator.serve(Options(), SystemClock())
    try:
        host, port = engine.addresses[0][:2]
        seeded = await seed(sessions, f"http://{host}:{port}")
        async with gateway_process(database_settings, valkey, tmp_path) as gateway:
            headers = {"Authorization": f"Bearer {seeded.customer.secret}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
                yield Running(gateway, seeded, engine.app[SIMULATOR], sessions, client)
    finally:
        await engine.cleanup()


async def test_the_official_sdk(running: Running) -> None:
    """Sync and async, stream and not, chat, completions, embeddings and models."""
    await asyncio.to_thread(_sync_sdk, running.base_url, running.key)
    async with openai.AsyncOpenAI(base_url=running.base_url, api_key=running.key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=12)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        stream = await client.chat.completions.create(
            model="sim", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == answer.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == 12
        with pytest.raises(openai.NotFoundError, match="sim"):
            await client.chat.completions.create(model="nope", messages=HELLO)
        vectors = await client.embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
        assert len(vectors.data) == 2
    async with openai.AsyncOpenAI(base_url=running.base_url, api_key="tg_wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="sim", messages=HELLO)


def _sync_sdk(base_url: str, key: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(model="sim", messages=HELLO)
        assert answer.model == "sim"
        text = ""
        for chunk in client.chat.completions.create(model="sim", messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == answer.choices[0].message.content
        completion = client.completions.create(model="sim", prompt="[[sim n=3]]")
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 3
        assert [model.id for model in client.models.list()] == ["sim"]
        assert client.models.retrieve("sim").id == "sim"


async def test_what_callers_and_operators_are_told(running: Running) -> None:
    """One process for all of it, because a start costs seconds."""
    await _ready_and_metrics_tell_the_truth(running)
    await _no_credit_is_402_and_nothing_reaches_the_engine(running)
    await _an_engine_hears_of_a_client_that_left_within_a_second(running)
    await _a_revoked_key_is_refused_within_a_second(running)


async def _a_revoked_key_is_refused_within_a_second(running: Running) -> None:
    assert (await running.client.get("/v1/models")).status_code == 200
    customer = running.seeded.customer
    async with db.transaction(running.sessions) as session:
        await api_keys.revoke(session, customer.tenant.id, customer.key.id, clock=SystemClock())
    async with asyncio.timeout(1):
        while (answer := await running.client.get("/v1/models")).status_code == 200:
            pass
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "KEY_REVOKED")


async def _no_credit_is_402_and_nothing_reaches_the_engine(running: Running) -> None:
    before = running.engine.sequence
    huge = {"model": "sim", "messages": HELLO, "max_tokens": 30_000, "n": 100}
    answer = await running.client.post("/v1/chat/completions", json=huge)
    assert (answer.status_code, answer.json()["error"]["code"]) == (402, "INSUFFICIENT_CREDIT")
    assert running.engine.sequence == before


async def _ready_and_metrics_tell_the_truth(running: Running) -> None:
    open_to_all = await running.client.get("/ready")
    assert (open_to_all.status_code, open_to_all.json()) == (200, {"serving": True})
    ready = await running.client.get("/ready", headers=METRICS_HEADERS)
    assert ready.status_code == 200
    assert ready.json() == {
        "serving": True,
        "parts": {"config": "ok", "postgres": "ok", "valkey": "ok", "spool": "ok", "process": "ok"},
    }
    await running.client.post("/v1/chat/completions", json={"model": "sim", "messages": HELLO})
    for headers in ({}, {"Authorization": ""}, {"Authorization": f"Bearer {METRICS_TOKEN}x"}):
        refused = await running.client.get("/metrics", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "METRICS_TOKEN_MISSING")
    metrics = (await running.client.get("/metrics", headers=METRICS_HEADERS)).text
    assert 'tidegate_gateway_requests_total{endpoint="chat",status="200"} 1\n' in metrics
    assert 'tidegate_gateway_tokens_total{kind="output"} 12\n' in metrics
    assert 'tidegate_admission_drift{kind="global"} 0\n' in metrics
    assert 'tidegate_admission_grants_total{tier="standard",model="sim"} 1\n' in metrics
    assert running.seeded.customer.tenant.id.hex not in metrics
    control = await running.client.get("/api/v1/projects")
    assert (control.status_code, control.json()["error"]["code"]) == (404, "NOT_FOUND")


async def _an_engine_hears_of_a_client_that_left_within_a_second(running: Running) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=1000 d=20000]]"}], "stream": True}
    async with running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_text():
            break
        assert running.engine.running == 1
    await until(lambda: running.engine.running == 0, 1)


async def test_sigterm_lets_a_stream_end_and_its_bill_be_written(running: Running) -> None:
    slow = {"model": "sim", "messages": [{"role": "user", "content": "[[sim n=20 d=30000]]"}], "stream": True}
    async with running.client.stream("POST", "/v1/chat/completions", json=slow) as answer:
        seen = ""
        async for text in answer.aiter_text():
            if not seen:
                running.gateway.process.send_signal(signal.SIGTERM)
            seen += text
    assert seen.endswith("data: [DONE]\n\n")
    async with asyncio.timeout(10):
        assert await running.gateway.process.wait() == 0
    (event,) = SpoolReader(running.gateway.home / "spool" / "g1").read(10)
    assert (event.outcome, event.usage.output) == (Outcome.COMPLETED, 20)


async def test_kill_nine_loses_no_answered_request(running: Running) -> None:
    body = {"model": "sim", "messages": HELLO}
    answers = await asyncio.gather(*(running.client.post("/v1/chat/completions", json=body) for _ in range(50)))
    running.gateway.process.kill()
    await running.gateway.process.wait()
    written = {f"gen_{event.id.hex}" for event in SpoolReader(running.gateway.home / "spool" / "g1").read(1000)}
    assert {answer.headers["x-request-id"] for answer in answers} <= written
