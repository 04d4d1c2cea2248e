"""Queries of accounts and usage. What a tenant owns takes `tenant_id` first; prices and posting have own files."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.types import Balance, BillingMode
from core.money import Currency

PAGE_MAX = 500
EXPIRY_LEAD = "90 seconds"  # credit counts for admission until so long before it expires: figures are set once a minute


# Accounts


async def insert_account(
    session: AsyncSession, account_id: UUID, tenant_id: UUID | None, *, code: str, currency: Currency, normal: str
) -> UUID:
    """Insert an account with an unbounded balance of 0 unless it exists; returns the id it has."""
    statement = """
        WITH made AS (
            INSERT INTO ledger_account (id, tenant_id, code, currency, normal)
            VALUES (:id, :tenant, :code, :currency, :normal) ON CONFLICT DO NOTHING RETURNING id
        ), balance AS (INSERT INTO ledger_balance (account_id) SELECT id FROM made)
        SELECT id FROM made
    """
    values = {"id": account_id, "tenant": tenant_id, "code": code, "currency": currency.value, "normal": normal}
    made = (await session.execute(text(statement), values)).scalar_one_or_none()
    if made is not None:
        return account_id
    find = """
        SELECT id FROM ledger_account
        WHERE tenant_id IS NOT DISTINCT FROM CAST(:tenant AS uuid) AND code = :code AND currency = :currency
    """
    found: UUID = (await session.execute(text(find), values)).scalar_one()
    return found


async def insert_bounded_account(
    session: AsyncSession,
    account_id: UUID,
    tenant_id: UUID,
    *,
    code: str,
    currency: Currency,
    normal: str,
    credit_limit: int,
) -> None:
    statement = """
        WITH made AS (
            INSERT INTO ledger_account (id, tenant_id, code, currency, normal)
            VALUES (:id, :tenant, :code, :currency, :normal) RETURNING id
        )
        INSERT INTO ledger_balance (account_id, bounded, credit_limit) SELECT id, true, :limit FROM made
    """
    values = {"id": account_id, "tenant": tenant_id, "code": code, "currency": currency.value, "normal": normal}
    await session.execute(text(statement), {**values, "limit": credit_limit})


async def insert_profile(session: AsyncSession, tenant_id: UUID, values: dict[str, Any]) -> None:
    statement = """
        INSERT INTO billing_profile
            (tenant_id, currency, mode, unbilled_account, revenue_account, min_charge_account, overrun_account)
        VALUES (:tenant, :currency, :mode, :unbilled_account, :revenue_account, :min_charge_account, :overrun_account)
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def insert_lot(session: AsyncSession, tenant_id: UUID, account_id: UUID, source: str) -> None:
    statement = "INSERT INTO credit_lot (account_id, tenant_id, source) VALUES (:account, :tenant, :source)"
    await session.execute(text(statement), {"account": account_id, "tenant": tenant_id, "source": source})


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> None:
    """Take the lock on a tenant's money before its first row exists."""
    await session.execute(
        text("SELECT pg_advisory_xact_lock(7481204, hashtext(CAST(:tenant AS text)))"), {"tenant": tenant_id}
    )


async def profile(session: AsyncSession, tenant_id: UUID) -> Row[Any] | None:
    statement = "SELECT * FROM billing_profile WHERE tenant_id = :tenant"
    return (await session.execute(text(statement), {"tenant": tenant_id})).one_or_none()


async def paid_lot(session: AsyncSession, tenant_id: UUID) -> UUID:
    """Return the one lot of paid credit that never expires."""
    statement = "SELECT account_id FROM credit_lot WHERE tenant_id = :tenant AND source = 'paid' AND expires_at IS NULL"
    account: UUID = (await session.execute(text(statement), {"tenant": tenant_id})).scalar_one()
    return account


async def transaction_of_key(session: AsyncSession, tenant_id: UUID, kind: str, key: str) -> Row[Any] | None:
    statement = """
        SELECT id, body_sha256 FROM ledger_tx WHERE tenant_id = :tenant AND kind = :kind AND idempotency_key = :key
    """
    values = {"tenant": tenant_id, "kind": kind, "key": key}
    return (await session.execute(text(statement), values)).one_or_none()


_BALANCES = """
    SELECT p.tenant_id, p.currency, p.mode, p.version,
           coalesce(u.credit + u.credit_limit - u.debit, 0) + coalesce(l.available, 0) AS available,
           coalesce(u.credit_limit, 0) AS credit_limit
    FROM billing_profile p
    LEFT JOIN ledger_balance u ON u.account_id = p.unbilled_account AND p.mode = 'postpaid'
    LEFT JOIN LATERAL (
        SELECT sum(b.credit - b.debit) AS available FROM credit_lot JOIN ledger_balance b USING (account_id)
        WHERE tenant_id = p.tenant_id AND models IS NULL AND tiers IS NULL
          AND (expires_at IS NULL OR expires_at > now() + CAST(:lead AS interval))
    ) l ON true
    WHERE {where}
    ORDER BY p.tenant_id LIMIT :page
"""


