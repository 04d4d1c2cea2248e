"""How an engine of a local deployment is started: the command, and the process.

The command is a pure function of the deployment, so a bad `engine_args` is refused when it is written, not when it is
run. An engine holds a lock on its lock file for as long as it lives (the open file is inherited), so there is at most
one engine of a seat on a host, whatever happens to the controllers that start it.
"""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from catalog.hardware import HardwareProfile, Vendor
from catalog.types import Deployment, EngineKind
from engine.arguments import llama_cpp
from engine.arguments.command import accepted, convert, invalid
from engine.arguments.llama_cpp import LlamaArguments
from engine.arguments.types import Task
from engine.model_files import locate

SOCKET_PATH_MAX = 100  # the kernel allows 107 bytes
LOG_MAX_BYTES = 4_000_000


class SimulatorArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine_args` of the simulator; see engine.simulator."""

    plan: str = ""
    dialect: str = "openai"
    slots: int = 1024
    load_ms: int = 0
    log: str = ""


class Launch(msgspec.Struct, frozen=True):
    """What to run and where it will answer (``unix:/path`` or ``http://127.0.0.1:port``)."""

    arguments: tuple[str, ...]
    url: str


def plan_launch(deployment: Deployment, listen: str, lock: str, home: Path) -> Launch:
    """Return the command of a deployment's engine.

    Args:
        deployment: a local one.
        listen: a socket's path ending in ``.sock``, or ``127.0.0.1:port``.
        lock: the path of the lock it will hold; among its arguments, so that it can be found by it.
        home: of this host; weights are looked for and kept there.

    Raises:
        PlatformError: kind invalid, when its engine_args or source cannot be used.
    """
    unix = listen.endswith(".sock")
    url = f"unix:{listen}" if unix else f"http://{listen}"
    if deployment.engine is EngineKind.LLAMA_CPP:
        weights = locate(deployment.source, deployment.sha256, home)
        arguments = ("engine.llama_server", *_llama_arguments(deployment, weights.path, listen))
        command = (sys.executable, "-m", *arguments, "--lock", lock)
        return Launch(command if weights.ready else _prepared(deployment, command, lock, home), url)
    if deployment.engine is EngineKind.SIMULATOR:
        where = ("--uds", listen) if unix else ("--port", listen.rpartition(":")[2])
        arguments = ("engine.simulator", *where, *_simulator_arguments(deployment))
        return Launch((sys.executable, "-m", *arguments, "--lock", lock), url)
    raise invalid(f"No local launcher for {deployment.engine}.")


def _prepared(deployment: Deployment, command: tuple[str, ...], lock: str, home: Path) -> tuple[str, ...]:
    """The same after `engine.prepare`, which brings and compares the weights and then becomes the engine."""
    weights = ("--source", deployment.source, "--sha256", deployment.sha256, "--home", str(home))
    return (sys.executable, "-m", "engine.prepare", *weights, "--lock", lock, "--", *command)


def _llama_arguments(deployment: Deployment, model: Path, listen: str) -> list[str]:
    given = convert(deployment.engine_args, LlamaArguments)
    if given.extra:
        raise invalid("The llama.cpp of this host takes no extra options: leave 'extra' empty.")
    unix = listen.endswith(".sock")
    task = Task(
        model=str(model),
        served_name=deployment.upstream_model,
        context_max=deployment.context_max,
        hardware=HardwareProfile(vendor=Vendor.CPU),
        host=listen if unix else listen.rpartition(":")[0],
        port=0 if unix else int(listen.rpartition(":")[2]),
    )
    line = accepted(llama_cpp.command_line(given, task))
    return [*line.arguments, "--embeddings" if given.embeddings else "--no-embeddings"]


def _simulator_arguments(deployment: Deployment) -> list[str]:
    given = convert(deployment.engine_args, SimulatorArguments)
    found = ["--model", deployment.upstream_model, "--slots", str(given.slots), "--load-ms", str(given.load_ms)]
    found += ["--dialect", given.dialect]
    found += ["--plan", given.plan] if given.plan else []
    return found + (["--log", given.log] if given.log else [])


def choose_listen(folder: Path, name: str) -> str:
    """Return a socket in `folder`, or a free loopback port where its path would be too long."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return str(path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def take_lock(path: Path) -> int | None:
    """Return an open file that holds the lock; None when an engine (or another starter) has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def spawn(launch: Launch, lock: int, log: Path) -> "subprocess.Popen[bytes]":
    """Start the engine with the lock in its hands; returns at once. The caller closes its own copy of the lock."""
    if launch.url.startswith("unix:"):
        Path(launch.url.removeprefix("unix:")).unlink(missing_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            launch.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            env={
                **_environment(prepares="engine.prepare" in launch.arguments),
                "OMP_WAIT_POLICY": "passive",
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,  # Ctrl-C in a terminal reaches the controller, which drains first
        )


def _environment(*, prepares: bool) -> dict[str, str]:
    """Our own without the platform's settings, which hold secrets; but for the object store's where they are needed."""

    def kept(name: str) -> bool:
        return not name.startswith("TIDEGATE_") or (prepares and name.startswith("TIDEGATE_OBJECTS__"))

    return {name: value for name, value in os.environ.items() if kept(name)}


def trim_log(log: Path) -> None:
    """Empty a log that has grown too long; its engine appends, so it goes on at the beginning."""
    if log.exists() and log.stat().st_size > LOG_MAX_BYTES:
        os.truncate(log, 0)
