"""Queries of credit lots, reversals and adjustments. What a tenant owns takes `tenant_id` first."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

PAGE_MAX = 500


async def insert_lot(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    """Insert a lot of given credit, or of paid credit that expires; its account is open already."""
    statement = """
        INSERT INTO credit_lot (account_id, tenant_id, source, priority, expires_at, models, tiers,
                                unearned_account, used_account)
        VALUES (:account, :tenant, :source, :priority, :expires_at, CAST(:models AS uuid[]),
                CAST(:tiers AS smallint[]), :unearned, :used)
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def lots(session: AsyncSession, tenant_id: UUID) -> Sequence[Row[Any]]:
    """Return a tenant's lots in the order in which usage takes from them, the empty ones too; at most a page."""
    statement = """
        SELECT l.*, b.credit, b.credit - b.debit AS available
        FROM credit_lot l JOIN ledger_balance b ON b.account_id = l.account_id
        WHERE l.tenant_id = :tenant ORDER BY l.priority, l.expires_at NULLS LAST, l.account_id LIMIT :page
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "page": PAGE_MAX})).all()


_EXPIRED = "l.expires_at <= :before AND b.credit > b.debit AND (:paid OR l.source <> 'paid')"


async def tenants_with_expired(session: AsyncSession, before: datetime, *, paid: bool) -> list[UUID]:
    """Return tenants with credit left in lots, also `paid` ones, that expired before that instant, at most a page."""
    statement = f"""
        SELECT DISTINCT l.tenant_id FROM credit_lot l JOIN ledger_balance b ON b.account_id = l.account_id
        WHERE {_EXPIRED} ORDER BY 1 LIMIT :page
    """  # noqa: S608 - built of constants
    values = {"before": before, "paid": paid, "page": PAGE_MAX}
    return list((await session.scalars(text(statement), values)).all())


async def expired_lots(session: AsyncSession, tenant_id: UUID, before: datetime, *, paid: bool) -> Sequence[Row[Any]]:
    """Return the tenant's lots, also the `paid` ones, with something left that expired before that instant."""
    statement = f"""
        SELECT l.account_id, l.unearned_account, l.expires_at, b.credit - b.debit AS available
        FROM credit_lot l JOIN ledger_balance b ON b.account_id = l.account_id
        WHERE l.tenant_id = :tenant AND {_EXPIRED} ORDER BY l.expires_at, 1
    """  # noqa: S608 - built of constants
    return (await session.execute(text(statement), {"tenant": tenant_id, "before": before, "paid": paid})).all()


async def tenants_expiring(session: AsyncSession, since: datetime, until: datetime) -> list[UUID]:
    """Return tenants with a lot that expires in that time, at most a page."""
    statement = """
        SELECT DISTINCT tenant_id FROM credit_lot WHERE expires_at BETWEEN :since AND :until ORDER BY 1 LIMIT :page
    """
    values = {"since": since, "until": until, "page": PAGE_MAX}
    return list((await session.scalars(text(statement), values)).all())


async def transaction_row(session: AsyncSession, tenant_id: UUID, tx_id: UUID) -> Row[Any] | None:
    """Return a transaction with the id of its reversal, if it was reversed."""
    statement = """
        SELECT x.*, (SELECT r.id FROM ledger_tx r WHERE r.reverses_tx = x.id) AS reversed_by
        FROM ledger_tx x WHERE x.tenant_id = :tenant AND x.id = :id
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "id": tx_id})).one_or_none()


async def transfers(session: AsyncSession, tenant_id: UUID, tx_id: UUID) -> Sequence[Row[Any]]:
    statement = """
        SELECT t.* FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
        WHERE x.tenant_id = :tenant AND t.tx_id = :id ORDER BY t.seq
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "id": tx_id})).all()


