"""Words of the registry: the files of a version, what is known of it, and weights on their way in."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec


class WeightFile(msgspec.Struct, frozen=True):
    """One file of a version: its path inside the version's folder, its bytes, and their SHA-256 in hex."""

    path: str
    size_bytes: int
    sha256: str


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the files themselves say. Empty or 0: they do not say.

    `kv_bytes_per_token` is of a KV cache in 16 bits, over all layers, on all devices together.
    """

    format: str = ""  # gguf, safetensors
    architecture: str = ""
    parameters: int = 0
    context_length: int = 0
    kv_bytes_per_token: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    quantisation: str = ""  # Q4_K_M, awq, bfloat16, …
    quantisation_parameters: dict[str, str | int | bool] = {}
    tokenizer: str = ""
    vocabulary: int = 0
    chat_template: bool = False
    licence: str = ""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a version came from: `kind` is upload, folder, s3, hub or package."""

    kind: str
    source: str = ""
    revision: str = ""
    by: str = ""  # who brought it in, an id
    note: str = ""


class IntakeKind(StrEnum):
    """What an intake does."""

    UPLOAD = "upload"
    IMPORT = "import"
    CHECK = "check"  # reads again what is stored


class IntakeState(StrEnum):
    """How far it is. An upload receives, an import plans (lists and hashes its source); then both move and verify."""

    RECEIVING = "receiving"
    PLANNING = "planning"
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset({IntakeState.RECEIVING, IntakeState.PLANNING, IntakeState.MOVING})
WORKING = frozenset({IntakeState.PLANNING, IntakeState.MOVING})


class SourceKind(StrEnum):
    """Where an import reads from."""

    FOLDER = "folder"
    S3 = "s3"
    HUB = "hub"


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of an import. `location` is a folder's path, ``s3://bucket/prefix``, or the hub's ``owner/name``."""

    kind: SourceKind
    location: str
    revision: str = ""
    include: tuple[str, ...] = ()  # shell patterns; none: all that an engine may need


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """What whoever brings weights says of them; what is left out is read from the files."""

    licence: str = ""
    context_max: int = 0
    template_tokens: int = 0
    bytes_per_token_milli: int = 1000
    make_current: bool = False
    note: str = ""
    by: str = ""


class IntakeFile(msgspec.Struct, frozen=True):
    """A file of an intake, and how much of it came."""

    no: int
    path: str
    size_bytes: int
    sha256: str
    received_bytes: int
    moved: bool


class Intake(msgspec.Struct, frozen=True):
    """Work on the weights of one version, and how far it is."""

    id: UUID
    model_id: UUID
    version_id: UUID | None
    number: int
    kind: IntakeKind
    state: IntakeState
    source: Source | None
    asked: Asked
    sha256: str
    size_bytes: int
    done_bytes: int
    part_bytes: int  # what each part of an upload has, but for the last one of a file
    attempts: int
    error: str
    created_at: datetime
    updated_at: datetime
    expires_at: datetime


class RegisteredVersion(msgspec.Struct, frozen=True):
    """A version as the registry knows it. `manifest` is the signed text; empty for versions without one."""

    id: UUID
    model_id: UUID
    model: str
    number: int
    source: str
    sha256: str
    licence: str
    context_max: int
    template_tokens: int
    bytes_per_token_milli: int
    size_bytes: int
    facts: Facts
    provenance: dict[str, Any]
    manifest: str
    signature: bytes
    signed_by: str
    deprecated_at: datetime | None
    deprecation_note: str
    verified_at: datetime | None
    damage: str
    removed_at: datetime | None
    created_at: datetime

    @property
    def reference(self) -> str:
        """``name@number:sha256``; without a hash, ``name@number``."""
        return f"{self.model}@{self.number}" + (f":{self.sha256}" if self.sha256 else "")
