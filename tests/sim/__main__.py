"""`python -m tests.sim --yardsticks DIR`: the tables of the overload runs beside their baselines."""

import argparse
import importlib
import sys
import tempfile
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from catalog.types import DeploymentKind, EngineKind, ServedModel
from cli.embedded import valkey
from tests.sim.overload import simulate
from tests.sim.scripts import Scripts

FIGURES = (
    *("goodput_tok_s", "value_goodput_s", "raw_tok_s", "in_slo_priority", "in_slo_standard", "in_slo_batch"),
    *("retries", "wasted_tok_s", "fair_mean_error", "fair_worst_error", "jain_mean", "recovery_s"),
)


def yardsticks(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    names = {
        "load": "overload_load",
        "engine": "engine_model",
        "score": "overload_score",
        "baseline": "overload_baseline",
    }
    return SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--yardsticks", type=Path, required=True)
    parser.add_argument("--scales", default="1.5,2")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--burst", default="")
    parser.add_argument("--flood", default="")
    parser.add_argument("--per-pod", type=int, default=128)
    args = parser.parse_args()
    yard = yardsticks(args.yardsticks)
    with tempfile.TemporaryDirectory(prefix="tg-sim-") as folder:
        path = Path(folder) / "valkey.sock"
        server = valkey.start(Path(folder), path)
        try:
            valkey.wait_ready(Path(folder), path, lambda: server.poll() is None)
            for scale in map(float, args.scales.split(",")):
                for seed in range(args.seeds):
                    run(yard, path, args, scale, seed)
        finally:
            server.terminate()
            server.wait()


def run(yard: Any, path: Path, args: argparse.Namespace, scale: float, seed: int) -> None:
    burst = tuple(map(float, args.burst.split(":"))) if args.burst else None
    flood = (int(args.flood.split(":")[0]), float(args.flood.split(":")[1])) if args.flood else None
    meta, schedule = yard.load.make_schedule("conv", scale, seed, True, args.seconds, burst=burst, flood=flood)
    model = ServedModel(
        name="sim",
        model_id=uuid.UUID(int=1),
        version_id=uuid.UUID(int=2),
        deployment_id=uuid.UUID(int=3),
        kind=DeploymentKind.LOCAL,
        engine=EngineKind.SIMULATOR,
        upstream_model="sim",
        context_max=120_000,
        default_max_tokens=256,
        endpoints=frozenset({"chat"}),
        inflight_max=0,
        waiting_max=1000,
        max_wait_s=300,
    )
    world = simulate(yard, Scripts(path), model, meta, schedule, per_pod=args.per_pod)
    figures = yard.score.score(meta, schedule, world.outcomes, world.log)
    shown = {name: round(figures[name], 3) for name in FIGURES if figures.get(name) is not None}
    sys.stdout.write(f"x{scale} seed {seed} {shown}\n    refused {world.refused}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
