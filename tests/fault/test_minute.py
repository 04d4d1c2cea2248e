"""The user's minute: a first start with the real model, the line it prints, the SDK, the bill, the next start."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from cli.processes import start_token
from tests.fault.test_up import ROOT, eventually

IDLE_PSS_MAX_KB = 500_000
QUESTION: Any = [{"role": "user", "content": "Say hello."}]


class Run:
    """`tidegate up` as a user starts it, on a free port."""

    def __init__(self, folder: Path) -> None:
        self.ready_file, self.output = folder / "ready.json", folder / "out"
        with self.output.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cli.main", "up", "--port", "0", "--home", str(folder / "home")),
                    *("--ready-file", str(self.ready_file)),
                ],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        eventually(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()
        self.facts: dict[str, Any] = json.loads(self.ready_file.read_text(encoding="utf-8"))

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def balance(self) -> Decimal:
        headers = {"authorization": f"Bearer {self.facts['api_key']}"}
        found = httpx.get(f"{self.facts['base_url']}/api/v1/balance", headers=headers, timeout=20)
        return Decimal(found.raise_for_status().json()["available"])

    def family(self) -> list[psutil.Process]:
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    started: list[Run] = []

    def start() -> Run:
        started.append(Run(tmp_path))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop()


def paste(line: str) -> str:
    """Do what the shell and curl make of the printed line; return the body."""
    words = shlex.split(line)
    assert words[:2] == ["curl", "-N"]
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1]
    return httpx.post(words[2], headers=headers, content=body, timeout=60).raise_for_status().text


def idle_pss_kb(processes: list[psutil.Process]) -> int:
    """Memory of all processes, shared pages counted once (Linux)."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:  # one of Postgres' short processes
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


async def ask_with_the_sdk(facts: dict[str, Any]) -> None:
    known = {"base_url": facts["openai_base_url"], "api_key": facts["api_key"], "max_retries": 0}
    asked: dict[str, Any] = {"model": facts["model"], "messages": QUESTION, "max_tokens": 6}
    async with openai.AsyncOpenAI(**known) as client:
        whole = await client.chat.completions.create(**asked)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        stream = await client.chat.completions.create(**asked, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]).strip()


def ask_with_the_sync_sdk(facts: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=facts["openai_base_url"], api_key=facts["api_key"], max_retries=0) as client:
        whole = client.chat.completions.create(model=facts["model"], messages=QUESTION, max_tokens=6)
        assert whole.choices[0].message.content
        stream = client.chat.completions.create(model=facts["model"], messages=QUESTION, max_tokens=6, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).strip()
        assert [model.id for model in client.models.list()] == [facts["model"]]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="no-such-model", messages=QUESTION)


def test_a_user_gets_an_answer_and_a_bill_and_finds_both_again(run: Callable[[], Run]) -> None:
    first = run()
    assert first.balance() == 100
    if sys.platform == "linux":
        assert idle_pss_kb(first.family()) <= IDLE_PSS_MAX_KB
    answer = paste(next(line for line in first.said().splitlines() if line.strip().startswith("curl ")))
    assert answer.endswith("data: [DONE]\n\n")
    eventually(lambda: first.balance() < 100)
    ask_with_the_sync_sdk(first.facts)
    asyncio.run(ask_with_the_sdk(first.facts))
    family = first.family()
    assert first.stop() == 0
    assert [process for process in family if start_token(process.pid)] == []
    books = [sys.executable, "-m", "cli.main", "ledger", "verify", "--home", str(first.ready_file.with_name("home"))]
    assert subprocess.run(books, cwd=ROOT, check=False, capture_output=True).returncode == 0
    second = run()
    assert second.facts["api_key"] == first.facts["api_key"]
    assert Decimal(99) < second.balance() < 100
    assert second.stop() == 0
