"""`python -m tests.sim --yardsticks DIR`: overload on a virtual clock, in tables beside plain proxies, and drawn.

Azure's conversation trace with three retries; tenants and tiers are drawn by seed, because no trace names them.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.embedded import valkey
from tests.sim import plots, report, runs
from tests.sim.overload import Rules
from tests.sim.runs import Load, Run
from tests.sim.scripts import Scripts

PLATFORM, CANCELS, PLAIN = "Tidegate", "plain proxy, passes cancels", "plain proxy"
PARTS = ("sweep", "burst", "flood", "fair")
BURST_FACTOR, BELOW_FULL, FAIR_FLOOD = 5.0, 0.9, (2, 12.0)
PRIORITY = "priority"


class Bench:
    """One set of runs: what is common to all, and how far it is."""

    def __init__(self, yard: Any, scripts: Callable[[], Scripts], args: argparse.Namespace) -> None:
        self.yard, self.scripts, self.args = yard, scripts, args
        self.started, self.done = time.monotonic(), 0

    def over_seeds(self, load: Load, design: str) -> list[Run]:
        return [self.one(replace(load, seed=seed), design) for seed in range(self.args.seeds)]

    def one(self, load: Load, design: str) -> Run:
        if design == PLATFORM:
            run = runs.platform(self.yard, self.scripts(), load, self.args.per_pod, self.rules())
        else:
            run = runs.plain_proxy(self.yard, load, cancels=design == CANCELS)
        self.done += 1
        spent = time.monotonic() - self.started
        sys.stderr.write(f"  {self.done:3} {spent:5.0f} s  {load.name} x {load.scale:g} seed {load.seed}: {design}\n")
        return run

    def rules(self) -> Rules:
        return Rules(whole_batch=self.args.whole_batch, preempt=self.args.preempt)

    def designs(self) -> tuple[str, ...]:
        return (PLATFORM, CANCELS, PLAIN) if self.args.baselines else (PLATFORM,)


def sweep(bench: Bench, scales: list[float]) -> tuple[str, plots.Sweep, list[tuple[float, ...]]]:
    """More and more load, and how much of the highest value is left."""
    seconds = bench.args.seconds
    found = {d: {s: bench.over_seeds(Load("load", s, 0, seconds), d) for s in scales} for d in bench.designs()}
    alone = {s: bench.over_seeds(Load("priority alone", s, 0, seconds, only=PRIORITY), PLATFORM) for s in scales}
    rows = [(f"x {s:g} {d}", of[s]) for s in scales for d, of in found.items()]
    text = report.table("Load", report.SWEEP, rows)
    for design, of in found.items():
        best = max(report.mean("value_goodput_s", of[s]) for s in scales if s <= plots.BEFORE_THE_PEAK)
        kept = ", ".join(f"x {s:g} {report.mean('value_goodput_s', of[s]) / best:.0%}" for s in scales)
        text += f"\n{design}, value of its peak: {kept}"
    met = {
        s: (report.mean("in_slo_priority", found[PLATFORM][s]), report.mean("in_slo_priority", alone[s]))
        for s in scales
    }
    own = ", ".join(f"x {s:g} {among:.1%} of {by_itself:.1%}" for s, (among, by_itself) in met.items())
    text += f"\n{PLATFORM}, priority in SLO beside what it is with no other tier: {own}"
    asked = {s: sum((Counter(run.asked) for run in found[PLATFORM][s]), Counter[str]()) for s in scales}
    text += f"\n{PLATFORM}, asked for a place: {', '.join(f'x {s:g} {dict(asked[s])}' for s in scales)}\n"
    return text, found, found[PLATFORM][max(scales)][0].trail


def burst(bench: Bench) -> tuple[str, dict[str, Run]]:
    """Five times the load for a tenth of the time, on a load that is nearly all that fits."""
    seconds = bench.args.seconds
    load = Load("burst", BELOW_FULL, 0, seconds, burst=(seconds / 3, seconds / 10, BURST_FACTOR))
    found = {design: bench.over_seeds(load, design) for design in bench.designs()}
    text = report.table(f"Burst of x {BURST_FACTOR:g} on x {BELOW_FULL:g}", report.BURST, list(found.items()))
    return text, {design: of[0] for design, of in found.items()}


def flood(bench: Bench) -> str:
    """Twelve times as much batch, from a third of the run on."""
    load = Load("without flood", BELOW_FULL, 0, bench.args.seconds)
    flooded = replace(load, name="flood", batch_factor=runs.FLOOD_FACTOR)
    rows = [(f"{d}, {of.name}", bench.over_seeds(of, d)) for d in bench.designs()[:2] for of in (load, flooded)]
    return report.table(f"Batch x {runs.FLOOD_FACTOR} on x {BELOW_FULL:g}", report.FLOOD, rows)


def fair(bench: Bench) -> str:
    """Two tenants of weights 1 and 2 that always have more than they get."""
    load = Load("fair", 0.0, 0, bench.args.seconds, flood=FAIR_FLOOD)
    rows = [(design, bench.over_seeds(load, design)) for design in bench.designs()[:2]]
    return report.table("Shares of two tenants of weights 1 and 2, each window of 60 s", report.FAIR, rows)


def run(bench: Bench) -> Iterator[str]:
    """Yield the text of each part; the drawings come last."""
    args = bench.args
    drawn: dict[str, Any] = {}
    if "sweep" in args.parts:
        text, drawn["sweep"], drawn["trail"] = sweep(bench, list(map(float, args.scales.split(","))))
        yield text
    if "burst" in args.parts:
        text, drawn["burst"] = burst(bench)
        yield text
    if "flood" in args.parts:
        yield flood(bench)
    if "fair" in args.parts:
        yield fair(bench)
    if args.plots and {"sweep", "burst"} <= drawn.keys():
        yield f"Drawn: {', '.join(map(str, plots.draw(args.plots, **drawn)))}\n"


@contextmanager
def fresh_scripts() -> Iterator[Callable[[], Scripts]]:
    """A Valkey; each call gives it back empty."""
    with tempfile.TemporaryDirectory(prefix="tg-sim-") as folder:
        path = Path(folder) / "valkey.sock"
        server = valkey.start(Path(folder), path)
        try:
            valkey.wait_ready(Path(folder), path, lambda: server.poll() is None)
            yield lambda: Scripts(path)
        finally:
            server.terminate()
            server.wait()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--yardsticks", type=Path, required=True, help="folder of the load, the engine and the scorer")
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: text.split(","))
    parser.add_argument("--scales", default="1,1.25,1.5,2,3,5")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--per-pod", type=int, default=128, help="the most requests one engine is given at first")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false", help="only the platform")
    parser.add_argument("--whole-batch", action="store_true", help="batch is not streamed, so it can be preempted")
    parser.add_argument("--no-preempt", dest="preempt", action="store_false", help="nobody gives its place")
    parser.add_argument("--plots", type=Path, default=Path(".cache/sim"), help="where drawings go")
    return parser


def main() -> None:
    args = arguments().parse_args()
    with fresh_scripts() as scripts:
        for text in run(Bench(runs.yardsticks(args.yardsticks), scripts, args)):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
