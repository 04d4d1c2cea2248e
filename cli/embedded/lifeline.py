"""What a child does when its parent is gone.

Programs that are not ours (Postgres, Valkey) get the kernel's parent-death signal, which only Linux has; elsewhere the
next start ends them. Our own processes watch a pipe, whose other end only the parent holds.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what runs between fork and exec, so that `number` is sent to the program when the caller dies."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork

    def prepare() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def adopt_orphans() -> None:
    """Make grandchildren whose parent died ours, so that they can be ended with the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def watch(read_end: int) -> None:
    """Ask this process to end (SIGTERM) as soon as nobody holds the other end of the pipe."""

    def wait_for_end() -> None:
        try:
            while os.read(read_end, 1):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
