"""Where an import reads from: a folder, a prefix in S3, a hub. Each lists its files and yields the bytes of one."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import msgspec
from obstore.store import ObjectStore

from catalog.registry import manifest, store
from catalog.registry.errors import invalid
from catalog.registry.hub import Hub, check_repository
from catalog.registry.types import Source, SourceKind
from core.settings import Settings

NEEDED = ("*.safetensors", "*.gguf", "*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "LICENCE*", "NOTICE*", "*.md")
PATTERNS_MAX = 50


class Listed(msgspec.Struct, frozen=True):
    """A file of a source; `sha256` is empty until it was read, where the source does not say it."""

    path: str
    size_bytes: int
    sha256: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The files of a source, what pins it, and what it says of the licence."""

    files: list[Listed]
    revision: str = ""
    licence: str = ""


class Origin(Protocol):
    """A source that can be read."""

    async def listing(self) -> Listing: ...

    def read(self, file: Listed) -> AsyncIterator[bytes]: ...


def check_source(source: Source, settings: Settings, roots: Sequence[Path]) -> None:
    """Refuse a source that could not be read, or must not be.

    Args:
        source: what is asked for.
        settings: of the installation.
        roots: folders that imports may read.

    Raises:
        PlatformError: kind invalid.
    """
    if len(source.include) > PATTERNS_MAX or any(not 0 < len(pattern) <= 255 for pattern in source.include):
        raise invalid(f"`include` has at most {PATTERNS_MAX} patterns of 1 to 255 characters.", "include")
    if source.kind is SourceKind.HUB:
        check_repository(source.location, source.revision, settings.registry)
    elif source.kind is SourceKind.S3:
        name, _, prefix = source.location.removeprefix("s3://").partition("/")
        if not source.location.startswith("s3://") or not name or ".." in source.location or not prefix.strip("/"):
            raise invalid("Write s3://bucket/prefix.", "source")
    else:
        _folder(source.location, roots)


def open_origin(source: Source, settings: Settings, roots: Sequence[Path]) -> Origin:
    """Return what reads a source; raises as `check_source`."""
    check_source(source, settings, roots)
    if source.kind is SourceKind.HUB:
        return _HubOrigin(source, settings)
    if source.kind is SourceKind.S3:
        return _BucketOrigin(store.bucket(settings.objects, source.location), source)
    return _FolderOrigin(_folder(source.location, roots), source, roots)


def _folder(location: str, roots: Sequence[Path]) -> Path:
    path = Path(location)
    if not path.is_absolute() or not path.is_dir():
        raise invalid("There is no such folder on this host. Write an absolute path.", "source")
    if not _below(path.resolve(), roots):
        raise invalid("This folder is not one that imports may read: see TIDEGATE_REGISTRY__IMPORT_FOLDERS.", "source")
    return path


def _below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root.resolve()) for root in roots)


def _wanted(path: str, source: Source) -> bool:
    """Say whether a file is taken: by the patterns, else what an engine may need; never one that hides."""
    if any(part.startswith(".") for part in path.split("/")):
        return False
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path, pattern) or fnmatchcase(name, pattern) for pattern in source.include or NEEDED)


def _checked(files: list[Listed]) -> list[Listed]:
    if not files:
        raise invalid("The source has no files of weights that `include` names.", "source")
    if len(files) > manifest.FILES_MAX:
        raise invalid(f"The source has more than {manifest.FILES_MAX:,} files: narrow it by `include`.", "include")
    return sorted(files, key=lambda file: file.path)


class _FolderOrigin:
    def __init__(self, root: Path, source: Source, roots: Sequence[Path]) -> None:
        self._root, self._source, self._roots = root, source, roots

    async def listing(self) -> Listing:
        return Listing(_checked(await asyncio.to_thread(self._walk)))

    def _walk(self) -> list[Listed]:
        found = []
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                inside = path.relative_to(self._root).as_posix()
                if _wanted(inside, self._source) and path.is_file() and (size := path.stat().st_size):
                    found.append(Listed(inside, size))
                    if len(found) > manifest.FILES_MAX:
                        return found
        return found

    async def read(self, file: Listed) -> AsyncIterator[bytes]:
        real = (self._root / file.path).resolve()
        if not _below(real, self._roots):
            raise invalid(f"{file.path!r} leads out of the folders that imports may read.", "source")
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise invalid(f"{file.path!r} is no file.", "source")
            while piece := await asyncio.to_thread(opened.read, store.CHUNK_BYTES):
                yield piece


class _BucketOrigin:
    def __init__(self, objects: ObjectStore, source: Source) -> None:
        self._objects, self._source = objects, source

    async def listing(self) -> Listing:
        found = []
        async for one in store.listed(self._objects, ""):
            if _wanted(one["path"], self._source) and one["size"]:
                found.append(Listed(one["path"], one["size"]))
                if len(found) > manifest.FILES_MAX:
                    break
        return Listing(_checked(found))

    def read(self, file: Listed) -> AsyncIterator[bytes]:
        return store.read(self._objects, file.path)


class _HubOrigin:
    def __init__(self, source: Source, settings: Settings) -> None:
        self._hub, self._source = Hub(settings.registry, source.location), source

    async def listing(self) -> Listing:
        found = await self._hub.listing(self._source.revision)
        files = [Listed(file.path, file.size_bytes, file.sha256) for file in found.files if file.size_bytes]
        wanted = _checked([file for file in files if _wanted(file.path, self._source)])
        return Listing(wanted, revision=found.commit, licence=found.licence)

    def read(self, file: Listed) -> AsyncIterator[bytes]:
        return self._hub.read(self._source.revision, file.path, file.size_bytes)
