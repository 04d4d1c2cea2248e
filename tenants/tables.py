"""Tables of who may call. The migrations are the truth on constraints; this mirrors them."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, DateTime, ForeignKey, LargeBinary, SmallInteger, Text, text
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
    plan_id: Mapped[UUID] = mapped_column(ForeignKey("plan.id"))
    cache_seed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    closed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    erased_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class LegalProfileRow(Base):
    __tablename__ = "legal_profile"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    legal_name: Mapped[str] = mapped_column(Text, server_default="")
    address: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    country: Mapped[str] = mapped_column(Text, server_default="")
    tax_id: Mapped[str] = mapped_column(Text, server_default="")
    billing_email: Mapped[str] = mapped_column(Text, server_default="")
    language: Mapped[str] = mapped_column(Text, server_default="en")
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class ProjectRow(Base):
    __tablename__ = "project"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default="active")
    keep_answers: Mapped[bool] = mapped_column(server_default="false")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class ApiKeyRow(Base):
    __tablename__ = "api_key"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    project_id: Mapped[UUID] = mapped_column(ForeignKey("project.id"))
    owner_person_id: Mapped[UUID | None] = mapped_column(ForeignKey("person.id"))
    owner_service_account_id: Mapped[UUID | None]
    name: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default="active")
    scopes: Mapped[list[str]] = mapped_column(ARRAY(Text))
    tier_default: Mapped[int] = mapped_column(SmallInteger, server_default="1")
    tier_max: Mapped[int] = mapped_column(SmallInteger, server_default="2")
    model_patterns: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    allowed_networks: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    created_by: Mapped[UUID | None]
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    last_used_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class ApiKeySecretRow(Base):
    """One secret under one pepper; `id` is the secret's, the same under every pepper."""

    __tablename__ = "api_key_secret"

    digest: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    id: Mapped[UUID]
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_key.id"))
    prefix: Mapped[str] = mapped_column(Text)
    last4: Mapped[str] = mapped_column(Text)
    pepper_id: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class OperatorRow(Base):
    __tablename__ = "operator"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    role: Mapped[str] = mapped_column(Text, server_default="admin")
    person_id: Mapped[UUID | None] = mapped_column(ForeignKey("person.id"), unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    disabled_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    origin: Mapped[str] = mapped_column(Text, server_default="")
    vouched_by: Mapped[UUID | None] = mapped_column(ForeignKey("person.id"))
    confirmed_by: Mapped[UUID | None] = mapped_column(ForeignKey("person.id"))
    confirmed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class OperatorTokenRow(Base):
    __tablename__ = "operator_token"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    operator_id: Mapped[UUID] = mapped_column(ForeignKey("operator.id"))
    issued_by: Mapped[UUID | None] = mapped_column(ForeignKey("person.id"))
    prefix: Mapped[str] = mapped_column(Text)
    last4: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    pepper_id: Mapped[str] = mapped_column(Text, server_default="")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class AuditRow(Base):
    """Append-only: a trigger and missing grants refuse anything else. The database chains each (`audit_chain`)."""

    __tablename__ = "audit_record"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    actor_kind: Mapped[str] = mapped_column(Text)
    actor_id: Mapped[UUID | None]
    tenant_id: Mapped[UUID | None]
    action: Mapped[str] = mapped_column(Text)
    target_id: Mapped[UUID | None]
    request_id: Mapped[str] = mapped_column(Text, server_default="")
    client_ip: Mapped[str] = mapped_column(Text, server_default="")
    details: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")


class PersonRow(Base):
    __tablename__ = "person"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(Text)
    name: Mapped[str] = mapped_column(Text, server_default="")
    language: Mapped[str] = mapped_column(Text, server_default="en")
    status: Mapped[str] = mapped_column(Text, server_default="active")
    password_hash: Mapped[str | None] = mapped_column(Text)
    password_changed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    totp_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    totp_confirmed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    totp_last_step: Mapped[int] = mapped_column(BigInteger, server_default="0")
    sessions_valid_from: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default="epoch")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    deleted_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class MemberRow(Base):
    __tablename__ = "member"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenant.id"))
    project_id: Mapped[UUID | None]
    person_id: Mapped[UUID] = mapped_column(ForeignKey("person.id"))
    role: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default="active")
    origin: Mapped[str] = mapped_column(Text, server_default="")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class ServiceAccountRow(Base):
    __tablename__ = "service_account"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    project_id: Mapped[UUID]
    name: Mapped[str] = mapped_column(Text)
    role: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(Text, server_default="active")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class InviteRow(Base):
    __tablename__ = "invite"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenant.id"))
    project_id: Mapped[UUID | None]
    role: Mapped[str | None] = mapped_column(Text)
    operator_role: Mapped[str | None] = mapped_column(Text)
    email: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    invited_by: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    accepted_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class SessionRow(Base):
    __tablename__ = "person_session"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    person_id: Mapped[UUID] = mapped_column(ForeignKey("person.id"))
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    method: Mapped[str] = mapped_column(Text)
    provider_id: Mapped[UUID | None]
    second_factor: Mapped[bool] = mapped_column(server_default="false")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    seen_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    ended_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    ip: Mapped[str] = mapped_column(Text, server_default="")
    user_agent: Mapped[str] = mapped_column(Text, server_default="")


class PersonTokenRow(Base):
    __tablename__ = "person_token"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    person_id: Mapped[UUID] = mapped_column(ForeignKey("person.id"))
    purpose: Mapped[str] = mapped_column(Text)
    digest: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    expires_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    used_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class RecoveryCodeRow(Base):
    __tablename__ = "recovery_code"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    person_id: Mapped[UUID] = mapped_column(ForeignKey("person.id"))
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    used_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
