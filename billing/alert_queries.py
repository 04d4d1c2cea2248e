"""Queries of crossings, of alerts on credit, and of what tenants set about both."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

# Crossings


async def insert_crossings(session: AsyncSession, tenant_id: UUID, rows: Sequence[Mapping[str, Any]]) -> set[UUID]:
    """Insert crossings, each once for all time; returns the ids of those that are new."""
    statement = """
        INSERT INTO budget_crossing (id, tenant_id, level, owner_id, project_id, metric, mode, model, window_start,
                                     window_end, threshold, limit_pico, spent_pico)
        VALUES (:id, :tenant, :level, :owner_id, :project_id, :metric, :mode, :model, :window_start, :window_end,
                :threshold, :limit_pico, :spent_pico)
        ON CONFLICT DO NOTHING RETURNING id
    """
    made: set[UUID] = set()
    for row in rows:
        made.update((await session.scalars(text(statement), {"tenant": tenant_id, **row})).all())
    return made


async def crossings(
    session: AsyncSession, tenant_id: UUID, projects: Collection[UUID] | None, *, after: UUID | None, limit: int
) -> Sequence[Row[Any]]:
    """Return crossings newest first; with `projects` only those of budgets of these projects and their keys."""
    statement = """
        SELECT * FROM budget_crossing
        WHERE tenant_id = :tenant AND (CAST(:after AS uuid) IS NULL OR id < :after)
          AND (CAST(:projects AS uuid[]) IS NULL OR project_id = ANY(CAST(:projects AS uuid[])))
        ORDER BY id DESC LIMIT :limit
    """
    values = {
        "tenant": tenant_id,
        "projects": None if projects is None else list(projects),
        "after": after,
        "limit": limit,
    }
    return (await session.execute(text(statement), values)).all()


async def crossings_named(session: AsyncSession, tenant_id: UUID, ids: Sequence[UUID]) -> Sequence[Row[Any]]:
    statement = "SELECT * FROM budget_crossing WHERE tenant_id = :tenant AND id = ANY(:ids) ORDER BY id"
    return (await session.execute(text(statement), {"tenant": tenant_id, "ids": list(ids)})).all()


async def alert_settings(session: AsyncSession, tenant_ids: Collection[UUID]) -> dict[UUID, Row[Any]]:
    """Return what these tenants set about alerts; one that set nothing is left out."""
    rows = await session.execute(
        text("SELECT * FROM alert_settings WHERE tenant_id = ANY(:tenants)"), {"tenants": list(tenant_ids)}
    )
    return {row.tenant_id: row for row in rows}


async def put_alert_settings(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        INSERT INTO alert_settings (tenant_id, thresholds, low_balance_pico, days_left)
        VALUES (:tenant, CAST(:thresholds AS smallint[]), :low_balance_pico, :days_left)
        ON CONFLICT (tenant_id) DO UPDATE SET thresholds = excluded.thresholds,
            low_balance_pico = excluded.low_balance_pico, days_left = excluded.days_left,
            updated_at = clock_timestamp()
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


# Alerts on credit


async def open_alerts(session: AsyncSession, tenant_ids: Collection[UUID]) -> Sequence[Row[Any]]:
    """Return tenant and kind of the alerts that are open."""
    statement = "SELECT tenant_id, kind FROM balance_alert WHERE cleared_at IS NULL AND tenant_id = ANY(:tenants)"
    return (await session.execute(text(statement), {"tenants": list(tenant_ids)})).all()


async def insert_alert(session: AsyncSession, tenant_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        INSERT INTO balance_alert (id, tenant_id, kind, threshold_pico, days, available_pico, raised_at)
        VALUES (:id, :tenant, :kind, :threshold, :days, :available, :at)
    """
    await session.execute(text(statement), {"tenant": tenant_id, **values})


async def end_alerts(session: AsyncSession, tenant_id: UUID, kinds: Collection[str], now: datetime | None) -> None:
    """End open alerts of these kinds at that instant, without one at the server's."""
    statement = """
        UPDATE balance_alert
        SET cleared_at = greatest(raised_at, coalesce(CAST(:now AS timestamptz), clock_timestamp()))
        WHERE tenant_id = :tenant AND kind = ANY(:kinds) AND cleared_at IS NULL
    """
    if kinds:
        await session.execute(text(statement), {"tenant": tenant_id, "kinds": [*map(str, kinds)], "now": now})


async def alerts(session: AsyncSession, tenant_id: UUID, after: UUID | None, limit: int) -> Sequence[Row[Any]]:
    statement = """
        SELECT * FROM balance_alert WHERE tenant_id = :tenant AND (CAST(:after AS uuid) IS NULL OR id < :after)
        ORDER BY id DESC LIMIT :limit
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "after": after, "limit": limit})).all()


async def alert(session: AsyncSession, tenant_id: UUID, alert_id: UUID) -> Row[Any] | None:
    statement = "SELECT * FROM balance_alert WHERE tenant_id = :tenant AND id = :id"
    return (await session.execute(text(statement), {"tenant": tenant_id, "id": alert_id})).one_or_none()


async def burn(
    session: AsyncSession, tenant_ids: Collection[UUID], since: datetime, until: datetime
) -> Sequence[Row[Any]]:
    """Return what each of these tenants used in that time, and the first minute of it."""
    statement = """
        SELECT r.tenant_id, sum(r.amount_pico) AS pico, min(r.minute) AS first
        FROM usage_rollup r JOIN billing_profile p USING (tenant_id)
        WHERE r.tenant_id = ANY(:tenants) AND p.mode = 'prepaid' AND r.minute >= :since AND r.minute < :until
        GROUP BY r.tenant_id
    """
    values = {"tenants": list(tenant_ids), "since": since, "until": until}
    return (await session.execute(text(statement), values)).all()
