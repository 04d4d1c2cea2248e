"""The house rules that a program can see. Each takes a file's path and text and returns its violations as sentences."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "billing", "catalog", "cli", "core", "engine", "knative", "scheduler", "tenants", "migrations")
Rule = Callable[[Path, str], list[str]]

FUNCTION_LINES = 70
FILE_LINES = 500
TEST_FILE_LINES = 800


def source_files() -> Iterator[Path]:
    """Every Python file of the application, as a path below the root."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT)


def test_files() -> Iterator[Path]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield path.relative_to(ROOT)


def file_is_short(path: Path, text: str) -> list[str]:
    """At most 500 lines a file, 800 in tests."""
    limit = TEST_FILE_LINES if path.parts[0] == "tests" else FILE_LINES
    lines = text.count("\n")
    return [f"{path} has {lines} lines; the limit is {limit}. Split it by what changes apart."] if lines > limit else []


def functions_are_short(path: Path, text: str) -> list[str]:
    """At most 70 lines a function."""
    return [
        f"{path}:{node.lineno} {node.name} has {length} lines; the limit is {FUNCTION_LINES}."
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def _calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every call."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def commits_only_at_the_edge(path: Path, text: str) -> list[str]:
    """One request or task is one transaction: `commit(` stands in core/db.py alone."""
    if path == Path("core/db.py") or path.parts[0] == "migrations":
        return []
    return [
        f"{path}:{line} calls {name}(). Open the transaction with core.db.transaction instead."
        for line, name in _calls(text)
        if name.endswith(".commit")
    ]


def clock_is_injected(path: Path, text: str) -> list[str]:
    """Wall time is read in core/clock.py alone."""
    if path == Path("core/clock.py"):
        return []
    banned = ("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time", "time.time_ns")
    return [
        f"{path}:{line} calls {name}(). Take a core.clock.Clock."
        for line, name in _calls(text)
        if name in banned or name.endswith((".datetime.now", ".date.today"))
    ]


def only_the_cli_prints(path: Path, text: str) -> list[str]:
    """Programs talk to people in cli, everything else logs."""
    if path.parts[0] == "cli":
        return []
    return [f"{path}:{line} prints. Log an event instead." for line, name in _calls(text) if name == "print"]


def money_is_never_float(path: Path, text: str) -> list[str]:
    """Amounts are integers: `float` and fractions have no place in billing or in core/money.py."""
    if path.parts[0] != "billing" and path != Path("core/money.py"):
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == "float":
            found.append(f"{path}:{node.lineno} uses float. Money is an integer number of pico.")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not _builds_a_path(node):
            found.append(f"{path}:{node.lineno} divides with `/`. Use `//` and say how it rounds.")
    return found


def _builds_a_path(node: ast.BinOp) -> bool:
    """A division whose right side is text, or whose left side is named a folder, joins paths."""
    left = ast.unparse(node.left)
    texts = any(
        isinstance(part, ast.Constant | ast.JoinedStr) and not _is_number(part) for part in ast.walk(node.right)
    )
    return texts or re.search(r"(folder|path|dir|root|home)\b", left, re.IGNORECASE) is not None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def queries_live_in_queries(path: Path, text: str) -> list[str]:
    """`select(` and SQL text stand in a package's queries, its tables and the migrations, nowhere else."""
    parts = path.parts
    if parts[0] == "migrations" or path == Path("core/db.py") or any("queries" in part for part in parts):
        return []
    return [
        f"{path}:{line} builds a query with {name}(). Move it to the package's queries.py."
        for line, name in _calls(text)
        if name in {"select", "sa.select", "sqlalchemy.select"}
    ]


def no_registry_addresses(path: Path, text: str) -> list[str]:
    """Nothing in the tree names a package registry: it installs from any mirror."""
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "registry.npmjs" + ".org", "deb.debian" + ".org")
    return [f"{path} names {host}." for host in hosts if host in text]


SOURCE_RULES: tuple[Rule, ...] = (
    file_is_short,
    functions_are_short,
    commits_only_at_the_edge,
    clock_is_injected,
    only_the_cli_prints,
    money_is_never_float,
    queries_live_in_queries,
)
TEST_RULES: tuple[Rule, ...] = (file_is_short, functions_are_short)
