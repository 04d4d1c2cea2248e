"""`tidegate restore`: a home made of a backup, which ends with the books verified and no figure different."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from billing import verify as books
from cli import home as homes
from cli import installation, schema, screen, trail
from cli.backup import queries
from cli.backup.archive import DATABASE, ArchiveReader, BackupError, Figures, Manifest
from cli.backup.take import SECRETS_SUFFIX
from cli.embedded import dump
from cli.embedded import postgres as pg
from cli.home import Home, HomeSecrets, HomeState
from core import db
from core.files import write_private

FOLDERS = ("spool", "audit", "ledger", "objects")  # of the archive, and of the home


def restore(file: Path, home_path: Path, secrets_path: Path | None) -> int:
    """Make a home of a backup; return 0, or 1 when the books or the audit trail in it are not right.

    Args:
        file: the backup.
        home_path: where to; it must not be there, or be empty.
        secrets_path: the installation's secrets; None looks beside the backup.

    Raises:
        BackupError: the file is missing or damaged, or the home is not empty, or the restored database differs from the
            backup; the home is as it was.
    """
    if not file.is_file():
        raise BackupError(f"There is no backup {file}.")
    secrets = _secrets(secrets_path or file.with_name(file.name + SECRETS_SUFFIX))
    if home_path.exists() and (not home_path.is_dir() or any(home_path.iterdir())):
        raise BackupError(f"{home_path.absolute()} is not empty. A backup is restored to a new home: --home FOLDER.")
    with ArchiveReader(file) as archive:
        manifest = _checked(archive)
        existed = home_path.exists()
        home = homes.open_home(home_path)
        lock = homes.lock(home)
        try:
            return _fill(home, secrets, archive, manifest)
        except BaseException:
            _clear(home, existed=existed)
            raise
        finally:
            os.close(lock)


def _secrets(path: Path) -> bytes:
    try:
        text = path.read_bytes()
        msgspec.json.decode(text, type=HomeSecrets)
    except FileNotFoundError:
        raise BackupError(
            f"There is no {path}. Without the installation's secrets no key and no sealed credential would work: "
            "name the file with --secrets."
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise BackupError(f"The secrets in {path} cannot be read ({error}).") from error
    return text


def _checked(archive: ArchiveReader) -> Manifest:
    manifest = archive.manifest()
    total = sum(facts.bytes for facts in manifest.files.values())
    with screen.step("backup", "checking every file") as step:
        archive.check(manifest, screen.Meter("backup", total).add)
        step.note = f"of {manifest.taken_at} by version {manifest.version}: {len(manifest.files)} files are whole"
    if manifest.revision not in schema.revisions():
        raise BackupError(
            f"{archive.path} has the schema {manifest.revision}, which this version does not know. "
            f"Restore it with version {manifest.version} or a newer one."
        )
    return manifest


def _fill(home: Home, secrets_text: bytes, archive: ArchiveReader, manifest: Manifest) -> int:
    write_private(home.secrets_file, secrets_text)
    secrets = homes.load_secrets(home, installation.refuse)
    files = installation.postgres_files(home, secrets)
    with screen.step("postgres", "creating the database"):
        pg.initialise(files)
    port = pg.free_port()
    process = pg.start(files, port)
    try:
        pg.wait_ready(files, port, lambda: process.poll() is None)
        pg.create_databases(files, port, installation.DATABASE)
        settings = installation.settings(home, secrets, HomeState(database_port=port))
        owner_url = pg.url(files, port, "owner", installation.DATABASE)
        _load(owner_url, archive, manifest)
        for name in manifest.files:
            if name.partition("/")[0] in FOLDERS:
                _place(home, name, archive.pieces(name))
        _compare(owner_url, manifest.figures)
        if not schema.is_current(owner_url):
            with screen.step("schema", f"migrating from {manifest.revision}"):
                db.migrate(owner_url)
        wrong = books.main(settings, screen.say) or trail.check(settings, home.path, [])
    finally:
        pg.stop(process)
        homes.clear_sockets(home)
    return _conclude(home, manifest, wrong)


def _load(owner_url: str, archive: ArchiveReader, manifest: Manifest) -> None:
    meter = screen.Meter("database", manifest.files[DATABASE].bytes)

    def metered() -> Iterator[bytes]:
        for piece in archive.pieces(DATABASE):
            yield piece
            meter.add(len(piece))

    with screen.step("database", "loading") as step:
        try:
            dump.load(owner_url, metered())
        except dump.DumpError as error:
            raise BackupError(f"The database could not be loaded. {error}") from error
        step.note = f"loaded, {screen.size(manifest.files[DATABASE].bytes)}"


def _place(home: Home, name: str, pieces: Iterable[bytes]) -> None:
    """Write a file of the archive below the home, wherever its name tries to lead."""
    parts = PurePosixPath(name).parts
    if ".." in parts or PurePosixPath(name).is_absolute():
        raise BackupError(f"The backup names a file outside of the home: {name}.")
    path = home.path.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def _compare(owner_url: str, wanted: Figures) -> None:
    """Compare every figure of the manifest.

    Raises:
        BackupError: naming the first that differs.
    """
    with screen.step("figures", "adding up every table") as step:
        with queries.frozen(owner_url) as connection:
            found = queries.figures(connection)
        different = differences(wanted, found)
        if different:
            raise BackupError(f"The restored database differs from the backup: {different[0]}.")
        rows = sum(table.rows for table in found.tables.values())
        step.note = f"{rows:,} rows of {len(found.tables)} tables: zero difference to the backup"


def differences(wanted: Figures, found: Figures) -> list[str]:
    """Return every figure that differs, in words. Pure."""
    one, other = _flat(wanted), _flat(found)
    return [
        f"{name} is {other.get(name, 'missing')} and was {one.get(name, 'missing')}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _flat(figures: Figures) -> dict[str, str]:
    flat = {f"the sum of debits in {currency}": text for currency, text in figures.debit.items()}
    flat |= {f"the sum of credits in {currency}": text for currency, text in figures.credit.items()}
    for table, facts in figures.tables.items():
        flat |= {f"{table}: rows": str(facts.rows), f"{table}: checksum": facts.checksum}
        flat |= {f"{table}: sum of {column}": text for column, text in facts.sums.items()}
    return flat


def _conclude(home: Home, manifest: Manifest, wrong: int) -> int:
    if wrong:
        screen.say("Everything is restored as it was in the backup; what is wrong was wrong already when it was taken.")
        return 1
    screen.say(f"Restored to {home.path}, as of {manifest.taken_at}. Start it: tidegate up --home {home.path}")
    if manifest.spooled_events:
        screen.say(
            f"{manifest.spooled_events:,} events of usage lie in the spools; the poster posts those that are not "
            "posted yet, and none twice."
        )
    screen.say(
        "What was acknowledged later is not in it. If spools of the lost home are left, adopt them (`tidegate spool`)."
    )
    return 0


def _clear(home: Home, *, existed: bool) -> None:
    """Leave the home as it was found: empty, or not there."""
    for path in home.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not existed:
        home.path.rmdir()
