"""What Tidegate relies on in vLLM itself. When an upgrade breaks one of these, the gateway's promises break with it."""

import asyncio
import json
from contextlib import aclosing

import httpx

from tests.vllm.calls import cached_tokens, chat, gauge, prompt, stream, text_of, until
from tests.vllm.conftest import BLOCK_TOKENS, MODEL, SEATS

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"


async def test_answers_with_the_weights_of_the_packaged_model(engine_client: httpx.AsyncClient) -> None:
    # The same call to llama.cpp with the GGUF answers the same text from the same 27 prompt tokens.
    answer = await chat(engine_client, {"model": MODEL, "messages": prompt("What is the capital of France?")})
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 8


async def test_logprobs_are_those_of_the_packaged_model(engine_client: httpx.AsyncClient) -> None:
    # llama.cpp on the 4-bit file says the values below; rows of q and k in the wrong order would give noise.
    body = {"model": MODEL, "messages": prompt("What is the capital of France?"), "max_tokens": 1}
    answer = await chat(engine_client, body | {"logprobs": True, "top_logprobs": 4})
    top = {entry["token"]: entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    expected = {"The": -1.59, "La": -1.82, "Le": -1.98, "L": -2.13}
    assert set(top) == set(expected)
    assert all(abs(top[token] - value) < 0.3 for token, value in expected.items())


async def test_stream_says_the_same_and_ends_with_usage(engine_client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": prompt("Name three colours."), "max_tokens": 24}
    whole = await chat(engine_client, body)
    events = [e async for e in stream(engine_client, body | {"stream_options": {"include_usage": True}})]
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    # One token a chunk: what an aborted stream is billed by. The first chunk carries only the role.
    assert sum(1 for e in events if e["choices"] and e["choices"][0]["delta"].get("content")) <= 24


async def test_abort_frees_the_seat(engine_client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": prompt("Tell a very long story."), "max_tokens": 2000, "ignore_eos": True}
    async with aclosing(stream(engine_client, body)) as events:
        await anext(events)
        await until(engine_client, RUNNING, 1, within_s=5)
    await until(engine_client, RUNNING, 0, within_s=2)


async def test_cached_tokens_come_in_whole_blocks(engine_client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": prompt("Hello?", lines=30, subject="goats"), "max_tokens": 1}
    first, second = await chat(engine_client, body), await chat(engine_client, body)
    assert cached_tokens(first) == 0
    tokens = second["usage"]["prompt_tokens"]
    assert tokens > 2 * BLOCK_TOKENS
    assert cached_tokens(second) == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # the last token is always computed


async def test_cache_salt_divides_the_prefix_cache(engine_client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": prompt("Hello?", lines=30, subject="ducks"), "max_tokens": 1}
    await chat(engine_client, body | {"cache_salt": "tenant-a"})
    assert cached_tokens(await chat(engine_client, body | {"cache_salt": "tenant-b"})) == 0
    assert cached_tokens(await chat(engine_client, body | {"cache_salt": "tenant-a"})) >= BLOCK_TOKENS


async def test_json_schema_binds_the_answer(engine_client: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"enum": ["few", "many"]}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    body = {"model": MODEL, "messages": prompt("Describe Paris."), "max_tokens": 80, "response_format": form}
    answer = await chat(engine_client, body)
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert set(value) == {"city", "people"}
    assert value["people"] in {"few", "many"}


async def test_tokenize_counts_what_a_chat_is_billed(engine_client: httpx.AsyncClient) -> None:
    messages = prompt("How many tokens is this?")
    counted = (await engine_client.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
    answer = await chat(engine_client, {"model": MODEL, "messages": messages, "max_tokens": 1})
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_waiting_requests_start_by_priority_not_by_arrival(engine_client: httpx.AsyncClient) -> None:
    story = {"model": MODEL, "messages": prompt("Tell a story."), "ignore_eos": True}
    short = {"model": MODEL, "messages": prompt("Say hello."), "max_tokens": 2, "ignore_eos": True}
    ended: list[str] = []

    async def call(name: str, priority: int) -> None:
        await chat(engine_client, short | {"priority": priority})
        ended.append(name)

    seats = [asyncio.create_task(chat(engine_client, story | {"max_tokens": n})) for n in (60, 120)]
    await until(engine_client, RUNNING, SEATS, within_s=10)
    late = []
    for position, (name, priority) in enumerate((("low", 20), ("middle", 10), ("high", -10)), 1):
        late.append(asyncio.create_task(call(name, priority)))
        await until(engine_client, WAITING, position, within_s=10)
    await asyncio.gather(*seats, *late)
    assert ended == ["high", "middle", "low"]  # one after the other in the seat that came free first
    assert await gauge(engine_client, WAITING) == 0
