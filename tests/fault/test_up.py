"""`tidegate up` when things go wrong. Our own processes are stand-ins here; Postgres and Valkey are real."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis

from cli import home as homes
from cli import installation, seed
from cli.embedded import postgres as pg
from cli.processes import end, start_token

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


@dataclass(slots=True)
class Up:
    """A running `up` on one home."""

    home: Path
    ready_file: Path
    process: "subprocess.Popen[str]"
    output: Path

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.ready_file.read_text(encoding="utf-8"))
        return facts

    def pid(self, name: str) -> int:
        return int(self.facts()["pids"][name])

    def family(self) -> list[psutil.Process]:
        """Every process it started, at any depth, itself first."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")


def eventually(what: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process lives: a dead one that nobody has collected yet does not."""
    return start_token(pid) != ""


def name_of(process: psutil.Process) -> str:
    """Return a process's name, empty for one that has just ended (Postgres starts short ones)."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


class Starter:
    """Starts `up` on homes below one folder, and ends what a failed test left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Up] = []

    def command(self, home: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "tests.fault.standin", "--home", str(self.folder / home), *more]

    def __call__(self, home: str, **environment: str) -> Up:
        ready_file = self.folder / f"{home}.ready.json"
        ready_file.unlink(missing_ok=True)  # one that was killed could not remove it
        output = self.folder / f"{home}.out"
        with output.open("a", encoding="utf-8") as out:
            process = subprocess.Popen(
                self.command(home, "--port", "0", "--ready-file", str(ready_file)),
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=out,
                stderr=out,
                text=True,
                start_new_session=True,
            )
        up = Up(self.folder / home, ready_file, process, output)
        self.started.append(up)
        eventually(lambda: ready_file.exists() or process.poll() is not None)
        assert process.poll() is None, up.said()
        return up

    def stop(self, up: Up) -> int:
        up.process.send_signal(signal.SIGINT)
        return up.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for up in starter.started:
        if up.process.poll() is None:
            starter.stop(up)
    for up in starter.started:
        if up.home.exists():
            left = homes.load_state(homes.open_home(up.home)).processes
            end([process for process in left if process.name != "postgres"], signal.SIGKILL, PATIENCE_S)
            pg.clear_leftovers(files_of(up))


def files_of(up: Up) -> pg.PostgresFiles:
    home = homes.open_home(up.home)
    return installation.postgres_files(home, homes.load_secrets(home, seed.mint_secrets))


def database(up: Up) -> "psycopg.Connection[tuple[Any, ...]]":
    home = homes.open_home(up.home)
    port = homes.load_state(home).database_port
    return psycopg.connect(pg.url(files_of(up), port, "owner", "tidegate"), autocommit=True)


def answers(up: Up) -> bool:
    try:
        with database(up):
            return True
    except psycopg.OperationalError:
        return False


def kill_and_wait(up: Up, name: str) -> None:
    """Kill a process and return when its successor is ready."""
    seen = up.said().count(f"{name} is back")
    os.kill(up.pid(name), signal.SIGKILL)
    eventually(lambda: up.said().count(f"{name} is back") > seen and answers(up))


def put(up: Up, value: int) -> None:
    with database(up) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value int)")
        connection.execute("INSERT INTO kept VALUES (%s)", [value])


def kept(up: Up) -> list[int]:
    with database(up) as connection:
        return [row[0] for row in connection.execute("SELECT value FROM kept ORDER BY value")]


def test_ctrl_c_leaves_no_process_and_the_next_start_has_everything(start: Starter) -> None:
    first = start("a")
    facts = first.facts()
    assert first.ready_file.stat().st_mode & 0o777 == 0o600
    assert (first.home / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert first.home.stat().st_mode & 0o777 == 0o700
    put(first, 1)
    family = first.family()
    assert {"sleep", "valkey-server", "postgres"} <= {name for process in family if (name := name_of(process))}
    assert start.stop(first) == 0
    assert [process for process in family if runs(process.pid)] == []
    assert not first.ready_file.exists()
    second = start("a")
    assert {**second.facts(), "base_url": "", "openai_base_url": "", "pids": {}} == {
        **facts,
        "base_url": "",
        "openai_base_url": "",
        "pids": {},
    }
    assert kept(second) == [1]
    with database(second) as connection:
        assert connection.execute("SELECT count(*) FROM tenant").fetchone() == (1,)
    assert start.stop(second) == 0


def test_a_home_in_use_is_refused_and_another_home_runs_beside_it(start: Starter) -> None:
    first = start("a")
    refused = subprocess.run(
        start.command("a", "--port", "0"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert refused.returncode == 1
    assert f"in use by process {first.process.pid}" in refused.stderr
    second = start("b")
    assert first.facts()["base_url"] != second.facts()["base_url"]
    assert first.facts()["api_key"] != second.facts()["api_key"]
    put(first, 1)
    put(second, 2)
    assert (kept(first), kept(second)) == ([1], [2])


def test_a_port_in_use_is_said_in_words(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = subprocess.run(
            start.command("a", "--port", str(port)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
    assert refused.returncode == 1
    assert f"Port {port} on 127.0.0.1 cannot be used" in refused.stderr
    assert f"process {os.getpid()}" in refused.stderr
    assert "--port" in refused.stderr
    assert not (start.folder / "a" / "postgres" / "data").exists()


def test_a_ready_file_that_cannot_be_written_is_said_before_anything_starts(start: Starter) -> None:
    nowhere = start.folder / "none" / "ready.json"
    refused = subprocess.run(
        start.command("a", "--port", "0", "--ready-file", str(nowhere)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert refused.returncode == 1
    assert f"The ready file {nowhere} cannot be written" in refused.stderr
    assert not (start.folder / "a" / "postgres" / "data").exists()


def test_a_part_that_cannot_start_ends_the_start_with_its_last_words(start: Starter) -> None:
    done = subprocess.run(
        start.command("a", "--port", "0"),
        cwd=ROOT,
        env={**os.environ, "STANDIN_BROKEN": "no such thing"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "gateway does not start: it ended with code 70" in done.stdout
    assert "ValueError: no such thing" in done.stdout
    assert [left for left in homes.load_state(homes.open_home(start.folder / "a")).processes if left.name != "up"] == []


def test_killing_up_ends_its_processes_and_the_next_start_takes_over(start: Starter) -> None:
    first = start("a", STANDIN_DEAF="1")  # its gateway does not end by itself: an orphan for the next start
    put(first, 1)
    family = first.family()
    pids = first.facts()["pids"]
    first.process.kill()
    first.process.wait()
    eventually(lambda: sum(runs(process.pid) for process in family) <= 1)
    assert runs(pids["gateway"])
    second = start("a")
    assert "ending 1 processes of an earlier start" in second.said()
    assert not runs(pids["gateway"])
    assert kept(second) == [1]
    assert second.facts()["api_key"] == homes.load_secrets(homes.open_home(first.home), seed.mint_secrets).api_key


@pytest.mark.soak
@pytest.mark.parametrize("round_seed", range(20))
def test_any_order_of_kills_keeps_what_was_acknowledged(start: Starter, round_seed: int) -> None:
    chance = random.Random(round_seed)
    up, count = start("a"), 0
    for _ in range(6):
        put(up, count := count + 1)
        name = chance.choice(["gateway", "controller", "postgres", "valkey", "up"])
        if name == "up":
            up.process.kill()
            up.process.wait()
            up = start("a")
        else:
            kill_and_wait(up, name)
        assert kept(up) == list(range(1, count + 1))
    assert start.stop(up) == 0


def test_what_is_killed_comes_back_with_its_data(start: Starter) -> None:
    up = start("a")
    put(up, 1)
    socket_path = str(homes.open_home(up.home).valkey_socket)
    with redis.Redis(unix_socket_path=socket_path) as client:
        client.set("kept", "1")
    for name in ("gateway", "controller", "postgres", "valkey"):
        old = up.pid(name)
        kill_and_wait(up, name)
        assert f"{name} was ended by SIGKILL; starting it again in 0.2 s." in up.said()
        assert up.pid(name) != old
        assert kept(up) == [1]
        with redis.Redis(unix_socket_path=socket_path) as client:
            assert client.get("kept") == b"1"
    family = up.family()
    assert start.stop(up) == 0
    assert [process for process in family if runs(process.pid)] == []
