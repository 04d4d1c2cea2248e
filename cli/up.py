"""`tidegate up`: everything on this machine, in one home, behind one port."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from setproctitle import setproctitle

from cli import home as homes
from cli import installation, parts, schema, screen, seed
from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from cli.home import Home, HomeSecrets, HomeState
from cli.processes import ProcessRecord, end, record
from cli.supervisor import Service, StartError, Stopped, Supervisor, Voice
from core import db
from core.files import write_private
from core.settings import Settings

DATABASE_STAGE = 3  # stopped after every process of ours
MIGRATE_TIMEOUT_S = 300.0
SEED_TIMEOUT_S = 60.0
LEFTOVER_TIMEOUT_S = 5.0
DEFAULT_PORT = 8080


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line said."""

    home: Path
    host: str
    port: int
    ready_file: Path | None


class PortTakenError(Exception):
    """Another program listens there; the message says which and what to do."""


def up(options: UpOptions, version: str) -> int:
    """Run the whole platform until Ctrl-C or SIGTERM; return the exit code."""
    home = homes.open_home(options.home)
    lock = homes.lock(home)
    setproctitle(f"tidegate: up {home.path}")
    screen.say(f"Tidegate {version}, home {home.path}")
    port = claim_port(options.host, options.port)
    secrets = _secrets(home)
    if options.ready_file is not None:
        _forget(options.ready_file)
    _end_leftovers(home, secrets)
    state = HomeState(
        base_url=base_url(options.host, port),
        host=options.host,
        port=port,
        database_port=_database_port(homes.load_state(home).database_port),
    )
    news = _News(home, secrets, state, options.ready_file)
    supervisor = Supervisor(home.logs, Voice(screen.ready, screen.trouble, news.changed), (lock,))
    supervisor.open()
    try:
        _start(home, secrets, state, supervisor)
        news.announce()
        supervisor.serve()
        screen.say("Stopping …")
    except Stopped:
        screen.say("Stopping …")
    except (StartError, RuntimeError) as error:
        screen.say(f"Tidegate did not start. {error}")
        return 1
    finally:
        supervisor.stop()
        news.withdraw()
        homes.clear_sockets(home)
    screen.say("Stopped. Everything is kept in the home.")
    return 0


def _secrets(home: Home) -> HomeSecrets:
    """Return the home's secrets, completed when an older version made them."""
    known = homes.load_secrets(home, seed.mint_secrets)
    complete = seed.complete(known)
    if complete != known:
        homes.save_secrets(home, complete)
    return complete


def _forget(ready_file: Path) -> None:
    """Remove what an earlier start left, and make sure that this one can write there."""
    try:
        ready_file.unlink(missing_ok=True)
        trial = ready_file.with_name(f".{ready_file.name}.trial")  # nobody may see an empty one of the real name
        write_private(trial, b"")
        trial.unlink()
    except OSError as error:
        raise homes.HomeError(f"The ready file {ready_file} cannot be written ({error.strerror}).") from error


def _start(home: Home, secrets: HomeSecrets, state: HomeState, supervisor: Supervisor) -> None:
    """Bring everything up, in order, with a line for each step."""
    files = installation.postgres_files(home, secrets)
    settings = installation.settings(home, secrets, state)
    if not files.data.exists():
        with screen.step("postgres", "creating the database (first start)"):
            pg.initialise(files)
    supervisor.begin(*_stores(home, files, state.database_port))
    supervisor.wait_ready("postgres", "valkey")
    pg.create_databases(files, state.database_port, installation.DATABASE)
    owner_url = pg.url(files, state.database_port, "owner", installation.DATABASE)
    migrating = not schema.is_current(owner_url)
    if migrating:
        supervisor.begin_job("migrations", lambda: db.migrate(owner_url), MIGRATE_TIMEOUT_S)
    with screen.step("programs", "loading"):
        parts.preload()
    if migrating:
        supervisor.wait_job("migrations")
    supervisor.begin_job("demo", lambda: seed.run(settings, secrets), SEED_TIMEOUT_S)
    supervisor.wait_job("demo")
    supervisor.begin(*(_service(part, settings) for part in parts.PARTS))
    supervisor.wait_ready(*(part.name for part in parts.PARTS))


def _service(part: parts.Part, settings: Settings) -> Service:
    def run(ready: Callable[[], None]) -> None:
        parts.runner(part)(settings, ready)

    return Service(part.name, run=run, stop_stage=part.stop_stage, stop_timeout_s=part.stop_timeout_s)


