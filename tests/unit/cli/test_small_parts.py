"""Leaves of the command line: logs, processes, addresses, arguments."""

import os
import signal
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cli import logs, main, screen, up
from cli.backup import take
from cli.backup.archive import BackupError
from cli.processes import ProcessRecord, end, is_alive, record


def test_a_long_log_keeps_its_newest_part_beside_and_its_writers_go_on(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100 + b"new\n" * 10)
        logs.shorten(log, max_bytes=40)
        assert (tmp_path / "part.log.1").read_bytes() == b"new\n" * 10
        writer.write(b"next\n")
    assert log.read_bytes() == b"next\n"


def test_a_short_log_stays(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"a\nb\nc\n")
    logs.shorten_all(tmp_path)
    assert logs.tail(log, 2) == ["b", "c"]
    assert list(tmp_path.iterdir()) == [log]
    assert logs.tail(tmp_path / "none.log", 2) == []


def test_a_process_is_known_by_pid_and_start_time() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        mine = record("sleep", process.pid)
        stranger = ProcessRecord("sleep", process.pid, "another-boot:1")
        assert is_alive(mine)
        assert not is_alive(stranger)
        assert end([stranger], signal.SIGKILL, 0.0) == []
        assert is_alive(mine)
        assert end([mine], signal.SIGTERM, 10.0) == []
        assert not is_alive(mine)
    assert not is_alive(record("gone", process.pid))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),  # noqa: S104 - nothing is bound
        ("::", "http://[::1]:8080"),
        ("::1", "http://[::1]:8080"),
        ("gateway.example", "http://gateway.example:8080"),
    ],
)
def test_the_printed_address_works_on_this_machine(host: str, url: str) -> None:
    assert up.base_url(host, 8080) == url


def test_a_taken_port_names_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(up.PortTakenError, match=f"process {os.getpid()}"):
            up.claim_port("127.0.0.1", port)
    assert up.claim_port("127.0.0.1", port) == port
    assert up.claim_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize("port", ["-1", "65536", "http", ""])
def test_a_bad_port_is_a_usage_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["up", "--port", port])
    assert caught.value.code == 2
    assert "is not a port" in capsys.readouterr().err or port == "-1"


@pytest.mark.parametrize("month", ["2026-13", "2026", "October", "2026-10-01", ""])
@pytest.mark.parametrize("command", [["close"], ["trial-balance", "--month"]])
def test_a_bad_month_is_a_usage_error(command: list[str], month: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["ledger", *command, month])
    assert caught.value.code == 2
    assert f"{month!r} is not a month like 2026-10" in capsys.readouterr().err


@pytest.mark.parametrize("days", ["0", "1.5", "x", "", "99999999999"])
def test_a_bad_number_of_days_is_a_usage_error(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["ledger", "drop-days", "--keep-days", days])
    assert caught.value.code == 2
    assert f"{days!r} is not a number of days" in capsys.readouterr().err


def test_a_backup_that_is_not_there_is_named_and_makes_no_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["restore", str(tmp_path / "none.tgbackup"), "--home", str(tmp_path / "home")]) == 1
    assert f"There is no backup {tmp_path / 'none.tgbackup'}." in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["backups", "backups/", "daily/tonight", "v1.2"])
def test_a_backup_to_a_folder_not_there_yet_makes_it_and_a_second_one_lies_beside(tmp_path: Path, name: str) -> None:
    target = Path(f"{tmp_path}/{name}")
    for hour in (1, 2):
        file = take.file_of(target, datetime(2026, 12, 1, hour, tzinfo=UTC))
        assert file == target / f"tidegate-20261201T0{hour}0000Z.tgbackup"
        file.write_bytes(b"")
    assert len(list(target.iterdir())) == 2


def test_a_backup_to_a_file_is_that_file_and_no_folder_is_made_of_one(tmp_path: Path) -> None:
    file, now = tmp_path / "x.tgbackup", datetime(2026, 12, 1, tzinfo=UTC)
    assert take.file_of(file, now) == file
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes").write_bytes(b"")
    with pytest.raises(BackupError, match=r"for a file give a name that ends in \.tgbackup"):
        take.file_of(tmp_path / "notes", now)


def test_one_thing_is_not_said_in_the_plural() -> None:
    assert [screen.count(number, "tenant") for number in (0, 1, 1200)] == ["0 tenants", "1 tenant", "1,200 tenants"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    for name in ("up", "gateway", "poster", "api", "controller", "worker", "migrate", "version"):
        assert f"\n    {name}" in text


def test_a_process_on_its_own_says_what_it_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["gateway", "--home", str(tmp_path / "none")]) == 1
    assert "There is no home" in capsys.readouterr().err


def test_missing_settings_are_named_without_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_DATABASE__URL", "postgresql://me:top-secret@/x")
    assert main.main(["gateway", "--home", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "TIDEGATE_SECRETS" in said
    assert "TIDEGATE_VALKEY" in said
    assert "The settings are not complete" in said
    assert "top-secret" not in said


def test_a_wrong_setting_is_named_as_wrong_not_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DATABASE__URL": "postgresql://me@/x",
        **{f"VALKEY__{name}": "redis://127.0.0.1:1" for name in ("URL", "BROKER_URL")},
        **{f"SECRETS__{name}": "00" * 32 for name in ("PEPPER", "SIGNING", "SEALING")},
        "GATEWAY__SPOOL_POLICY": "nonsense",
    }.items():
        monkeypatch.setenv(f"TIDEGATE_{name}", value)
    assert main.main(["gateway", "--home", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "The settings are not valid" in said
    assert "TIDEGATE_GATEWAY__SPOOL_POLICY" in said
