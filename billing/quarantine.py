"""Usage that was kept from billing: what a person may look at, and what they decide, once and for good.

Nothing is held for it meanwhile: with its batch's settlement the hold of its request went back. Billing it makes a new
event with the counts that an operator gives, at the price version that was frozen at admission; the one in quarantine
stays as it came.
"""

from datetime import date, datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import assess, errors, idempotency, posting, posting_queries, price_book, pricing, quarantine_queries
from billing.spool_format import decode
from billing.types import CountSource, Outcome, UsageEvent
from core.ids import new_uuid
from core.money import Currency
from core.usage import TokenUsage

REASON_MAX_CHARS = 500
TOKENS_MAX = 10**9  # of one part that an operator gives


class QuarantineState(StrEnum):
    """What became of a quarantined event."""

    WAITING = "waiting"
    BILLED = "billed"  # as another event, with counts that an operator gave
    DISMISSED = "dismissed"  # never billed


class Decision(msgspec.Struct, frozen=True):
    """What was decided, by whom and why. `event_id`: the event that was billed instead."""

    state: QuarantineState
    reason: str
    by: UUID
    at: datetime
    event_id: UUID | None = None


class Item(msgspec.Struct, frozen=True):
    """A quarantined event. `seq` is its place in the queue; `event` is what the gateway wrote."""

    seq: int
    tenant_id: UUID
    id: UUID
    reason: str
    admitted_at: datetime  # within what an instant may be
    quarantined_at: datetime
    raw_usage: str
    event: UsageEvent
    decision: Decision | None = None

    @property
    def state(self) -> QuarantineState:
        return QuarantineState.WAITING if self.decision is None else self.decision.state


class Estimate(msgspec.Struct, frozen=True):
    """What it would be billed with the counts it came with; None with the reason why that cannot be said."""

    amount_pico: int | None
    problem: str = ""


async def get(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> Item:
    """Return a quarantined event.

    Raises:
        PlatformError: NOT_FOUND.
    """
    row = await quarantine_queries.item(session, tenant_id, event_id)
    if row is None:
        raise errors.not_quarantined()
    return _item(row)


async def search(
    session: AsyncSession,
    tenant_id: UUID | None,
    *,
    state: QuarantineState | None = None,
    model: str | None = None,
    reason: str | None = None,
    after: int = 0,
    limit: int,
) -> list[Item]:
    """Return quarantined events, the one that waits longest first, after that place in the queue."""
    rows = await quarantine_queries.search(
        session,
        tenant_id,
        state=None if state is None else state.value,
        model=model,
        reason=reason,
        after=after,
        limit=limit,
    )
    return [_item(row) for row in rows]


def _item(row: Row[Any]) -> Item:
    decision = None
    if row.action is not None:
        decision = Decision(
            QuarantineState(row.action), row.decision_reason, row.decided_by, row.decided_at, row.event_id
        )
    event = decode(row.payload)
    times = (row.admitted_at, row.quarantined_at)
    return Item(row.seq, row.tenant_id, row.id, row.reason, *times, row.raw_usage, event, decision)


async def estimate(session: AsyncSession, item: Item) -> Estimate:
    """Return what the event would be billed with the counts it came with."""
    try:
        return Estimate(await _charge(session, item.event, item.event.usage))
    except ValueError as error:
        return Estimate(None, str(error))


async def _charge(session: AsyncSession, event: UsageEvent, usage: TokenUsage) -> int:
    version = await price_book.load_version(session, event.price_version_id)
    schedule = None if version is None else version.schedule(event.model_id, event.tier, event.tenant_id)
    if version is None or schedule is None or version.currency is not event.currency:
        raise ValueError("its price version has no price for this model, tier and currency")
    return pricing.charge(usage, schedule, event.outcome)


async def amount(session: AsyncSession, tenant_id: UUID, event_id: UUID, usage: TokenUsage) -> int:
    """Return what these counts would be billed. Pico.

    Raises:
        PlatformError: NOT_FOUND, ALREADY_DECIDED, NOT_BILLABLE: it has no price.
    """
    item = await get(session, tenant_id, event_id)
    if item.decision is not None:
        raise errors.already_decided(event_id)
    try:
        return await _charge(session, item.event, usage)
    except ValueError as error:
        raise errors.not_billable(str(error)) from None


async def bill(
    session: AsyncSession, tenant_id: UUID, event_id: UUID, usage: TokenUsage, *, reason: str, by: UUID, now: datetime
) -> Item:
    """Post the event with these counts, exactly once. After the commit, settle it with `credit_figures`.

    Raises:
        PlatformError: NOT_FOUND, ALREADY_DECIDED, NOT_BILLABLE: it has no price, no account, no instant that can be,
            or a repeat of it by the same idempotency key is billed.
    """
    profiles = {row.tenant_id: row for row in await posting_queries.lock_profiles(session, [tenant_id])}
    item = await get(session, tenant_id, event_id)
    try:
        amount_pico = await _charge(session, item.event, usage)
    except ValueError as error:
        raise errors.not_billable(str(error)) from None
    corrected = msgspec.structs.replace(
        item.event,
        id=new_uuid(),
        usage=usage,
        amount_pico=amount_pico,
        count_source=CountSource.OPERATOR,
        quarantine="",
        raw_usage="",
    )
    version = await price_book.load_version(session, corrected.price_version_id)
    currency = Currency(profiles[tenant_id].currency) if profiles else None
    day = assess.day_number(corrected.id)
    objection = assess.objection(corrected, version, currency, day)
    if objection:
        raise errors.not_billable(objection)
    await _decide(session, item, billed_as=corrected.id, reason=reason, by=by, now=now)
    (corrected,) = await idempotency.bill_once(session, [corrected], [objection])
    if corrected.outcome is Outcome.REPEAT:
        raise errors.not_billable("another request with its Idempotency-Key is billed already; dismiss this one")
    line = assess.copy_line(corrected, new_uuid().hex, assess.min_charge(corrected, version))
    await posting_queries.ensure_partition(session, date.fromordinal(day))
    await posting_queries.copy_incoming(session, line.encode())
    await posting.post_incoming(session, profiles)
    return await get(session, tenant_id, event_id)


async def dismiss(
    session: AsyncSession, tenant_id: UUID, event_id: UUID, *, reason: str, by: UUID, now: datetime
) -> Item:
    """Never bill the event.

    Raises:
        PlatformError: NOT_FOUND, ALREADY_DECIDED.
    """
    item = await get(session, tenant_id, event_id)
    await _decide(session, item, billed_as=None, reason=reason, by=by, now=now)
    return await get(session, tenant_id, event_id)


async def _decide(
    session: AsyncSession, item: Item, *, billed_as: UUID | None, reason: str, by: UUID, now: datetime
) -> None:
    done = await quarantine_queries.insert_decision(
        session, item.tenant_id, item.id, billed_as=billed_as, reason=reason, by=by, now=now
    )
    if not done:
        raise errors.already_decided(item.id)
