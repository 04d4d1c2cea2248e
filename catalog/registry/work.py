"""Moves an intake on, a moment at a time: the worker has other things to do between two moments.

A file is read, hashed and written by one task of this process's loop, which stands still between the moments and goes
on in the next. A process that dies loses the file it was at, and no other: each is noted when it is whole and right.
Only the holder of an intake's lease moves it on.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from obstore.store import ObjectStore

from catalog import models
from catalog.registry import intakes, manifest, queries, reading, store, versions
from catalog.registry.errors import conflict, invalid
from catalog.registry.origins import Listed, Origin, open_origin
from catalog.registry.safetensors import main_file
from catalog.registry.types import Intake, IntakeFile, IntakeKind, IntakeState, Provenance, Source, WeightFile
from catalog.types import NewVersion
from core import db
from core.clock import Clock
from core.errors import ErrorKind, PlatformError
from core.ids import new_uuid
from core.logging import get_logger
from core.settings import Settings

MOMENT_S = 2.0
LEASE = timedelta(seconds=30)
TASKS_MAX = 8
FINAL = frozenset({ErrorKind.INVALID, ErrorKind.CONFLICT, ErrorKind.NOT_FOUND})  # trying again would not help

log = get_logger(__name__)


@dataclass(slots=True)
class Desk:
    """What the work is done with. `roots` are the folders that imports may read."""

    settings: Settings
    sessions: db.Sessions
    clock: Clock
    objects: ObjectStore
    keys: Sequence[Ed25519PrivateKey]
    roots: Sequence[Path]


@dataclass(slots=True)
class _Reading:
    """One file on its way."""

    no: int
    task: "asyncio.Task[str]"
    done_bytes: int = 0


@dataclass(slots=True)
class Mover:
    """Who works, in one process, and the files it is at."""

    holder: UUID = field(default_factory=new_uuid)
    reading: dict[UUID, _Reading] = field(default_factory=dict)

    async def drop(self, intake_id: UUID) -> None:
        """Stop reading for an intake; what was half written never appears."""
        found = self.reading.pop(intake_id, None)
        if found is not None:
            found.task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await found.task


def open_desk(settings: Settings, sessions: db.Sessions, clock: Clock, roots: Sequence[Path] | None = None) -> Desk:
    """Return the desk of this installation; without `roots`, imports read the folders of the settings."""
    return Desk(
        settings,
        sessions,
        clock,
        store.open_store(settings),
        manifest.keys_of(settings.secrets),
        settings.registry.import_folders if roots is None else roots,
    )


async def work(mover: Mover, desk: Desk, intake_id: UUID, *, seconds: float = MOMENT_S) -> bool:
    """Move an intake on for so long; returns whether there is more to do by this process.

    Raises:
        Exception: the source or the store is away; nothing is lost, and it may be tried again later.
    """
    until = desk.clock.monotonic() + seconds
    while await _claim(mover, desk, intake_id):
        async with db.transaction(desk.sessions) as session:
            intake, files = await intakes.get(session, intake_id)
        try:
            await _step(mover, desk, intake, files, until)
        except PlatformError as error:
            await mover.drop(intake_id)
            if error.kind not in FINAL:
                raise
            await _fail(desk, intake, error.message)
            return False
        if desk.clock.monotonic() >= until:
            return True
    await mover.drop(intake_id)
    return False


async def _claim(mover: Mover, desk: Desk, intake_id: UUID) -> bool:
    if intake_id not in mover.reading and len(mover.reading) >= TASKS_MAX:
        return False
    now = desk.clock.now()
    async with db.transaction(desk.sessions) as session:
        return await queries.claim_intake(session, intake_id, mover.holder, now, now + LEASE)


async def _step(mover: Mover, desk: Desk, intake: Intake, files: Sequence[IntakeFile], until: float) -> None:
    """Do the next thing: list the source, read a file for a while, or finish."""
    planning = intake.state is IntakeState.PLANNING
    if planning and not files:
        await _list(desk, intake)
        return
    if not all(_is_through(file, planning=planning) for file in files):
        await _read(mover, desk, intake, files, until)
    elif planning:
        await _planned(desk, intake, files)
    elif intake.kind is IntakeKind.CHECK:
        await _checked(desk, intake)
    else:
        await _finish(desk, intake, files)


def _is_through(file: IntakeFile, *, planning: bool) -> bool:
    """Whether this step is done with a file: its hash is known, or it is where it belongs."""
    return bool(file.sha256) if planning else file.moved


async def _list(desk: Desk, intake: Intake) -> None:
    source = _source(intake)
    found = await open_origin(source, desk.settings, desk.roots).listing()
    for file in found.files:
        manifest.check_path(file.path)
    main_file([file.path for file in found.files])
    size, most = sum(file.size_bytes for file in found.files), desk.settings.registry.version_max_bytes
    if size > most:
        raise invalid(f"A version has at most {most:,} bytes; these are {size:,}.", "source")
    pinned = msgspec.structs.replace(source, revision=found.revision or source.revision)
    asked = msgspec.structs.replace(intake.asked, licence=intake.asked.licence or found.licence)
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake.id, lock=True)
        if row is None or row.state != IntakeState.PLANNING or await queries.intake_files(session, intake.id):
            return
        row.source, row.asked = msgspec.to_builtins(pinned), msgspec.to_builtins(asked)
        row.size_bytes, row.updated_at = size, desk.clock.now()
        named = [WeightFile(file.path, file.size_bytes, file.sha256) for file in found.files]
        await intakes.add_files(session, intake.id, named)


async def _read(mover: Mover, desk: Desk, intake: Intake, files: Sequence[IntakeFile], until: float) -> None:
    """Read the first file that waits until it is whole or the moment is over."""
    planning = intake.state is IntakeState.PLANNING
    before = sum(one.size_bytes for one in files if _is_through(one, planning=planning))
    file = next(one for one in files if not _is_through(one, planning=planning))
    now = mover.reading.get(intake.id)
    if now is None or now.no != file.no:
        await mover.drop(intake.id)
        now = mover.reading[intake.id] = _begin(desk, intake, file)
    await asyncio.wait({now.task}, timeout=max(0.0, until - desk.clock.monotonic()))
    if not now.task.done():
        await _note(desk, intake, before + now.done_bytes)
        return
    del mover.reading[intake.id]
    sha256 = now.task.result()
    async with db.transaction(desk.sessions) as session:
        await queries.set_file(session, intake.id, file.no, **({"sha256": sha256} if planning else {"moved": True}))
    await _note(desk, intake, before + file.size_bytes)


def _begin(desk: Desk, intake: Intake, file: IntakeFile) -> _Reading:
    """Start the task that reads a file: to hash it, to move it, or to compare it with what is known of it."""
    weights = WeightFile(file.path, file.size_bytes, file.sha256)
    key = f"{store.version_folder(intake.model_id, intake.number, intake.sha256)}/{file.path}"

    def meter(count: int) -> None:
        reading_now.done_bytes += count

    async def run() -> str:
        if intake.state is IntakeState.PLANNING:
            return await _hash(_pieces(desk, intake, file), file, meter)
        if intake.kind is IntakeKind.CHECK:
            await _compare(desk, key, weights, meter)
        elif await store.size_of(desk.objects, key) != file.size_bytes:  # there already: it was right when it appeared
            await store.put_verified(desk.objects, key, _pieces(desk, intake, file), weights, meter)
        return file.sha256

    reading_now = _Reading(file.no, asyncio.get_running_loop().create_task(run()))
    return reading_now


async def _hash(pieces: AsyncIterator[bytes], file: IntakeFile, meter: store.Meter) -> str:
    digest, seen = hashlib.sha256(), 0
    async for piece in pieces:
        digest.update(piece)
        seen += len(piece)
        meter(len(piece))
    if seen != file.size_bytes:
        raise invalid(f"{file.path!r} changed while it was read. Import again when the source stands still.")
    return digest.hexdigest()


async def _compare(desk: Desk, key: str, weights: WeightFile, meter: store.Meter) -> None:
    try:
        await store.check(desk.objects, key, weights, meter)
    except FileNotFoundError:
        raise invalid(f"{weights.path!r} is not in the store.", code="HASH_WRONG") from None


def _pieces(desk: Desk, intake: Intake, file: IntakeFile) -> AsyncIterator[bytes]:
    if intake.kind is IntakeKind.UPLOAD:
        return _parts(desk, intake.id, file.no)
    origin: Origin = open_origin(_source(intake), desk.settings, desk.roots)
    return origin.read(Listed(file.path, file.size_bytes, file.sha256))


async def _parts(desk: Desk, intake_id: UUID, no: int) -> AsyncIterator[bytes]:
    async with db.transaction(desk.sessions) as session:
        parts = await queries.parts(session, intake_id, no)
    for start, _, sha256 in parts:
        async for piece in store.read(desk.objects, store.part_key(intake_id, no, start, sha256)):
            yield piece


async def _note(desk: Desk, intake: Intake, done_bytes: int) -> None:
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake.id, lock=True)
        if row is not None and row.state == intake.state:
            row.done_bytes, row.updated_at = done_bytes, desk.clock.now()


async def _planned(desk: Desk, intake: Intake, files: Sequence[IntakeFile]) -> None:
    """All hashes are known: the version's own is too, and it is known whether it is there already."""
    weights = _weights(files)
    manifest.check_files(weights)
    sha256 = manifest.content_hash(weights)
    async with db.transaction(desk.sessions) as session:
        there = await queries.same_weights(session, intake.model_id, sha256)
        row = await queries.intake(session, intake.id, lock=True)
        if row is None or row.state != IntakeState.PLANNING:
            return
        row.sha256, row.done_bytes, row.updated_at = sha256, 0, desk.clock.now()
        row.state = IntakeState.MOVING
        if there is not None:
            _require_kept(there.removed_at is not None)
            row.version_id = there.id
            intakes.close(row, IntakeState.DONE, now=desk.clock.now())