async def insert_adjustment(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        INSERT INTO credit_adjustment (id, tenant_id, kind, amount_pico, source, expires_at, models, tiers, reverses_tx,
                                       details, note, idempotency_key, body_sha256, requested_by, requested_people,
                                       answered_by, requested_at, needs_approval)
        VALUES (:id, :tenant, :kind, :amount, :source, :expires_at, CAST(:models AS uuid[]), CAST(:tiers AS smallint[]),
                :reverses, CAST(:details AS jsonb), :note, :key, :body, :by, CAST(:people AS uuid[]), :answers, :at,
                :needs_approval)
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def adjustment(session: AsyncSession, tenant_id: UUID, adjustment_id: UUID) -> Row[Any] | None:
    statement = "SELECT * FROM credit_adjustment WHERE tenant_id = :tenant AND id = :id"
    return (await session.execute(text(statement), {"tenant": tenant_id, "id": adjustment_id})).one_or_none()


async def adjustment_of_key(session: AsyncSession, tenant_id: UUID, key: str) -> Row[Any] | None:
    statement = "SELECT * FROM credit_adjustment WHERE tenant_id = :tenant AND idempotency_key = :key"
    return (await session.execute(text(statement), {"tenant": tenant_id, "key": key})).one_or_none()


async def waiting_adjustment(session: AsyncSession, tenant_id: UUID, kind: str, body: bytes) -> Row[Any] | None:
    """Return the one that asks for the same and waits for a decision."""
    statement = """
        SELECT * FROM credit_adjustment
        WHERE tenant_id = :tenant AND state = 'pending' AND kind = :kind AND body_sha256 = :body ORDER BY id LIMIT 1
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "kind": kind, "body": body})).one_or_none()


async def usage_waits(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> bool:
    """Whether the bill of quarantined usage waits for a second person."""
    statement = """
        SELECT EXISTS (SELECT FROM credit_adjustment WHERE tenant_id = :tenant AND state = 'pending' AND kind = 'usage'
                       AND CAST(details ->> 'event_id' AS uuid) = :event)
    """
    return bool((await session.execute(text(statement), {"tenant": tenant_id, "event": event_id})).scalar_one())


async def asked_alone_pico(session: AsyncSession, tenant_id: UUID, person_id: UUID | None, since: datetime) -> int:
    """Return what was adjusted of the tenant since that instant without approval, of which this person answers.

    None: what nobody answers for, all of it together.
    """
    statement = """
        SELECT coalesce(sum(amount_pico), 0) FROM credit_adjustment
        WHERE tenant_id = :tenant AND answered_by IS NOT DISTINCT FROM CAST(:by AS uuid)
          AND requested_at > :since AND NOT needs_approval
    """
    values = {"tenant": tenant_id, "by": person_id, "since": since}
    return int((await session.execute(text(statement), values)).scalar_one())


async def decide(session: AsyncSession, tenant_id: UUID, adjustment_id: UUID, values: Mapping[str, Any]) -> None:
    """Set what became of a pending adjustment; the table refuses a decision by who asked for it."""
    statement = """
        UPDATE credit_adjustment SET state = :state, tx_id = :tx, decided_by = :by, decided_person = :person,
            decided_at = :at
        WHERE tenant_id = :tenant AND id = :id
    """
    await session.execute(text(statement), {"tenant": tenant_id, "id": adjustment_id, **values})


async def adjustments(
    session: AsyncSession, tenant_id: UUID | None, *, pending: bool, after: UUID | None, limit: int
) -> Sequence[Row[Any]]:
    """Return adjustments, newest first; without a tenant, of all."""
    statement = """
        SELECT * FROM credit_adjustment
        WHERE (CAST(:tenant AS uuid) IS NULL OR tenant_id = :tenant) AND (NOT :pending OR state = 'pending')
          AND (CAST(:after AS uuid) IS NULL OR id < :after)
        ORDER BY id DESC LIMIT :limit
    """
    values = {"tenant": tenant_id, "pending": pending, "after": after, "limit": limit}
    return (await session.execute(text(statement), values)).all()


# How a tenant pays


async def insert_terms(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    """Insert a tenant's next terms; the caller holds the tenant's lock."""
    statement = """
        INSERT INTO credit_terms (id, tenant_id, number, mode, credit_limit, since, changed_by, note)
        SELECT :id, :tenant, 1 + count(*), :mode, :limit, coalesce(CAST(:since AS timestamptz), clock_timestamp()), :by,
               :note
        FROM credit_terms WHERE tenant_id = :tenant
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def terms(session: AsyncSession, tenant_id: UUID, limit: int) -> Sequence[Row[Any]]:
    """Return a tenant's terms, newest first."""
    statement = "SELECT * FROM credit_terms WHERE tenant_id = :tenant ORDER BY number DESC LIMIT :limit"
    return (await session.execute(text(statement), {"tenant": tenant_id, "limit": limit})).all()


async def set_mode(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        UPDATE billing_profile SET mode = :mode, unbilled_account = :unbilled,
            prepaid_since = CASE WHEN CAST(:unbilled AS uuid) IS NOT NULL THEN CAST(:prepaid_since AS timestamptz) END
        WHERE tenant_id = :tenant
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def owed(session: AsyncSession, tenant_id: UUID, account_id: UUID) -> int:
    """Return what is unbilled of a tenant. Pico."""
    statement = """
        SELECT b.debit - b.credit FROM ledger_balance b JOIN ledger_account a ON a.id = b.account_id
        WHERE a.tenant_id = :tenant AND a.id = :account
    """
    return int((await session.execute(text(statement), {"tenant": tenant_id, "account": account_id})).scalar_one())


async def set_credit_limit(session: AsyncSession, tenant_id: UUID, account_id: UUID, limit_pico: int) -> None:
    statement = """
        UPDATE ledger_balance SET credit_limit = :limit
        WHERE account_id = (SELECT id FROM ledger_account WHERE tenant_id = :tenant AND id = :account)
    """
    values = {"tenant": tenant_id, "account": account_id, "limit": limit_pico}
    await session.execute(text(statement), values)


async def has_paid_lot(session: AsyncSession, tenant_id: UUID) -> bool:
    """Whether the tenant has the lot of paid credit that never expires."""
    statement = """
        SELECT EXISTS (SELECT FROM credit_lot WHERE tenant_id = :tenant AND source = 'paid' AND expires_at IS NULL)
    """
    return bool((await session.execute(text(statement), {"tenant": tenant_id})).scalar_one())
