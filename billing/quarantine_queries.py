"""Queries of quarantined usage and of what was decided on it. What a tenant owns takes `tenant_id` first."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

_ITEM = """
    SELECT q.*, d.action, d.event_id, d.reason AS decision_reason, d.decided_by, d.decided_at
    FROM usage_quarantine q LEFT JOIN usage_decision d ON d.tenant_id = q.tenant_id AND d.id = q.id
"""
_STATE = "coalesce(d.action, 'waiting')"


async def insert_quarantine(session: AsyncSession, rows: list[Mapping[str, Any]]) -> None:
    """Insert events that are not to be billed by themselves; one that is posted or known already is left out."""
    statement = """
        INSERT INTO usage_quarantine
            (tenant_id, id, reason, amount_pico, admitted_at, model, outcome, raw_usage, payload)
        SELECT :tenant_id, :id, :reason, :amount_pico, :admitted_at, :model, :outcome, :raw_usage, :payload
        WHERE NOT EXISTS (
            SELECT FROM usage_event WHERE tenant_id = :tenant_id AND id = :id
            AND day = (uuid_extract_timestamp(CAST(:id AS uuid)) AT TIME ZONE 'UTC')::date)
        ON CONFLICT DO NOTHING
    """
    if rows:
        await session.execute(text(statement), rows)


async def item(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> Row[Any] | None:
    """Return a quarantined event with what was decided on it."""
    statement = f"{_ITEM} WHERE q.tenant_id = :tenant AND q.id = :id"
    return (await session.execute(text(statement), {"tenant": tenant_id, "id": event_id})).one_or_none()


async def search(
    session: AsyncSession,
    tenant_id: UUID | None,
    *,
    state: str | None,
    model: str | None,
    reason: str | None,
    after: int,
    limit: int,
) -> list[Row[Any]]:
    """Return quarantined events in the order in which they came; without a tenant, of all.

    Args:
        session: the transaction.
        tenant_id: whose.
        state: waiting, billed or dismissed; None: any.
        model: the public name; None: any.
        reason: a part of the reason, in any case of letters; None: any.
        after: the place of the last one seen; 0 at first.
        limit: most to return.
    """
    statement = f"""
        {_ITEM} WHERE q.seq > :after AND (CAST(:tenant AS uuid) IS NULL OR q.tenant_id = :tenant)
            AND (CAST(:state AS text) IS NULL OR {_STATE} = :state)
            AND (CAST(:model AS text) IS NULL OR q.model = :model)
            AND (CAST(:reason AS text) IS NULL OR strpos(lower(q.reason), lower(:reason)) > 0)
        ORDER BY q.seq LIMIT :limit
    """
    values = {"tenant": tenant_id, "state": state, "model": model, "reason": reason, "after": after, "limit": limit}
    return list((await session.execute(text(statement), values)).all())


async def insert_decision(
    session: AsyncSession,
    tenant_id: UUID,
    event_id: UUID,
    *,
    billed_as: UUID | None,
    reason: str,
    by: UUID,
    now: datetime,
) -> bool:
    """Decide on an event; False when that was done before. `billed_as` is the event that is billed; None: dismissed."""
    statement = """
        INSERT INTO usage_decision (tenant_id, id, action, event_id, reason, decided_by, decided_at)
        VALUES (:tenant, :id, CASE WHEN CAST(:event AS uuid) IS NULL THEN 'dismissed' ELSE 'billed' END, :event,
                :reason, :by, :now)
        ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
    """
    values = {"tenant": tenant_id, "id": event_id, "event": billed_as, "reason": reason, "by": by, "now": now}
    return (await session.execute(text(statement), values)).first() is not None


async def waiting(session: AsyncSession) -> Row[Any]:
    """Return how many wait for a decision, and since when the oldest does."""
    statement = """
        SELECT count(*) AS events, min(q.quarantined_at) AS since FROM usage_quarantine q
        WHERE NOT EXISTS (SELECT FROM usage_decision d WHERE d.tenant_id = q.tenant_id AND d.id = q.id)
    """
    return (await session.execute(text(statement))).one()
