"""The two foreign programs that add our books up: hledger and beancount."""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

TIMEOUT_S = 120
HLEDGER_CHECKS = ("ordereddates", "accounts", "commodities", "balancednoautoconversion", "assertions")
WITHOUT_HLEDGER = (
    "hledger, which audits the exported books, is not installed. As root: make hledger. "
    "Otherwise install version 1.25 or newer by your system's means (Debian and Ubuntu: the package hledger)."
)


def hledger_program() -> str:
    """Return where hledger is. Without it the test fails in CI and is skipped, with a word, on other machines."""
    found = shutil.which("hledger")
    if found is None and os.environ.get("CI"):
        pytest.fail(WITHOUT_HLEDGER)
    if found is None:
        pytest.skip(WITHOUT_HLEDGER)
    return found


def has_hledger() -> bool:
    """Whether hledger is there, for a test that has more to say without it; in CI it must be."""
    return bool(shutil.which("hledger") or ("CI" in os.environ and hledger_program()))


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=TIMEOUT_S
    )


def hledger_objects(journal: Path) -> str:
    """Return what hledger says against the journal; empty when it finds it right."""
    program = hledger_program()
    for checks in (("--strict",), HLEDGER_CHECKS):
        done = _run(program, "-f", str(journal), "check", *checks)
        if done.returncode != 0:
            return done.stderr
    return ""


def beancount_objects(file: Path) -> str:
    """Return what bean-check says against the file; empty when it finds it right."""
    done = _run(str(Path(sys.executable).with_name("bean-check")), str(file))
    return done.stdout + done.stderr if done.returncode != 0 else ""


def hledger_balances(journal: Path) -> dict[str, Decimal]:
    """Return the balance of every account that moved, as hledger adds it up, by the account's name."""
    done = _run(hledger_program(), "-f", str(journal), "balance", "--flat", "--empty", "-N", "-O", "csv")
    assert done.returncode == 0, done.stderr
    return dict(_balances(done.stdout))


def _balances(text: str) -> Iterator[tuple[str, Decimal]]:
    for account, amount in list(csv.reader(text.splitlines()))[1:]:
        number = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)(?: (?:USD|CNY))?", amount)
        assert number is not None, amount
        yield account, Decimal(number[1])
