"""A tenant asks for a higher limit; an operator approves or declines with a note."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import limit_queries, limits, own_limits
from tenants.errors import invalid, not_found
from tenants.limit_tables import LimitRequestRow
from tenants.limits import Why
from tenants.types import LimitLevel, LimitMetric, LimitRule, LimitSlot

OPEN_MAX = 50
"""Requests of one tenant that wait for an answer."""


class RequestState(StrEnum):
    """Of a request."""

    OPEN = "open"
    APPROVED = "approved"
    DECLINED = "declined"


@dataclass(frozen=True, slots=True)
class LimitRequest:
    """What was asked for, and the answer. `granted` may differ from `amount`."""

    id: UUID
    slot: LimitSlot
    amount: int
    reason: str
    state: RequestState
    asked_by_kind: str
    asked_by_id: UUID | None
    created_at: datetime
    decided_by: UUID | None
    decided_at: datetime | None
    note: str
    granted: int | None


def _request(row: LimitRequestRow) -> LimitRequest:
    return LimitRequest(
        id=row.id,
        slot=LimitSlot(
            LimitLevel(row.level),
            LimitMetric(row.metric),
            model=row.model,
            project_id=row.project_id,
            key_id=row.key_id,
            tenant_id=row.tenant_id,
        ),
        amount=int(row.amount),
        reason=row.reason,
        state=RequestState(row.state),
        asked_by_kind=row.asked_by_kind,
        asked_by_id=row.asked_by_id,
        created_at=row.created_at,
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        note=row.note,
        granted=None if row.granted is None else int(row.granted),
    )


async def ask(session: AsyncSession, slot: LimitSlot, amount: int, why: Why) -> LimitRequest:
    """Ask for a higher hard limit in a slot of the tenant.

    Raises:
        PlatformError: invalid when there is no such limit or it is as high already, conflict for too many requests.
    """
    assert slot.tenant_id is not None  # noqa: S101 - tenants ask
    await limits.check_target(session, slot)
    here = [rule.amount for rule in await own_limits.allowed(session, slot) if _same(rule.slot, slot)]
    if not here:
        raise invalid("metric", "There is no such limit here that could be raised.")
    if amount <= here[0]:
        raise invalid("amount", f"{limits.amount_out(slot.metric, here[0])} is allowed already. Ask for more.")
    if await limit_queries.lock_tenant(session, slot.tenant_id) is None:
        raise not_found(IdKind.TENANT)
    if await limit_queries.count_open_requests(session, slot.tenant_id) >= OPEN_MAX:
        message = f"{OPEN_MAX} requests wait for an answer already."
        raise PlatformError("TOO_MANY_REQUESTS_OPEN", ErrorKind.CONFLICT, message)
    row = LimitRequestRow(
        id=new_uuid(),
        tenant_id=slot.tenant_id,
        level=slot.level,
        project_id=slot.project_id,
        key_id=slot.key_id,
        model=slot.model,
        metric=slot.metric,
        amount=amount,
        reason=why.reason,
        state=RequestState.OPEN,
        asked_by_kind=why.actor.kind,
        asked_by_id=why.actor.id,
        created_at=why.clock.now(),
        note="",
    )
    session.add(row)
    await session.flush()
    return _request(row)


def _same(rule: LimitSlot, slot: LimitSlot) -> bool:
    return (rule.level, rule.model) == (slot.level, slot.model)


async def get(session: AsyncSession, tenant_id: UUID, request_id: UUID) -> LimitRequest:
    row = await limit_queries.request(session, tenant_id, request_id)
    if row is None:
        raise not_found(IdKind.LIMIT_REQUEST)
    return _request(row)


async def list_requests(
    session: AsyncSession,
    tenant_id: UUID | None,
    *,
    state: RequestState | None = None,
    asked_by: UUID | None = None,
    after: UUID | None,
    limit: int,
) -> Sequence[LimitRequest]:
    """Return at most `limit` requests, newest first, of one tenant or of all when None; `asked_by` narrows."""
    rows = await limit_queries.requests(session, tenant_id, state, asked_by, after=after, limit=limit)
    return [_request(row) for row in rows]


async def approve(
    session: AsyncSession, tenant_id: UUID, request_id: UUID, amount: int | None, why: Why
) -> tuple[LimitRequest, LimitRule, int | None]:
    """Grant what was asked for, or another amount; the reason is the note.

    Returns:
        The request, the rule, and the rule's amount before, None when there was none.

    Raises:
        PlatformError: not_found, conflict when it is decided already.
    """
    row = await _open(session, tenant_id, request_id)
    request = _request(row)
    granted = request.amount if amount is None else amount
    rule, before = await limits.set_limit(session, request.slot, granted, why)
    row.granted = granted
    return await _decide(session, row, RequestState.APPROVED, why), rule, before


async def decline(session: AsyncSession, tenant_id: UUID, request_id: UUID, why: Why) -> LimitRequest:
    """Refuse; the reason is the note."""
    return await _decide(session, await _open(session, tenant_id, request_id), RequestState.DECLINED, why)


async def _open(session: AsyncSession, tenant_id: UUID, request_id: UUID) -> LimitRequestRow:
    row = await limit_queries.request(session, tenant_id, request_id, lock=True)
    if row is None:
        raise not_found(IdKind.LIMIT_REQUEST)
    if row.state != RequestState.OPEN:
        raise PlatformError("ALREADY_DECIDED", ErrorKind.CONFLICT, f"This request is {row.state} already.")
    return row


async def _decide(session: AsyncSession, row: LimitRequestRow, state: RequestState, why: Why) -> LimitRequest:
    row.state, row.note = state, why.reason
    row.decided_by, row.decided_at = why.actor.id, why.clock.now()
    await session.flush()
    return _request(row)
