"""Runs before an engine, in its process: brings its weights here, compares them with their hash, becomes the engine.

Nothing is started from a file that was not read and found right. What was fetched when this was ended before is kept
and gone on with. The engine gets an environment without the platform's settings.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.store import LocalStore

from catalog.registry import manifest, store
from catalog.registry.types import WeightFile
from core.errors import ErrorKind, PlatformError
from core.settings import Objects, load_objects
from engine import model_files
from engine.model_files import SeenFile

CHUNK_BYTES = 4 * 1024 * 1024
MANIFEST_MAX_BYTES = 4 * 1024 * 1024
FETCHED = ".fetched"  # of the file beside the lock that says how many microseconds the weights took
WRONG = 3  # exit status: no engine was started


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare and become the command; ends with status 3 and a line that says why when the weights are not right."""
    given, begun_ns = _parse(arguments), time.monotonic_ns()
    try:
        prepare(given.source, given.sha256, Path(given.home), load_objects())
    except PlatformError as problem:
        sys.stderr.write(f"prepare: {problem.message}\n")
        sys.exit(WRONG)
    except (OSError, obstore.exceptions.BaseError) as problem:
        sys.stderr.write(f"prepare: the weights could not be fetched ({type(problem).__name__})\n")
        sys.exit(WRONG)
    if given.lock:
        took_us = (time.monotonic_ns() - begun_ns) // 1000
        Path(given.lock).with_suffix(FETCHED).write_text(str(took_us), encoding="ascii")
    command = given.command
    os.execve(command[0], command, clean_environment())  # noqa: S606 - the command is of our own making


def clean_environment() -> dict[str, str]:
    """Return the environment without the platform's settings, which hold secrets that no engine needs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.prepare", description=__doc__)
    parser.add_argument("--source", required=True)
    parser.add_argument("--sha256", required=True)
    parser.add_argument("--home", required=True)
    parser.add_argument("--lock", default="", help="the lock that this process holds, to be found by")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def prepare(source: str, sha256: str, home: Path, objects: Objects) -> None:
    """See to it that a version's weights are here and right, and note it.

    Raises:
        PlatformError: HASH_WRONG when a file is not what its hash says; kind invalid for a source that leads nowhere.
        OSError: what is needed could not be read or written.
    """
    if not source.startswith("registry:"):
        path = model_files.file_of(source)
        before = model_files.seen(path)
        _compare(path, WeightFile(path.name, before.size_bytes, sha256))
        model_files.take_note(home, path, sha256, [before])
        return
    parts = model_files.registry_source(source)
    folder = model_files.models_folder(home) / sha256
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    objects_store: Any = store.bucket(objects, objects.url) if objects.url else LocalStore(home / "objects")
    with _alone(folder):
        if model_files.is_noted(home, folder, sha256):
            return
        key = f"{store.MODELS}/{parts.folder}"
        files = _files(objects_store, key, sha256)
        found = [_fetch(objects_store, f"{key}/{file.path}", folder / file.path, file) for file in files]
        model_files.take_note(home, folder, sha256, found)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time fetches a version."""
    descriptor = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _files(objects: Any, key: str, sha256: str) -> list[WeightFile]:
    name = f"{key}/{manifest.MANIFEST_FILE}"
    if obstore.head(objects, name)["size"] > MANIFEST_MAX_BYTES:
        raise _wrong("the manifest in the store")
    return manifest.read_files(bytes(obstore.get(objects, name).bytes()), sha256)


def _fetch(objects: Any, key: str, path: Path, file: WeightFile) -> SeenFile:
    """Bring one file here, read-only, and compare it; one that is here is compared only."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        if isinstance(objects, LocalStore):
            _link(Path(str(objects.prefix), key), partial)
        else:
            _download(objects, key, partial, file.size_bytes)
        try:
            _compare(partial, file)
        except PlatformError:
            partial.unlink(missing_ok=True)  # else it would be wrong for ever
            raise
        partial.chmod(0o444)
        partial.replace(path)
        return model_files.seen(path)
    before = model_files.seen(path)
    try:
        _compare(path, file)
    except PlatformError:
        path.unlink(missing_ok=True)
        raise
    return before


def _link(original: Path, partial: Path) -> None:
    """A store in a folder costs no second copy, where both are on one disk."""
    partial.unlink(missing_ok=True)
    try:
        os.link(original, partial)
    except OSError:
        shutil.copyfile(original, partial)


def _download(objects: Any, key: str, partial: Path, size_bytes: int) -> None:
    start = partial.stat().st_size if partial.exists() else 0
    if start >= size_bytes:
        return
    with partial.open("ab") as file:
        options: Any = {"range": {"offset": start}} if start else {}
        for piece in obstore.get(objects, key, options=options).stream(min_chunk_size=CHUNK_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _compare(path: Path, file: WeightFile) -> None:
    digest, seen = hashlib.sha256(), 0
    with path.open("rb") as opened:
        while piece := opened.read(CHUNK_BYTES):
            digest.update(piece)
            seen += len(piece)
    if seen != file.size_bytes or digest.hexdigest() != file.sha256:
        raise _wrong(repr(file.path))


def _wrong(what: str) -> PlatformError:
    message = f"{what} is not what its version's SHA-256 says, so no engine is started from it."
    return PlatformError("HASH_WRONG", ErrorKind.CONFLICT, message)


if __name__ == "__main__":
    main()
