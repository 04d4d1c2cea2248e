"""`tidegate ledger verify`, `audit verify` and `spool`, on a home that runs and on one that is stopped."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from cli import main
from tests.fault.test_up import Starter, Up, database, start

__all__ = ["start"]  # the fixture


class Done(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def tidegate(*arguments: str) -> Done:
    """Run a command in this process: a Python of its own takes longer than what the command does."""
    said, complained = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with redirect_stdout(said), redirect_stderr(complained):
        try:
            code = main.main(arguments)
        except SystemExit as error:  # of argparse
            code = int(error.code or 0)
    texts = []
    for stream in (said, complained):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Done(code, *texts)


def _look_after(home: Path, *, valkey: bool) -> None:
    """Every command on the demo tenant's 100.00 of credit."""
    balance = tidegate("ledger", "trial-balance", "--home", str(home))
    lines = [line.split() for line in balance.stdout.splitlines()]
    assert ["USD", "asset.cash", "100.000000000000", "0.000000000000"] in lines, balance
    assert ["USD", "total", "100.000000000000", "100.000000000000"] in lines
    compared = tidegate("ledger", "reconcile", "--home", str(home))
    assert (compared.returncode, "wrong" in compared.stdout) == (0, False), compared
    assert ("figures compared" in compared.stdout) is valkey
    sealed = tidegate("ledger", "seal", "--home", str(home))
    assert (sealed.returncode, "the head is 1:" in sealed.stdout) == (0, True), sealed
    wrote = tidegate("ledger", "write-off", "gone", "--home", str(home))
    assert (wrote.returncode, wrote.stdout.startswith("0 holds")) == (0 if valkey else 1, valkey), wrote
    early = tidegate("ledger", "close", "2999-01", "--home", str(home))
    assert (early.returncode, "when it is over" in early.stdout) == (1, True), early


def _refuse_an_older_schema(up: Up) -> None:
    """Books of another version are not judged: their rows would seem wrong."""
    with database(up) as connection:
        [[newest]] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        connection.execute("UPDATE alembic_version SET version_num = '0001_old'")
    for command in (("ledger", "verify"), ("ledger", "seal"), ("audit", "verify")):
        refused = tidegate(*command, "--home", str(up.home))
        assert (refused.returncode, "schema of another version" in refused.stderr) == (1, True), refused
        assert "Traceback" not in refused.stderr
    with database(up) as connection:
        connection.execute("UPDATE alembic_version SET version_num = %s", (newest,))


def test_the_books_are_verified_while_it_runs_and_when_it_is_stopped(start: Starter) -> None:
    up = start("a")
    right = tidegate("ledger", "verify", "--home", str(up.home))
    assert (right.returncode, right.stdout[:19]) == (0, "the books are right"), right
    with database(up) as connection:
        connection.execute(
            "INSERT INTO audit_record (id, actor_kind, action) VALUES (gen_random_uuid(), 'system', 'x')"
        )
        newest = "SELECT seq, encode(hash, 'hex') FROM audit_chain ORDER BY seq DESC LIMIT 1"
        [[seq, digest]] = connection.execute(newest).fetchall()
    anchor = f"{seq}:{digest}"
    trail = tidegate("audit", "verify", "--home", str(up.home), "--anchor", anchor)
    assert (trail.returncode, trail.stdout) == (
        0,
        f"the audit trail is right: {seq} records, the newest has the hash {digest}\n",
    ), trail
    _look_after(up.home, valkey=True)
    assert start.stop(up) == 0
    _look_after(up.home, valkey=False)
    assert tidegate("ledger", "verify", "--home", str(up.home)).returncode == 0
    assert tidegate("audit", "verify", "--home", str(up.home)).returncode == 0
    exported = tidegate("ledger", "export", "--format", "beancount", "--home", str(up.home))
    assert (exported.returncode, exported.stdout.splitlines()[-1]) == (0, "; the end: 1 entries, 5 accounts"), exported
    file = up.home / "books"
    assert (
        tidegate("ledger", "export", *("--format", "hledger", "--home", str(up.home), "--output", str(file))).stdout
        == ""
    )
    assert "Assets:Cash:USD  100.000000000000 USD\n" in file.read_text("utf-8")
    up = start("a")
    _refuse_an_older_schema(up)
    with database(up) as connection:
        connection.execute("SET session_replication_role = replica")  # as somebody who may do anything
        connection.execute("UPDATE ledger_balance SET credit = credit + 1 WHERE bounded")
    wrong = tidegate("ledger", "verify", "--home", str(up.home))
    assert (wrong.returncode, wrong.stdout[:21]) == (1, "wrong: ledger_balance"), wrong
    with database(up) as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM audit_record WHERE action = 'x'")
    wrong = tidegate("audit", "verify", "--home", str(up.home))
    assert wrong.returncode == 1, wrong
    assert wrong.stdout.startswith(f"wrong: record {seq} "), wrong
    assert wrong.stdout.endswith(": the record is missing\n"), wrong
    assert tidegate("audit", "verify", "--home", str(up.home), "--anchor", "7").returncode == 2


def test_a_folder_without_usage_is_not_adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["spool", "adopt", str(tmp_path), "--home", str(tmp_path / "home")]) == 1
    assert "holds no spool segments" in capsys.readouterr().err
    assert main.main(["spool", "list", "--home", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out == "No spools.\n"
