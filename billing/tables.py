"""Tables of money. The migration `0004_billing` is the truth on constraints and triggers; this mirrors the columns."""

from datetime import date, datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Date,
    DateTime,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from core.db import Base

NOW = text("clock_timestamp()")
Pico = Numeric(38, 0)
Instant = DateTime(timezone=True)


class PriceBookRow(Base):
    __tablename__ = "price_book"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    currency: Mapped[str] = mapped_column(Text)
    for_plan: Mapped[bool] = mapped_column(server_default="false")
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)


class PriceVersionRow(Base):
    __tablename__ = "price_version"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    book_id: Mapped[UUID]
    state: Mapped[str] = mapped_column(Text, server_default="draft")
    note: Mapped[str] = mapped_column(Text, server_default="")
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)
    effective_at: Mapped[datetime | None] = mapped_column(Instant)
    published_at: Mapped[datetime | None] = mapped_column(Instant)
    content_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)


class PriceItemRow(Base):
    __tablename__ = "price_item"

    version_id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(primary_key=True)
    tier: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    meter: Mapped[str] = mapped_column(Text, primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(primary_key=True)
    above_tokens: Mapped[int] = mapped_column(BigInteger, primary_key=True, server_default="0")
    unit_price_pico: Mapped[int] = mapped_column(BigInteger)


class PriceDiscountRow(Base):
    """How a tenant's own prices of a version came about."""

    __tablename__ = "price_discount"

    version_id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(primary_key=True)
    tier: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    off_ppm: Mapped[int] = mapped_column(Integer)


class LedgerAccountRow(Base):
    __tablename__ = "ledger_account"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None]
    code: Mapped[str] = mapped_column(Text)
    currency: Mapped[str] = mapped_column(Text)
    normal: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)


class LedgerBalanceRow(Base):
    __tablename__ = "ledger_balance"

    account_id: Mapped[UUID] = mapped_column(primary_key=True)
    debit: Mapped[Decimal] = mapped_column(Pico, server_default="0")
    credit: Mapped[Decimal] = mapped_column(Pico, server_default="0")
    bounded: Mapped[bool] = mapped_column(Boolean, server_default="false")
    credit_limit: Mapped[Decimal] = mapped_column(Pico, server_default="0")


class BillingProfileRow(Base):
    __tablename__ = "billing_profile"

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(Text)
    mode: Mapped[str] = mapped_column(Text)
    unbilled_account: Mapped[UUID | None]
    revenue_account: Mapped[UUID]
    min_charge_account: Mapped[UUID]
    overrun_account: Mapped[UUID]
    version: Mapped[int] = mapped_column(BigInteger, server_default="1")
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)


class CreditLotRow(Base):
    __tablename__ = "credit_lot"

    account_id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    source: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(SmallInteger, server_default="100")
    expires_at: Mapped[datetime | None] = mapped_column(Instant)
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)


class LedgerTxRow(Base):
    __tablename__ = "ledger_tx"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    kind: Mapped[str] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(Text)
    body_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)
    actor: Mapped[str] = mapped_column(Text, server_default="")
    note: Mapped[str] = mapped_column(Text, server_default="")
    booked_at: Mapped[datetime] = mapped_column(Instant, server_default=NOW)
    usage_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)


class LedgerTransferRow(Base):
    __tablename__ = "ledger_transfer"

    tx_id: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    debit_account: Mapped[UUID]
    credit_account: Mapped[UUID]
    currency: Mapped[str] = mapped_column(Text)
    amount: Mapped[Decimal] = mapped_column(Pico)


class UsageEventRow(Base):
    """Partitioned by `day`, the day of the id itself in UTC."""

    __tablename__ = "usage_event"

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)
    tx_id: Mapped[UUID]
    project_id: Mapped[UUID]
    key_id: Mapped[UUID]
    model_id: Mapped[UUID]
    version_id: Mapped[UUID]
    deployment_id: Mapped[UUID]
    price_version_id: Mapped[UUID]
    model: Mapped[str] = mapped_column(Text)
    endpoint: Mapped[str] = mapped_column(Text)
    tier: Mapped[int] = mapped_column(SmallInteger)
    currency: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    count_source: Mapped[str] = mapped_column(Text)
    stream: Mapped[bool]
    http_status: Mapped[int] = mapped_column(SmallInteger)
    input_uncached: Mapped[int] = mapped_column(BigInteger)
    input_cached: Mapped[int] = mapped_column(BigInteger)
    input_cache_write: Mapped[int] = mapped_column(BigInteger)
    output: Mapped[int] = mapped_column(BigInteger)
    reasoning: Mapped[int] = mapped_column(BigInteger)
    amount_pico: Mapped[int] = mapped_column(BigInteger)
    min_charge_pico: Mapped[int] = mapped_column(BigInteger, server_default="0")
    admitted_at: Mapped[datetime] = mapped_column(Instant)
    ended_at: Mapped[datetime] = mapped_column(Instant)
    queue_us: Mapped[int] = mapped_column(BigInteger)
    ttft_us: Mapped[int] = mapped_column(BigInteger)
    upstream_id: Mapped[str] = mapped_column(Text)
    posted_at: Mapped[datetime] = mapped_column(Instant)
    digest: Mapped[bytes | None] = mapped_column(LargeBinary)
    preemptions: Mapped[int | None] = mapped_column(SmallInteger)
    waste_tokens: Mapped[int | None] = mapped_column(BigInteger)
    waste_us: Mapped[int | None] = mapped_column(BigInteger)
    wait: Mapped[list[int] | None] = mapped_column(ARRAY(BigInteger))  # `core.waits.Wait`, its members in their order


class UsageRollupRow(Base):
    """Additive sums by minute of admission."""

    __tablename__ = "usage_rollup"

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    minute: Mapped[datetime] = mapped_column(Instant, primary_key=True)
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    key_id: Mapped[UUID] = mapped_column(primary_key=True)
    model_id: Mapped[UUID] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(Text, primary_key=True)
    endpoint: Mapped[str] = mapped_column(Text, primary_key=True)
    tier: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    outcome: Mapped[str] = mapped_column(Text, primary_key=True)
    price_version_id: Mapped[UUID] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(Text)
    requests: Mapped[int] = mapped_column(BigInteger)
    input_uncached: Mapped[Decimal] = mapped_column(Pico)
    input_cached: Mapped[Decimal] = mapped_column(Pico)
    input_cache_write: Mapped[Decimal] = mapped_column(Pico)
    output: Mapped[Decimal] = mapped_column(Pico)
    reasoning: Mapped[Decimal] = mapped_column(Pico)
    amount_pico: Mapped[Decimal] = mapped_column(Pico)
    min_charge_pico: Mapped[Decimal] = mapped_column(Pico, server_default="0")


class UsageQuarantineRow(Base):
    __tablename__ = "usage_quarantine"

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    amount_pico: Mapped[Decimal] = mapped_column(Pico)
    admitted_at: Mapped[datetime] = mapped_column(Instant)
    model: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    raw_usage: Mapped[str] = mapped_column(Text)
    payload: Mapped[bytes] = mapped_column(LargeBinary)
    quarantined_at: Mapped[datetime] = mapped_column(Instant)
    seq: Mapped[int] = mapped_column(BigInteger)


class UsageDecisionRow(Base):
    """What an operator decided on a quarantined event."""

    __tablename__ = "usage_decision"

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    action: Mapped[str] = mapped_column(Text)
    event_id: Mapped[UUID | None]
    reason: Mapped[str] = mapped_column(Text)
    decided_by: Mapped[UUID]
    decided_at: Mapped[datetime] = mapped_column(Instant)
