"""`tidegate ledger verify` and `tidegate spool`, on a home that runs and on one that is stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

from cli import main
from tests.fault.test_up import ROOT, Starter, database, start

__all__ = ["start"]  # the fixture


def tidegate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_books_are_verified_while_it_runs_and_when_it_is_stopped(start: Starter) -> None:
    up = start("a")
    right = tidegate("ledger", "verify", "--home", str(up.home))
    assert (right.returncode, right.stdout[:19]) == (0, "the books are right"), right
    assert start.stop(up) == 0
    assert tidegate("ledger", "verify", "--home", str(up.home)).returncode == 0
    up = start("a")
    with database(up) as connection:
        connection.execute("SET session_replication_role = replica")  # as somebody who may do anything
        connection.execute("UPDATE ledger_balance SET credit = credit + 1 WHERE bounded")
    wrong = tidegate("ledger", "verify", "--home", str(up.home))
    assert (wrong.returncode, wrong.stdout[:21]) == (1, "wrong: ledger_balance"), wrong


def test_a_folder_without_usage_is_not_adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["spool", "adopt", str(tmp_path), "--home", str(tmp_path / "home")]) == 1
    assert "holds no spool segments" in capsys.readouterr().err
    assert main.main(["spool", "list", "--home", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out == "No spools.\n"
