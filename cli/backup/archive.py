"""The backup file: a tar archive that any `tar` opens, a manifest at its end, and a hash of every file in it.

==================  =================================================================================================
``spool/…``         usage that was acknowledged and perhaps not posted when the backup began
``audit/…``         the newest record of the audit trail that the worker had noted then
``database.dump``   the whole database at one instant after that, in pg_dump's custom format
``objects/…``       the objects as they were after that instant
``manifest.json``   what is in the file, and the figures that the restored database must have
``manifest.sha256`` its hash
==================  =================================================================================================
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Self

import msgspec

from billing.spool_format import sync_folder
from cli.home import HomeError

FORMAT = 1
DATABASE = "database.dump"
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
MANIFEST_MAX_BYTES = 64 * 1024 * 1024
BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 1024 * 1024


class BackupError(HomeError):
    """A backup cannot be taken or used; the message says why, names the file, and says what to do."""


class FileFacts(msgspec.Struct, frozen=True):
    """A file of the archive as it was written."""

    bytes: int
    sha256: str


class TableFacts(msgspec.Struct, frozen=True):
    """Of a table: rows, the sum of each column of whole numbers, and a sum of hashes of its rows."""

    rows: int
    sums: dict[str, str]
    checksum: str


class Figures(msgspec.Struct, frozen=True):
    """What a restored database is compared with. Amounts are pico, by currency."""

    debit: dict[str, str]
    credit: dict[str, str]
    tables: dict[str, TableFacts]


class Manifest(msgspec.Struct, frozen=True):
    """What a backup is, and what is in it."""

    format: int
    version: str
    taken_at: str  # when the database was looked at
    revision: str  # of its schema
    spooled_events: int
    figures: Figures
    files: dict[str, FileFacts]


class Member:
    """A file being written into the archive."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.bytes += len(piece)

    def facts(self) -> FileFacts:
        return FileFacts(self.bytes, self._digest.hexdigest())


class ArchiveWriter:
    """Writes an archive beside its name; it takes its name only when it is whole and on disk. For its owner only.

    Raises:
        BackupError: there is such a file already, or none can be made.
    """

    def __init__(self, path: Path, mtime: int) -> None:
        self._path = path
        self._mtime = mtime
        self._partial = path.with_name(f".{path.name}.part")
        self.files: dict[str, FileFacts] = {}
        if path.exists():
            raise BackupError(f"{path} is there already. Give the backup another name.")
        try:
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackupError(f"{path} cannot be written ({error.strerror}).") from error
        self._file = os.fdopen(descriptor, "w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    @contextmanager
    def member(self, name: str) -> Iterator[Member]:
        """Take a file piece by piece, whatever its size will be: its header is written when that is known."""
        start, reserved = self._file.tell(), len(self._header(name, 0))
        self._file.write(bytes(reserved))
        member = Member(self._file)
        yield member
        self._file.write(bytes(-member.bytes % BLOCK))
        end = self._file.tell()
        self._file.seek(start)
        self._file.write(self._header(name, member.bytes))
        self._file.seek(end)
        self.files[name] = member.facts()

    def copy(self, name: str, source: Path) -> None:
        """Take a file from disk."""
        with source.open("rb") as file, self.member(name) as member:
            while piece := file.read(PIECE_BYTES):
                member.write(piece)

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, and give the file its name."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
        with self.member(MANIFEST) as member:
            member.write(text)
        with self.member(MANIFEST_HASH) as member:
            member.write(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode())
        self._file.write(bytes(2 * BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.rename(self._path)
        sync_folder(self._path.parent)

    def _header(self, name: str, size: int) -> bytes:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = size, self._mtime, 0o600
        return info.tobuf(tarfile.GNU_FORMAT)


class ArchiveReader:
    """Reads an archive; nothing of it is used before `check` has read all of it once.

    Raises:
        BackupError: it is no backup, of another format, or without its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as stack:
            try:
                self._tar = stack.enter_context(tarfile.open(path, "r:"))
                self._members = {info.name: info for info in self._tar if info.isreg()}
            except (OSError, tarfile.TarError) as error:
                raise BackupError(f"{path} cannot be read as a backup ({error}).") from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def manifest(self) -> Manifest:
        """Return the manifest, when it is as it was written.

        Raises:
            BackupError: it is missing, damaged or of another format.
        """
        for name in (MANIFEST, MANIFEST_HASH):
            if name not in self._members:
                raise BackupError(f"{self.path} was cut off or is no backup: {name} is missing.")
        if self._members[MANIFEST].size > MANIFEST_MAX_BYTES:
            raise self._damaged(MANIFEST)
        text = b"".join(self.pieces(MANIFEST))
        if hashlib.sha256(text).hexdigest() != b"".join(self.pieces(MANIFEST_HASH))[:64].decode("ascii", "replace"):
            raise self._damaged(MANIFEST)
        try:
            version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("format", msgspec.Raw(b"0"))
            if bytes(version) != str(FORMAT).encode():
                raise BackupError(
                    f"{self.path} has the format {bytes(version).decode()}; this Tidegate reads {FORMAT}."
                )
            return msgspec.json.decode(text, type=Manifest)
        except msgspec.DecodeError as error:
            raise self._damaged(MANIFEST) from error

    def check(self, manifest: Manifest, read: Callable[[int], None]) -> None:
        """Read every file once, telling `read` how many bytes; all are there and as they were written.

        Raises:
            BackupError: naming the first file that is not.
        """
        for name, facts in manifest.files.items():
            if name not in self._members:
                raise BackupError(f"{self.path} is damaged: {name} is missing. Use another backup.")
            digest, size = hashlib.sha256(), 0
            for piece in self.pieces(name):
                digest.update(piece)
                size += len(piece)
                read(len(piece))
            if FileFacts(size, digest.hexdigest()) != facts:
                raise self._damaged(name)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file."""
        file = self._tar.extractfile(self._members[name])
        if file is None:
            raise self._damaged(name)
        try:
            while piece := file.read(PIECE_BYTES):
                yield piece
        except (OSError, tarfile.TarError) as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> BackupError:
        return BackupError(f"{self.path} is damaged: {name} is not as it was written. Use another backup.")
