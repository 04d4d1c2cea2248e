"""`tidegate up` with small stand-ins for our own processes: tested is how they are started, watched and ended.

Run as `python -m tests.fault.standin --home …`; the controller's stand-in starts a program of its own, as that does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

from cli import main, parts
from core.settings import Settings


def run(_settings: Settings, ready: Callable[[], None]) -> None:
    """Be a process that does nothing until it is asked to end, or not even then."""
    deaf = "STANDIN_DEAF" in os.environ
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda _number, _frame: sys.exit(0))
    if "STANDIN_BROKEN" in os.environ:
        raise ValueError(os.environ["STANDIN_BROKEN"])
    ready()
    while True:
        signal.pause()


def run_with_child(settings: Settings, ready: Callable[[], None]) -> None:
    """Be a process with a program of its own, which ends with it unless it is killed."""
    program = subprocess.Popen(["sleep", "600"])

    def end(_number: int, _frame: object) -> None:
        program.terminate()
        program.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    ready()
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.modules["tests.fault.standin"] = sys.modules["__main__"]
    with_child = ModuleType("with_child")
    with_child.run = run_with_child  # type: ignore[attr-defined]
    sys.modules["tests.fault.standin.with_child"] = with_child
    parts.PARTS = (
        parts.Part("gateway", "tests.fault.standin", "", stop_stage=0),
        parts.Part("controller", "tests.fault.standin.with_child", "", stop_stage=1),
    )
    parts.PRELOADED = ()
    sys.exit(main.main(["up", *sys.argv[1:]]))