def _require_kept(removed: bool) -> None:
    if removed:
        raise conflict("VERSION_REMOVED", "These weights were a version of this model before, which was taken out.")


async def _checked(desk: Desk, intake: Intake) -> None:
    now = desk.clock.now()
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake.id, lock=True)
        if row is None or row.state != IntakeState.MOVING or intake.version_id is None:
            return
        await versions.note_check(session, intake.version_id, "", now)
        intakes.close(row, IntakeState.DONE, now=now)


async def _finish(desk: Desk, intake: Intake, files: Sequence[IntakeFile]) -> None:
    """Read what the files say, write the manifest beside them, and make the version."""
    weights, now = _weights(files), desk.clock.now()
    folder = store.version_folder(intake.model_id, intake.number, intake.sha256)
    facts = await reading.read_facts(desk.objects, folder, weights)
    asked = intake.asked
    context_max = asked.context_max or facts.context_length
    if not 0 < context_max <= versions.CONTEXT_MAX:
        raise invalid("The files do not say how long a context may be: give context_max.", "context_max")
    main = main_file([file.path for file in weights])
    new = versions.NewRegistered(
        NewVersion(
            context_max=context_max,
            source=versions.registry_source(intake.model_id, intake.number, intake.sha256, main),
            sha256=intake.sha256,
            licence=asked.licence or facts.licence,
            template_tokens=asked.template_tokens,
            bytes_per_token_milli=asked.bytes_per_token_milli,
        ),
        tuple(weights),
        facts,
        _provenance(intake),
        intake.number,
    )
    async with db.transaction(desk.sessions) as session:
        name = await models.name_of(session, intake.model_id)
    text = versions.manifest_text(name, intake.number, new, now)
    await store.put(desk.objects, f"{folder}/{manifest.MANIFEST_FILE}", text.encode())
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake.id, lock=True)
        if row is None or row.state != IntakeState.MOVING:
            return
        version_id = await versions.register(session, intake.model_id, new, keys=desk.keys, now=now)
        row.version_id = version_id
        intakes.close(row, IntakeState.DONE, now=now)
        if asked.make_current:
            await models.set_alias(session, name, version_id, now=now)
        made = await versions.get(session, version_id)
    log.info("model_version.registered", version_id=version_id.hex, number=made.number, sha256=made.sha256)
    if made.number != intake.number:  # somebody else brought the same weights first
        await store.delete_below(desk.objects, folder)
    await tidy(desk, intake.id)


