"""Tables of who may call. The migration `0002_tenants` is the truth on constraints; this mirrors it."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, DateTime, ForeignKey, LargeBinary, SmallInteger, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from core.db import Base

NOW = text("clock_timestamp()")


class TenantRow(Base):
    __tablename__ = "tenant"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    currency: Mapped[str] = mapped_column(Text)
    tz: Mapped[str] = mapped_column(Text, server_default="UTC")
    status: Mapped[str] = mapped_column(Text, server_default="active")
    billing_mode: Mapped[str] = mapped_column(Text, server_default="prepaid")
    concurrency_limit: Mapped[int] = mapped_column(server_default="0")
    cache_seed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class ProjectRow(Base):
    __tablename__ = "project"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default="active")
    rpm_limit: Mapped[int] = mapped_column(server_default="0")
    concurrency_limit: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class ApiKeyRow(Base):
    __tablename__ = "api_key"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    project_id: Mapped[UUID] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str] = mapped_column(Text)
    prefix: Mapped[str] = mapped_column(Text)
    last4: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text))
    tier_default: Mapped[int] = mapped_column(SmallInteger, server_default="1")
    tier_max: Mapped[int] = mapped_column(SmallInteger, server_default="2")
    model_patterns: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    allowed_networks: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    rpm_limit: Mapped[int] = mapped_column(server_default="0")
    concurrency_limit: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    last_used_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class OperatorRow(Base):
    __tablename__ = "operator"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    disabled_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class OperatorTokenRow(Base):
    __tablename__ = "operator_token"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    operator_id: Mapped[UUID] = mapped_column(ForeignKey("operator.id"))
    prefix: Mapped[str] = mapped_column(Text)
    last4: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class AuditRow(Base):
    """Append-only: a trigger and missing grants refuse anything else."""

    __tablename__ = "audit_record"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    actor_kind: Mapped[str] = mapped_column(Text)
    actor_id: Mapped[UUID | None]
    tenant_id: Mapped[UUID | None]
    action: Mapped[str] = mapped_column(Text)
    target_id: Mapped[UUID | None]
    request_id: Mapped[str] = mapped_column(Text, server_default="")
    details: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
