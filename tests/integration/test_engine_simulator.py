"""The engine simulator over a real socket: what it says, what it logs, and how it fails."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
import pytest

from core.clock import SystemClock
from engine import simulator
from engine.simulator import Options


@dataclass(frozen=True, slots=True)
class Running:
    client: httpx.AsyncClient
    log: Path

    def records(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.log.read_bytes().splitlines()]

    async def last_record(self) -> dict[str, Any]:
        """The log's last line; an abort is written a moment after the client left."""
        for _ in range(200):
            if self.log.exists() and (found := self.records()):
                return found[-1]
            await asyncio.sleep(0.01)
        raise AssertionError("nothing was logged")


@pytest.fixture
async def sim(service_folder: Path, tmp_path: Path) -> AsyncIterator[Running]:
    uds = service_folder / "sim.sock"
    log = tmp_path / "sim.jsonl"
    runner = await simulator.serve(Options(log=str(log)), SystemClock(), uds=str(uds))
    transport = httpx.AsyncHTTPTransport(uds=str(uds))
    async with httpx.AsyncClient(transport=transport, base_url="http://sim", timeout=10) as client:
        yield Running(client, log)
    await runner.cleanup()
    uds.unlink(missing_ok=True)


def chat(prompt: str, **members: object) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": prompt}], **members}


def events(body: bytes) -> list[Any]:
    lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else orjson.loads(line[6:]) for line in lines]


def text_of(found: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in found[:-1] for choice in event["choices"])


async def test_streamed_and_buffered_answers_say_the_same(sim: Running) -> None:
    body = chat("[[sim n=25 cached=3 p=40]]")
    whole = (await sim.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "r1"})).json()
    streamed = await sim.client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    found = events(streamed.content)
    assert found[-1] == "data: [DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 25
    assert text_of(found) == whole["choices"][0]["message"]["content"]
    first, second = sim.records()
    assert (first["request_id"], first["generated"], first["cached_tokens"], first["ended"]) == (
        "r1",
        25,
        3,
        "completed",
    )
    assert (second["stream"], second["generated"]) == (True, 25)


@pytest.mark.parametrize("usage", ["final", "choice", "every", "null", "middle", "spaced"])
@pytest.mark.parametrize("split", [0, 7])
async def test_usage_comes_in_every_odd_place_with_the_same_final_count(sim: Running, usage: str, split: int) -> None:
    body = chat(f"[[sim n=5 usage={usage} split={split}]]", stream=True, stream_options={"include_usage": True})
    found = events((await sim.client.post("/v1/chat/completions", json=body)).content)
    reported = [event["usage"] for event in found[:-1] if event.get("usage")]
    assert reported[-1]["completion_tokens"] == 5
    assert ({"usage": None}.items() <= found[0].items()) == (usage == "null")


async def test_each_choice_of_n_is_generated_and_counted(sim: Running) -> None:
    body = chat("[[sim n=4]]", n=3, stream=True, stream_options={"include_usage": True})
    found = events((await sim.client.post("/v1/chat/completions", json=body)).content)
    assert found[-2]["usage"]["completion_tokens"] == 12
    assert {choice["index"] for event in found[:-1] for choice in event["choices"]} == {0, 1, 2}


async def test_a_client_that_leaves_is_logged_with_the_tokens_until_then(sim: Running) -> None:
    body = chat("[[sim n=1000 d=2000]]", stream=True)
    async with sim.client.stream("POST", "/v1/chat/completions", json=body) as response:
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data: ")
            if seen > 20:
                break
    record = await sim.last_record()
    assert record["ended"] == "aborted"
    assert 19 <= record["generated"] < 200


async def test_a_death_in_the_middle_cuts_the_stream(sim: Running) -> None:
    body = chat("[[sim n=10 fault=die at=4]]", stream=True)
    with pytest.raises(httpx.RemoteProtocolError):
        await sim.client.post("/v1/chat/completions", json=body)
    record = await sim.last_record()
    assert (record["ended"], record["generated"]) == ("died", 4)


@pytest.mark.parametrize(("fault", "status"), [("refuse", 500), ("busy", 503)])
async def test_failures_before_the_first_byte_have_a_status(sim: Running, fault: str, status: int) -> None:
    answer = await sim.client.post("/v1/chat/completions", json=chat(f"[[sim fault={fault}]]"))
    assert answer.status_code == status
    assert (await sim.last_record())["generated"] == 0


@pytest.mark.parametrize(("ids", "expected"), [("null", None), ("empty", ""), ("same", "chatcmpl-same")])
async def test_upstream_ids_can_be_useless(sim: Running, ids: str, expected: str | None) -> None:
    answers = [await sim.client.post("/v1/chat/completions", json=chat(f"[[sim ids={ids}]]")) for _ in range(2)]
    assert [answer.json()["id"] for answer in answers] == [expected, expected]


async def test_the_final_done_can_be_missing(sim: Running) -> None:
    body = chat("[[sim n=2 done=0]]", stream=True)
    assert b"[DONE]" not in (await sim.client.post("/v1/chat/completions", json=body)).content


async def test_defaults_change_for_the_whole_process_and_back(sim: Running) -> None:
    await sim.client.post("/sim/defaults", json={"n": 3})
    changed = (await sim.client.post("/v1/chat/completions", json=chat("x"))).json()
    await sim.client.post("/sim/defaults", json={})
    restored = (await sim.client.post("/v1/chat/completions", json=chat("x"))).json()
    assert [body["usage"]["completion_tokens"] for body in (changed, restored)] == [3, 16]


async def test_text_embeddings_tokens_models_and_metrics(sim: Running) -> None:
    text = (await sim.client.post("/v1/completions", json={"model": "sim-n2", "prompt": "12345678"})).json()
    embedded = (await sim.client.post("/v1/embeddings", json={"model": "sim", "input": ["a", "b"]})).json()
    tokenized = (await sim.client.post("/tokenize", json={"model": "sim", "prompt": "12345"})).json()
    models = (await sim.client.get("/v1/models")).json()
    metrics = (await sim.client.get("/metrics")).text
    assert (text["choices"][0]["text"], text["usage"]["prompt_tokens"]) == ("tide gate ", 2)
    assert len(embedded["data"]) == 2
    assert tokenized["count"] == 2
    assert [model["id"] for model in models["data"]] == ["sim"]
    assert "vllm:num_requests_running 0\n" in metrics


async def test_requests_beyond_the_seats_wait(service_folder: Path) -> None:
    uds = service_folder / "sim-seats.sock"
    runner = await simulator.serve(Options(slots=1), SystemClock(), uds=str(uds))
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(uds))) as session:
        held = await session.post(
            "http://sim/v1/chat/completions", json=chat("[[sim n=2 fault=stall at=1]]", stream=True)
        )
        waiting = asyncio.create_task(session.post("http://sim/v1/chat/completions", json=chat("x")))
        text = ""
        for _ in range(200):
            text = await (await session.get("http://sim/metrics")).text()
            if "num_requests_waiting 1\n" in text:
                break
            await asyncio.sleep(0.01)
        assert "num_requests_running 1\n" in text
        assert "num_requests_waiting 1\n" in text
        held.close()
        answer = await asyncio.wait_for(waiting, 5)
        assert answer.status == 200
        await answer.read()
    await runner.cleanup()
