"""The engine contract against the real llama.cpp server, and a gateway before it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from catalog.types import EngineKind
from core.clock import SystemClock
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import LLAMA_CPP, Dialect
from tests.factories.gateway import rig, served_model


@pytest.fixture
async def client(llama_cpp: str) -> AsyncIterator[httpx.AsyncClient]:
    async with contract.connect(llama_cpp) as client:
        yield client


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_llama_cpp_keeps_the_contract(
    client: httpx.AsyncClient, check: Callable[[httpx.AsyncClient, Dialect], Awaitable[None]]
) -> None:
    await check(client, LLAMA_CPP)


async def test_the_template_adds_30_tokens(client: httpx.AsyncClient) -> None:
    """The figure that the catalog is seeded with; a system message is added when the caller sends none."""
    assert await contract.template_tokens(client, LLAMA_CPP) == 30


@pytest.fixture
async def gateway(llama_cpp: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before the engine."""
    model = served_model("smol", llama_cpp, engine=EngineKind.LLAMA_CPP, context_max=1024)
    async with rig({"smol": model}, clock=SystemClock()) as made:
        headers = {"Authorization": f"Bearer {made.key}"}
        async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=60) as client:
            yield client


@pytest.mark.parametrize(
    "check",
    [
        *(contract.check_chat, contract.check_stream, contract.check_cached_tokens, contract.check_logprobs),
        *(contract.check_json_schema, contract.check_completions, contract.check_embeddings, contract.check_refusal),
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
async def test_the_gateway_keeps_what_the_engine_can(
    gateway: httpx.AsyncClient, check: Callable[[httpx.AsyncClient, Dialect], Awaitable[None]]
) -> None:
    await check(gateway, LLAMA_CPP)


async def test_the_gateway_counts_text_and_conversations_in_one_shape(gateway: httpx.AsyncClient) -> None:
    text = (await gateway.post("/tokenize", json={"model": "smol", "prompt": "The tide gate opens at noon."})).json()
    messages = [{"role": "user", "content": ""}]
    chat = (await gateway.post("/tokenize", json={"model": "smol", "messages": messages})).json()
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 1024)
    assert 6 <= text["count"] <= 10
    assert chat["count"] == 30  # as `usage` counts it: what the chat template adds
    bad = await gateway.post("/tokenize", json={"model": "smol", "messages": [{"role": 7}]})
    assert bad.status_code >= 400


async def test_several_answers_are_refused_because_llama_cpp_counts_only_the_first(gateway: httpx.AsyncClient) -> None:
    chat = await gateway.post("/v1/chat/completions", json=contract.chat_body(LLAMA_CPP, "Name a river.", n=2))
    text = await gateway.post("/v1/completions", json={"model": "smol", "prompt": ["a", "b"], "max_tokens": 1})
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in (chat, text)] == [
        (400, "n"),
        (400, "n"),
    ]


async def test_a_prompt_beyond_the_context_is_refused_in_words_for_callers(gateway: httpx.AsyncClient) -> None:
    answer = await gateway.post("/v1/chat/completions", json=contract.chat_body(LLAMA_CPP, "word " * 2000))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("tokens; this model takes 1024, prompt and answer together.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"tools": [{}] * 3000}, "The tool 0 must be an object with a 'type'."),
        ({"tools": [{"type": "zork"}]}, "Failed to parse tools: "),  # llama.cpp calls it a failure of its own: 500
        ({"temperature": "hot"}, "Field 'temperature': type must be number, but is string"),
    ],
)
async def test_what_the_engine_cannot_take_is_the_callers_fault(
    gateway: httpx.AsyncClient, members: dict[str, Any], words: str, stream: bool
) -> None:
    body = contract.chat_body(LLAMA_CPP, "hi", stream=stream, **members)
    answer = await gateway.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "INVALID_REQUEST")
    assert error["message"].startswith(words)
    assert "tools = " not in error["message"]
