"""The tree keeps the house rules, and each rule bites."""

import subprocess
from pathlib import Path

import pytest

from tests.architecture import rules


@pytest.mark.parametrize("rule", rules.SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: rules.Rule) -> None:
    violations = [v for path in rules.source_files() for v in rule(path, (rules.ROOT / path).read_text("utf-8"))]
    assert violations == []


@pytest.mark.parametrize("rule", rules.TEST_RULES, ids=lambda rule: rule.__name__)
def test_the_tests_keep(rule: rules.Rule) -> None:
    violations = [v for path in rules.test_files() for v in rule(path, (rules.ROOT / path).read_text("utf-8"))]
    assert violations == []


def test_no_tracked_file_names_a_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=rules.ROOT, capture_output=True, check=True).stdout
    names = [Path(name) for name in listed.decode().split("\0") if name]
    assert len(names) > 30
    violations = []
    for name in names:
        path = rules.ROOT / name
        if path.is_file() and path.stat().st_size < 2_000_000:
            violations += rules.no_registry_addresses(name, path.read_text("utf-8", errors="replace"))
    assert violations == []


LONG_FUNCTION = "def f() -> None:\n" + "    x = 1\n" * 70


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.file_is_short, "core/x.py", "x = 1\n" * 501),
        (rules.file_is_short, "tests/unit/test_x.py", "x = 1\n" * 801),
        (rules.functions_are_short, "core/x.py", LONG_FUNCTION),
        (rules.commits_only_at_the_edge, "billing/ledger.py", "async def f(s):\n    await s.commit()\n"),
        (rules.clock_is_injected, "api/app.py", "import time\nx = time.time()\n"),
        (rules.clock_is_injected, "api/app.py", "import datetime\nx = datetime.datetime.now()\n"),
        (rules.only_the_cli_prints, "api/app.py", "print('x')\n"),
        (rules.money_is_never_float, "billing/pricing.py", "x = float('1')\n"),
        (rules.money_is_never_float, "billing/pricing.py", "def f(a: int) -> object:\n    return a / 2\n"),
        (rules.queries_live_in_queries, "billing/ledger.py", "x = select(1)\n"),
        (rules.no_registry_addresses, "README.md", "see https://pypi" + ".org/simple\n"),
    ],
)
def test_the_rule_bites(rule: rules.Rule, path: str, text: str) -> None:
    assert rule(Path(path), text) != []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (rules.file_is_short, "core/x.py", "x = 1\n" * 500),
        (rules.functions_are_short, "core/x.py", "def f() -> None:\n" + "    x = 1\n" * 69),
        (rules.commits_only_at_the_edge, "core/db.py", "async def f(s):\n    await s.commit()\n"),
        (rules.clock_is_injected, "core/clock.py", "import time\nx = time.time()\n"),
        (rules.only_the_cli_prints, "cli/up.py", "print('x')\n"),
        (rules.money_is_never_float, "billing/spool.py", "def f(folder):\n    return folder / '1.spool'\n"),
        (rules.queries_live_in_queries, "billing/queries.py", "x = select(1)\n"),
    ],
)
def test_the_rule_lets_good_code_pass(rule: rules.Rule, path: str, text: str) -> None:
    assert rule(Path(path), text) == []
