"""docs/alerts.yml: whole rules, each about figures there are, in expressions that are well formed."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no types
from prometheus_client import CollectorRegistry

from api.inference.admission_metrics import AdmissionMetrics
from billing.metrics import poster_metrics
from core.telemetry import render, worker_metrics

ROOT = Path(__file__).parents[2]
RULES = [rule for group in yaml.safe_load((ROOT / "docs/alerts.yml").read_text())["groups"] for rule in group["rules"]]
FUNCTIONS = {"time", "sum", "by", "rate", "increase", "histogram_quantile"}
TOKEN = re.compile(
    r"\s*(?:(?P<name>[a-z_]+)|\d+(?:\.\d+)?|\[\d+[smh]\]|==|!=|[<>+*,()-]|\{(?P<label>[a-z]+)=\"[a-z_]+\"\})"
)


class NoBlocks(dict[bytes, object]):
    """The blocks of a gateway that never leased one."""

    granted = 0


def known() -> set[str]:
    """All series of poster and worker, of the admission's own, and of what tasks measure, as Prometheus has them."""
    registry = CollectorRegistry()
    poster_metrics(registry)
    worker_metrics(registry)
    drift = SimpleNamespace(rounds=1, last={"global": 0}, total={"global": 0})
    admission: Any = SimpleNamespace(waiting=0, drift=drift, blocks=NoBlocks())
    lines = [*render(registry).decode().splitlines(), *AdmissionMetrics().lines(admission)]
    found = set()
    for kind, name in (line.split()[::-1][:2] for line in lines if line.startswith("# TYPE")):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    for path in ROOT.glob("*/*tasks.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "context.figures.set":
                assert isinstance(node.args[0], ast.Constant)
                found.add("tidegate_" + str(node.args[0].value))
    return found


def names_of(expression: str) -> set[str]:
    """The words of an expression that are neither functions nor what it groups by; it is nothing but known tokens."""
    at, names, depth = 0, set(), 0
    while at < len(expression):
        token = TOKEN.match(expression, at)
        assert token is not None, f"not an expression from here on: {expression[at:]}"
        at = token.end()
        depth += {"(": 1, ")": -1}.get(token[0].strip(), 0)
        assert depth >= 0, expression
        names |= {token["name"]} - {None}
    assert depth == 0, expression
    grouped = set(re.findall(r"by \((\w+)\)", expression))
    return names - FUNCTIONS - grouped


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_rule_is_about_figures_there_are(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert set(rule["annotations"]) == {"summary", "what_to_do"}
    assert "for" not in rule or re.fullmatch(r"\d+[smh]", rule["for"])
    named = names_of(rule["expr"])
    assert named
    assert named <= known()


def test_what_must_be_told_has_a_rule() -> None:
    told = {name for rule in RULES for name in names_of(rule["expr"])}
    assert told >= {
        "tidegate_ledger_anchor_lost",
        "tidegate_ledger_wrong",
        "tidegate_ledger_verified_seconds",
        "tidegate_audit_wrong",
        "tidegate_reconcile_books_wrong",
        "tidegate_spool_unposted_bytes",
        "tidegate_admission_drift",
    }
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("wrong", ["tidegate_x ==", "(tidegate_ledger_wrong", "tidegate_ledger_wrong) == 1", "a ? b"])
def test_a_broken_expression_is_seen(wrong: str) -> None:
    with pytest.raises(AssertionError):
        assert names_of(wrong) <= known()
