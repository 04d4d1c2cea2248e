"""The receipt of one generation: what was counted, at which prices, and what it came to."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    errors,
    idempotency_queries,
    price_book,
    pricing,
    quarantine_queries,
    queries,
    rerating_queries,
    usage_days,
)
from billing.price_table import price_text
from billing.spool_format import decode
from billing.types import Meter, Outcome, PriceSchedule, PriceStep, UsageEvent
from core import keyspace
from core.ids import IdKind, format_id, uuid7_time
from core.money import Currency, format_pico
from core.resp import RespClient
from core.tiers import Tier
from core.usage import TokenUsage
from core.waits import Wait


class ReceiptLine(msgspec.Struct, frozen=True):
    """One kind of token, or a price per request; `unit_price` is per million tokens or per request, both decimals.

    Of `min_charge` it is the minimum, and the amount what was missing to it.
    """

    meter: Meter
    quantity: int
    unit_price: str
    amount: str


class ReceiptRerating(msgspec.Struct, frozen=True):
    """The generation rated again: what it came to from then on, and at which price version, in which transaction."""

    price_version_id: UUID
    amount: str
    transaction_id: UUID
    at: datetime
    note: str


class Receipt(msgspec.Struct, frozen=True):
    """What a generation cost. Amounts are decimal strings of the currency; the lines add up to `amount` exactly.

    `state` is ``posted``; ``quarantined`` while a person looks at it, or ``dismissed`` by one: then nothing is charged.
    """

    id: UUID
    state: str
    model: str
    endpoint: str
    tier: Tier
    outcome: Outcome
    http_status: int
    stream: bool
    count_source: str
    currency: Currency
    price_version_id: UUID
    lines: tuple[ReceiptLine, ...]
    amount: str
    admitted_at: datetime
    ended_at: datetime
    queue_us: int
    ttft_us: int
    upstream_id: str
    project_id: UUID
    key_id: UUID
    transaction_id: UUID | None = None
    above_tokens: int = 0  # of the long-context step that priced it; 0: none
    note: str = ""
    preemptions: int = 0  # how often its place went to a higher tier; what that wasted is not charged
    wait: Wait | None = None  # why it waited for its place; None when it did not
    version_id: UUID | None = None  # of the model: which of its versions served
    reratings: tuple[ReceiptRerating, ...] = ()  # oldest first; `amount` and lines stay what was billed at first

    @property
    def effective_amount(self) -> str:
        """What it comes to now."""
        return self.reratings[-1].amount if self.reratings else self.amount


def lines(usage: TokenUsage, s: PriceSchedule, charged: int) -> tuple[ReceiptLine, ...]:
    """Return a line per kind of token that was counted, and of what was lifted to the minimum; they sum to `charged`.

    Pure. Of an ending that is not charged the tokens are shown with amounts of 0.
    """
    any_usage = usage.input_total + usage.output_total > 0
    unit = pricing.step_of(s, usage.input_total)
    parts = (
        (Meter.INPUT, usage.input_uncached, unit.input),
        (Meter.CACHED_INPUT, usage.input_cached, unit.cached_input),
        (Meter.CACHE_WRITE, usage.input_cache_write, unit.cache_write),
        (Meter.OUTPUT, usage.output, unit.output),
        (Meter.REASONING, usage.reasoning, unit.reasoning),
        (Meter.REQUEST, 1 if any_usage and s.request else 0, s.request),
    )
    found = [
        ReceiptLine(meter, quantity, price_text(meter, price), format_pico(quantity * price if charged else 0))
        for meter, quantity, price in parts
        if quantity
    ]
    lifted = pricing.min_charge(charged, usage, s)
    if lifted:
        found.append(ReceiptLine(Meter.MIN_CHARGE, 1, price_text(Meter.MIN_CHARGE, s.minimum), format_pico(lifted)))
    return tuple(found)


async def is_pending(client: RespClient, tenant_id: UUID, generation_id: UUID) -> bool:
    """Whether the generation runs or waits to be posted: its receipt will be there soon.

    What a gateway admitted by itself is known to nobody else while it runs (ADR 0032). So where a tenant has such
    requests, any id that may be one of them is taken for one, until it is too old.
    """
    found: int = await client.call("HEXISTS", keyspace.outstanding(tenant_id), generation_id.hex)
    if found:
        return True
    raw: bytes | None = await client.call("GET", keyspace.local(tenant_id))
    if raw is None or generation_id.version != 7:
        return False
    made_us = (generation_id.int >> 80) * 1000  # see `uuid7_time`
    return int(raw) - made_us <= LOCAL_US  # it says when a block was renewed last


async def receipt(session: AsyncSession, tenant_id: UUID, generation_id: UUID) -> Receipt | None:
    """Return the receipt of a tenant's generation; None when it is not posted (see `is_pending`) or not its own.

    Raises:
        PlatformError: RECEIPT_GONE: the events of its day are no longer kept, be they this tenant's or not.
    """
    if generation_id.version != 7:
        return None
    row = await queries.event(session, tenant_id, generation_id, uuid7_time(generation_id))
    if row is not None:
        found = await _posted(session, row)
        return found if found.outcome is not Outcome.REPEAT else await _explained(session, tenant_id, found)
    held = await quarantine_queries.item(session, tenant_id, generation_id)
    if held is None:
        await _require_kept(session, generation_id)
        return None
    if held.event_id is None:
        return _not_billed(held)
    billed = await queries.event(session, tenant_id, held.event_id, uuid7_time(held.event_id))
    if billed is None:
        await _require_kept(session, held.event_id)
        return None
    return msgspec.structs.replace(await _posted(session, billed), id=generation_id, note=_CORRECTED)


async def _require_kept(session: AsyncSession, event_id: UUID) -> None:
    day = uuid7_time(event_id).astimezone(UTC).date()
    if await usage_days.is_dropped(session, day):
        raise errors.receipt_gone(day)


async def _posted(session: AsyncSession, row: Row[Any]) -> Receipt:
    usage = TokenUsage(row.input_uncached, row.input_cached, row.input_cache_write, row.output, row.reasoning)
    version = await price_book.load_version(session, row.price_version_id)
    schedule = version.schedule(row.model_id, Tier(row.tier), row.tenant_id) if version else None
    outcome = Outcome(row.outcome)
    shown: tuple[ReceiptLine, ...] = ()
    above = 0
    if schedule is not None:
        shown = lines(usage, schedule, pricing.charge(usage, schedule, outcome))
        unit = pricing.step_of(schedule, usage.input_total)
        above = unit.above if isinstance(unit, PriceStep) else 0
    return Receipt(
        row.id,
        "posted",
        row.model,
        row.endpoint,
        Tier(row.tier),
        outcome,
        row.http_status,
        row.stream,
        row.count_source,
        Currency(row.currency),
        row.price_version_id,
        shown,
        format_pico(row.amount_pico),
        row.admitted_at,
        row.ended_at,
        row.queue_us,
        row.ttft_us,
        row.upstream_id,
        row.project_id,
        row.key_id,
        row.tx_id,
        above,
        preemptions=row.preemptions or 0,
        wait=Wait(*row.wait) if row.wait else None,
        version_id=row.version_id,
        reratings=tuple(
            ReceiptRerating(line.right_version, format_pico(line.to_pico), line.tx_id, line.booked_at, line.note)
            for line in await rerating_queries.lines_of(session, row.tenant_id, row.id)
        ),
    )


async def _explained(session: AsyncSession, tenant_id: UUID, repeat: Receipt) -> Receipt:
    billed = await idempotency_queries.repeat_of(session, tenant_id, repeat.id)
    name = "another one" if billed is None else format_id(IdKind.GENERATION, billed)
    note = f"This came with the same Idempotency-Key as {name}, which is billed; this one is not."
    return msgspec.structs.replace(repeat, note=note)


_NOTES = {
    "quarantined": "The count of this generation is being checked; it is not charged meanwhile.",
    "dismissed": "The count of this generation could not be right; it is not charged.",
}
LOCAL_US = 600_000_000  # how old a request may be that a gateway admitted by itself
_CORRECTED = "A person corrected the count of this generation before it was charged."


def _not_billed(row: Row[Any]) -> Receipt:
    event: UsageEvent = decode(row.payload)
    state = "quarantined" if row.action is None else "dismissed"
    return Receipt(
        event.id,
        state,
        event.model,
        event.endpoint,
        event.tier,
        event.outcome,
        event.http_status,
        event.stream,
        event.count_source.value,
        event.currency,
        event.price_version_id,
        (),
        format_pico(0),
        row.admitted_at,
        row.admitted_at,
        event.queue_us,
        event.ttft_us,
        event.upstream_id,
        event.project_id,
        event.key_id,
        None,
        note=_NOTES[state],
        wait=event.wait,
        version_id=event.version_id,
    )
