"""Rows of the registry; private to catalog and to migrations. See migrations/versions/…_create_registry.py."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import BigInteger, DateTime

from core.db import Base

Timestamp = DateTime(timezone=True)


class ModelFileRow(Base):
    """One file of a version."""

    __tablename__ = "model_file"

    version_id: Mapped[UUID] = mapped_column(ForeignKey("model_version.id"), primary_key=True)
    no: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(Text)


class IntakeRow(Base):
    """Work on the weights of one version."""

    __tablename__ = "model_intake"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(ForeignKey("model.id"))
    version_id: Mapped[UUID | None] = mapped_column(ForeignKey("model_version.id"))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    source: Mapped[dict[str, Any]] = mapped_column(JSONB)
    asked: Mapped[dict[str, Any]] = mapped_column(JSONB)
    sha256: Mapped[str] = mapped_column(Text)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    done_bytes: Mapped[int] = mapped_column(BigInteger)
    part_bytes: Mapped[int]
    attempts: Mapped[int]
    error: Mapped[str] = mapped_column(Text)
    holder: Mapped[UUID | None]
    leased_until: Mapped[datetime | None] = mapped_column(Timestamp)
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    updated_at: Mapped[datetime] = mapped_column(Timestamp)
    expires_at: Mapped[datetime] = mapped_column(Timestamp)


class IntakeFileRow(Base):
    """A file of an intake."""

    __tablename__ = "model_intake_file"

    intake_id: Mapped[UUID] = mapped_column(ForeignKey("model_intake.id"), primary_key=True)
    no: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(Text)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(Text)
    received_bytes: Mapped[int] = mapped_column(BigInteger)
    moved: Mapped[bool]


class IntakePartRow(Base):
    """A part of a file, as it lies in the store."""

    __tablename__ = "model_intake_part"
    __table_args__ = (
        ForeignKeyConstraint(["intake_id", "no"], ["model_intake_file.intake_id", "model_intake_file.no"]),
    )

    intake_id: Mapped[UUID] = mapped_column(primary_key=True)
    no: Mapped[int] = mapped_column(primary_key=True)
    start_byte: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(Text)
