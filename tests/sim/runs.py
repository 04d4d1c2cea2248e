"""Which loads are run, and what is read from one run: the yardsticks' scores, and first tokens by tier."""

import importlib
import random
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from catalog.types import DeploymentKind, EngineKind, ServedModel
from tests.sim.overload import Rules, simulate
from tests.sim.scripts import Scripts

FLOOD_FACTOR, FLOOD_JITTER_S, FLOOD_FROM = 12, 5.0, 1 / 3  # of the run: before it everything is as without
CONTEXT_MAX = 120_000

Rows = list[dict[str, Any]]


def yardsticks(folder: Path) -> Any:
    """Import the programs that make loads, model the engine, score, and are the plain proxy."""
    sys.path.insert(0, str(folder))
    names = {
        "load": "overload_load",
        "engine": "engine_model",
        "score": "overload_score",
        "baseline": "overload_baseline",
    }
    return SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


@dataclass(frozen=True)
class Load:
    """One schedule: what comes when."""

    name: str
    scale: float
    seed: int
    seconds: float
    burst: tuple[float, float, float] | None = None  # from, for so long (s), times so many
    flood: tuple[int, float] | None = None  # tenants of rising weight, requests a second of each
    batch_factor: int = 1
    only: str = ""  # this tier's requests alone

    def schedule(self, yard: Any) -> tuple[dict[str, Any], Rows]:
        meta, rows = yard.load.make_schedule(
            "conv", self.scale, self.seed, True, self.seconds, burst=self.burst, flood=self.flood
        )
        if self.batch_factor > 1:
            rows = _with_more_batch(rows, self.batch_factor, self.seconds * FLOOD_FROM, self.seed)
        if self.only:
            rows = [row for row in rows if row["tier"] == self.only]
        return meta, rows


@dataclass
class Run:
    """What came of one load."""

    load: Load
    figures: dict[str, Any]
    refused: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)  # for its place: tier, and whether it gave it
    trail: list[tuple[float, ...]] = field(default_factory=list)  # of the caps, once a second
    bins: list[tuple[float, float]] = field(default_factory=list)  # start s, part of the priority requests in time


def platform(yard: Any, scripts: Scripts, load: Load, per_pod: int, rules: Rules) -> Run:
    """Run a load through admission's own scripts."""
    meta, rows = load.schedule(yard)
    world = simulate(yard, scripts, _model(), meta, rows, per_pod=per_pod, rules=rules)
    run = _scored(yard, load, (meta, rows), (world.outcomes, world.log))
    run.refused, run.asked, run.trail = world.refused, world.asked, world.trail
    return run


def plain_proxy(yard: Any, load: Load, *, cancels: bool) -> Run:
    """Run the same load through a proxy that only passes on; `cancels`: also that a caller left."""
    meta, rows = load.schedule(yard)
    return _scored(yard, load, (meta, rows), yard.baseline.simulate(meta, rows, cancels))


def _scored(yard: Any, load: Load, asked: tuple[dict[str, Any], Rows], seen: tuple[Rows, Rows]) -> Run:
    (meta, rows), (outcomes, log) = asked, seen
    figures = dict(yard.score.score(meta, rows, outcomes, log))
    by_request = yard.score.by_request(rows, outcomes)
    since = load.seconds * FLOOD_FROM if load.batch_factor > 1 else 0.0
    figures |= first_tokens(by_request, since_s=since)
    return Run(load, figures, bins=_bins(yard, meta, by_request))


def first_tokens(by_request: dict[str, Any], *, since_s: float = 0.0) -> dict[str, float]:
    """Return priority's part that got a whole answer, and its P95 to the first token (s from the scheduled arrival)."""
    asked, times = 0, []
    for request, attempts in by_request.values():
        if request["tier"] != "priority" or request["time_s"] < since_s:
            continue
        asked += 1
        whole = [row["first_s"] - request["time_s"] for row in attempts if row["result"] == "ok"]
        if whole:
            times.append(min(whole))
    if not times:
        return {}
    return {"success_priority": len(times) / asked, "ttft_p95_priority_s": quantile(times, 0.95)}


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _bins(yard: Any, meta: dict[str, Any], by_request: dict[str, Any]) -> list[tuple[float, float]]:
    counts: dict[int, list[int]] = {}
    for request, attempts in by_request.values():
        if request["tier"] == "priority":
            met = counts.setdefault(int(request["time_s"] // 10), [0, 0])
            met[0] += 1
            met[1] += yard.score.met_slo(meta, request, attempts)
    return [(10.0 * number, met / asked) for number, (asked, met) in sorted(counts.items())]


def _with_more_batch(rows: Rows, factor: int, since_s: float, seed: int) -> Rows:
    """Every batch request after `since_s` comes so many times, the copies some seconds later."""
    draw = random.Random(seed)
    copies = [
        {**row, "id": f"{row['id']}x{n}", "time_s": round(row["time_s"] + draw.uniform(0, FLOOD_JITTER_S), 4)}
        for row in rows
        if row["tier"] == "batch" and row["time_s"] >= since_s
        for n in range(1, factor)
    ]
    return sorted(rows + copies, key=lambda row: row["time_s"])


def _model() -> ServedModel:
    return ServedModel(
        name="sim",
        model_id=uuid.UUID(int=1),
        version_id=uuid.UUID(int=2),
        deployment_id=uuid.UUID(int=3),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="sim",
        context_max=CONTEXT_MAX,
        default_max_tokens=256,
        endpoints=frozenset({"chat"}),
        inflight_max=0,
        waiting_max=1000,
        max_wait_s=300,
    )
