"""What the registry is on the wire: versions, intakes, and what is said of weights when they come."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from pydantic import Field, StringConstraints

from api.schemas import Input, Output
from catalog.registry.types import Asked, Intake, IntakeFile, RegisteredVersion
from core.ids import IdKind, format_id

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ShortText = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*$")]
ModelIdText = Annotated[str, Field(max_length=64)]
Bytes = Annotated[int, Field(ge=1, le=1 << 43)]


class ModelVersionOut(Output):
    """A version: which weights, where they came from, and what they say of themselves."""

    id: str
    model_id: str
    model: str
    number: int
    reference: str = Field(description="`name@number:sha256`: what a deployment pins.")
    source: str
    sha256: str
    size_bytes: int
    licence: str
    context_max: int
    template_tokens: int
    bytes_per_token_milli: int
    facts: dict[str, Any] = Field(description="Read from the files: architecture, quantisation, KV bytes per token, …")
    provenance: dict[str, Any]
    signed_by: str = Field(description="Which key signed the manifest; empty: there is none.")
    deprecated_at: datetime | None
    deprecated: bool = Field(description="The date has passed. It is served all the same.")
    deprecation_note: str
    verified_at: datetime | None
    damage: str = Field(description="What the last check found wrong; empty: nothing.")
    removed_at: datetime | None = Field(description="When its weights were taken out of the store.")
    created_at: datetime


class ModelVersionPage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[ModelVersionOut]
    next_after: str | None


class ManifestOut(Output):
    """A version's manifest. Signed with Ed25519: the line ``tidegate model manifest``, then the text of `manifest`."""

    manifest: str
    signature: str = Field(description="Base64.")
    signed_by: str
    public_key: str = Field(description="Of the present key, base64.")
    authentic: bool = Field(
        description="Whether a key of this installation signed it, and its files are those in the books."
    )


class FileIn(Input):
    """One file, by its path inside the version."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    size_bytes: Bytes
    sha256: Sha256


class _AskedIn(Input):
    model_id: ModelIdText
    number: int = Field(0, ge=0, le=1_000_000, description="The version's number; 0 takes the next.")
    licence: ShortText = Field("", description="Left out: what the files or the hub say.")
    context_max: int = Field(0, ge=0, le=100_000_000, description="Tokens of prompt and answer; 0: what the files say.")
    template_tokens: int = Field(0, ge=0, le=100_000)
    bytes_per_token_milli: int = Field(1000, ge=1000, le=100_000)
    make_current: bool = Field(False, description="Let the model's own name lead to it when it is there.")
    note: ShortText = ""

    def asked(self, by: str) -> Asked:
        """Return what is said of the weights."""
        return Asked(
            licence=self.licence,
            context_max=self.context_max,
            template_tokens=self.template_tokens,
            bytes_per_token_milli=self.bytes_per_token_milli,
            make_current=self.make_current,
            note=self.note,
            by=by,
        )


class UploadIn(_AskedIn):
    """A new upload: all its files, with sizes and hashes, before the first byte."""

    files: Annotated[list[FileIn], Field(min_length=1, max_length=2000)]


class ImportIn(_AskedIn):
    """An import, done by the worker."""

    kind: Annotated[str, StringConstraints(pattern=r"^(folder|s3|hub)$")]
    location: Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f]*$")] = Field(
        description="A folder of the worker's host, s3://bucket/prefix, or owner/name of the hub."
    )
    revision: Annotated[str, StringConstraints(max_length=100)] = Field(
        "", description="Of the hub: branch, tag, commit."
    )
    include: Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=255)]], Field(max_length=50)] = (
        Field(default_factory=list, description="Patterns of files; none: what an engine may need.")
    )


class DeprecationIn(Input):
    """From when on a version should not be used, and what instead; null takes that back."""

    at: Annotated[datetime | None, Field(strict=False)]
    note: Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")] = ""


class IntakeFileOut(Output):
    """A file; `received_bytes` is where its next part begins."""

    no: int
    path: str
    size_bytes: int
    sha256: str
    received_bytes: int
    moved: bool


class IntakeOut(Output):
    """Work on the weights of one version. `done_bytes` is of the present step: receiving, planning or moving."""

    id: str
    model_id: str
    version_id: str | None
    number: int
    kind: str
    state: str
    source: dict[str, Any] | None
    sha256: str
    size_bytes: int
    done_bytes: int
    part_bytes: int = Field(description="What each part of a file has, but for its last one.")
    error: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime


class IntakeDetailOut(IntakeOut):
    """The same with its files."""

    files: list[IntakeFileOut]


class IntakePage(Output):
    """Newest first; `next_after` is null at the end."""

    items: list[IntakeOut]
    next_after: str | None


def version_out(version: RegisteredVersion, now: datetime) -> ModelVersionOut:
    at = version.deprecated_at
    return ModelVersionOut(
        id=format_id(IdKind.MODEL_VERSION, version.id),
        model_id=format_id(IdKind.MODEL, version.model_id),
        model=version.model,
        number=version.number,
        reference=version.reference,
        source=version.source,
        sha256=version.sha256,
        size_bytes=version.size_bytes,
        licence=version.licence,
        context_max=version.context_max,
        template_tokens=version.template_tokens,
        bytes_per_token_milli=version.bytes_per_token_milli,
        facts=msgspec.to_builtins(version.facts),
        provenance=version.provenance,
        signed_by=version.signed_by,
        deprecated_at=at,
        deprecated=at is not None and at <= now,
        deprecation_note=version.deprecation_note,
        verified_at=version.verified_at,
        damage=version.damage,
        removed_at=version.removed_at,
        created_at=version.created_at,
    )


def intake_members(intake: Intake) -> dict[str, Any]:
    return {
        "id": format_id(IdKind.MODEL_INTAKE, intake.id),
        "model_id": format_id(IdKind.MODEL, intake.model_id),
        "version_id": intake.version_id and format_id(IdKind.MODEL_VERSION, intake.version_id),
        "number": intake.number,
        "kind": intake.kind.value,
        "state": intake.state.value,
        "source": None if intake.source is None else msgspec.to_builtins(intake.source),
        "sha256": intake.sha256,
        "size_bytes": intake.size_bytes,
        "done_bytes": intake.done_bytes,
        "part_bytes": intake.part_bytes,
        "error": intake.error,
        "created_at": intake.created_at,
        "updated_at": intake.updated_at,
        "expires_at": intake.expires_at,
    }


def intake_out(intake: Intake) -> IntakeOut:
    return IntakeOut(**intake_members(intake))


def detail_out(intake: Intake, files: list[IntakeFile]) -> IntakeDetailOut:
    return IntakeDetailOut(**intake_members(intake), files=[file_out(file) for file in files])


def file_out(file: IntakeFile) -> IntakeFileOut:
    return IntakeFileOut(**msgspec.structs.asdict(file))
