"""Queries of re-rating: runs, their tenants, the events they touch and what they post."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

TIME_LIMIT = "5min"  # of finding a run's tenants in the rollup


async def insert_run(session: AsyncSession, values: Mapping[str, Any]) -> None:
    statement = """
        INSERT INTO rerating (id, currency, wrong_versions, right_version, models, tiers, meters, since, until,
                              charge_more, note, idempotency_key, body_sha256, requested_by, requested_people,
                              answered_by, requested_at)
        VALUES (:id, :currency, CAST(:wrong AS uuid[]), :right, CAST(:models AS uuid[]), CAST(:tiers AS smallint[]),
                CAST(:meters AS text[]), :since, :until, :charge_more, :note, :key, :body, :by,
                CAST(:people AS uuid[]), :answers, :now)
    """
    await session.execute(text(statement), dict(values))


async def lock_key(session: AsyncSession, key: str) -> None:
    """Let no other call with this key in until the end of the transaction."""
    await session.execute(text("SELECT pg_advisory_xact_lock(7481211, hashtext(:key))"), {"key": key})


async def insert_tenants(session: AsyncSession, run_id: UUID) -> None:
    """Enter the tenants that used something at the run's wrong prices, with how many requests it may be."""
    statement = """
        INSERT INTO rerating_tenant (run_id, tenant_id, requests)
        SELECT r.id, u.tenant_id, sum(u.requests) FROM rerating r CROSS JOIN LATERAL (
            SELECT m.tenant_id, m.requests FROM usage_rollup m
            WHERE m.minute >= date_trunc('minute', r.since, 'UTC') AND m.minute < r.until
              AND m.price_version_id = ANY(r.wrong_versions) AND m.currency = r.currency
              AND (r.models IS NULL OR m.model_id = ANY(r.models)) AND (r.tiers IS NULL OR m.tier = ANY(r.tiers))
            UNION ALL
            SELECT l.tenant_id, 1 FROM usage_rerating l
            WHERE l.admitted_at >= r.since AND l.admitted_at < r.until AND l.version_id = ANY(r.wrong_versions)
              AND NOT l.price_version_id = ANY(r.wrong_versions)
              AND (r.models IS NULL OR l.model_id = ANY(r.models)) AND (r.tiers IS NULL OR l.tier = ANY(r.tiers))
        ) u WHERE r.id = :run GROUP BY 1, 2
    """
    await session.execute(text(f"SET LOCAL statement_timeout = '{TIME_LIMIT}'"))
    await session.execute(text(statement), {"run": run_id})


_RUN = """
    SELECT r.*, t.* FROM rerating r CROSS JOIN LATERAL (
        SELECT count(*) AS tenants, coalesce(sum(requests), 0) AS requests, coalesce(sum(events), 0) AS events,
               coalesce(sum(credit_pico), 0) AS credit_pico, coalesce(sum(charge_pico), 0) AS charge_pico,
               coalesce(sum(uncharged), 0) AS uncharged, coalesce(sum(uncharged_pico), 0) AS uncharged_pico,
               coalesce(sum(unpriced), 0) AS unpriced, coalesce(sum(done_events), 0) AS done_events,
               coalesce(sum(credited_pico), 0) AS credited_pico, coalesce(sum(given_pico), 0) AS given_pico,
               coalesce(sum(charged_pico), 0) AS charged_pico, coalesce(sum(overrun_pico), 0) AS overrun_pico
        FROM rerating_tenant WHERE run_id = r.id) t
"""


async def run(session: AsyncSession, run_id: UUID) -> Row[Any] | None:
    """Return a run with the sums of its tenants."""
    return (await session.execute(text(f"{_RUN} WHERE r.id = :run"), {"run": run_id})).one_or_none()


async def run_of_key(session: AsyncSession, key: str) -> Row[Any] | None:
    return (await session.execute(text(f"{_RUN} WHERE r.idempotency_key = :key"), {"key": key})).one_or_none()


async def runs(session: AsyncSession, after: UUID | None, limit: int) -> Sequence[Row[Any]]:
    """Return runs, newest first."""
    statement = f"{_RUN} WHERE CAST(:after AS uuid) IS NULL OR r.id < :after ORDER BY r.id DESC LIMIT :limit"
    return (await session.execute(text(statement), {"after": after, "limit": limit})).all()


async def lock_run(session: AsyncSession, run_id: UUID) -> Row[Any] | None:
    """Lock a run: its batches come one after the other."""
    statement = "SELECT * FROM rerating WHERE id = :run FOR NO KEY UPDATE"
    return (await session.execute(text(statement), {"run": run_id})).one_or_none()