def _stores(home: Home, files: pg.PostgresFiles, port: int) -> tuple[Service, Service]:
    def start_postgres() -> "subprocess.Popen[bytes]":
        pg.clear_leftovers(files)  # backends of a killed postmaster
        return pg.start(files, port)

    postgres = Service(
        "postgres",
        command=start_postgres,
        probe=lambda: pg.answers(files, port),
        stop_stage=DATABASE_STAGE,
        stop_signal=signal.SIGINT,
    )
    valkey = Service(
        "valkey",
        command=lambda: vk.start(home.path / "valkey", home.valkey_socket, home.logs / "valkey.log"),
        probe=lambda: vk.answers(home.valkey_socket),
        stop_stage=DATABASE_STAGE,
    )
    return postgres, valkey


def _end_leftovers(home: Home, secrets: HomeSecrets) -> None:
    """End what an earlier start, killed without warning, left running. The lock says that nobody else owns it."""
    processes = homes.load_state(home).processes
    ours = [process for process in processes if process.name not in {"postgres", "up"}]
    left = end(ours, signal.SIGTERM, 0.0)
    if left:
        with screen.step("leftovers", f"ending {len(left)} processes of an earlier start"):
            end(end(left, signal.SIGTERM, LEFTOVER_TIMEOUT_S), signal.SIGKILL, LEFTOVER_TIMEOUT_S)
    vk.clear_leftover(home.valkey_socket)
    pg.clear_leftovers(installation.postgres_files(home, secrets))


def _database_port(last: int) -> int:
    """Return the last start's port when it is still free, so that tools keep their settings, else another one."""
    if last and _holder("127.0.0.1", last) is None:
        return last
    return pg.free_port()


def claim_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0.

    Raises:
        PortTakenError: something listens there, or the host is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            holder = _holder(host, port)
            by = f" by {holder}" if holder else ""
            raise PortTakenError(
                f"Port {port} on {host} cannot be used ({error.strerror}{by}). "
                "Choose another with --port (0 takes a free one), e.g. make run ARGS='--port 0'."
            ) from error
        chosen: int = probe.getsockname()[1]
        return chosen


def _holder(host: str, port: int) -> str | None:
    """Return who listens on the port, as far as we may see; None when nobody does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((host, port)) != 0:
            return None
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
    except psutil.Error:
        pass
    return "another program"


def base_url(host: str, port: int) -> str:
    """Return the address that a program on this machine uses."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - a comparison, nothing is bound
    return f"http://{f'[{local}]' if ':' in local and '[' not in local else local}:{port}"


@dataclass(slots=True)
class _News:
    """Keeps the files that tell others what runs, and the words for people."""

    home: Home
    secrets: HomeSecrets
    state: HomeState
    ready_file: Path | None
    announced: bool = False

    def changed(self, processes: Sequence[ProcessRecord]) -> None:
        every = (record("up", os.getpid()), *processes)
        self.state = msgspec.structs.replace(self.state, processes=every)
        try:
            homes.save_state(self.home, self.state)
            if self.announced and self.ready_file is not None:
                homes.write_ready_file(self.ready_file, self._facts(), every)
        except OSError as error:  # a full disk is no reason to stop what runs
            screen.trouble(f"The list of processes could not be written ({error.strerror}).")

    def announce(self) -> None:
        self.announced = True
        self.changed(self.state.processes[1:])
        url, key = self.state.base_url, self.secrets.api_key
        headers = f"-H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
        body = (
            f'{{"model": "{seed.MODEL}", "stream": true, "max_tokens": 60, '
            '"messages": [{"role": "user", "content": "Say hello in one short sentence."}]}'
        )
        for line in (
            "",
            f"Tidegate is ready at {url}  (Ctrl-C stops it; everything is kept in {self.home.path})",
            "",
            f"  OpenAI base URL   {url}/v1",
            f"  API key           {key}   (tenant {seed.TENANT}, credit at the start {seed.CREDIT} USD)",
            f"  operator login    {seed.OPERATOR_EMAIL}   password {self.secrets.operator_password}   (as first set)",
            f"  tenant login      {seed.TENANT_EMAIL}   password {self.secrets.tenant_password}   (as first set)",
            f"  sign in           POST {url}/api/v1/auth/password with email and password",
            f"  operator token    {self.secrets.operator_token}",
            f"  API description   {url}/api/openapi.json",
            "",
            "Ask the model (its first answer wakes it, which takes a second or two):",
            "",
            f"  curl -N {url}/v1/chat/completions {headers} -d '{body}'",
            "",
        ):
            screen.say(line)

    def withdraw(self) -> None:
        """Nothing is ready any more."""
        self.announced = False
        if self.ready_file is not None:
            self.ready_file.unlink(missing_ok=True)

    def _facts(self) -> dict[str, str]:
        return {
            "base_url": self.state.base_url,
            "openai_base_url": f"{self.state.base_url}/v1",
            "admin_token": self.secrets.operator_token,
            "operator_email": seed.OPERATOR_EMAIL,
            "operator_password": self.secrets.operator_password,
            "tenant_email": seed.TENANT_EMAIL,
            "tenant_password": self.secrets.tenant_password,
            "api_key": self.secrets.api_key,
            "model": seed.MODEL,
        }
