"""Intakes: weights on their way in. An upload comes in parts, each at the place where the last one ended.

What came is in the store before its row says so, and a part counts once: a repeat, or two who send the same file, is
told where the file ends now. So an upload that was cut anywhere goes on from there, and never mixes.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

import msgspec
from obstore.store import ObjectStore
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import models
from catalog.registry import manifest, queries, store, versions
from catalog.registry.errors import conflict, invalid, missing
from catalog.registry.safetensors import main_file
from catalog.registry.tables import IntakeFileRow, IntakeRow
from catalog.registry.types import (
    OPEN,
    WORKING,
    Asked,
    Intake,
    IntakeFile,
    IntakeKind,
    IntakeState,
    Source,
    WeightFile,
)
from core import db, outbox
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, new_uuid
from core.settings import Registry

WORK = "registry.work"  # the job that moves an intake on


async def create_upload(
    session: AsyncSession,
    model_id: UUID,
    files: Sequence[WeightFile],
    asked: Asked,
    *,
    number: int,
    limits: Registry,
    now: datetime,
) -> UUID:
    """Open an upload of these files, as version `number` of a model; 0 means the next.

    Raises:
        PlatformError: kind invalid for files that are no version, not_found for the model, conflict for a number or
            weights that are there already, or rate_limited with too many intakes open.
    """
    manifest.check_files(files)
    main_file([file.path for file in files])
    sha256, size = manifest.content_hash(files), sum(file.size_bytes for file in files)
    row = await _open(session, model_id, IntakeKind.UPLOAD, asked, number=number, limits=limits, now=now)
    there = await queries.same_weights(session, model_id, sha256)
    if there is not None:
        known = format_id(IdKind.MODEL_VERSION, there.id)
        raise conflict("VERSION_EXISTS", f"These weights are version {there.number} already.", version_id=known)
    if size > limits.version_max_bytes:
        raise invalid(f"A version has at most {limits.version_max_bytes:,} bytes; these are {size:,}.", "files")
    row.sha256, row.size_bytes = sha256, size
    await add_files(session, row.id, files)
    return row.id


async def create_import(
    session: AsyncSession,
    model_id: UUID,
    source: Source,
    asked: Asked,
    *,
    number: int,
    limits: Registry,
    now: datetime,
) -> UUID:
    """Ask for an import; the worker lists, reads and verifies the source. Raises as `create_upload`."""
    row = await _open(session, model_id, IntakeKind.IMPORT, asked, number=number, limits=limits, now=now)
    row.source, row.state = msgspec.to_builtins(source), IntakeState.PLANNING
    await session.flush()
    await outbox.add(session, WORK, {"intake_id": row.id.hex})
    return row.id


async def create_check(session: AsyncSession, version_id: UUID, *, by: str, limits: Registry, now: datetime) -> UUID:
    """Ask for a check: every stored file of a version is read again and compared with its hash.

    Raises:
        PlatformError: kind not_found, conflict for a version whose weights are not in the store.
    """
    version = await versions.get(session, version_id)
    files = await versions.files_of(session, version_id)
    if version.removed_at is not None or not files or not version.source.startswith("registry:"):
        raise conflict("NOT_IN_STORE", "This version has no weights in the registry's store.")
    row = await _open(
        session, version.model_id, IntakeKind.CHECK, Asked(by=by), number=version.number, limits=limits, now=now
    )
    row.version_id, row.sha256, row.size_bytes = version_id, version.sha256, version.size_bytes
    row.state = IntakeState.MOVING
    await add_files(session, row.id, files)
    await outbox.add(session, WORK, {"intake_id": row.id.hex})
    return row.id


async def _open(
    session: AsyncSession,
    model_id: UUID,
    kind: IntakeKind,
    asked: Asked,
    *,
    number: int,
    limits: Registry,
    now: datetime,
) -> IntakeRow:
    name = await models.name_locked(session, model_id)
    if kind is not IntakeKind.CHECK and number and await queries.number_taken(session, model_id, number):
        raise conflict("VERSION_TAKEN", f"Version {number} of {name} is there already.")
    if await queries.open_count(session) >= limits.uploads_max:
        message = f"There are {limits.uploads_max} uploads and imports open. Complete or cancel one first."
        raise PlatformError("TOO_MANY_INTAKES", ErrorKind.RATE_LIMITED, message, retry_after_s=60)
    row = IntakeRow(
        id=new_uuid(),
        model_id=model_id,
        version_id=None,
        number=number or await queries.last_number(session, model_id) + 1,
        kind=kind,
        state=IntakeState.RECEIVING,
        source={},
        asked=msgspec.to_builtins(asked),
        sha256="",
        size_bytes=0,
        done_bytes=0,
        part_bytes=limits.part_bytes,
        attempts=0,
        error="",
        holder=None,
        leased_until=None,
        created_at=now,
        updated_at=now,
        expires_at=now + timedelta(days=limits.upload_days),
    )
    session.add(row)
    await session.flush()
    return row


async def add_files(session: AsyncSession, intake_id: UUID, files: Sequence[WeightFile]) -> None:
    """Say which files an intake has; of an import the hashes may come later."""
    for no, file in enumerate(files):
        session.add(
            IntakeFileRow(
                intake_id=intake_id,
                no=no,
                path=file.path,
                size_bytes=file.size_bytes,
                sha256=file.sha256,
                received_bytes=0,
                moved=False,
            )
        )
    await session.flush()


async def receive(
    sessions: db.Sessions,
    objects: ObjectStore,
    intake_id: UUID,
    no: int,
    *,
    start: int,
    content: bytes,
    sha256: str,
    now: datetime,
) -> IntakeFile:
    """Take the next part of a file: as many bytes as the upload's `part_bytes` says, or what is left of the file.

    Args:
        sessions: for two short transactions; the part is written between them.
        objects: the store.
        intake_id: of an upload that receives.
        no: the file's place in the upload's list.
        start: where in the file the part begins; where the file ends now.
        content: the part.
        sha256: of the part, when the sender says it; empty otherwise.
        now: wall time.

    Raises:
        PlatformError: OFFSET_WRONG (kind conflict, with `received_bytes`) for another place than where the file ends;
            kind invalid for a part of another size or another hash; not_found, or conflict when it does not receive.
    """
    found = hashlib.sha256(content).hexdigest()
    async with db.transaction(sessions) as session:
        file, part_bytes = await _receiving_file(session, intake_id, no)
    if start != file.received_bytes:
        raise _elsewhere(file)
    _check_part(content, min(part_bytes, file.size_bytes - start), right=sha256 in {"", found})
    await store.put(objects, store.part_key(intake_id, no, start, found), content)
    async with db.transaction(sessions) as session:
        row = await _receiving(session, intake_id)
        moved = await queries.advance(session, intake_id, no, start=start, size=len(content), sha256=found)
        file = _file(next(file for file in await queries.intake_files(session, intake_id) if file.no == no))
        if not moved:
            raise _elsewhere(file)
        row.done_bytes, row.updated_at = row.done_bytes + len(content), now
    return file


def _check_part(content: bytes, wanted: int, *, right: bool) -> None:
    if len(content) != wanted or not wanted:
        why = f"The next part of this file has {wanted:,} bytes; {len(content):,} came. Send it again."
        raise invalid(why, code="PART_WRONG")
    if not right:
        raise invalid("The part has another SHA-256 than was said: it was altered on its way.", code="PART_WRONG")


def _elsewhere(file: IntakeFile) -> PlatformError:
    message = f"{file.path!r} ends at {file.received_bytes:,} now: go on from there."
    return conflict("OFFSET_WRONG", message, received_bytes=file.received_bytes)


async def complete(session: AsyncSession, intake_id: UUID, *, now: datetime) -> None:
    """Say that all is sent: the worker verifies it and makes the version. Doing it again changes nothing.

    Raises:
        PlatformError: UPLOAD_INCOMPLETE (kind conflict) naming a file that is not whole; not_found; conflict.
    """
    row = await _locked(session, intake_id)
    if row.kind == IntakeKind.UPLOAD and row.state in {IntakeState.MOVING, IntakeState.DONE}:
        return
    _require_receiving(row)
    files = await queries.intake_files(session, intake_id)
    for file in files:
        if file.received_bytes != file.size_bytes:
            raise conflict(
                "UPLOAD_INCOMPLETE",
                f"{file.path!r} has {file.received_bytes:,} of {file.size_bytes:,} bytes.",
                file_no=file.no,
                received_bytes=file.received_bytes,
            )
    row.state, row.updated_at, row.done_bytes = IntakeState.MOVING, now, 0
    await session.flush()
    await outbox.add(session, WORK, {"intake_id": intake_id.hex})


async def cancel(session: AsyncSession, intake_id: UUID, *, now: datetime) -> None:
    """Give an intake up; what came of it is deleted by the worker. One that is over stays as it is."""
    row = await _locked(session, intake_id)
    if row.state in OPEN:
        close(row, IntakeState.CANCELLED, now=now)
        await session.flush()


def close(row: IntakeRow, state: IntakeState, *, now: datetime, error: str = "") -> None:
    """End an intake."""
    row.state, row.error, row.updated_at = state, error, now
    row.holder, row.leased_until = None, None


async def get(session: AsyncSession, intake_id: UUID) -> tuple[Intake, list[IntakeFile]]:
    """Return an intake and its files; kind not_found when there is none."""
    row = await queries.intake(session, intake_id)
    if row is None:
        raise _missing(intake_id)
    return _intake(row), [_file(file) for file in await queries.intake_files(session, intake_id)]


async def list_all(session: AsyncSession) -> list[Intake]:
    """Return the newest 1,000, newest first."""
    return [_intake(row) for row in await queries.intakes(session)]


def fraction_done(intake: Intake, files: Sequence[IntakeFile]) -> float:
    """Return how much of its present step is done, 0 to 1."""
    if intake.state is IntakeState.DONE:
        return 1.0
    received = sum(file.received_bytes for file in files)
    done = received if intake.state is IntakeState.RECEIVING else intake.done_bytes
    return min(1.0, done / intake.size_bytes) if intake.size_bytes else 0.0


def is_working(intake: Intake) -> bool:
    return intake.state in WORKING


async def _receiving(session: AsyncSession, intake_id: UUID) -> IntakeRow:
    row = await _locked(session, intake_id)
    _require_receiving(row)
    return row


async def _receiving_file(session: AsyncSession, intake_id: UUID, no: int) -> tuple[IntakeFile, int]:
    """Return a file of an upload that receives, and how large its parts are."""
    row = await queries.intake(session, intake_id)
    if row is None:
        raise _missing(intake_id)
    _require_receiving(row)
    file = await queries.intake_file(session, intake_id, no)
    if file is None:
        raise missing(f"This upload has no file {no}.")
    return _file(file), row.part_bytes


def _require_receiving(row: IntakeRow) -> None:
    if row.state != IntakeState.RECEIVING:
        raise conflict("NOT_RECEIVING", f"This {row.kind} is {row.state} and takes nothing more.", state=row.state)


async def _locked(session: AsyncSession, intake_id: UUID) -> IntakeRow:
    row = await queries.intake(session, intake_id, lock=True)
    if row is None:
        raise _missing(intake_id)
    return row


def _missing(intake_id: UUID) -> PlatformError:
    return missing(f"There is no model intake {format_id(IdKind.MODEL_INTAKE, intake_id)}.")


def _file(row: IntakeFileRow) -> IntakeFile:
    return IntakeFile(row.no, row.path, row.size_bytes, row.sha256, row.received_bytes, row.moved)


def _intake(row: IntakeRow) -> Intake:
    return Intake(
        id=row.id,
        model_id=row.model_id,
        version_id=row.version_id,
        number=row.number,
        kind=IntakeKind(row.kind),
        state=IntakeState(row.state),
        source=msgspec.convert(row.source, Source) if row.source else None,
        asked=msgspec.convert(row.asked, Asked),
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        done_bytes=row.done_bytes,
        part_bytes=row.part_bytes,
        attempts=row.attempts,
        error=row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
        expires_at=row.expires_at,
    )
