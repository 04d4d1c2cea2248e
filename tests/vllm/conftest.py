"""A real vLLM on the CPU, one for the whole run. It must start: a test that needs it fails when it does not."""

import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from catalog.hardware import HardwareProfile, Vendor
from catalog.types import EngineKind
from cli.embedded.postgres import free_port
from engine.arguments import vllm as vllm_arguments
from engine.arguments.command import accepted, command_line
from engine.arguments.types import CommandLine, Family, Task
from engine.usage import CHOICES_UNCOUNTED
from tests.contract.engine_contract import Dialect

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WEIGHTS = ROOT / ".cache" / "vllm-weights"
LOG = ROOT / ".cache" / "vllm.log"
MODEL = "smollm2-135m-instruct"
SEATS = 2  # sequences that run at once; more wait inside the engine
BLOCK_TOKENS = 128  # prefix cache granularity on the CPU
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: less than the platform would take
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the first request with logprobs would take 20 s
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def command(port: int) -> CommandLine:
    """The platform's own command line for this engine on this machine."""
    task = Task(
        model=str(WEIGHTS),
        served_name=MODEL,
        context_max=4096,
        hardware=HardwareProfile(vendor=Vendor.CPU, memory_mib=8192),
        port=port,
    )
    return accepted(command_line(Family.VLLM, {"seats": SEATS, "extra": "--dtype bfloat16 --enforce-eager"}, task))


VLLM = Dialect(
    model=MODEL,
    running_metric="vllm:num_requests_running",
    tokenize_member="prompt",
    long_prompt_words=200,
    counts_every_choice=EngineKind.VLLM not in CHOICES_UNCOUNTED,
)


@dataclass(frozen=True, slots=True)
class Vllm:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def _start(port: int) -> Vllm:
    for needed in (PYTHON, WEIGHTS / "config.json"):
        if not needed.exists():
            raise RuntimeError(f"{needed} is missing. Run `make vllm`.")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    line = command(port)
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), "-m", vllm_arguments.MODULE, *line.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment | line.environment | ENVIRONMENT,
            cwd=ROOT,
        )
    return Vllm(port, process)


def _stop(server: Vllm) -> None:
    server.process.terminate()
    try:
        server.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def _healthy(server: Vllm) -> bool:
    try:
        return httpx.get(f"{server.base_url}/health", timeout=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _wait_healthy(server: Vllm) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _healthy(server):
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not start. The end of its log:\n{LOG.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def vllm() -> Iterator[Vllm]:
    server = _start(free_port())
    try:
        _wait_healthy(server)
        yield server
    finally:
        _stop(server)


@pytest.fixture
async def engine_client(vllm: Vllm) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the engine itself, without the gateway."""
    async with httpx.AsyncClient(base_url=vllm.base_url, timeout=60.0) as client:
        yield client
