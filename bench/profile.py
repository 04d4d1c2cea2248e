"""Where the gateway's CPU goes: `make bench-profile`. Stack samples of one worker at saturation, summed by stage.

A sample belongs to the innermost frame that is code of this repository; time in C and in the kernel counts for the
Python line that called it. Only the thread of the event loop is sampled. Needs py-spy: `PYSPY=path`, or on the PATH.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.services import BUILD
from bench.targets import ROOT, Load, Target, Tools, one_key, saturate, start_tidegate, start_upstream, write_inputs
from bench.targets import generate as generate_streams

STAGES = (  # of files, first match wins
    ("1-2 authenticate, resolve", ("api/inference/access.py", "api/inference/directory.py", "tenants/")),
    ("parse the body", ("api/inference/request.py",)),
    (
        "4 admit",
        ("api/inference/admit.py", "api/inference/estimate.py", "billing/holds.py", "scheduler/", "core/resp.py"),
    ),
    (
        "5-6 route, stream",
        ("api/inference/route.py", "api/inference/stream.py", "api/inference/relay.py", "api/inference/sse.py"),
    ),
    ("6 engine client", ("engine/",)),
    ("7 settle", ("api/inference/settle.py", "billing/", "api/inference/count.py", "core/ids.py", "core/money.py")),
    ("metrics, access log", ("api/inference/metrics.py", "api/inference/access_log.py", "core/logging.py")),
    ("HTTP of the caller", ("api/inference/protocol.py", "api/inference/wire.py", "api/inference/bridge.py")),
    ("event loop: waiting, reading, callbacks", ("api/inference/app.py",)),
    ("serve itself", ("api/inference/",)),
)
OTHER = "event loop and the rest"
SAMPLES_PER_S = 500
WARM_S = 6.0  # until every key has been seen


def stage_of(frames: list[str]) -> tuple[str, str]:
    """Return the stage and the innermost frame of ours, for a stack written outermost first."""
    for frame in reversed(frames):
        for stage, places in STAGES:
            if any(f"({place}" in frame for place in places):
                return stage, frame
    return OTHER, frames[-1]


def summarise(lines: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Add up py-spy's raw stacks by stage and by function."""
    stages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if "MainThread" not in stack:  # the spool's thread mostly waits, which is no CPU
            continue
        stage, frame = stage_of([frame.replace(f"({ROOT}/", "(") for frame in stack.split(";")])
        stages[stage] += int(count)
        functions[frame.rpartition(":")[0] + ")"] += int(count)
    return stages, functions


def report(stages: Counter[str], functions: Counter[str], kernel_share: float) -> str:
    total = sum(stages.values())
    lines = ["| stage | share |", "|---|---|"]
    lines += [f"| {name} | {100 * count / total:.1f} % |" for name, count in stages.most_common()]
    lines += [
        "",
        f"{total} samples; {100 * kernel_share:.0f} % of the CPU in the kernel.",
        "",
        "| function | share |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {100 * count / total:.1f} % |" for name, count in functions.most_common(25)]
    return "\n".join(lines)


def record(pyspy: str, target: Target, seconds: int) -> subprocess.Popen[bytes]:
    assert target.process is not None
    options = ["-t", "-d", str(seconds), "-r", str(SAMPLES_PER_S), "-f", "raw", "-F", "-o", str(BUILD / "stacks.txt")]
    return subprocess.Popen(
        ["taskset", "-c", "1", pyspy, "record", "-p", str(target.process.pid), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--model", default="", help="stream this simulated model instead of buffered requests")
    options = parser.parse_args()
    pyspy = os.environ.get("PYSPY") or shutil.which("py-spy")
    if not pyspy:
        sys.exit("bench: py-spy is not there. Install it anywhere and name it: make bench-profile PYSPY=path")
    tools = Tools.build()
    write_inputs()
    with ExitStack() as stack:
        start_upstream(stack, tools)
        target = start_tidegate(stack)
        assert target.process is not None
        saturate(tools, target, Load("many", "200 B", 128), WARM_S)
        before = psutil.Process(target.process.pid).cpu_times()
        with record(pyspy, target, options.seconds):
            if options.model:
                settings = ("-c", 64, "-w", 0, "-d", options.seconds, "-s", "-U")
                print(generate_streams(tools, target, one_key("one"), options.model, *settings), file=sys.stderr)
            else:
                print(saturate(tools, target, Load("many", "200 B", 128), options.seconds), file=sys.stderr)
        after = psutil.Process(target.process.pid).cpu_times()
    user, kernel = after.user - before.user, after.system - before.system
    stages, functions = summarise(Path(BUILD / "stacks.txt").read_text(encoding="utf-8").splitlines())
    print(report(stages, functions, kernel / (user + kernel)))


if __name__ == "__main__":
    main()
