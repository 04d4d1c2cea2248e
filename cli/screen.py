"""What `tidegate up` says on the terminal. A terminal that went away is no reason to stop."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAME_WIDTH = 12


def say(text: str = "") -> None:
    """Print a line at once."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process


@dataclass(slots=True)
class Step:
    """What the running step adds to its line."""

    note: str = ""


@contextmanager
def step(name: str, doing: str) -> Iterator[Step]:
    """Say that a step begins, and how long it took when it is done."""
    start = time.monotonic()
    terminal = sys.stdout.isatty()
    if terminal:
        print(f"  {name:<{NAME_WIDTH}} {doing} …", end="\r", flush=True)
    made = Step()
    yield made
    seconds = time.monotonic() - start
    clear = "\x1b[2K" if terminal else ""
    say(f"{clear}  {name:<{NAME_WIDTH}} {made.note or doing} ({seconds:.1f} s)")


def ready(name: str, seconds: float) -> None:
    say(f"  {name:<{NAME_WIDTH}} ready ({seconds:.1f} s)")


def trouble(sentence: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {sentence}")
