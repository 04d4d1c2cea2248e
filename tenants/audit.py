"""The audit trail: who did what, append-only, in the transaction that did it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.ids import new_uuid
from tenants import queries
from tenants.tables import AuditRow
from tenants.types import Actor, ActorKind


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One act. `details` hold ids and names, never a secret."""

    id: UUID
    recorded_at: datetime
    actor: Actor
    tenant_id: UUID | None
    action: str
    target_id: UUID | None
    details: Mapping[str, Any]


def record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    *,
    tenant_id: UUID | None = None,
    target_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Add a record to the open transaction; `action` reads like ``api_key.revoke``."""
    session.add(
        AuditRow(
            id=new_uuid(),
            actor_kind=actor.kind,
            actor_id=actor.id,
            tenant_id=tenant_id,
            action=action,
            target_id=target_id,
            request_id=actor.request_id,
            details=dict(details or {}),
        )
    )


async def list_records(
    session: AsyncSession, tenant_id: UUID | None, *, after: UUID | None, limit: int
) -> Sequence[AuditRecord]:
    """Return at most `limit` records, newest first, of one tenant, or of everybody when None."""
    rows = await queries.audit_records(session, tenant_id, after, limit)
    return [
        AuditRecord(
            id=row.id,
            recorded_at=row.recorded_at,
            actor=Actor(ActorKind(row.actor_kind), row.actor_id, row.request_id),
            tenant_id=row.tenant_id,
            action=row.action,
            target_id=row.target_id,
            details=row.details,
        )
        for row in rows
    ]
