"""Queries of the audit trail and its chain. Operators read the trail of all; a tenant is one of the filters."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.types import AuditFilter

TrailRow = Row[*tuple[Any, ...]]
LIKE_ESCAPES = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})

_COLUMNS = """
    c.seq, c.prev_hash, c.hash, r.id, r.recorded_at, r.actor_kind, r.actor_id, r.client_ip, r.tenant_id, r.action,
    r.target_id, r.request_id, r.details::text AS details
"""


def _where(wanted: AuditFilter) -> tuple[list[str], dict[str, object]]:
    conditions = {
        "r.tenant_id = :tenant_id": ("tenant_id", wanted.tenant_id),
        "r.actor_id = :actor_id": ("actor_id", wanted.actor_id),
        "r.target_id = :target_id": ("target_id", wanted.target_id),
        "r.recorded_at >= :since": ("since", wanted.since),
        "r.recorded_at < :until": ("until", wanted.until),
        "starts_with(r.action, :action)": ("action", wanted.action or None),
        "r.details::text ILIKE :text": ("text", f"%{wanted.text.translate(LIKE_ESCAPES)}%" if wanted.text else None),
    }
    kept = {condition: pair for condition, pair in conditions.items() if pair[1] is not None}
    conditions_kept = list(kept)
    if wanted.to_members and (wanted.text or wanted.actor_id):
        conditions_kept.append("r.actor_kind <> 'operator'")
    return conditions_kept, dict(kept.values())


async def records(session: AsyncSession, wanted: AuditFilter, after: UUID | None, limit: int) -> Sequence[TrailRow]:
    """Return records newest first, continuing after an id."""
    conditions, values = _where(wanted)
    if after is not None:
        conditions.append("r.id < :after")
        values["after"] = after
    where = " AND ".join(conditions) or "true"
    statement = f"""
        SELECT {_COLUMNS} FROM audit_record r JOIN audit_chain c ON c.record_id = r.id
        WHERE {where} ORDER BY r.id DESC LIMIT :limit
    """  # noqa: S608 - the conditions are ours, their values are bound
    return (await session.execute(text(statement), {**values, "limit": limit})).all()


async def records_in_order(
    session: AsyncSession, wanted: AuditFilter, after_seq: int, last_seq: int, limit: int
) -> Sequence[TrailRow]:
    """Return records in the chain's order, those after `after_seq` up to `last_seq`."""
    conditions, values = _where(wanted)
    where = " AND ".join(["c.seq > :after_seq", "c.seq <= :last_seq", *conditions])
    statement = f"""
        SELECT {_COLUMNS} FROM audit_chain c JOIN audit_record r ON r.id = c.record_id
        WHERE {where} ORDER BY c.seq LIMIT :limit
    """  # noqa: S608 - the conditions are ours, their values are bound
    values |= {"after_seq": after_seq, "last_seq": last_seq, "limit": limit}
    return (await session.execute(text(statement), values)).all()


async def freeze(session: AsyncSession) -> None:
    """Let the whole transaction see one instant. Must be its first statement."""
    await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))


async def links(session: AsyncSession, after_seq: int, limit: int) -> Sequence[TrailRow]:
    """Return links of the chain with their records; `id` is null where the record is gone."""
    statement = f"""
        SELECT {_COLUMNS}, c.record_id FROM audit_chain c LEFT JOIN audit_record r ON r.id = c.record_id
        WHERE c.seq > :after_seq ORDER BY c.seq LIMIT :limit
    """  # noqa: S608 - the columns are ours
    return (await session.execute(text(statement), {"after_seq": after_seq, "limit": limit})).all()


async def link_hash(session: AsyncSession, seq: int) -> bytes | None:
    """Return the hash of one link."""
    found = (await session.execute(text("SELECT hash FROM audit_chain WHERE seq = :seq"), {"seq": seq})).scalar()
    return None if found is None else bytes(found)


async def newest(session: AsyncSession) -> tuple[int, bytes] | None:
    """Return the chain's newest link."""
    row = (await session.execute(text("SELECT seq, hash FROM audit_chain ORDER BY seq DESC LIMIT 1"))).one_or_none()
    return None if row is None else (row.seq, bytes(row.hash))


async def first_unchained(session: AsyncSession) -> UUID | None:
    """Return a record that is not in the chain."""
    statement = """
        SELECT r.id FROM audit_record r
        WHERE NOT EXISTS (SELECT FROM audit_chain c WHERE c.record_id = r.id) ORDER BY r.id LIMIT 1
    """
    found: UUID | None = (await session.execute(text(statement))).scalar()
    return found