def _balance(row: Row[Any]) -> Balance:
    return Balance(
        row.tenant_id,
        Currency(row.currency),
        BillingMode(row.mode),
        int(row.available),
        int(row.credit_limit),
        row.version,
    )


async def balances(session: AsyncSession, tenant_ids: Sequence[UUID]) -> list[Balance]:
    """Return what these tenants may spend on any model; tenants without an account are left out."""
    statement = text(_BALANCES.format(where="p.tenant_id = ANY(CAST(string_to_array(:tenants, ',') AS uuid[]))"))
    tenants = ",".join(tenant.hex for tenant in tenant_ids)  # quicker than the driver's arrays
    rows = await session.execute(statement, {"tenants": tenants, "page": len(tenant_ids), "lead": EXPIRY_LEAD})
    return [_balance(row) for row in rows]


async def balances_after(session: AsyncSession, last: UUID) -> list[Balance]:
    """Return the next page of all tenants' balances, in the order of their ids."""
    statement = text(_BALANCES.format(where="p.tenant_id > :last"))
    rows = await session.execute(statement, {"last": last, "page": PAGE_MAX, "lead": EXPIRY_LEAD})
    return [_balance(row) for row in rows]


# Usage


async def event(session: AsyncSession, tenant_id: UUID, event_id: UUID, day: datetime) -> Row[Any] | None:
    statement = "SELECT * FROM usage_event WHERE tenant_id = :tenant AND id = :id AND day = CAST(:day AS date)"
    values = {"tenant": tenant_id, "id": event_id, "day": day.date()}
    return (await session.execute(text(statement), values)).one_or_none()


async def settled_ids(session: AsyncSession, tenant_id: UUID, ids: Sequence[UUID], since: datetime) -> set[UUID]:
    """Return those of `ids` that are posted or in quarantine; `since` is not later than the oldest id's day."""
    statement = """
        SELECT id FROM usage_event
        WHERE tenant_id = :tenant AND id = ANY(:ids) AND day >= CAST(:since AS date)
        UNION SELECT id FROM usage_quarantine WHERE tenant_id = :tenant AND id = ANY(:ids)
    """
    values = {"tenant": tenant_id, "ids": list(ids), "since": since.date()}
    return set((await session.scalars(text(statement), values)).all())


async def usage_by_day_and_model(
    session: AsyncSession, tenant_id: UUID, *, zone: str, start: datetime, end: datetime, project_id: UUID | None
) -> Sequence[Row[Any]]:
    statement = """
        WITH rerated AS (
            SELECT CAST(admitted_at AT TIME ZONE :zone AS date) AS day, model, sum(to_pico - from_pico) AS changed
            FROM usage_rerating
            WHERE tenant_id = :tenant AND admitted_at >= :start AND admitted_at < :end
              AND (CAST(:project AS uuid) IS NULL OR project_id = :project)
            GROUP BY 1, 2
        ), used AS (
        SELECT CAST(minute AT TIME ZONE :zone AS date) AS day, model, currency,
               sum(requests) AS requests,
               sum(requests) FILTER (WHERE outcome = 'completed') AS completed,
               sum(input_uncached) AS input_uncached, sum(input_cached) AS input_cached,
               sum(input_cache_write) AS input_cache_write, sum(output) AS output, sum(reasoning) AS reasoning,
               sum(amount_pico) AS amount_pico, sum(min_charge_pico) AS min_charge_pico
        FROM usage_rollup
        WHERE tenant_id = :tenant AND minute >= :start AND minute < :end
          AND (CAST(:project AS uuid) IS NULL OR project_id = :project)
        GROUP BY 1, 2, 3)
        SELECT u.*, coalesce(r.changed, 0) AS rerated_pico FROM used u LEFT JOIN rerated r USING (day, model)
        ORDER BY day, model, currency LIMIT :page
    """
    values = {"tenant": tenant_id, "zone": zone, "start": start, "end": end, "project": project_id, "page": 50_000}
    return (await session.execute(text(statement), values)).all()


async def last_uses(session: AsyncSession, since: datetime) -> list[tuple[UUID, UUID, datetime]]:
    """Return tenant, key and the newest minute it was used in, of every key used since then."""
    statement = """
        SELECT tenant_id, key_id, max(minute) FROM usage_rollup WHERE minute >= :since GROUP BY tenant_id, key_id
    """
    rows = await session.execute(text(statement), {"since": since})
    return [(row[0], row[1], row[2]) for row in rows]
