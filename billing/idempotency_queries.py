"""The SQL of generations that were asked for with an idempotency key."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CursorResult, Row, text
from sqlalchemy.ext.asyncio import AsyncSession

_KNOWN = text(
    """
    SELECT tenant_id, digest, event_id, admitted_us, repeat_of FROM usage_idempotency
    WHERE tenant_id = ANY(:tenants) AND digest = ANY(:digests)
    """
)
_INSERT = text(
    """
    INSERT INTO usage_idempotency (tenant_id, digest, event_id, admitted_us, repeat_of)
    VALUES (:tenant_id, :digest, :event_id, :admitted_us, :repeat_of)
    """
)
_REPEAT_OF = text("SELECT repeat_of FROM usage_idempotency WHERE tenant_id = :tenant AND event_id = :event")
_FORGET = text(
    """
    DELETE FROM usage_idempotency WHERE (tenant_id, event_id) IN (
        SELECT tenant_id, event_id FROM usage_idempotency
        WHERE admitted_us < CAST(extract(epoch FROM CAST(:before AS timestamptz)) * 1000000 AS bigint)
        ORDER BY admitted_us LIMIT :most
    )
    """
)


async def known(session: AsyncSession, tenant_ids: Iterable[UUID], digests: Iterable[bytes]) -> Sequence[Row[Any]]:
    """Return what is known of these tenants' keys, a row per generation."""
    values = {"tenants": list(tenant_ids), "digests": list(digests)}
    return (await session.execute(_KNOWN, values)).all()


async def insert(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    await session.execute(_INSERT, rows)


async def repeat_of(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> UUID | None:
    """Return the generation that was billed in this one's place."""
    found: UUID | None = (await session.execute(_REPEAT_OF, {"tenant": tenant_id, "event": event_id})).scalar()
    return found


async def forget(session: AsyncSession, before: datetime, most: int) -> int:
    """Delete what was admitted before, at most so many rows; returns how many."""
    result = await session.execute(_FORGET, {"before": before, "most": most})
    assert isinstance(result, CursorResult)  # noqa: S101 - what a DELETE returns
    return int(result.rowcount)
