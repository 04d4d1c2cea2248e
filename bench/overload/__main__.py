"""`python -m bench.overload PART --yardsticks DIR`: real gateways beyond what the engines can serve."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.overload.parts import PARTS

RESULTS = Path(__file__).resolve().parents[1] / "build" / "overload.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--yardsticks", type=Path, required=True)
    parser.add_argument("--scales", default="1.5,5")
    parser.add_argument("--only", default="", help="this tier alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for figures in PARTS[args.part](args):
        row = {"part": args.part, "seconds": args.seconds, "seed": args.seed, "load_average": os.getloadavg()[0]}
        row |= {name: _rounded(value) for name, value in figures.items()}
        for name, value in row.items():
            sys.stdout.write(f"  {name:26} {json.dumps(value)}\n")
        sys.stdout.write("\n")
        sys.stdout.flush()
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.strftime("%F %T"), **row}) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return [_rounded(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
