"""`tidegate model`: the registry from the host it lies on, running or stopped, and uploads from anywhere."""

import argparse
import asyncio
import shutil
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from billing.version_use import is_used
from catalog import deployments, models
from catalog.registry import garbage, intakes, manifest, origins, versions, work
from catalog.registry.types import Asked, Intake, IntakeState, RegisteredVersion, Source, SourceKind
from cli import screen
from cli.books import database
from core.clock import SystemClock
from core.db import create_engine, create_sessions, transaction
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, parse_id
from core.settings import Settings
from engine import model_files
from tenants import audit
from tenants.types import SYSTEM

ANYWHERE = (Path("/"),)  # whoever runs this reads what this host's user may read
T = TypeVar("T")


def _run(home: Path, do: Callable[[work.Desk], Awaitable[T]]) -> T:
    """Do something at the registry's desk of a home or of the database in the environment."""

    async def main(settings: Settings) -> T:
        engine = create_engine(settings.database)
        try:
            return await do(work.open_desk(settings, create_sessions(engine), SystemClock(), ANYWHERE))
        finally:
            await engine.dispose()

    with database(home) as settings:
        return asyncio.run(main(settings))


async def find(session: AsyncSession, text: str) -> RegisteredVersion:
    """Return the version of ``name@number:sha256``, of ``name@number``, or of an id.

    Raises:
        PlatformError: there is none, or its hash is another.
    """
    if text.startswith(f"{IdKind.MODEL_VERSION.value}_"):
        return await versions.get(session, parse_id(IdKind.MODEL_VERSION, text))
    if ":" in text.rpartition("@")[2]:
        return await versions.get(session, await versions.pinned(session, text))
    name, _, number = text.rpartition("@")
    for version in await versions.list_all(session, name):
        if str(version.number) == number:
            return version
    raise PlatformError(
        "NOT_FOUND", ErrorKind.NOT_FOUND, f"There is no version {text[:100]!r}: see `tidegate model list`."
    )


def show_list(given: argparse.Namespace) -> int:
    async def do(desk: work.Desk) -> list[RegisteredVersion]:
        async with transaction(desk.sessions) as session:
            return await versions.list_all(session, given.model)

    now = SystemClock().now()
    found = _run(given.home, do)
    for version in found:
        screen.say(_line(version, now))
    if not found:
        screen.say("No versions.")
    return 0


def _line(version: RegisteredVersion, now: datetime) -> str:
    notes = [screen.size(version.size_bytes) if version.size_bytes else "elsewhere", version.facts.quantisation]
    if version.deprecated_at is not None:
        word = "DEPRECATED since" if version.deprecated_at <= now else "deprecated from"
        notes.append(f"{word} {version.deprecated_at:%Y-%m-%d} {version.deprecation_note}".strip())
    notes += ["taken out"] * (version.removed_at is not None) + ["DAMAGED"] * bool(version.damage)
    return f"{version.reference}  {', '.join(filter(None, notes))}"


def show(given: argparse.Namespace) -> int:
    async def do(desk: work.Desk) -> tuple[RegisteredVersion, bool]:
        async with transaction(desk.sessions) as session:
            version = await find(session, given.version)
            files = await versions.files_of(session, version.id)
        return version, versions.is_authentic(version, files, desk.keys)

    version, authentic = _run(given.home, do)
    if given.manifest:
        screen.say(version.manifest)
        return 0
    facts = {name: value for name in version.facts.__struct_fields__ if (value := getattr(version.facts, name))}
    rows: dict[str, Any] = {
        "id": format_id(IdKind.MODEL_VERSION, version.id),
        "reference": version.reference,
        "source": version.source,
        "licence": version.licence,
        "context_max": version.context_max,
        **facts,
        **{f"from_{name}": value for name, value in version.provenance.items()},
        "manifest": f"signed by {version.signed_by}, {'authentic' if authentic else 'NOT AUTHENTIC'}"
        if version.manifest
        else "none: made before the registry, or served elsewhere",
        "deprecated": version.deprecated_at and f"{version.deprecated_at:%Y-%m-%d} {version.deprecation_note}",
        "damage": version.damage,
    }
    for name, value in rows.items():
        if value:
            screen.say(f"{name:<24} {value}")
    return 0


def bring(given: argparse.Namespace) -> int:
    """Import from a folder, S3 or the hub, here and now; a run that was ended is gone on with by the worker."""

    async def do(desk: work.Desk) -> int:
        source = _source(given)
        origins.check_source(source, desk.settings, desk.roots)
        async with transaction(desk.sessions) as session:
            model_id = await _model(session, given.model, desk.clock.now())
            intake_id = await intakes.create_import(
                session,
                model_id,
                source,
                _asked(given),
                number=given.number,
                limits=desk.settings.registry,
                now=desk.clock.now(),
            )
            details = {"on_host": True, "source": source.location}
            audit.record(session, SYSTEM, "model_intake.import", target_id=intake_id, details=details)
        return await _work(desk, intake_id)

    return _run(given.home, do)


def _source(given: argparse.Namespace) -> Source:
    where, include = given.source, tuple(given.include)
    if where.startswith("s3://"):
        return Source(SourceKind.S3, where, include=include)
    if where.startswith("hub:"):
        return Source(SourceKind.HUB, where.removeprefix("hub:"), given.revision, include)
    return Source(SourceKind.FOLDER, str(Path(where).absolute()), include=include)


