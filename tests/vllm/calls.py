"""What the tests ask of an engine, the same whether it is called directly or through the gateway."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

Json = dict[str, Any]
POLL_S = 0.05


def prompt(question: str, *, lines: int = 0, subject: str = "sheep") -> list[dict[str, str]]:
    """Messages of a chat. Each of `lines` adds about 12 tokens that any caller with the same `subject` shares."""
    rules = "".join(f"Rule {n}: speak about {subject} number {n}, and be brief. " for n in range(lines))
    return [
        {"role": "system", "content": f"You are a helpful assistant. {rules}"},
        {"role": "user", "content": question},
    ]


async def chat(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Json:
    """Return a buffered chat answer."""
    response = await client.post("/v1/chat/completions", json={"temperature": 0, **body})
    assert response.status_code == httpx.codes.OK, response.text
    answer: Json = response.json()
    return answer


async def stream(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: dict[str, str] | None = None
) -> AsyncGenerator[Json, None]:
    """Yield the events of a streamed chat answer; ends with the stream, which must say [DONE].

    The answer's headers are put into `headers`, before the first event.
    """
    done = False
    payload = {"temperature": 0, "stream": True, **body}
    async with client.stream("POST", "/v1/chat/completions", json=payload) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        if headers is not None:
            headers.update(response.headers)
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
    assert done


def cached_tokens(answer: Json) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details["cached_tokens"] or 0)


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    """Read one of the engine's own gauges."""
    response = await client.get("/metrics")
    values = [line.rsplit(" ", 1)[1] for line in response.text.splitlines() if line.startswith(f"{name}{{")]
    assert len(values) == 1, f"{name}: {values}"
    return float(values[0])


async def until(client: httpx.AsyncClient, name: str, value: float, *, within_s: float) -> None:
    """Return once the gauge shows `value`; the engine updates it a few times a second."""
    async with asyncio.timeout(within_s):
        while await gauge(client, name) != value:  # noqa: ASYNC110 - the engine can only be polled
            await asyncio.sleep(POLL_S)
