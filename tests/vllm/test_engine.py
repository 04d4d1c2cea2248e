"""What Tidegate relies on in vLLM itself. When an upgrade breaks one of these, the gateway's promises break with it."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.contract import engine_contract as contract
from tests.vllm.calls import cached_tokens, chat, gauge, prompt, until
from tests.vllm.conftest import BLOCK_TOKENS, MODEL, SEATS, VLLM

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
CHECKS = [check for check in contract.CHECKS if check is not contract.check_embeddings]  # it serves one kind of model


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_vllm_keeps_the_contract_of_every_engine(
    engine_client: httpx.AsyncClient, check: Callable[[httpx.AsyncClient, contract.Dialect], Awaitable[None]]
) -> None:
    await check(engine_client, VLLM)


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
