"""Given credit for tests, and what is left in each lot."""

from datetime import UTC, datetime
from uuid import UUID

import msgspec

from billing import adjustments, lots
from billing.adjustment_kinds import Adjustment
from billing.adjustments import Asked
from billing.lots import Grant, LotSource
from billing.types import PriceSchedule, UsageEvent
from core.db import Sessions, transaction
from core.ids import new_uuid
from core.money import parse_pico
from core.tiers import Tier
from core.usage import TokenUsage
from tenants.types import Responsible
from tests.factories import billing as make


def person(number: int, *, operator: int = 0) -> Responsible:
    """Somebody confirmed, signed in as the operator that is theirs, or as another."""
    one = UUID(f"01890000-0000-7000-8000-00000000d{number:03}")
    return Responsible(UUID(int=one.int + 16**8 * (1 + operator)), (one,), one, signed_in=True)


ASKER, OTHER = person(1), person(2)


def asked(
    now: datetime, key: str = "", *, by: Responsible = ASKER, note: str = "why", alone_max_pico: int = 10**30
) -> Asked:
    return Asked(by, note, key or new_uuid().hex, alone_max_pico, now)


async def give(
    sessions: Sessions,
    tenant_id: UUID,
    amount: str,
    now: datetime,
    *,
    source: LotSource = LotSource.PROMO,
    expires_at: datetime | None = None,
    models: tuple[UUID, ...] = (),
    tiers: tuple[Tier, ...] = (),
) -> Adjustment:
    grant = Grant(parse_pico(amount), source, expires_at, models, tiers)
    async with transaction(sessions) as session:
        return await adjustments.give(session, tenant_id, grant, asked(now))


async def buy(
    sessions: Sessions,
    tenant_id: UUID,
    amount: str,
    now: datetime,
    expires_at: datetime | None,
    *,
    key: str = "",
    may_expire: bool = True,
    alone_max_pico: int = 10**30,
) -> Adjustment:
    """A top-up that may expire."""
    async with transaction(sessions) as session:
        who = asked(now, key, alone_max_pico=alone_max_pico)
        return await adjustments.top_up(
            session, tenant_id, parse_pico(amount), who, expires_at=expires_at, may_expire=may_expire
        )


async def left(sessions: Sessions, tenant_id: UUID) -> list[int]:
    """What is in each lot, in the order in which usage takes from them."""
    async with transaction(sessions) as session:
        return [lot.available_pico for lot in await lots.all_of(session, tenant_id)]


async def expire(sessions: Sessions, tenant_id: UUID, now: datetime) -> int:
    async with transaction(sessions) as session:
        return await lots.expire(session, tenant_id, now)


def event_at(tenant_id: UUID, s: PriceSchedule, at: datetime, units: str, model_id: UUID = make.MODEL) -> UsageEvent:
    """Usage admitted at that instant whose price is `units`: tokens of input at 2.00 per million."""
    micros = (at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    made = make.event(
        tenant_id,
        s,
        TokenUsage(parse_pico(units) // 2_000_000, 0, 0, 0, 0),
        event_id=make.uuid7_at(int(micros), new_uuid().int & 0xFFFF_FFFF),
    )
    us = int(micros) * 1_000_000
    return msgspec.structs.replace(made, admitted_at_us=us, ended_at_us=us + 40_000_000, model_id=model_id)
