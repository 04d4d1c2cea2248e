"""Tables of runs over several seeds: the mean, and the worst of them in brackets. Pure."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from tests.sim.runs import Run

# name, heading, which of several seeds is the worst, how it is written
Column = tuple[str, str, Callable[[Sequence[float]], float], Callable[[float], str]]


def whole(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def seconds(value: float) -> str:
    return f"{value:.2f} s"


SWEEP: tuple[Column, ...] = (
    ("goodput_tok_s", "goodput tok/s", min, whole),
    ("raw_tok_s", "raw tok/s", min, whole),
    ("value_goodput_s", "value", min, whole),
    ("in_slo_priority", "priority in SLO", min, percent),
    ("in_slo_standard", "standard", min, percent),
    ("in_slo_batch", "batch", min, percent),
    ("wasted_tok_s", "wasted tok/s", max, whole),
    ("retries", "retries", max, whole),
)
BURST: tuple[Column, ...] = (
    ("recovery_s", "recovery after the burst", max, seconds),
    ("value_goodput_s", "value", min, whole),
    ("in_slo_priority", "priority in SLO", min, percent),
)
FLOOD: tuple[Column, ...] = (
    ("success_priority", "priority answered", min, percent),
    ("ttft_p95_priority_s", "its P95 to the first token", max, seconds),
    ("in_slo_priority", "in SLO", min, percent),
    ("in_slo_batch", "batch in SLO", min, percent),
)
FAIR: tuple[Column, ...] = (
    ("fair_mean_error", "mean error", max, percent),
    ("fair_worst_error", "worst window", max, percent),
    ("jain_mean", "Jain", min, lambda value: f"{value:.3f}"),
)


def table(title: str, columns: tuple[Column, ...], rows: Sequence[tuple[str, Sequence[Run]]]) -> str:
    """Return a Markdown table; a row is a name and the runs of its seeds."""
    lines = [f"### {title}", "", "| | " + " | ".join(heading for _, heading, _, _ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    lines += [f"| {name} | " + " | ".join(_cell(column, runs) for column in columns) + " |" for name, runs in rows]
    return "\n".join(lines) + "\n"


def mean(name: str, runs: Sequence[Run]) -> float:
    """Return the mean over the seeds that have the figure; 0 when none has."""
    values = _values(name, runs)
    return fmean(values) if values else 0.0


def _values(name: str, runs: Sequence[Run]) -> list[float]:
    found: list[Any] = [run.figures.get(name) for run in runs]
    return [value for value in found if value is not None]


def _cell(column: Column, runs: Sequence[Run]) -> str:
    name, _, worst, write = column
    values = _values(name, runs)
    if not values:
        return "never"
    missing = f", {len(runs) - len(values)} x never" if len(values) < len(runs) else ""
    return f"{write(fmean(values))} [{write(worst(values))}{missing}]"