async def set_state(session: AsyncSession, run_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        UPDATE rerating SET state = :state, needs_approval = :needs_approval, executed_by = :by,
               executed_answer = :answers, executed_person = :person, executed_at = :at, finished_at = :finished
        WHERE id = :run
    """
    await session.execute(text(statement), {"run": run_id, **values})


def execution_of(run: Row[Any]) -> dict[str, Any]:
    """Return who executes a run, as `set_state` takes it."""
    return {
        "needs_approval": run.needs_approval,
        "by": run.executed_by,
        "answers": run.executed_answer,
        "person": run.executed_person,
        "at": run.executed_at,
    }


async def moved_alone_pico(session: AsyncSession, person_id: UUID | None, since: datetime) -> int:
    """Return what runs moved since that instant without approval, of which this person answers (None: nobody)."""
    statement = """
        SELECT coalesce(sum(t.credited_pico + t.charged_pico), 0)
        FROM rerating r JOIN rerating_tenant t ON t.run_id = r.id
        WHERE r.executed_answer IS NOT DISTINCT FROM CAST(:by AS uuid) AND NOT r.needs_approval
          AND r.executed_at > :since
    """
    return int((await session.execute(text(statement), {"by": person_id, "since": since})).scalar_one())


async def tenants(session: AsyncSession, run_id: UUID, *, offset: int, limit: int) -> Sequence[Row[Any]]:
    """Return a run's tenants, those to whom it means most first."""
    statement = """
        SELECT * FROM rerating_tenant WHERE run_id = :run
        ORDER BY credit_pico + charge_pico DESC, tenant_id OFFSET :offset LIMIT :limit
    """
    return (await session.execute(text(statement), {"run": run_id, "offset": offset, "limit": limit})).all()


async def next_tenant(session: AsyncSession, run_id: UUID, *, counting: bool) -> Row[Any] | None:
    """Return the tenant whose turn it is."""
    open_ = "NOT counted" if counting else "NOT done"
    statement = f"SELECT * FROM rerating_tenant WHERE run_id = :run AND {open_} ORDER BY tenant_id LIMIT 1"  # noqa: S608
    return (await session.execute(text(statement), {"run": run_id})).one_or_none()


async def add_counted(session: AsyncSession, tenant_id: UUID, run_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        UPDATE rerating_tenant SET counted = :finished, counted_after = :after, events = events + :events,
            credit_pico = credit_pico + :credit, charge_pico = charge_pico + :charge,
            uncharged = uncharged + :uncharged, uncharged_pico = uncharged_pico + :uncharged_pico,
            unpriced = unpriced + :unpriced
        WHERE run_id = :run AND tenant_id = :tenant
    """
    await session.execute(text(statement), {"run": run_id, "tenant": tenant_id, **values})


async def add_done(session: AsyncSession, tenant_id: UUID, run_id: UUID, values: Mapping[str, Any]) -> None:
    statement = """
        UPDATE rerating_tenant SET done = :finished, done_after = :after, done_events = done_events + :events,
            credited_pico = credited_pico + :credit, given_pico = given_pico + :given,
            charged_pico = charged_pico + :charge, overrun_pico = overrun_pico + :overrun
        WHERE run_id = :run AND tenant_id = :tenant
    """
    await session.execute(text(statement), {"run": run_id, "tenant": tenant_id, **values})


async def events(session: AsyncSession, tenant_id: UUID, run: Row[Any], after: UUID, limit: int) -> Sequence[Row[Any]]:
    """Return the tenant's next events in the order of their ids, with what they come to now.

    `concerned` are those that the run is about. An event stands at its own price version until a re-rating of all its
    meters put it at another. One whose transaction was reversed costs nothing any more and is left out. An id is at
    most a day older than its admission, and younger only of what an operator billed out of quarantine.
    """
    statement = """
        WITH page AS MATERIALIZED (
            (SELECT * FROM usage_event
             WHERE tenant_id = :tenant AND id > :after AND day BETWEEN CAST(:since AS date) - 1 AND CAST(:until AS date)
             ORDER BY id LIMIT :limit)
            UNION ALL
            (SELECT b.* FROM usage_decision d JOIN usage_event b ON b.tenant_id = d.tenant_id AND b.id = d.event_id
                 AND b.day = (uuid_extract_timestamp(d.event_id) AT TIME ZONE 'UTC')::date
             WHERE d.tenant_id = :tenant AND d.event_id > :after AND b.day > CAST(:until AS date)
             ORDER BY b.id LIMIT :limit)
            ORDER BY id LIMIT :limit
        )
        SELECT e.id, e.tx_id, e.project_id, e.model_id, e.model, e.tier, e.outcome, e.price_version_id, e.admitted_at,
               e.input_uncached, e.input_cached, e.input_cache_write, e.output, e.reasoning,
               coalesce(l.seq, 0) AS seq, coalesce(l.to_pico, e.amount_pico) AS amount_pico,
               coalesce(l.to_min_pico, e.min_charge_pico) AS min_charge_pico,
               coalesce(l.version_id, e.price_version_id) AS version_id,
               e.admitted_at >= :since AND e.admitted_at < :until
               AND (CAST(:models AS uuid[]) IS NULL OR e.model_id = ANY(CAST(:models AS uuid[])))
               AND (CAST(:tiers AS smallint[]) IS NULL OR e.tier = ANY(CAST(:tiers AS smallint[])))
               AND coalesce(l.version_id, e.price_version_id) = ANY(CAST(:wrong AS uuid[]))
               AND NOT EXISTS (SELECT FROM ledger_tx x WHERE x.reverses_tx = e.tx_id) AS concerned
        FROM page e
        LEFT JOIN LATERAL (
            SELECT seq, to_pico, to_min_pico, version_id FROM usage_rerating
            WHERE tenant_id = e.tenant_id AND event_id = e.id ORDER BY seq DESC LIMIT 1) l ON true
        ORDER BY e.id
    """
    values = {
        "tenant": tenant_id,
        "after": after,
        "limit": limit,
        "since": run.since,
        "until": run.until,
        "models": run.models,
        "tiers": run.tiers,
        "wrong": run.wrong_versions,
    }
    return (await session.execute(text(statement), values)).all()


async def history(session: AsyncSession, tenant_id: UUID, event_ids: Iterable[UUID]) -> Sequence[Row[Any]]:
    """Return what earlier runs did to the prices of events, oldest first."""
    statement = """
        SELECT l.event_id, l.seq, r.right_version, r.meters FROM usage_rerating l JOIN rerating r ON r.id = l.run_id
        WHERE l.tenant_id = :tenant AND l.event_id = ANY(CAST(:ids AS uuid[])) ORDER BY l.event_id, l.seq
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "ids": list(event_ids)})).all()


