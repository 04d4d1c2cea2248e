"""Tables of identity providers. The migration `…_create_identity` is the truth on constraints; this mirrors it."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import ARRAY, DateTime, ForeignKey, LargeBinary, Text
from sqlalchemy.orm import Mapped, mapped_column

from core.db import Base
from tenants.tables import NOW


class IdentityProviderRow(Base):
    """`tenant_id` is whose own provider it is; without one it is the platform's."""

    __tablename__ = "identity_provider"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(Text, unique=True)
    issuer: Mapped[str] = mapped_column(Text)
    client_id: Mapped[str] = mapped_column(Text)
    client_secret: Mapped[bytes] = mapped_column(LargeBinary, server_default="")
    scopes: Mapped[str] = mapped_column(Text)
    groups_claim: Mapped[str] = mapped_column(Text, server_default="")
    email_domains: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    link_by_email: Mapped[bool] = mapped_column(server_default="false")
    default_role: Mapped[str | None] = mapped_column(Text)
    gateway_audience: Mapped[str] = mapped_column(Text, server_default="")
    enabled: Mapped[bool] = mapped_column(server_default="true")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class GroupMappingRow(Base):
    __tablename__ = "group_mapping"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    provider_id: Mapped[UUID] = mapped_column(ForeignKey("identity_provider.id"))
    group_name: Mapped[str] = mapped_column(Text)
    operator_role: Mapped[str | None] = mapped_column(Text)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenant.id"))
    project_id: Mapped[UUID | None]
    role: Mapped[str | None] = mapped_column(Text)


class PersonIdentityRow(Base):
    """Issuer and subject are who somebody is; an e-mail address is not."""

    __tablename__ = "person_identity"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    provider_id: Mapped[UUID] = mapped_column(ForeignKey("identity_provider.id"))
    subject: Mapped[str] = mapped_column(Text)
    person_id: Mapped[UUID] = mapped_column(ForeignKey("person.id"))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    seen_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))


class ProviderSessionRow(Base):
    """What a session needs of its provider: its tokens, sealed, and when its groups are read next."""

    __tablename__ = "provider_session"

    session_id: Mapped[UUID] = mapped_column(ForeignKey("person_session.id"), primary_key=True)
    provider_id: Mapped[UUID] = mapped_column(ForeignKey("identity_provider.id"))
    subject: Mapped[str] = mapped_column(Text)
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    read_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    due_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
