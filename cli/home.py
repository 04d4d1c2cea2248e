"""The home: the one folder (mode 700) that holds all state of an all-in-one installation.

==================  =================================================================================================
``lock``            held by the running `tidegate up`; its pid is in it
``secrets.json``    mode 600, made once: keys of the installation, database passwords, demo logins, token and API key
``postgres/``       the database; ``valkey/`` counters and the broker; ``spool/`` usage not posted yet; ``objects/``
``policy/``         what gateways know of keys, models and prices, sealed, mode 600: for a start without the database
``mail/``           mails that no SMTP server is set for, mode 600
``models/``         weights that engines of this host read, compared with their hash; made again when gone
``logs/``           one file per process, and at most one older one beside it
``run/``            sockets, and ``processes.json``: what the last start started (name, pid, start time)
==================  =================================================================================================
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cli.processes import ProcessRecord
from core.files import write_private

SOCKET_PATH_MAX = 100  # bytes; the kernel's limit is 107 and some libraries want room
LONGEST_SOCKET = "pg/.s.PGSQL.65535.lock"
FOLDERS = ("logs", "run", "postgres", "valkey", "spool", "objects")


class HomeError(Exception):
    """The home cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one home folder. `run` is elsewhere when the home's path is too long for a unix socket."""

    path: Path
    run: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def secrets_file(self) -> Path:
        return self.path / "secrets.json"

    @property
    def state_file(self) -> Path:
        return self.path / "run" / "processes.json"

    @property
    def control_socket(self) -> Path:
        return self.run / "control.sock"

    @property
    def valkey_socket(self) -> Path:
        return self.run / "valkey.sock"


class HomeSecrets(msgspec.Struct, frozen=True):
    """All that must stay secret and stay the same from start to start."""

    pepper: str
    signing: str
    sealing: str
    database_owner_password: str
    database_app_password: str
    operator_token: str = ""
    api_key: str = ""
    operator_password: str = ""
    tenant_password: str = ""
    metrics_token: str = ""
    previous_peppers: tuple[str, ...] = ()  # still believed, newest first
    previous_signing: tuple[str, ...] = ()


class HomeState(msgspec.Struct, frozen=True):
    """What the last start made of it, for the next one and for the other commands. No secrets."""

    base_url: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    database_port: int = 0
    processes: tuple[ProcessRecord, ...] = ()


def open_home(path: Path) -> Home:
    """Make what is missing, close it to others, and return it.

    Raises:
        HomeError: it is not a folder, or not ours.
    """
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        for name in FOLDERS:
            (path / name).mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise HomeError(
            f"The home {path} cannot be used ({error.strerror}). Choose another one with --home or TIDEGATE_HOME."
        ) from error
    return Home(path=path, run=_run_folder(path))


def existing_home(path: Path) -> Home:
    """Return the home at `path`.

    Raises:
        HomeError: there is none.
    """
    if not (path / "secrets.json").exists():
        raise HomeError(f"There is no home at {path.absolute()}. Start one with `tidegate up --home {path}`.")
    return open_home(path)


def _run_folder(path: Path) -> Path:
    """Return the folder of the sockets: below the home when its path is short enough, else a private one in /tmp.

    The private folder is remembered as the link ``run/short``; it is used again only when it is still our own.
    """
    if len(os.fsencode(path / "run" / LONGEST_SOCKET)) <= SOCKET_PATH_MAX:
        return path / "run"
    link = path / "run" / "short"
    if link.is_symlink():
        target = link.readlink()
        if _is_private(target):
            return target
        link.unlink()
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    target = Path(tempfile.mkdtemp(prefix=f"tidegate-{digest}-", dir="/tmp"))
    link.symlink_to(target)
    return target


def clear_sockets(home: Home) -> None:
    """Remove the private folder in /tmp of a home whose path is long; the next start makes another one."""
    if home.run != home.path / "run" and _is_private(home.run):
        shutil.rmtree(home.run, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def lock(home: Home) -> int:
    """Take the home for this process; return the descriptor that holds it until the process ends.

    Raises:
        HomeError: another process has it; the message names its pid.
    """
    descriptor = os.open(home.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise HomeError(
            f"The home {home.path} is in use by process {holder}. Stop that one, or give this one a home of its own: "
            "--home another-folder --port 0"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def load_secrets(home: Home, mint: Callable[[], HomeSecrets]) -> HomeSecrets:
    """Return the home's secrets, made with `mint` at the first start.

    Raises:
        HomeError: the file cannot be read, or is gone although there is a database.
    """
    try:
        return msgspec.json.decode(home.secrets_file.read_bytes(), type=HomeSecrets)
    except FileNotFoundError:
        if (home.path / "postgres" / "data").exists():
            raise HomeError(
                f"{home.secrets_file} is gone, and the database in this home cannot be opened without it. "
                "Put it back, or start with a new home."
            ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise HomeError(f"{home.secrets_file} cannot be read: {error}") from error
    made = mint()
    save_secrets(home, made)
    return made


def save_secrets(home: Home, secrets: HomeSecrets) -> None:
    write_private(home.secrets_file, msgspec.json.format(msgspec.json.encode(secrets), indent=2))


def random_hex() -> str:
    """Return 32 random bytes in hex."""
    return secrets.token_hex(32)


def load_state(home: Home) -> HomeState:
    """Return what the last start left; an unreadable file counts as none."""
    try:
        return msgspec.json.decode(home.state_file.read_bytes(), type=HomeState)
    except (OSError, msgspec.MsgspecError):
        return HomeState()


def save_state(home: Home, state: HomeState) -> None:
    write_private(home.state_file, msgspec.json.encode(state))


def write_ready_file(path: Path, facts: dict[str, Any], processes: Sequence[ProcessRecord]) -> None:
    """Tell a program that started us where everything is. Holds secrets: mode 600."""
    write_private(
        path, json.dumps({**facts, "pids": {process.name: process.pid for process in processes}}, indent=2).encode()
    )
