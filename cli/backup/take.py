"""`tidegate backup`: spools, then the database at one instant, then objects, into one file. Works while `up` runs."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from billing.spool_copy import read_spools
from cli import screen
from cli.backup import queries
from cli.backup.archive import DATABASE, FORMAT, ArchiveWriter, BackupError, Figures, Manifest
from cli.books import database_as_it_is
from cli.embedded import dump
from core.files import write_private
from core.settings import Settings

SUFFIX = ".tgbackup"
SECRETS_SUFFIX = ".secrets.json"
ANCHORS = ("audit/anchor.json", "ledger/anchor.json")  # of the audit trail, and of the seals


def backup(home_path: Path, target: Path, version: str, now: datetime, *, with_secrets: bool) -> int:
    """Back up an installation; return 0.

    Args:
        home_path: the installation, running or stopped.
        target: the file to make, or a folder in which one named by the time is made: one that is there, or a name
            that does not end in `SUFFIX`.
        version: of this program.
        now: for the file's name and time.
        with_secrets: also copy the home's secrets, to a file of their own beside it.

    Raises:
        BackupError: it cannot be taken; nothing is left of it.
    """
    target = file_of(target, now)
    secrets = target.with_name(target.name + SECRETS_SUFFIX)
    if with_secrets and secrets.exists():
        raise BackupError(f"{secrets} is there already. Give the backup another name.")
    with database_as_it_is(home_path) as settings, ArchiveWriter(target, int(now.timestamp())) as archive:
        owner = settings.database.owner_url
        if owner is None:
            raise BackupError("A backup reads the database as its owner: set TIDEGATE_DATABASE__OWNER_URL.")
        events = _spools(archive, settings)
        manifest = _database(archive, owner.get_secret_value())
        _objects(archive, settings)
        archive.finish(
            msgspec.structs.replace(manifest, version=version, spooled_events=events, files=dict(archive.files))
        )
    screen.say(f"Backed up to {target} ({screen.size(target.stat().st_size)}), as of {manifest.taken_at}.")
    _secrets(home_path, secrets, wanted=with_secrets)
    return 0


def file_of(target: Path, now: datetime) -> Path:
    """Return the file to make. A folder is told by what is there or by the name, as a path has lost its last slash.

    Raises:
        BackupError: the folder is not there and cannot be made.
    """
    if target.suffix == SUFFIX and not target.is_dir():
        return target
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"The folder {target} cannot be made ({error.strerror})"
        raise BackupError(f"{why}; for a file give a name that ends in {SUFFIX}.") from error
    return target / f"tidegate-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}{SUFFIX}"


def _spools(archive: ArchiveWriter, settings: Settings) -> int:
    """Take the spools, and the anchors, which must not be newer than the chains of the database's instant."""
    events = 0
    with screen.step("spools", "copying usage that may not be posted yet") as step:
        for file in read_spools(settings.spool_dir):
            with archive.member(f"spool/{file.spool}/{file.name}") as member:
                member.write(file.content)
            events += file.events
        for name in ANCHORS:
            if (settings.home / name).exists():
                archive.copy(name, settings.home / name)
        step.note = f"{screen.count(events, 'event')} copied" + (", posted ones among them" if events else "")
    return events


def _database(archive: ArchiveWriter, owner_url: str) -> Manifest:
    with queries.frozen(owner_url) as connection:
        name, taken_at = queries.snapshot(connection), queries.instant(connection)
        revision = queries.revision(connection)
        with screen.step("figures", "adding up every table") as step:
            figures: Figures = queries.figures(connection)
            rows = sum(table.rows for table in figures.tables.values())
            step.note = f"{rows:,} rows of {len(figures.tables)} tables added up"
        with screen.step("database", "dumping") as step, archive.member(DATABASE) as member:
            meter = screen.Meter("database")

            def take(piece: bytes) -> None:
                member.write(piece)
                meter.add(len(piece))

            try:
                dump.dump(owner_url, name, take)
            except dump.DumpError as error:
                raise BackupError(f"The database could not be dumped. {error}") from error
            step.note = f"dumped, {screen.size(member.bytes)}"
    return Manifest(FORMAT, "", taken_at, revision, 0, figures, {})


def _objects(archive: ArchiveWriter, settings: Settings) -> None:
    """After the instant: a row's objects are written before the row is, so those of every row are there."""
    with screen.step("objects", "copying") as step:
        count = 0
        for path in sorted(path for path in settings.objects_dir.rglob("*") if path.is_file()):
            try:
                archive.copy(f"objects/{path.relative_to(settings.objects_dir)}", path)
            except FileNotFoundError:
                continue  # deleted since it was listed
            count += 1
        step.note = f"{count:,} copied"


def _secrets(home_path: Path, target: Path, *, wanted: bool) -> None:
    source = home_path / "secrets.json"
    if wanted and source.exists():
        write_private(target, source.read_bytes())
        screen.say(f"The secrets are in {target}, for its owner only. Keep them apart from the backup: both together")
        screen.say("open every sealed credential, and the backup without them cannot be restored.")
    else:
        screen.say("The secrets are NOT in it. Without them nothing can be restored: keep a copy of")
        screen.say(f"{source.absolute()} at another safe place, or use --with-secrets.")
