"""What the platform needs of any engine. Plain checks, run against llama.cpp here and against vLLM in tests/vllm.

Each takes a client on the base URL (no /v1) and a `Dialect`. Usage is read by `engine.usage`, as in production.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from catalog.types import EngineKind
from core.usage import TokenUsage
from engine.usage import CHOICES_UNCOUNTED, normalise
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where engines differ."""

    model: str
    running_metric: str  # requests that generate now
    tokenize_member: str  # where /tokenize takes its text
    long_prompt_words: int = 40  # enough for a prefix cache to keep
    counts_every_choice: bool = True


LLAMA_CPP = Dialect(
    model="smol",
    running_metric="llamacpp:requests_processing",
    tokenize_member="content",
    counts_every_choice=EngineKind.LLAMA_CPP not in CHOICES_UNCOUNTED,
)


def connect(url: str) -> httpx.AsyncClient:
    """Return a client for ``unix:/path`` or ``http://…``."""
    if url.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:"))
        return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60)
    return httpx.AsyncClient(base_url=url, timeout=60)


def chat_body(dialect: Dialect, text: str, **members: Any) -> dict[str, Any]:
    return {
        "model": dialect.model,
        "messages": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
        **members,
    }


async def chat(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the events and whether ``[DONE]`` came."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"], data[-1] == "[DONE]"


def stream_usage(events: list[dict[str, Any]]) -> TokenUsage:
    reported = [event for event in events if event.get("usage")]
    return normalise(reported[-1])


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert values, f"{name} is not in /metrics"
    return sum(map(float, values))


async def check_health_and_models(client: httpx.AsyncClient, dialect: Dialect) -> None:
    assert (await client.get("/health")).status_code == 200
    names = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    assert dialect.model in names


async def check_chat(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """A buffered answer with text, the finish reason of a cut, and a usage that adds up."""
    body = await chat(client, chat_body(dialect, "Count from one to twenty in words.", max_tokens=6))
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    usage = normalise(body)
    assert usage.output_total == 6
    assert usage.input_total > 10


async def check_stream(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """The streamed answer is the buffered one: same text, same bill."""
    body = chat_body(dialect, "Name three seas.", max_tokens=12)
    whole = await chat(client, body)
    events, done = await stream(client, body)
    assert done
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"] if "delta" in choice
    )
    assert text == whole["choices"][0]["message"]["content"]
    streamed, buffered = stream_usage(events), normalise(whole)
    assert (streamed.input_total, streamed.output_total) == (buffered.input_total, buffered.output_total)


async def check_one_token_per_chunk(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """What an aborted stream is billed by: chunks with output are tokens."""
    # digits are tokens of whole characters, so that no token waits for the rest of a character
    events, _ = await stream(client, chat_body(dialect, "Write: 1 2 3 4 5 6 7 8 9", max_tokens=10))
    chunks = sum(1 for event in events if any(choice["delta"].get("content") for choice in event["choices"]))
    assert abs(chunks - stream_usage(events).output_total) <= 1  # an end-of-turn token is counted and says nothing


async def check_abort(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """A client that leaves stops the generation."""
    body = chat_body(dialect, "Tell a very long story about the sea.", max_tokens=900, stream=True, ignore_eos=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = 0
        async for line in answer.aiter_lines():
            lines += line.startswith("data: ")
            if lines > 3:
                break
        assert await metric(client, dialect.running_metric) == 1

    async def idle() -> bool:
        return await metric(client, dialect.running_metric) == 0

    await until(idle, timeout_s=5)


async def check_cached_tokens(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """The second call with the same long prefix reports it as cached, inside the prompt's total."""
    mark = secrets.token_hex(2)  # a prompt that no earlier check has put into the cache
    prompt = " ".join(f"{mark}{number}" for number in range(dialect.long_prompt_words))
    first = normalise(await chat(client, chat_body(dialect, prompt, max_tokens=2)))
    second = normalise(await chat(client, chat_body(dialect, prompt, max_tokens=2)))
    assert second.input_cached > first.input_cached
    assert second.input_total == first.input_total
    assert second.input_uncached > 0


async def check_logprobs(client: httpx.AsyncClient, dialect: Dialect) -> None:
    body = chat_body(dialect, "Say hello.", max_tokens=3, logprobs=True, top_logprobs=2)
    content = (await chat(client, body))["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]


async def check_json_schema(client: httpx.AsyncClient, dialect: Dialect) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    body = chat_body(dialect, "Which colour has grass?", max_tokens=60, response_format=form)
    answer = json.loads((await chat(client, body))["choices"][0]["message"]["content"])
    assert answer["colour"] in {"red", "green"}
    assert isinstance(answer["sure"], bool)


async def check_several_choices(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """Two choices are generated and counted twice, by engines that are not in `CHOICES_UNCOUNTED`."""
    body = await chat(client, chat_body(dialect, "Name a river.", n=2, max_tokens=4, temperature=0.9, seed=7))
    assert sorted(choice["index"] for choice in body["choices"]) == [0, 1]
    assert (normalise(body).output_total > 4) == dialect.counts_every_choice


async def check_completions(client: httpx.AsyncClient, dialect: Dialect) -> None:
    body = {"model": dialect.model, "prompt": "Once upon a", "max_tokens": 5, "temperature": 0}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"]
    assert normalise(answer).output_total == 5


async def check_embeddings(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """Vectors of one length, near for near texts, and billed by their prompt."""
    texts = ["The cat sleeps.", "A cat is sleeping.", "Stock prices fell sharply in Tokyo."]
    answer = (await client.post("/v1/embeddings", json={"model": dialect.model, "input": texts})).json()
    vectors = [entry["embedding"] for entry in sorted(answer["data"], key=lambda entry: entry["index"])]
    assert len({len(vector) for vector in vectors}) == 1

    def near(a: list[float], b: list[float]) -> float:
        product = sum(x * y for x, y in zip(a, b, strict=True))
        norm = sum(x * x for x in a) ** 0.5 * sum(y * y for y in b) ** 0.5
        return float(product / norm)

    assert near(vectors[0], vectors[1]) > near(vectors[0], vectors[2])
    usage = normalise(answer)
    assert usage.output_total == 0
    assert usage.input_total >= 12


async def check_tokenize(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """As many tokens as the engine then bills."""
    text = "The tide gate opens at noon."
    answer = await client.post("/tokenize", json={"model": dialect.model, dialect.tokenize_member: text})
    tokens = answer.json()["tokens"]
    body = {"model": dialect.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    billed = normalise((await client.post("/v1/completions", json=body)).json())
    assert 0 <= billed.input_total - len(tokens) <= 1  # some engines put one token at the beginning


async def check_refusal(client: httpx.AsyncClient, dialect: Dialect) -> None:
    """A prompt longer than the context is refused with a status, not served and cut."""
    answer = await client.post("/v1/chat/completions", json=chat_body(dialect, "word " * 20_000))
    assert 400 <= answer.status_code < 500
    assert "error" in answer.json()


async def template_tokens(client: httpx.AsyncClient, dialect: Dialect) -> int:
    """Return what the chat template adds to an empty message, a default system message included."""
    body = {"model": dialect.model, "messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    return normalise(await chat(client, body)).input_total


CHECKS = (
    check_health_and_models,
    check_chat,
    check_stream,
    check_one_token_per_chunk,
    check_abort,
    check_cached_tokens,
    check_logprobs,
    check_json_schema,
    check_several_choices,
    check_completions,
    check_embeddings,
    check_tokenize,
    check_refusal,
)
