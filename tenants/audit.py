"""The audit trail: who did what, append-only, in the transaction that did it. `audit_chain` proves it whole."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.db import Sessions, transaction
from core.ids import new_uuid
from tenants import audit_queries as queries
from tenants.audit_chain import Head, head
from tenants.errors import invalid
from tenants.tables import AuditRow
from tenants.types import Actor, ActorKind, AuditFilter

TEXT_CHARACTERS_MAX = 100
TEXT_SPAN_MAX = timedelta(days=92)
EXPORT_MAX = 500_000
EXPORT_PAGE = 1000


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One act, with its place in the chain. `details_text` is JSON, to the byte as it was hashed; never a secret."""

    id: UUID
    recorded_at: datetime
    actor: Actor
    tenant_id: UUID | None
    action: str
    target_id: UUID | None
    details_text: str
    seq: int
    prev_hash: bytes
    hash: bytes

    @property
    def details(self) -> Mapping[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.details_text)
        return found


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
            client_ip=actor.client_ip,
            tenant_id=tenant_id,
            action=action,
            target_id=target_id,
            request_id=actor.request_id,
            details=dict(details or {}),
        )
    )


def _record(row: queries.TrailRow) -> AuditRecord:
    return AuditRecord(
        id=row.id,
        recorded_at=row.recorded_at,
        actor=Actor(ActorKind(row.actor_kind), row.actor_id, row.request_id, row.client_ip),
        tenant_id=row.tenant_id,
        action=row.action,
        target_id=row.target_id,
        details_text=row.details,
        seq=row.seq,
        prev_hash=bytes(row.prev_hash),
        hash=bytes(row.hash),
    )


def checked(wanted: AuditFilter, now: datetime) -> AuditFilter:
    """Return the filter, its search for text bounded in time.

    Raises:
        PlatformError: a text that is too long, or a span too wide to look through every record of it.
    """
    if not wanted.text:
        return wanted
    if len(wanted.text) > TEXT_CHARACTERS_MAX:
        raise invalid("text", f"At most {TEXT_CHARACTERS_MAX} characters.")
    until = wanted.until or now
    since = wanted.since or until - TEXT_SPAN_MAX
    if until - since > TEXT_SPAN_MAX:
        raise invalid("since", f"Text is searched in {TEXT_SPAN_MAX.days} days at most. Narrow the time.")
    return msgspec.structs.replace(wanted, since=since, until=wanted.until)


async def search(
    session: AsyncSession, wanted: AuditFilter, *, after: UUID | None, limit: int
) -> Sequence[AuditRecord]:
    """Return at most `limit` records that match, newest first."""
    return [_record(row) for row in await queries.records(session, wanted, after, limit)]


@dataclass(slots=True)
class Export:
    """Records in the chain's order, page by page; when they are read, what a manifest says of them.

    The end is fixed when the export begins, and records never change: the same question has the same answer. Every
    page is a transaction of its own, so an export holds neither memory nor a connection.
    """

    sessions: Sessions
    wanted: AuditFilter
    newest: Head
    after_seq: int = 0
    records: int = 0
    last: Head = field(default_factory=Head)
    complete: bool = False

    @classmethod
    async def begin(cls, sessions: Sessions, wanted: AuditFilter, after_seq: int) -> "Export":
        """Fix the end at the newest record of now."""
        async with transaction(sessions) as session:
            return cls(sessions, wanted, await head(session), after_seq)

    async def pages(self) -> AsyncIterator[Sequence[AuditRecord]]:
        """Yield at most `EXPORT_MAX` records; `complete` says afterwards whether these were all."""
        at = self.after_seq
        while self.records < EXPORT_MAX:
            async with transaction(self.sessions) as session:
                rows = await queries.records_in_order(session, self.wanted, at, self.newest.seq, EXPORT_PAGE)
            if rows:
                at = rows[-1].seq
                self.records += len(rows)
                self.last = Head(at, bytes(rows[-1].hash))
                yield [_record(row) for row in rows]
            if len(rows) < EXPORT_PAGE:
                self.complete = True
                return
