"""A gateway with an engine behind it, and how tests talk to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from engine.simulator import Simulator
from tests.factories.gateway import Rig


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Return as soon as something is so that another task brings about; fail when it does not become so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is watched belongs to code that knows no test
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Stack:
    """A gateway, its engine and a client with a good key."""

    rig: Rig
    engine: Simulator
    log: Path
    client: httpx.AsyncClient

    async def chat(self, prompt: str, **members: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat(prompt, **members))

    def generated(self) -> list[dict[str, Any]]:
        """The engine's own log."""
        return [orjson.loads(line) for line in self.log.read_bytes().splitlines()] if self.log.exists() else []


def chat(prompt: str, **members: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": prompt}], **members}


def events_of(text: str) -> list[Any]:
    """The events of a stream; each one is whole."""
    assert text.endswith("\n\n")
    found = [block.removeprefix("data: ") for block in text[:-2].split("\n\n")]
    return [block if block == "[DONE]" else orjson.loads(block) for block in found]


def text_of(events: list[Any]) -> str:
    """What a client puts together of a stream of one choice."""
    deltas = [c["delta"] for e in events if e != "[DONE]" and "choices" in e for c in e["choices"]]
    return "".join((d.get("reasoning_content") or "") + (d.get("content") or "") for d in deltas)
