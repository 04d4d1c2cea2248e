"""Traffic against a running platform: callers that remember what they saw."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CALL_TIMEOUT_S = 60
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """What one caller saw. `whole` means that the answer arrived to its end."""

    generation_id: str
    status: int
    whole: bool
    code: str = ""


@dataclass(slots=True)
class Traffic:
    """Keeps `concurrency` callers busy until stopped; every second call streams."""

    base_url: str
    api_key: str
    model: str
    concurrency: int
    prompt: str
    max_tokens: int = 40
    answers: list[Answer] = field(default_factory=list)
    in_flight: int = 0
    _stopping: bool = False
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            self.base_url,
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._tasks = [asyncio.create_task(self._caller(number)) for number in range(self.concurrency)]

    async def until(self, condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        """Wait until a fact about the traffic holds.

        Raises:
            AssertionError: it did not in time.
        """
        for _ in range(int(limit_s / POLL_S)):
            if condition():
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"waited {limit_s} s for {what}: {self.summary()}")

    async def stop(self) -> None:
        """Let the running calls end, then stop."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        if self._session is not None:
            await self._session.close()

    def summary(self) -> dict[str, int]:
        """Return how many calls ended in which way."""
        counts: dict[str, int] = {}
        for answer in self.answers:
            name = "whole" if answer.whole else f"{answer.status} {answer.code or 'cut'}"
            counts[name] = counts.get(name, 0) + 1
        return counts

    def whole(self) -> int:
        return sum(answer.whole for answer in self.answers)

    async def _caller(self, number: int) -> None:
        serial = number
        while not self._stopping:
            serial += 1
            answer = await self._call(stream=serial % 2 == 0)
            self.answers.append(answer)
            if not answer.whole:
                await asyncio.sleep(0.05)

    async def _call(self, *, stream: bool) -> Answer:
        assert self._session is not None
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "stream": stream,
        }
        identity, status = "", 0
        self.in_flight += 1
        try:
            headers = {"authorization": f"Bearer {self.api_key}"}
            async with self._session.post("/v1/chat/completions", json=body, headers=headers) as response:
                identity, status = response.headers.get("x-request-id", ""), response.status
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return Answer(identity, status, whole=False)
        finally:
            self.in_flight -= 1
        if status != 200:
            return Answer(identity, status, whole=False, code=_code(text))
        if stream and not text.endswith(b"data: [DONE]\n\n"):
            return Answer(identity, status, whole=False)
        if stream and b'"error"' in text:
            return Answer(identity, status, whole=False, code="error event")
        return Answer(identity, status, whole=True)


def _code(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"
