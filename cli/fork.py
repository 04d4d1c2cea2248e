"""Our own processes are forks of `tidegate up`: what it imported is shared memory and costs no start time."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from setproctitle import setproctitle

from cli.embedded import lifeline

READY = b"1"
CHILD_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def fork(
    name: str,
    run: Callable[[Callable[[], None]], None],
    *,
    log_file: Path,
    lifeline_end: int,
    close: Iterable[int],
) -> tuple[int, int]:
    """Start `run(ready)` in a child; return its pid and a descriptor that delivers b"1" once it is ready, then ends.

    Args:
        name: shown in process lists.
        run: blocks until the process shall end.
        log_file: standard output and error go to its end.
        lifeline_end: the read end of a pipe whose write end only the caller keeps.
        close: the caller's descriptors that the child must not keep.
    """
    ready_read, ready_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(ready_write)
        os.set_blocking(ready_read, False)
        return pid, ready_read
    code = 70
    try:
        _become_child(name, log_file, lifeline_end, [ready_read, *close])
        run(_ready_once(name, ready_write))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - the child ends here whatever it was, and says why in its log
        traceback.print_exc()
    finally:
        _leave(code)
    raise AssertionError("unreachable")


def title(name: str) -> str:
    """Return what process lists show."""
    return f"tidegate: {name}"


def _ready_once(name: str, descriptor: int) -> Callable[[], None]:
    done = False

    def ready() -> None:
        nonlocal done
        if not done:
            done = True
            setproctitle(title(name))  # Celery gives itself another one
            os.write(descriptor, READY)
            os.close(descriptor)

    return ready


def _become_child(name: str, log_file: Path, lifeline_end: int, close: Iterable[int]) -> None:
    os.setsid()  # Ctrl-C in the terminal reaches only the supervisor, which stops everything in order
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in close:
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_file, CHILD_FLAGS, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    setproctitle(title(name))
    lifeline.watch(lifeline_end)
    gc.enable()


def _leave(code: int) -> None:
    """End without the parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
