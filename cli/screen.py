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


class Meter:
    """Says how far a long step has come: on a terminal in its line, elsewhere a line now and then."""

    def __init__(self, name: str, total: int = 0) -> None:
        self._name, self._total = name, total
        self._terminal = sys.stdout.isatty()
        self._every_s = 0.2 if self._terminal else 15.0
        self._done, self._said = 0, time.monotonic()

    def add(self, count: int) -> None:
        """Count so many bytes more."""
        self._done += count
        now = time.monotonic()
        if now - self._said < self._every_s:
            return
        self._said = now
        text = f"{size(self._done)} of {size(self._total)}" if self._total else size(self._done)
        if self._terminal:
            print(f"\x1b[2K  {self._name:<{NAME_WIDTH}} {text} …", end="\r", flush=True)
        else:
            say(f"  {self._name:<{NAME_WIDTH}} {text} …")


def size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count * 10 // unit / 10:,.1f} {name}"
    return f"{count} bytes"


def count(number: int, thing: str) -> str:
    """Return how many of a thing there are, for people."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def ready(name: str, seconds: float) -> None:
    say(f"  {name:<{NAME_WIDTH}} ready ({seconds:.1f} s)")


def trouble(sentence: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {sentence}")