async def _fail(desk: Desk, intake: Intake, why: str) -> None:
    now = desk.clock.now()
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake.id, lock=True)
        if row is None or row.state != intake.state:
            return
        intakes.close(row, IntakeState.FAILED, now=now, error=why[:500])
        if intake.kind is IntakeKind.CHECK and intake.version_id is not None:
            await versions.note_check(session, intake.version_id, why[:500], now)
    log.warning("model_intake.failed", intake_id=intake.id.hex, kind=intake.kind.value, reason=why)
    await tidy(desk, intake.id)


async def tidy(desk: Desk, intake_id: UUID) -> None:
    """Delete what an intake that is over leaves: its parts, and files that it moved and that are no version's."""
    async with db.transaction(desk.sessions) as session:
        row = await queries.intake(session, intake_id)
        orphaned = row is not None and row.sha256 and not await queries.folder_in_use(session, row)
    if row is not None and orphaned and row.state != IntakeState.DONE:
        folder = store.version_folder(row.model_id, row.number, row.sha256)
        await store.delete_below(desk.objects, folder)
    await store.delete_below(desk.objects, store.upload_folder(intake_id))
    async with db.transaction(desk.sessions) as session:
        await queries.drop_parts(session, intake_id)


def _weights(files: Sequence[IntakeFile]) -> list[WeightFile]:
    return [WeightFile(file.path, file.size_bytes, file.sha256) for file in files]


def _source(intake: Intake) -> Source:
    if intake.source is None:
        raise LookupError("an import has a source")
    return intake.source


def _provenance(intake: Intake) -> Provenance:
    asked, source = intake.asked, intake.source
    if source is None:
        return Provenance("upload", by=asked.by, note=asked.note)
    return Provenance(source.kind.value, source.location, source.revision, asked.by, asked.note)
