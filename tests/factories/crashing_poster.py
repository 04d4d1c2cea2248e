"""A poster that kills itself before the statement it is told to; as a program, it forks one per line of its stdin.

A line is JSON: database URL, Valkey socket, spool folder, at which point to die (0: never). The answer is a line too:
the child's exit status (negative: the signal) and, where it lived, the names of the points it passed.
"""

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from prometheus_client import CollectorRegistry

from billing import spool_format as fmt
from billing.metrics import poster_metrics
from billing.poster import Poster
from core.clock import SystemClock
from core.db import create_engine, create_sessions
from core.resp import RespClient
from core.settings import Database

ROUNDS_MAX = 20


class Points:
    """Counts what the poster does to the world outside, and dies before one of these."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.passed: list[str] = []

    def wrap(self, owner: Any, name: str, label: Callable[..., str]) -> None:
        wrapped = getattr(owner, name)

        @functools.wraps(wrapped)
        def before(*args: Any, **kwargs: Any) -> Any:
            self.passed.append(label(*args))
            if len(self.passed) == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return wrapped(*args, **kwargs)

        setattr(owner, name, before)

    def watch(self) -> None:
        def statement(_: object, query: Any, *__: object) -> str:
            return " ".join(str(query).split())[:60]

        self.wrap(psycopg.AsyncCursor, "execute", statement)
        self.wrap(psycopg.AsyncCursor, "copy", statement)
        self.wrap(psycopg.AsyncCopy, "write", lambda *_: "the lines of COPY")
        self.wrap(psycopg.AsyncConnection, "commit", lambda *_: "COMMIT")
        self.wrap(RespClient, "send", lambda _, packed: packed.split(b"\r\n")[2].decode())
        self.wrap(fmt, "write_checkpoint", lambda *_: "the checkpoint")
        self.wrap(Path, "replace", lambda path, *_: f"rename {path.name}")
        self.wrap(Path, "unlink", lambda path, *_, **__: f"unlink {path.name}")


async def post_all(database_url: str, valkey: str, spool_dir: str) -> None:
    engine = create_engine(Database.model_validate({"url": database_url}))
    client = await RespClient.connect(f"unix://{valkey}")
    poster = Poster(
        create_sessions(engine), client, Path(spool_dir), SystemClock(), poster_metrics(CollectorRegistry())
    )
    for _ in range(ROUNDS_MAX):
        if not await poster.step():
            break
    await client.close()
    await engine.dispose()


def _child(order: dict[str, Any], answer: int) -> None:
    points = Points(order["fatal"])
    points.watch()
    asyncio.run(post_all(order["database"], order["valkey"], order["spool"]))
    os.write(answer, json.dumps(points.passed).encode())


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what is logged is no answer
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _child(json.loads(line), write)
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
                os.write(write, json.dumps([repr(error)]).encode())
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps({"status": status, "passed": json.loads(said or b"[]")}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
