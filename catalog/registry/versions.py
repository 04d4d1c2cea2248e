"""Versions of the registry: registered once under a hash that never changes, looked up, deprecated, taken out."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import models
from catalog.registry import manifest, queries
from catalog.registry.errors import conflict, invalid, missing
from catalog.registry.tables import ModelFileRow
from catalog.registry.types import Facts, Provenance, RegisteredVersion, WeightFile
from catalog.tables import ModelRow, ModelVersionRow
from catalog.types import NewVersion
from core.db import record_config_change
from core.ids import IdKind, format_id, new_uuid

NOTE_MAX = 500
CONTEXT_MAX = 100_000_000
RESIGN_BATCH = 100


class NewRegistered(msgspec.Struct, frozen=True):
    """A version whose files are known and verified. `number` 0 means the next."""

    version: NewVersion
    files: tuple[WeightFile, ...]
    facts: Facts
    provenance: Provenance
    number: int = 0


def registry_source(model_id: UUID, number: int, sha256: str, main: str) -> str:
    """Return the `source` of weights in the store; `main` is the file an engine is pointed at, empty: the folder."""
    return f"registry:{model_id.hex}/{number}/{sha256}/{main}"


async def register(
    session: AsyncSession, model_id: UUID, new: NewRegistered, *, keys: Sequence[Ed25519PrivateKey], now: datetime
) -> UUID:
    """Add a version with its files and its signed manifest; the same weights again are the version that is there.

    Raises:
        PlatformError: kind not_found for the model, conflict when the number was taken by others, invalid for files
            that are none.
    """
    manifest.check_files(new.files)
    name = await models.name_locked(session, model_id)
    sha256 = manifest.content_hash(new.files)
    there = await queries.same_weights(session, model_id, sha256)
    if there is not None:
        if there.removed_at is not None:
            raise conflict(
                "VERSION_REMOVED", f"These weights were version {there.number}, which was taken out for good."
            )
        return there.id
    number = new.number or await queries.last_number(session, model_id) + 1
    if await queries.number_taken(session, model_id, number):
        raise conflict("VERSION_TAKEN", f"Version {number} of {name} is there, with other weights.")
    text = manifest_text(name, number, new, now)
    row = ModelVersionRow(
        id=new_uuid(),
        model_id=model_id,
        number=number,
        source=new.version.source,
        sha256=sha256,
        licence=new.version.licence,
        context_max=new.version.context_max,
        template_tokens=new.version.template_tokens,
        bytes_per_token_milli=new.version.bytes_per_token_milli,
        created_at=now,
        size_bytes=sum(file.size_bytes for file in new.files),
        facts=msgspec.to_builtins(new.facts),
        provenance=msgspec.to_builtins(new.provenance),
        manifest=text,
        signature=manifest.sign(keys[0], text),
        signed_by=manifest.key_id(keys[0].public_key()),
        deprecated_at=None,
        deprecation_note="",
        verified_at=now,
        damage="",
        removed_at=None,
    )
    session.add(row)
    await session.flush()
    for no, file in enumerate(new.files):
        session.add(
            ModelFileRow(version_id=row.id, no=no, path=file.path, size_bytes=file.size_bytes, sha256=file.sha256)
        )
    await session.flush()
    return row.id


def manifest_text(name: str, number: int, new: NewRegistered, now: datetime) -> str:
    """Return the manifest that a version gets."""
    return manifest.document(
        model=name,
        number=number,
        files=new.files,
        facts=new.facts,
        provenance=new.provenance,
        licence=new.version.licence,
        created_at=now.isoformat(),
    )


async def get(session: AsyncSession, version_id: UUID) -> RegisteredVersion:
    """Return a version; kind not_found when there is none."""
    found = await queries.version(session, version_id)
    if found is None:
        raise missing(f"There is no model version {format_id(IdKind.MODEL_VERSION, version_id)}.")
    return _version(*found)


async def list_all(session: AsyncSession, model: str | None = None) -> list[RegisteredVersion]:
    """Return the versions of all models, or of one by its own name: at most 1,000."""
    return [_version(*found) for found in await queries.versions(session, model)]


async def files_of(session: AsyncSession, version_id: UUID) -> tuple[WeightFile, ...]:
    """Return the files of a version; none for one that was made before the registry, or is served elsewhere."""
    rows = await queries.files(session, version_id)
    return tuple(WeightFile(row.path, row.size_bytes, row.sha256) for row in rows)


async def pinned(session: AsyncSession, reference: str) -> UUID:
    """Return the version that ``name@number:sha256`` names, when all three agree.

    Raises:
        PlatformError: kind invalid for another shape, not_found for none of this name and number, conflict when its
            weights have another hash.
    """
    wanted = manifest.parse_reference(reference)
    found = await queries.version_named(session, wanted.name, wanted.number)
    if found is None:
        raise missing(f"There is no version {wanted.number} of a model {wanted.name!r}.")
    row, _ = found
    if row.sha256 != wanted.sha256:
        raise conflict(
            "HASH_WRONG",
            f"{wanted.name}@{wanted.number} has other weights: its SHA-256 is {row.sha256 or 'not known'}.",
        )
    return row.id


async def deprecate(
    session: AsyncSession, version_id: UUID, *, at: datetime | None, note: str = ""
) -> RegisteredVersion:
    """Announce from when on a version should not be used, and why or what instead; None takes that back.

    It is served before and after that date all the same.

    Raises:
        PlatformError: kind not_found, or invalid for a note that is too long.
    """
    if len(note) > NOTE_MAX or "\x00" in note:
        raise invalid(f"The note has at most {NOTE_MAX} characters.", "note")
    found = await queries.version(session, version_id, lock=True)
    if found is None:
        raise missing(f"There is no model version {format_id(IdKind.MODEL_VERSION, version_id)}.")
    row, model = found
    row.deprecated_at, row.deprecation_note = at, note if at is not None else ""
    await session.flush()
    await record_config_change(session, "catalog", None)
    return _version(row, model)


async def note_check(session: AsyncSession, version_id: UUID, damage: str, now: datetime) -> None:
    """Keep what a check of the stored weights found; empty: all is right."""
    found = await queries.version(session, version_id, lock=True)
    if found is not None:
        found[0].damage = damage
        found[0].verified_at = found[0].verified_at if damage else now
        await session.flush()


def is_authentic(version: RegisteredVersion, files: Sequence[WeightFile], keys: Sequence[Ed25519PrivateKey]) -> bool:
    """Say whether the manifest is signed by this installation and the rows beside it are those it signs."""
    try:
        told = manifest.read_files(version.manifest.encode(), version.sha256)
    except Exception:  # noqa: BLE001 - an unreadable manifest is no authentic one, whatever is wrong with it
        return False
    same = sorted(told, key=lambda file: file.path) == sorted(files, key=lambda file: file.path)
    return same and manifest.is_signed(keys, version.manifest, version.signature)


async def sign_anew(session: AsyncSession, keys: Sequence[Ed25519PrivateKey]) -> int:
    """Sign with the current key what a previous key signed, and only that; returns how many of the batch were."""
    current = manifest.key_id(keys[0].public_key())
    signed = 0
    for row in await queries.versions_signed_by_others(session, current, RESIGN_BATCH):
        if manifest.is_signed(keys, row.manifest, row.signature):
            row.signature, row.signed_by = manifest.sign(keys[0], row.manifest), current
            signed += 1
    await session.flush()
    return signed


async def signed_by_previous(session: AsyncSession, keys: Sequence[Ed25519PrivateKey]) -> int:
    """Return how many manifests the present key has not signed yet: a previous key is needed for them."""
    return await queries.signed_by_others(session, manifest.key_id(keys[0].public_key()))


async def deprecated_in_use(session: AsyncSession, now: datetime) -> list[RegisteredVersion]:
    """Return the versions whose date has passed and that are deployed all the same."""
    return [_version(*found) for found in await queries.deprecated_in_use(session, now)]


def _version(row: ModelVersionRow, model: ModelRow) -> RegisteredVersion:
    return RegisteredVersion(
        id=row.id,
        model_id=row.model_id,
        model=model.name,
        number=row.number,
        source=row.source,
        sha256=row.sha256,
        licence=row.licence,
        context_max=row.context_max,
        template_tokens=row.template_tokens,
        bytes_per_token_milli=row.bytes_per_token_milli,
        size_bytes=row.size_bytes,
        facts=msgspec.convert(row.facts, Facts),
        provenance=row.provenance,
        manifest=row.manifest,
        signature=row.signature,
        signed_by=row.signed_by,
        deprecated_at=row.deprecated_at,
        deprecation_note=row.deprecation_note,
        verified_at=row.verified_at,
        damage=row.damage,
        removed_at=row.removed_at,
        created_at=row.created_at,
    )
