"""Queries that add re-ratings up again, as `verify_queries` does the rest."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

PAGE = 2000

CHECKS = {
    "rerating transfer": """
        SELECT t.tx_id || ' seq ' || t.seq AS row, 'no re-rating moves from ' || d.code || ' to ' || c.code AS problem
        FROM ledger_transfer t JOIN ledger_tx x ON x.id = t.tx_id AND x.kind = 'rerating'
        JOIN ledger_account d ON d.id = t.debit_account JOIN ledger_account c ON c.id = t.credit_account
        WHERE NOT ((d.code IN ('revenue.usage', 'revenue.min_charge')
                    AND c.code IN ('liability.credit_paid', 'liability.credit_promo', 'liability.credit_goodwill',
                                   'asset.unbilled', 'expense.overrun', 'contra.promo_used', 'revenue.usage',
                                   'revenue.min_charge'))
                OR (c.code IN ('revenue.usage', 'revenue.min_charge')
                    AND d.code IN ('liability.credit_paid', 'liability.credit_promo', 'liability.credit_goodwill',
                                   'asset.unbilled', 'expense.overrun'))
                OR (d.code, c.code) IN (('contra.promo_used', 'contra.promo_unearned'),
                                        ('contra.promo_unearned', 'contra.promo_used')))
        ORDER BY t.tx_id, t.seq LIMIT 1
    """,
    # What an event came to before is what it was billed, or what the re-rating before made of it. Events go in time.
    "usage_rerating": """
        SELECT l.event_id || ' seq ' || l.seq AS row, 'it does not go on from what the event came to before' AS problem
        FROM usage_rerating l
        LEFT JOIN rerating r ON r.id = l.run_id
        LEFT JOIN ledger_tx x ON x.id = l.tx_id AND x.tenant_id = l.tenant_id AND x.kind = 'rerating'
        LEFT JOIN usage_rerating b ON b.tenant_id = l.tenant_id AND b.event_id = l.event_id AND b.seq = l.seq - 1
        LEFT JOIN usage_event e ON e.tenant_id = l.tenant_id AND e.id = l.event_id
             AND e.day = (uuid_extract_timestamp(l.event_id) AT TIME ZONE 'UTC')::date
        WHERE x.id IS NULL OR r.id IS NULL OR l.seq < 1 OR (l.seq > 1 AND b.seq IS NULL) OR b.run_id = l.run_id
           OR (b.seq IS NOT NULL AND (b.to_pico, b.to_min_pico) <> (l.from_pico, l.from_min_pico))
           OR (l.seq = 1 AND e.id IS NOT NULL AND (e.amount_pico, e.min_charge_pico) <> (l.from_pico, l.from_min_pico))
           OR (e.id IS NOT NULL AND (e.project_id, e.model_id, e.model, e.tier, e.price_version_id, e.outcome,
                                     e.admitted_at)
                                    <> (l.project_id, l.model_id, l.model, l.tier, l.price_version_id, l.outcome,
                                        l.admitted_at))
           OR l.version_id <> CASE WHEN r.meters IS NULL THEN r.right_version
                                   ELSE coalesce(b.version_id, l.price_version_id) END
           OR (l.to_pico > l.from_pico AND NOT r.charge_more)
        ORDER BY l.event_id, l.seq LIMIT 1
    """,
    "usage_rerating and ledger_transfer": """
        SELECT x.id::text AS row,
               'its lines come to ' || coalesce(l.usage, 0) || ' and ' || coalesce(l.minimum, 0)
               || ' of minimum charges, its transfers to ' || coalesce(t.usage, 0) || ' and ' || coalesce(t.minimum, 0)
               || ', what accounts paid to ' || coalesce(m.amount, 0) AS problem
        FROM ledger_tx x
        LEFT JOIN (SELECT tx_id, sum((to_pico - to_min_pico) - (from_pico - from_min_pico)) AS usage,
                          sum(to_min_pico - from_min_pico) AS minimum
                   FROM usage_rerating GROUP BY 1) l ON l.tx_id = x.id
        LEFT JOIN (SELECT s.tx_id, sum(s.amount) FILTER (WHERE a.code = 'revenue.usage') AS usage,
                          sum(s.amount) FILTER (WHERE a.code = 'revenue.min_charge') AS minimum
                   FROM (SELECT tx_id, credit_account AS account, amount FROM ledger_transfer
                         UNION ALL SELECT tx_id, debit_account, -amount FROM ledger_transfer) s
                   JOIN ledger_account a ON a.id = s.account GROUP BY 1) t ON t.tx_id = x.id
        LEFT JOIN (SELECT tx_id, sum(amount) AS amount FROM rerating_move GROUP BY 1) m ON m.tx_id = x.id
        WHERE x.kind = 'rerating' AND (
            (coalesce(l.usage, 0), coalesce(l.minimum, 0)) <> (coalesce(t.usage, 0), coalesce(t.minimum, 0))
            OR coalesce(m.amount, 0) <> coalesce(l.usage, 0) + coalesce(l.minimum, 0))
        ORDER BY x.id LIMIT 1
    """,
    "rerating_move": """
        SELECT m.usage_tx || ' account ' || m.account_id AS row, 'more went back to it than it paid' AS problem
        FROM (SELECT usage_tx, account_id, sum(amount) AS amount FROM rerating_move GROUP BY 1, 2) m
        LEFT JOIN LATERAL (
            SELECT sum(t.amount) AS amount FROM ledger_transfer t JOIN ledger_account c ON c.id = t.credit_account
            WHERE t.tx_id = m.usage_tx AND t.debit_account = m.account_id
              AND c.code IN ('revenue.usage', 'revenue.min_charge')) p ON true
        WHERE coalesce(p.amount, 0) + m.amount < 0 ORDER BY 1 LIMIT 1
    """,
    # By account, but for expired credit, which pays nothing back itself; the sums above have that.
    "rerating_move and ledger_transfer": """
        SELECT tx_id || ' account ' || account AS row,
               'what it paid comes to ' || coalesce(m.amount, 0) || ', its transfers to ' || coalesce(t.amount, 0)
               AS problem
        FROM (SELECT tx_id, account_id AS account, sum(amount) AS amount FROM rerating_move GROUP BY 1, 2) m
        FULL JOIN (
            SELECT s.tx_id, s.account, sum(s.amount) AS amount
            FROM (SELECT tx_id, debit_account AS account, credit_account AS other, amount FROM ledger_transfer
                  UNION ALL SELECT tx_id, credit_account, debit_account, -amount FROM ledger_transfer) s
            JOIN ledger_tx x ON x.id = s.tx_id AND x.kind = 'rerating'
            JOIN ledger_account o ON o.id = s.other AND o.code IN ('revenue.usage', 'revenue.min_charge')
            JOIN ledger_account a ON a.id = s.account
                 AND a.code NOT IN ('revenue.usage', 'revenue.min_charge', 'contra.promo_used')
            GROUP BY 1, 2) t USING (tx_id, account)
        LEFT JOIN ledger_account a ON a.id = account
        WHERE coalesce(m.amount, 0) <> coalesce(t.amount, 0)
          AND NOT (t.amount IS NULL AND m.amount < 0
                   AND a.code IN ('liability.credit_promo', 'liability.credit_goodwill'))
        ORDER BY tx_id LIMIT 1
    """,
    # By transaction of usage, where its events are there to say which was whose.
    "rerating_move and usage_rerating": """
        SELECT tx_id || ' usage ' || usage_tx AS row,
               'what its accounts paid comes to ' || coalesce(m.amount, 0) || ', its lines to ' || coalesce(l.amount, 0)
               AS problem
        FROM (SELECT tx_id, usage_tx, sum(amount) AS amount FROM rerating_move GROUP BY 1, 2) m
        FULL JOIN (
            SELECT l.tx_id, e.tx_id AS usage_tx, sum(l.to_pico - l.from_pico) AS amount
            FROM usage_rerating l JOIN usage_event e ON e.tenant_id = l.tenant_id AND e.id = l.event_id
                 AND e.day = (uuid_extract_timestamp(l.event_id) AT TIME ZONE 'UTC')::date
            GROUP BY 1, 2) l USING (tx_id, usage_tx)
        WHERE coalesce(m.amount, 0) <> coalesce(l.amount, 0) AND NOT EXISTS (
            SELECT FROM usage_rerating g WHERE g.tx_id = coalesce(m.tx_id, l.tx_id) AND NOT EXISTS (
                SELECT FROM usage_event e WHERE e.tenant_id = g.tenant_id AND e.id = g.event_id
                AND e.day = (uuid_extract_timestamp(g.event_id) AT TIME ZONE 'UTC')::date))
        ORDER BY tx_id LIMIT 1
    """,
    "rerating_tenant": """
        SELECT t.run_id || ' tenant ' || t.tenant_id AS row,
               'it moved ' || t.moved || ' by ' || t.done_events || ' events, its lines say ' || t.amount || ' by '
               || t.lines AS problem
        FROM (
            SELECT p.run_id, p.tenant_id, p.credited_pico + p.charged_pico AS moved, p.done_events,
                   count(l.event_id) AS lines, coalesce(sum(abs(l.to_pico - l.from_pico)), 0) AS amount
            FROM rerating_tenant p
            LEFT JOIN usage_rerating l ON l.run_id = p.run_id AND l.tenant_id = p.tenant_id
            GROUP BY p.run_id, p.tenant_id) t
        WHERE t.moved <> t.amount OR t.done_events <> t.lines
        ORDER BY t.run_id, t.tenant_id LIMIT 1
    """,
    "rerating": """
        SELECT row, problem FROM (
            SELECT l.run_id || ' tenant ' || l.tenant_id AS row, 'it has lines of a tenant it does not know' AS problem
            FROM usage_rerating l LEFT JOIN rerating_tenant p USING (run_id, tenant_id) WHERE p.run_id IS NULL
            UNION ALL
            SELECT r.id::text, 'another run has its idempotency key'
            FROM rerating r JOIN rerating o ON o.idempotency_key = r.idempotency_key AND o.id <> r.id
            UNION ALL
            SELECT id::text, 'one person decided alone' FROM rerating
            WHERE needs_approval AND executed_by = requested_by
        ) w ORDER BY row LIMIT 1
    """,
}


async def lines_after(session: AsyncSession, tenant_id: UUID, event_id: UUID, seq: int) -> Sequence[Row[Any]]:
    """Return the next page of lines with what their events used; of events that are gone, none."""
    statement = """
        SELECT l.tenant_id, l.event_id, l.seq, l.to_pico, l.to_min_pico, l.model_id, l.tier, l.price_version_id,
               r.right_version, r.meters, e.outcome, e.input_uncached, e.input_cached, e.input_cache_write, e.output,
               e.reasoning
        FROM usage_rerating l JOIN rerating r ON r.id = l.run_id
        JOIN usage_event e ON e.tenant_id = l.tenant_id AND e.id = l.event_id
             AND e.day = (uuid_extract_timestamp(l.event_id) AT TIME ZONE 'UTC')::date
        WHERE (l.tenant_id, l.event_id, l.seq) > (:tenant, :event, :seq)
        ORDER BY l.tenant_id, l.event_id, l.seq LIMIT :page
    """
    values = {"tenant": tenant_id, "event": event_id, "seq": seq, "page": PAGE}
    return (await session.execute(text(statement), values)).all()
