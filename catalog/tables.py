"""Rows of the catalog; private to this package and to migrations. See migrations/versions/…_create_catalog.py."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, Identity, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import BigInteger, DateTime, LargeBinary

from core.db import Base

Timestamp = DateTime(timezone=True)


class ModelRow(Base):
    """A large language model under its public name."""

    __tablename__ = "model"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    owned_by: Mapped[str] = mapped_column(Text)
    description: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    retired_at: Mapped[datetime | None] = mapped_column(Timestamp)


class ModelVersionRow(Base):
    """One set of weights of a model, with what was measured of it."""

    __tablename__ = "model_version"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(ForeignKey("model.id"))
    number: Mapped[int]
    source: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(Text)
    licence: Mapped[str] = mapped_column(Text)
    context_max: Mapped[int]
    template_tokens: Mapped[int]
    bytes_per_token_milli: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    facts: Mapped[dict[str, Any]] = mapped_column(JSONB)
    provenance: Mapped[dict[str, Any]] = mapped_column(JSONB)
    manifest: Mapped[str] = mapped_column(Text)
    signature: Mapped[bytes] = mapped_column(LargeBinary)
    signed_by: Mapped[str] = mapped_column(Text)
    deprecated_at: Mapped[datetime | None] = mapped_column(Timestamp)
    deprecation_note: Mapped[str] = mapped_column(Text)
    verified_at: Mapped[datetime | None] = mapped_column(Timestamp)
    damage: Mapped[str] = mapped_column(Text)
    removed_at: Mapped[datetime | None] = mapped_column(Timestamp)


class ModelAliasRow(Base):
    """What callers write, and the version that answers."""

    __tablename__ = "model_alias"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    version_id: Mapped[UUID] = mapped_column(ForeignKey("model_version.id"))
    updated_at: Mapped[datetime] = mapped_column(Timestamp)


class DeploymentRow(Base):
    """A version with an engine: how it is run, or where it is found."""

    __tablename__ = "deployment"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    version_id: Mapped[UUID] = mapped_column(ForeignKey("model_version.id"), index=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    kind: Mapped[str] = mapped_column(Text)
    engine: Mapped[str] = mapped_column(Text)
    engine_args: Mapped[dict[str, Any]] = mapped_column(JSONB)
    endpoints: Mapped[list[str]] = mapped_column(ARRAY(Text))
    base_url: Mapped[str] = mapped_column(Text)
    sealed_credential: Mapped[bytes] = mapped_column(LargeBinary)
    upstream_model: Mapped[str] = mapped_column(Text)
    default_max_tokens: Mapped[int]
    inflight_max: Mapped[int]
    waiting_max: Mapped[int]
    max_wait_s: Mapped[int]
    fallback_model: Mapped[str] = mapped_column(Text)
    gpu_memory_mb: Mapped[int]
    kv_request_mb: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    retired_at: Mapped[datetime | None] = mapped_column(Timestamp)


class DesiredRow(Base):
    """What is wanted of a deployment. Nobody else writes scale."""

    __tablename__ = "desired"

    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"), primary_key=True)
    temperature: Mapped[str] = mapped_column(Text)
    min_scale: Mapped[int]
    max_scale: Mapped[int]
    keep_alive_s: Mapped[int]
    load_timeout_s: Mapped[int]
    epoch: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[datetime] = mapped_column(Timestamp)


class ReplicaRow(Base):
    """What the backend observes of one engine."""

    __tablename__ = "replica"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"))
    index: Mapped[int]
    state: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int | None]
    pid_started_ms: Mapped[int | None] = mapped_column(BigInteger)
    url: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    term: Mapped[int] = mapped_column(BigInteger)
    epoch: Mapped[int] = mapped_column(BigInteger)
    state_since: Mapped[datetime] = mapped_column(Timestamp)


class EngineLoadRow(Base):
    """How long one load took."""

    __tablename__ = "engine_load"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"))
    load_ms: Mapped[int]
    loaded_at: Mapped[datetime] = mapped_column(Timestamp)


class WakeRow(Base):
    """One start of an engine, by phase."""

    __tablename__ = "wake"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"))
    index: Mapped[int]
    cause: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    woken_at: Mapped[datetime] = mapped_column(Timestamp)
    decide_ms: Mapped[int]
    fetch_ms: Mapped[int]
    schedule_ms: Mapped[int]
    load_ms: Mapped[int | None]
    first_token_ms: Mapped[int | None]
    held: Mapped[int]
    attempts: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)


class ControllerTermRow(Base):
    """The one row that numbers the controller's leaders."""

    __tablename__ = "controller_term"

    singleton: Mapped[bool] = mapped_column(primary_key=True)
    term: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(Text)
