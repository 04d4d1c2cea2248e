"""Tables of entitlements and their history. Their migration is the truth on constraints; this mirrors it."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import DateTime, ForeignKey, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from core.db import Base

NOW = text("clock_timestamp()")


class EntitlementRow(Base):
    """What is null is not said."""

    __tablename__ = "entitlement"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenant.id"))
    plan_id: Mapped[UUID | None] = mapped_column(ForeignKey("plan.id"))
    model: Mapped[str] = mapped_column(Text, server_default="")
    weight: Mapped[int | None]
    guarantee: Mapped[int | None]
    deserved: Mapped[int | None]
    capability: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class EntitlementChangeRow(Base):
    """Append-only. `before` or `after` is null where there was, or is, no entitlement."""

    __tablename__ = "entitlement_change"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    changed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    actor_kind: Mapped[str] = mapped_column(Text)
    actor_id: Mapped[UUID | None]
    reason: Mapped[str] = mapped_column(Text)
    tenant_id: Mapped[UUID | None]
    plan_id: Mapped[UUID | None]
    model: Mapped[str] = mapped_column(Text)
    before: Mapped[dict[str, int] | None] = mapped_column(JSONB(none_as_null=True))
    after: Mapped[dict[str, int] | None] = mapped_column(JSONB(none_as_null=True))
    reverts: Mapped[UUID | None]
