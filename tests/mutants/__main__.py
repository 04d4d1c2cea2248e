"""Plant each fault in a copy of the project and say which tests see it: `python -m tests.mutants [--only WORDS]`.

The first of a fault's tests that fails has found it. A state machine goes other ways each time, so a test that
passes is tried again. Ends with 1 when a fault survives, or does not fit the source any more.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TRIES = 3
TIMEOUT_S = 900
FRAME = re.compile(r"^tests/(\S+\.py):\d+: in (\w+)$", re.MULTILINE)
SAID = re.compile(r"^E +(\S.*)$", re.MULTILINE)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def copy_project(to: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)


@contextmanager
def planted(copy: Path, fault: Fault) -> Iterator[None]:
    """Write the file with the fault, and afterwards as it was.

    Raises:
        ValueError: the text does not stand there once.
    """
    path = copy / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has the text of {fault.name!r} {source.count(fault.old)} times")
    compiled = Path(importlib.util.cache_from_source(str(path)))  # known by time and size, which may be as before
    try:
        path.write_text(source.replace(fault.old, fault.new))
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(source)
        compiled.unlink(missing_ok=True)


def failing(copy: Path, test: str) -> str:
    """Run a test there; returns what failed in it, or nothing when all passed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "--timeout", str(TIMEOUT_S), "--tb=short", test]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S)
    if done.returncode == 0:
        return ""
    frames, said = FRAME.findall(done.stdout), SAID.search(done.stdout)
    where = f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else f"pytest ended with {done.returncode}"
    return f"{where}: {said[1][:60]}" if said else where


def find(copy: Path, fault: Fault) -> tuple[str, str, int]:
    """Return the test that sees the fault, what it said, and in which try; empty when none does."""
    for number in range(1, TRIES + 1):
        for test in fault.tests:
            said = failing(copy, test)
            if said:
                return test, said, number
    return "", "", TRIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name has these words")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first fault")
    parser.add_argument("--to", type=int, default=len(FAULTS), dest="last", help="number after that of the last fault")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS[options.first : options.last] if options.only in fault.name]
    survived = []
    with tempfile.TemporaryDirectory(prefix="tg-mutants-") as name:
        copy = Path(name)
        copy.chmod(0o755)
        copy_project(copy)
        for fault in chosen:
            began = time.monotonic()
            with planted(copy, fault):
                test, said, tries = find(copy, fault)
            if not test:
                survived.append(fault.name)
            where = test.rpartition("::")[2] or "NOTHING SEES IT"
            say(f"| {fault.name} | {where} | {tries} | {time.monotonic() - began:.0f} s | {said} |")
    say(f"{len(chosen) - len(survived)} of {len(chosen)} faults found" + "".join(f"; not: {one}" for one in survived))
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
