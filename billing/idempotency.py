"""One bill per idempotency key, whatever gateways, Valkey and networks did: decided where events are posted.

A gateway lets one request of a key run at a time. When what it goes by is lost (Valkey was emptied, a gateway died
before it could say how its request ended) a repeat may run too. Its event carries the same digest, so it is met here:
the first one posted is billed, the others are kept as `repeat` and cost nothing; the platform bears what they used.
The digest is of key and body: another body under the key is another request, and billed.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import idempotency_queries as queries
from billing.types import Outcome, UsageEvent
from core.db import transaction
from core.tasks import TaskContext

WINDOW_US = 24 * 3600 * 1_000_000  # two of one key admitted closer than this are one bill
KEPT_FOR = timedelta(days=31)  # longer than any spool may wait
FORGET_AT_ONCE = 5000
FORGET_ROUNDS_MAX = 20


class Known(msgspec.Struct, frozen=True):
    """A generation that was posted under a key: billed, or the repeat of one that was."""

    tenant_id: UUID
    digest: bytes
    event_id: UUID
    admitted_us: int
    repeat_of: UUID | None = None


def decide(known: Iterable[Known], events: Sequence[UsageEvent]) -> list[Known]:
    """Return a row for each event that is not known yet, in their order. Pure.

    An event is billed unless another one of its tenant and key is, that was admitted within 24 hours of it.
    """
    seen: dict[tuple[UUID, bytes], list[Known]] = {}
    for row in known:
        seen.setdefault((row.tenant_id, row.digest), []).append(row)
    fresh = []
    for event in events:
        rows = seen.setdefault((event.tenant_id, event.idempotency), [])
        if any(row.event_id == event.id for row in rows):
            continue
        bills = (row.event_id for row in rows if row.repeat_of is None and _near(row.admitted_us, event))
        row = Known(event.tenant_id, event.idempotency, event.id, event.admitted_at_us, next(bills, None))
        rows.append(row)
        fresh.append(row)
    return fresh


def _near(admitted_us: int, event: UsageEvent) -> bool:
    return abs(admitted_us - event.admitted_at_us) < WINDOW_US


async def bill_once(
    session: AsyncSession, events: Sequence[UsageEvent], objections: Sequence[str]
) -> Sequence[UsageEvent]:
    """Return the events with those that repeat a billed one made free, and remember which is which.

    The caller holds the locks of the tenants' money, so that no two posters decide on one key at a time. Only what
    would be billed counts: an ending without a bill leaves its key free.
    """
    keyed = [
        event
        for event, objected in zip(events, objections, strict=True)
        if event.idempotency and event.amount_pico and not objected
    ]
    if not keyed:
        return events
    rows = await queries.known(session, {event.tenant_id for event in keyed}, {event.idempotency for event in keyed})
    known = [Known(row.tenant_id, bytes(row.digest), row.event_id, row.admitted_us, row.repeat_of) for row in rows]
    fresh = decide(known, keyed)
    if fresh:
        await queries.insert(session, [msgspec.structs.asdict(row) for row in fresh])
    repeats = {(row.tenant_id, row.event_id) for row in (*known, *fresh) if row.repeat_of is not None}
    return [_free(event) if (event.tenant_id, event.id) in repeats else event for event in events]


def _free(event: UsageEvent) -> UsageEvent:
    return msgspec.structs.replace(event, outcome=Outcome.REPEAT, amount_pico=0)


async def forget(context: TaskContext) -> None:
    """Delete what is too old for any repeat, some at a time."""
    before = context.clock.now() - KEPT_FOR
    for _ in range(FORGET_ROUNDS_MAX):
        async with transaction(context.sessions) as session:
            count = await queries.forget(session, before, FORGET_AT_ONCE)
        if count < FORGET_AT_ONCE:
            return
