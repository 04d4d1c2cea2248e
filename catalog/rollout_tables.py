"""Rows of rollouts; private to this package. See migrations/versions/…_create_rollout.py."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ForeignKey, Identity, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import BigInteger, DateTime, LargeBinary

from core.db import Base

Timestamp = DateTime(timezone=True)


class RolloutRow(Base):
    """A version that takes another one's place."""

    __tablename__ = "rollout"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(ForeignKey("model.id"), index=True)
    names: Mapped[list[str]] = mapped_column(ARRAY(Text))
    from_version_id: Mapped[UUID] = mapped_column(ForeignKey("model_version.id"))
    to_version_id: Mapped[UUID] = mapped_column(ForeignKey("model_version.id"))
    from_deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"))
    to_deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployment.id"))
    moves_engines: Mapped[bool]
    seed: Mapped[bytes] = mapped_column(LargeBinary)
    plan: Mapped[dict[str, Any]] = mapped_column(JSONB)
    room: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    step: Mapped[int]
    ending: Mapped[str | None] = mapped_column(Text)
    wish: Mapped[str | None] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    fence: Mapped[int] = mapped_column(BigInteger)
    from_min_scale: Mapped[int]
    from_max_scale: Mapped[int]
    to_min_scale: Mapped[int]
    to_max_scale: Mapped[int]
    back_min_scale: Mapped[int]
    back_max_scale: Mapped[int]
    epoch: Mapped[int] = mapped_column(BigInteger)
    state_since: Mapped[datetime] = mapped_column(Timestamp)
    created_at: Mapped[datetime] = mapped_column(Timestamp)
    ended_at: Mapped[datetime | None] = mapped_column(Timestamp)


class RolloutNoteRow(Base):
    """One move of a rollout, with the figures that decided it."""

    __tablename__ = "rollout_note"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    rollout_id: Mapped[UUID] = mapped_column(ForeignKey("rollout.id"))
    at: Mapped[datetime] = mapped_column(Timestamp)
    state: Mapped[str] = mapped_column(Text)
    step: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)
    figures: Mapped[dict[str, Any]] = mapped_column(JSONB)
