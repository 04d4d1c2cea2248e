"""Processes that share what one program has imported."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any


def run_forked(work: Callable[[int], Coroutine[Any, Any, None]], processes: int) -> int:
    """Run ``work(0)``, ``work(1)``, … each in a process and an event loop of its own.

    Returns:
        How many ended badly but by SIGKILL.
    """
    pids = []
    for number in range(processes):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                asyncio.run(work(number))
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    bad = 0
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        bad += status != 0 and os.WTERMSIG(status) != signal.SIGKILL
    return bad
