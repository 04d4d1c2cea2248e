"""The figures of a benchmark as one Markdown table."""

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "measured",
    "per second",
    "gateway CPU µs",
    "per gateway CPU-second",
    "x py-raw",
    "x nginx",
    "core",
    "beside, CPU µs each",
    "p50 / p99 ms",
    "more",
    "errors",
)


def _micro(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{1000 * milliseconds:.1f}"


def _beside(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_micro(value)}" for name, value in row.get("cpu_ms_beside", {}).items())


def _pair(row: Mapping[str, Any]) -> str:
    for name, label in (("latency_ms", ""), ("gap_ms", " between chunks")):
        if name in row:
            return f"{row[name]['p50']:.2f} / {row[name]['p99']:.2f}{label}"
    return ""


def line(row: Mapping[str, Any]) -> str:
    """Return one row of the table; a figure that was not measured is left empty."""
    ratio = row.get("ratio", {})
    cells = (
        row["name"],
        f"{row['per_s']:,.0f} {row['unit']}",
        _micro(row.get("cpu_ms")),
        f"{row['per_cpu_s']:,.0f}" if "per_cpu_s" in row else "",
        f"{ratio['py-raw']:.2f}" if "py-raw" in ratio else "",
        f"{ratio['nginx']:.2f}" if "nginx" in ratio else "",
        f"{row['core_share']:.2f}" if "core_share" in row else "",
        _beside(row),
        _pair(row),
        f"{row['kb_per_stream']:.1f} KB per stream" if "kb_per_stream" in row else "",
        str(row["errors"]),
    )
    return f"| {' | '.join(cells)} |"


def table(rows: list[dict[str, Any]]) -> str:
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    return "\n".join([head, *(line(row) for row in rows)])
