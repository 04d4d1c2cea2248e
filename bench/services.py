"""What the measured gateway leans on, all on core 1: Postgres, Valkey, the poster.

With `--until-gone PID` they end when that process has gone, else on SIGTERM.
Its folder is `bench/build/home`, seeded once with a tenant, prices, keys and a deployment at the simulated engine.
`services.json` beside it says when everything is ready: the environment of a gateway, and the pids.
"""

import argparse
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

from bench import machine, seed
from cli.embedded import postgres as pg
from cli.embedded import valkey as vk
from core import db
from core.settings import Settings

BUILD = Path(__file__).resolve().parent / "build"
HOME = BUILD / "home"
STATE = BUILD / "services.json"
AUX_PIDS = BUILD / "aux.pids"
DATABASE = "tidegate"
CHECK_EVERY_S = 0.5


def _secrets() -> dict[str, str]:
    path = HOME / "secrets.json"
    if not path.exists():
        names = ("pepper", "signing", "sealing", "owner_password", "app_password")
        path.write_text(json.dumps({name: secrets.token_hex(32) for name in names}), encoding="utf-8")
        path.chmod(0o600)
    loaded: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def create_database(files: pg.PostgresFiles, port: int) -> None:
    with psycopg.connect(pg.url(files, port, "owner", "postgres"), autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
            return
        role = sql.SQL("CREATE ROLE tidegate_app LOGIN PASSWORD {}").format(sql.Literal(files.app_password))
        connection.execute(role)
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))


def environment(given: dict[str, str], files: pg.PostgresFiles, port: int, valkey_socket: Path) -> dict[str, str]:
    """Return the settings of every process as environment variables."""
    return {
        "TIDEGATE_HOME": str(HOME),
        "TIDEGATE_SECRETS__PEPPER": given["pepper"],
        "TIDEGATE_SECRETS__SIGNING": given["signing"],
        "TIDEGATE_SECRETS__SEALING": given["sealing"],
        "TIDEGATE_DATABASE__URL": pg.url(files, port, "app", DATABASE),
        "TIDEGATE_DATABASE__OWNER_URL": pg.url(files, port, "owner", DATABASE),
        "TIDEGATE_VALKEY__URL": f"unix://{valkey_socket}",
        "TIDEGATE_VALKEY__BROKER_URL": f"redis+socket://{valkey_socket}?virtual_host=1",
        "TIDEGATE_GATEWAY__REPLICA_ID": "bench",
        "TIDEGATE_GATEWAY__GLOBAL_INFLIGHT_MAX": "100000",
        "TIDEGATE_GATEWAY__UPSTREAM_CONNECTIONS_MAX": "4096",
    }


def _settings(variables: dict[str, str]) -> Settings:
    groups: dict[str, dict[str, str]] = {}
    for name, value in variables.items():
        group, _, field = name.removeprefix("TIDEGATE_").lower().partition("__")
        if field:
            groups.setdefault(group, {})[field] = value
    return Settings.load(home=HOME, **groups)


def _publish(variables: dict[str, str], pids: dict[str, int]) -> None:
    AUX_PIDS.write_text(" ".join(map(str, pids.values())) + "\n", encoding="utf-8")
    partial = STATE.with_suffix(".partial")
    partial.write_text(json.dumps({"environment": variables, "pids": pids}), encoding="utf-8")
    partial.chmod(0o600)
    partial.rename(STATE)


def _wait_for_end(until_gone: int | None, watched: list[subprocess.Popen[bytes]]) -> None:
    """Return on SIGTERM or SIGINT, when `until_gone` has gone, or when a service ended by itself."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.wait(CHECK_EVERY_S):
        if until_gone is not None and not psutil.pid_exists(until_gone):
            return
        if any(process.poll() is not None for process in watched):
            print("bench: a service ended by itself", file=sys.stderr)
            return


def run(until_gone: int | None) -> None:
    """Start, seed, publish, wait, stop."""
    STATE.unlink(missing_ok=True)
    HOME.mkdir(parents=True, exist_ok=True)
    HOME.chmod(0o755)
    psutil.Process().cpu_affinity([machine.OTHER_CORE])  # children inherit it
    sockets = Path(tempfile.mkdtemp(prefix="tgb-"))  # unix socket names are limited to 107 bytes
    sockets.chmod(0o755)
    given, started = _secrets(), []
    try:
        files = pg.PostgresFiles(HOME / "postgres", given["owner_password"], given["app_password"], sockets / "pg")
        pg.initialise(files)
        port = pg.free_port()
        postgres = pg.start(files, port)
        started.append(postgres)
        pg.wait_ready(files, port, lambda: postgres.poll() is None)
        valkey = vk.start(HOME / "valkey", sockets / "valkey.sock")
        started.append(valkey)
        vk.wait_ready(HOME / "valkey", sockets / "valkey.sock", lambda: valkey.poll() is None)
        create_database(files, port)
        db.migrate(pg.url(files, port, "owner", DATABASE))
        variables = environment(given, files, port, sockets / "valkey.sock")
        seed.run(_settings(variables), BUILD)
        command = [sys.executable, "-m", "cli.main", "poster"]
        poster = machine.start(machine.OTHER_CORE, command, BUILD / "poster.log", **variables)
        started.append(poster)
        _publish(variables, {"postgres": postgres.pid, "valkey": valkey.pid, "poster": poster.pid})
        _wait_for_end(until_gone, started)
    finally:
        STATE.unlink(missing_ok=True)
        for process in reversed(started):
            machine.end(process)
        shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--until-gone", type=int, metavar="PID")
    run(parser.parse_args().until_gone)