async def lines_of(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> Sequence[Row[Any]]:
    """Return what re-ratings made of one event, oldest first."""
    statement = """
        SELECT l.to_pico, l.tx_id, r.right_version, r.note, x.booked_at
        FROM usage_rerating l JOIN rerating r ON r.id = l.run_id JOIN ledger_tx x ON x.id = l.tx_id
        WHERE l.tenant_id = :tenant AND l.event_id = :event ORDER BY l.seq
    """
    return (await session.execute(text(statement), {"tenant": tenant_id, "event": event_id})).all()


async def taken(session: AsyncSession, tenant_id: UUID, usage_txs: Iterable[UUID], now: datetime) -> Sequence[Row[Any]]:
    """Return what accounts paid of the usage of these transactions and did not get back, the last to pay first.

    That is the overrun, what is billed by invoice, then lots against the order of burn-down. An expired lot is not
    `open`: what goes back to it is lost.
    """
    statement = """
        SELECT s.usage_tx, s.account_id, sum(s.amount) AS amount, l.unearned_account, l.used_account,
               coalesce(l.expires_at > :now, true) AS open
        FROM (
            SELECT t.tx_id AS usage_tx, t.debit_account AS account_id, t.amount
            FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id
            JOIN billing_profile p ON p.tenant_id = x.tenant_id
            WHERE x.tenant_id = :tenant AND t.tx_id = ANY(CAST(:txs AS uuid[]))
              AND t.credit_account IN (p.revenue_account, p.min_charge_account)
            UNION ALL SELECT usage_tx, account_id, amount FROM rerating_move WHERE usage_tx = ANY(CAST(:txs AS uuid[]))
        ) s
        JOIN ledger_account a ON a.id = s.account_id LEFT JOIN credit_lot l ON l.account_id = s.account_id
        GROUP BY s.usage_tx, s.account_id, a.code, l.account_id HAVING sum(s.amount) > 0
        ORDER BY s.usage_tx, a.code = 'expense.overrun' DESC, a.code = 'asset.unbilled' DESC,
                 l.priority DESC, l.expires_at DESC NULLS FIRST, s.account_id DESC
    """
    values = {"tenant": tenant_id, "txs": list(usage_txs), "now": now}
    return (await session.execute(text(statement), values)).all()


async def is_rerated(session: AsyncSession, tenant_id: UUID, usage_tx: UUID) -> bool:
    """Whether a re-rating moved money of the usage of this transaction."""
    statement = """
        SELECT EXISTS (SELECT FROM rerating_move m JOIN ledger_tx x ON x.id = m.usage_tx
                       WHERE x.tenant_id = :tenant AND m.usage_tx = :tx)
    """
    found: bool = (await session.execute(text(statement), {"tenant": tenant_id, "tx": usage_tx})).scalar_one()
    return found


async def insert_lines(session: AsyncSession, tenant_id: UUID, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what events come to now. A run that touches an event twice is refused."""
    statement = """
        INSERT INTO usage_rerating (tenant_id, event_id, seq, run_id, tx_id, version_id, from_pico, from_min_pico,
                                    to_pico, to_min_pico, project_id, model_id, model, tier, price_version_id, outcome,
                                    admitted_at)
        VALUES (:tenant, :event, :seq, :run, :tx, :version, :from, :from_min, :to, :to_min, :project, :model_id, :model,
                :tier, :price_version, :outcome, :admitted_at)
    """
    await session.execute(text(statement), [{"tenant": tenant_id, **row} for row in rows])


async def insert_moves(session: AsyncSession, rows: Sequence[Mapping[str, Any]]) -> None:
    statement = """
        INSERT INTO rerating_move (tx_id, usage_tx, account_id, amount) VALUES (:tx, :usage_tx, :account, :amount)
    """
    if rows:
        await session.execute(text(statement), list(rows))