def _asked(given: argparse.Namespace) -> Asked:
    return Asked(
        licence=given.licence,
        context_max=given.context_max,
        make_current=given.make_current,
        note=given.note,
        by="host",
    )


async def _model(session: AsyncSession, name: str, now: datetime) -> UUID:
    for model in await models.list_models(session):
        if model.name == name:
            return model.id
    return await models.create_model(session, name=name, now=now)


async def _work(desk: work.Desk, intake_id: UUID) -> int:
    """Do the worker's work here, and say how far it is; 1 when it failed."""
    mover = work.Mover()
    while True:
        going = await work.work(mover, desk, intake_id, seconds=1.0)
        async with transaction(desk.sessions) as session:
            intake, _ = await intakes.get(session, intake_id)
        screen.say(_progress(intake))
        if not intakes.is_working(intake):
            break
        if not going:
            await asyncio.sleep(1.0)  # the worker has it
    if intake.state is not IntakeState.DONE:
        return 1
    if intake.version_id is not None:
        async with transaction(desk.sessions) as session:
            screen.say((await versions.get(session, intake.version_id)).reference)
    return 0


def _progress(intake: Intake) -> str:
    if intake.error:
        return f"{intake.state.value}: {intake.error}"
    of = f" {screen.size(intake.done_bytes)} of {screen.size(intake.size_bytes)}" if intake.size_bytes else ""
    return f"{intake.state.value}{of}"


def verify(given: argparse.Namespace) -> int:
    """Read what is stored of a version again, and its manifest's signature; 1 when anything is wrong."""

    async def do(desk: work.Desk) -> int:
        async with transaction(desk.sessions) as session:
            version = await find(session, given.version)
            files = await versions.files_of(session, version.id)
        if not versions.is_authentic(version, files, desk.keys):
            screen.say(
                "The manifest is not signed by this installation, or the files in the books are not those of it."
            )
            return 1
        if not version.source.startswith("registry:"):
            return _verify_in_place(version, desk.settings.home)
        async with transaction(desk.sessions) as session:
            limits, now = desk.settings.registry, desk.clock.now()
            intake_id = await intakes.create_check(session, version.id, by="host", limits=limits, now=now)
            audit.record(session, SYSTEM, "model_version.verify", target_id=version.id, details={"on_host": True})
        return await _work(desk, intake_id)

    return _run(given.home, do)


def _verify_in_place(version: RegisteredVersion, home: Path) -> int:
    from core.settings import load_objects
    from engine.prepare import prepare

    prepare(version.source, version.sha256, home.resolve(), load_objects())
    screen.say(f"{version.reference}: right")
    return 0


def collect(given: argparse.Namespace) -> int:
    """Show what nobody needs, and with --apply delete it; also what this host's engines had that is not deployed."""

    async def do(desk: work.Desk) -> int:
        now, weights_days = desk.clock.now(), desk.settings.retention.weights_days
        take = garbage.collect if given.apply else garbage.plan
        plan = await take(desk.sessions, desk.objects, is_used, now=now, weights_days=weights_days)
        for kept in plan.keep:
            screen.say(f"keep    {kept.version.reference}: {kept.because}")
        word = "removed" if given.apply else "remove "
        for version in plan.remove:
            screen.say(f"{word} {version.reference}")
        if plan.loose:
            screen.say(f"{word} {screen.count(len(plan.loose), 'file')} that are no version's")
        if given.apply:
            async with transaction(desk.sessions) as session:
                details = {"on_host": True, "removed": [version.reference for version in plan.remove]}
                audit.record(session, SYSTEM, "model_version.collect", details=details)
        size = plan.bytes + await _clean_host(desk, apply=given.apply)
        screen.say(f"{screen.size(size)} {'freed' if given.apply else 'would be freed: give --apply'}")
        return 0

    return _run(given.home, do)


async def _clean_host(desk: work.Desk, *, apply: bool) -> int:
    """Delete weights that were brought to this host for engines and are deployed no more; returns their bytes."""
    async with transaction(desk.sessions) as session:
        needed = {deployment.sha256 for deployment in await deployments.list_all(session)}
    folder, size = model_files.models_folder(desk.settings.home), 0
    for path in sorted(folder.glob("[0-9a-f]" * 64)) if folder.exists() else ():
        if path.name not in needed and path.is_dir():
            size += sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.stat().st_nlink == 1)
            if apply:
                shutil.rmtree(path)
    return size


def deprecate(given: argparse.Namespace) -> int:
    """Announce the end of a version, or take that back."""

    async def do(desk: work.Desk) -> RegisteredVersion:
        at = None if given.withdraw else datetime(given.at.year, given.at.month, given.at.day, tzinfo=UTC)
        async with transaction(desk.sessions) as session:
            version = await find(session, given.version)
            details = {"on_host": True, "at": at and at.isoformat(), "note": given.note}
            audit.record(session, SYSTEM, "model_version.deprecate", target_id=version.id, details=details)
            return await versions.deprecate(session, version.id, at=at, note=given.note)

    screen.say(_line(_run(given.home, do), SystemClock().now()))
    return 0


def weights_in(path: Path) -> dict[str, Path]:
    """Return the files that an upload of a file or folder has, by their paths in the version."""
    if path.is_file():
        return {path.name: path}
    found = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    kept = {name: file for name, file in found.items() if not any(part.startswith(".") for part in name.split("/"))}
    for name in kept:
        manifest.check_path(name)
    return kept
