"""Shapes of given credit, lots and adjustments, for the routes of operators and of members."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.schemas import CurrencyCode, Input, Instant, Output, PositiveAmount, TierName
from billing import lots
from billing.adjustment_kinds import Adjustment
from billing.lots import Grant, Lot, LotSource
from core.ids import IdKind, format_id, parse_id
from core.money import format_pico, parse_pico
from core.tiers import Tier
from tenants import tenants

Why = Annotated[
    str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]*$", description="Why; it stands in the statement.")
]


class GrantIn(Input):
    """Credit that nobody pays for. With models or tiers it pays for use that other credit let in, and opens no door."""

    amount: PositiveAmount
    source: Literal["promo", "goodwill"]
    note: Why
    expires_at: Instant | None = Field(None, description="A whole minute in the future; without it, never.")
    models: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=100, description="Without any: for all.")
    tiers: list[TierName] = Field([], max_length=3, description="Without any: for all.")

    def grant(self) -> Grant:
        models = tuple(sorted({parse_id(IdKind.MODEL, text) for text in self.models}))
        tiers = tuple(sorted({Tier[name.upper()] for name in self.tiers}))
        return Grant(parse_pico(self.amount), LotSource(self.source), self.expires_at, models, tiers)


class ReversalIn(Input):
    """Why it is undone."""

    note: Why


class GrantOut(Output):
    """What is given, and for what it may be used."""

    source: str
    expires_at: datetime | None
    models: list[str]
    tiers: list[str]


class NewTermsOut(Output):
    """How the tenant is to pay."""

    billing_mode: str
    credit_limit: str


class BilledUsageOut(Output):
    """Which quarantined usage is billed, with which counts."""

    generation_id: str
    counts: dict[str, int]


class AdjustmentOut(Output):
    """An adjustment: `pending` until a second person decides, else `posted` or `declined`."""

    id: str
    tenant_id: str
    kind: Literal["grant", "reversal", "top_up", "terms", "usage"]
    amount: str = Field(description="Of terms: how much more may be owed.")
    state: str
    note: str
    requested_by: str
    requested_at: datetime
    decided_by: str | None
    decided_at: datetime | None
    transaction_id: str | None
    reverses: str | None
    expires_at: datetime | None = Field(description="Of a top-up: when what is left of it is the platform's.")
    grant: GrantOut | None
    terms: NewTermsOut | None
    usage: BilledUsageOut | None


class AdjustmentPage(Output):
    """Adjustments, newest first."""

    items: list[AdjustmentOut]
    next_after: str | None


class LotOut(Output):
    """A lot of credit: paid, promo or goodwill, and what is left of it."""

    id: str
    source: str
    granted: str
    available: str
    created_at: datetime
    expires_at: datetime | None
    models: list[str]
    tiers: list[str]


class LotsOut(Output):
    """A tenant's lots in the order in which usage takes from them."""

    currency: CurrencyCode
    items: list[LotOut]


def shown(found: Adjustment) -> AdjustmentOut:
    grant = found.grant
    return AdjustmentOut(
        id=format_id(IdKind.ADJUSTMENT, found.id),
        tenant_id=format_id(IdKind.TENANT, found.tenant_id),
        kind=found.kind,
        amount=format_pico(found.amount_pico),
        state=found.state,
        note=found.note,
        requested_by=format_id(IdKind.OPERATOR, found.requested_by),
        requested_at=found.requested_at,
        decided_by=None if found.decided_by is None else format_id(IdKind.OPERATOR, found.decided_by),
        decided_at=found.decided_at,
        transaction_id=None if found.transaction_id is None else format_id(IdKind.TRANSACTION, found.transaction_id),
        reverses=None if found.reverses is None else format_id(IdKind.TRANSACTION, found.reverses),
        expires_at=found.expires_at,
        grant=None
        if grant is None
        else GrantOut(
            source=grant.source.value,
            expires_at=grant.expires_at,
            models=[format_id(IdKind.MODEL, model) for model in grant.models],
            tiers=[tier.name.lower() for tier in grant.tiers],
        ),
        terms=None
        if found.new_terms is None
        else NewTermsOut(
            billing_mode=found.new_terms.mode.value, credit_limit=format_pico(found.new_terms.credit_limit_pico)
        ),
        usage=None
        if found.billed is None
        else BilledUsageOut(
            generation_id=format_id(IdKind.GENERATION, found.billed.event_id),
            counts=msgspec.structs.asdict(found.billed.usage),
        ),
    )


def lot_shown(lot: Lot) -> LotOut:
    return LotOut(
        id=format_id(IdKind.ACCOUNT, lot.id),
        source=lot.source.value,
        granted=format_pico(lot.granted_pico),
        available=format_pico(lot.available_pico),
        created_at=lot.created_at,
        expires_at=lot.expires_at,
        models=[format_id(IdKind.MODEL, model) for model in lot.models],
        tiers=[tier.name.lower() for tier in lot.tiers],
    )


async def lots_of(session: AsyncSession, tenant_id: UUID) -> LotsOut:
    tenant = await tenants.get(session, tenant_id)
    found = await lots.all_of(session, tenant_id)
    return LotsOut(currency=tenant.currency.value, items=[lot_shown(lot) for lot in found])
