"""Plant each fault in a copy of the project and say which tests see it: `python -m tests.mutants [--only WORDS]`.

The first of a fault's tests that fails has found it. The money machine goes other ways each time, so what passes is
tried again. Ends with 1 when a fault survives, or does not fit the source any more.
"""

import argparse
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import PostgresService, fresh_database, running_postgres, running_valkey
from tests.mutants.faults import FAULTS, MACHINE, Fault
from tests.short_paths import memory_folder

ROOT = Path(__file__).parents[2]
TRIES = 4
TIMEOUT_S = 900
FRAME = re.compile(r"^tests/(\S+)\.py:\d+: in (\w+)$", re.MULTILINE)
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


def run(copy: Path, module: str, *arguments: str, given: str = "") -> tuple[int, str]:
    """Run a module by the copy's code; returns how it ended, and its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=copy,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * TIMEOUT_S,
    )
    return done.returncode, done.stdout


def failing(copy: Path, test: str, postgres: PostgresService, valkey: Path) -> str:
    """Run a test there; returns what failed in it, or nothing when all passed."""
    if test == MACHINE:  # on one server for all faults, which saves most of the time
        with fresh_database(postgres) as name:
            urls = {"url": postgres.url("app", name), "owner_url": postgres.url("owner", name)}
            given = {"database": urls, "valkey": str(valkey), "seed": random.randrange(10**9)}
            ended, said = run(copy, "tests.mutants.machine", given=json.dumps(given))
        return ((said.splitlines() or [""])[-1] or f"it ended with {ended}") if ended else ""
    ended, said = run(copy, "pytest", "-n", "0", "-x", "--timeout", str(TIMEOUT_S), "--tb=short", test)
    frames, errors = FRAME.findall(said), SAID.search(said)
    where = f"{frames[-1][0].rpartition('/')[2]}.{frames[-1][1]}" if frames else f"pytest ended with {ended}"
    return (f"{where}: {errors[1][:60]}" if errors else where) if ended else ""


def find(copy: Path, fault: Fault, postgres: PostgresService, valkey: Path) -> tuple[str, str, int]:
    """Return the test that sees the fault, what it said, and in which try; empty when none does."""
    for number in range(1, TRIES + 1):
        for test in fault.tests:
            said = failing(copy, test, postgres, valkey)
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
    with (
        tempfile.TemporaryDirectory(prefix="tg-m-") as name,
        tempfile.TemporaryDirectory(prefix="tg-m-", dir=memory_folder()) as services,
    ):
        copy, folder = Path(name), Path(services)
        copy_project(copy)
        folder.chmod(0o755)
        with running_postgres(folder) as postgres, running_valkey(folder) as valkey:
            for fault in chosen:
                began = time.monotonic()
                with planted(copy, fault):
                    test, said, tries = find(copy, fault, postgres, valkey)
                if not test:
                    survived.append(fault.name)
                where = test.rpartition("/")[2] or "NOTHING SEES IT"
                say(f"| {fault.name} | {where} | {tries} | {time.monotonic() - began:.0f} s | {said} |")
    say(f"{len(chosen) - len(survived)} of {len(chosen)} faults found" + "".join(f"; not: {one}" for one in survived))
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
