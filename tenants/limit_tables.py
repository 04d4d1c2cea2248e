"""Tables of plans, limits and their history. Its migration is the truth on constraints; this mirrors it."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import DateTime, ForeignKey, Numeric, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db import Base

NOW = text("clock_timestamp()")


class PlanRow(Base):
    __tablename__ = "plan"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    description: Mapped[str] = mapped_column(Text, server_default="")
    price_book_id: Mapped[UUID | None]  # of `billing`
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class LimitRuleRow(Base):
    """`amount` is a count, or pico for spend."""

    __tablename__ = "limit_rule"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenant.id"))
    plan_id: Mapped[UUID | None] = mapped_column(ForeignKey("plan.id"))
    author: Mapped[str] = mapped_column(Text)
    level: Mapped[str] = mapped_column(Text)
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]
    model: Mapped[str] = mapped_column(Text, server_default="")
    metric: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(Numeric(38, 0))
    mode: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class LimitChangeRow(Base):
    """Append-only. An amount that is null means there was, or is, no rule."""

    __tablename__ = "limit_change"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    changed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    actor_kind: Mapped[str] = mapped_column(Text)
    actor_id: Mapped[UUID | None]
    reason: Mapped[str] = mapped_column(Text)
    tenant_id: Mapped[UUID | None]
    plan_id: Mapped[UUID | None]
    author: Mapped[str] = mapped_column(Text)
    level: Mapped[str] = mapped_column(Text)
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]
    model: Mapped[str] = mapped_column(Text)
    metric: Mapped[str] = mapped_column(Text)
    mode: Mapped[str] = mapped_column(Text)
    amount_before: Mapped[int | None] = mapped_column(Numeric(38, 0))
    amount_after: Mapped[int | None] = mapped_column(Numeric(38, 0))
    beside_mode: Mapped[str | None]  # of the rule that the same change removed or put back
    beside_before: Mapped[int | None] = mapped_column(Numeric(38, 0))
    beside_after: Mapped[int | None] = mapped_column(Numeric(38, 0))
    reverts: Mapped[UUID | None]


class LimitRequestRow(Base):
    """A tenant asks for more; an operator answers."""

    __tablename__ = "limit_request"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    level: Mapped[str] = mapped_column(Text)
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]
    model: Mapped[str] = mapped_column(Text, server_default="")
    metric: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(Numeric(38, 0))
    reason: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text, server_default="open")
    asked_by_kind: Mapped[str] = mapped_column(Text)
    asked_by_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    decided_by: Mapped[UUID | None]
    decided_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    note: Mapped[str] = mapped_column(Text, server_default="")
    granted: Mapped[int | None] = mapped_column(Numeric(38, 0))
