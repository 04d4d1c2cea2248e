"""Queries that add the books up again. Each answers the first row that is wrong, and how, or nothing.

They repeat in SQL what the code computes in Python, on purpose: two ways to one figure, which must agree.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import price_queries, verify_rerating_queries
from billing.price_table import PublishedVersion, VersionPrices
from core.money import Currency

PAGE = 1000
WORK_MEM = "48MB"  # of each sort, twice as much of each hash

# name of the table → statement; columns are row (text) and problem (text)
_CHECKS = {
    "ledger_transfer": """
        SELECT t.tx_id || ' seq ' || t.seq AS row, 'its amount is not positive, or its accounts do not fit' AS problem
        FROM ledger_transfer t
        LEFT JOIN ledger_tx x ON x.id = t.tx_id
        LEFT JOIN ledger_account d ON d.id = t.debit_account
        LEFT JOIN ledger_account c ON c.id = t.credit_account
        WHERE NOT coalesce(
            t.amount > 0 AND d.id <> c.id AND d.currency = t.currency AND c.currency = t.currency
            AND coalesce(d.tenant_id, x.tenant_id) = x.tenant_id AND coalesce(c.tenant_id, x.tenant_id) = x.tenant_id
            AND ((x.kind, d.code, c.code) IN (
                ('top_up', 'asset.cash', 'liability.credit_paid'),
                ('usage', 'liability.credit_paid', 'revenue.usage'),
                ('usage', 'asset.unbilled', 'revenue.usage'),
                ('usage', 'expense.overrun', 'revenue.usage'),
                ('usage', 'liability.credit_promo', 'revenue.usage'),
                ('usage', 'liability.credit_goodwill', 'revenue.usage'),
                ('usage', 'liability.credit_paid', 'revenue.min_charge'),
                ('usage', 'asset.unbilled', 'revenue.min_charge'),
                ('usage', 'expense.overrun', 'revenue.min_charge'),
                ('usage', 'liability.credit_promo', 'revenue.min_charge'),
                ('usage', 'liability.credit_goodwill', 'revenue.min_charge'),
                ('usage', 'contra.promo_used', 'contra.promo_unearned'),
                ('grant', 'contra.promo_unearned', 'liability.credit_promo'),
                ('grant', 'contra.promo_unearned', 'liability.credit_goodwill'),
                ('expiry', 'liability.credit_paid', 'revenue.breakage'),
                ('expiry', 'liability.credit_promo', 'contra.promo_unearned'),
                ('expiry', 'liability.credit_goodwill', 'contra.promo_unearned'))
                OR x.kind IN ('reversal', 'rerating')), false)
        ORDER BY t.tx_id, t.seq LIMIT 1
    """,
    # The hash of a top-up holds its amount, its note and the expiry of its lot, if it has any.
    "ledger_tx": """
        SELECT x.id::text AS row,
               'its transfers are not what was asked for: ' || coalesce(t.amount::text, 'none') AS problem
        FROM ledger_tx x LEFT JOIN LATERAL (
            SELECT sum(t.amount) AS amount, count(*) AS n, min(l.expires_at) AS expires_at
            FROM ledger_transfer t LEFT JOIN credit_lot l ON l.account_id = t.credit_account
            WHERE t.tx_id = x.id) t ON true
        WHERE x.kind = 'top_up'
          AND (t.n <> 1 OR x.body_sha256 IS DISTINCT FROM sha256(convert_to(t.amount || coalesce(
               to_char(t.expires_at AT TIME ZONE 'UTC', '" until "YYYY-MM-DD"T"HH24:MI:SS"+00:00"'), '')
               || '|' || x.note, 'UTF8')))
        ORDER BY x.id LIMIT 1
    """,
    "ledger_tx reversal": """
        SELECT x.id::text AS row, 'it does not move back what it reverses, or was made of a reversal' AS problem
        FROM ledger_tx x JOIN ledger_tx o ON o.id = x.reverses_tx
        WHERE x.kind <> 'reversal' OR o.kind = 'reversal' OR o.tenant_id <> x.tenant_id OR EXISTS (
            SELECT FROM (SELECT * FROM ledger_transfer WHERE tx_id = o.id) t
            FULL JOIN (SELECT * FROM ledger_transfer WHERE tx_id = x.id) b ON b.seq = t.seq
            WHERE (t.debit_account, t.credit_account, t.currency, t.amount)
                  IS DISTINCT FROM (b.credit_account, b.debit_account, b.currency, b.amount))
        ORDER BY x.id LIMIT 1
    """,
    # Of what was asked for by operators, and by whom it was agreed.
    "credit_adjustment": """
        SELECT j.id::text AS row,
               'its transaction is not what was asked for once, or one person decided alone' AS problem
        FROM credit_adjustment j LEFT JOIN ledger_tx x ON x.id = j.tx_id
        LEFT JOIN LATERAL (SELECT sum(amount) AS amount FROM ledger_transfer WHERE tx_id = x.id) t ON true
        WHERE NOT coalesce(CASE j.state
            WHEN 'pending' THEN num_nulls(j.tx_id, j.decided_by, j.decided_person, j.decided_at) = 4
            WHEN 'declined' THEN j.tx_id IS NULL AND j.decided_by <> j.requested_by
            WHEN 'posted' THEN CASE j.kind
                 WHEN 'terms' THEN EXISTS (SELECT FROM credit_terms c WHERE c.tenant_id = j.tenant_id
                      AND c.mode = j.details ->> 'mode'
                      AND (c.mode = 'prepaid' OR c.credit_limit = (j.details ->> 'credit_limit_pico')::numeric))
                 WHEN 'usage' THEN EXISTS (SELECT FROM usage_decision d
                      LEFT JOIN usage_event e ON e.tenant_id = d.tenant_id AND e.id = d.event_id
                      WHERE d.tenant_id = j.tenant_id AND d.id = (j.details ->> 'event_id')::uuid
                      AND d.action = 'billed' AND coalesce(e.amount_pico, j.amount_pico) = j.amount_pico)
                 ELSE x.tenant_id = j.tenant_id AND x.kind = j.kind AND t.amount = j.amount_pico
                      AND x.note = j.note AND x.reverses_tx IS NOT DISTINCT FROM j.reverses_tx END
                 AND (NOT j.needs_approval OR j.decided_by <> j.requested_by
                      AND (j.requested_people IS NULL OR j.decided_person <> ALL (j.requested_people))) END, false)
           OR EXISTS (SELECT FROM credit_adjustment o WHERE o.id <> j.id AND o.tx_id = j.tx_id)
           OR EXISTS (SELECT FROM credit_adjustment o WHERE o.id <> j.id AND o.tenant_id = j.tenant_id
                      AND o.idempotency_key = j.idempotency_key)
        ORDER BY j.id LIMIT 1
    """,
    "ledger_tx without adjustment": """
        SELECT x.id::text AS row, 'nobody asked for this ' || x.kind AS problem FROM ledger_tx x
        WHERE x.kind IN ('grant', 'reversal')
          AND NOT EXISTS (SELECT FROM credit_adjustment j WHERE j.tx_id = x.id AND j.kind = x.kind)
        ORDER BY x.id LIMIT 1
    """,
    # What was paid for and expires is of one top-up, and expires when that was asked to.
    "credit_lot and ledger_tx": """
        SELECT l.account_id::text AS row, 'it is not the lot of one top-up, or expires at another time' AS problem
        FROM credit_lot l
        LEFT JOIN (SELECT t.credit_account, x.id FROM ledger_transfer t
                   JOIN ledger_tx x ON x.id = t.tx_id AND x.kind = 'top_up') x ON x.credit_account = l.account_id
        LEFT JOIN credit_adjustment j ON j.tx_id = x.id
        WHERE l.source = 'paid'
        GROUP BY l.account_id
        HAVING (l.expires_at IS NOT NULL AND count(x.id) <> 1)
            OR bool_or(j.id IS NOT NULL AND j.expires_at IS DISTINCT FROM l.expires_at)
        ORDER BY l.account_id LIMIT 1
    """,
    # A lot is what its grant was, and the account of nothing else.
    "credit_lot and credit_adjustment": """
        SELECT coalesce(a.id, l.account_id) || ' (' || coalesce(a.code, 'no account') || ')' AS row,
               'its lot is not what was granted, or has other accounts than its own' AS problem
        FROM ledger_account a
        FULL JOIN credit_lot l ON l.account_id = a.id
        LEFT JOIN ledger_account u ON u.id = l.unearned_account
        LEFT JOIN ledger_account d ON d.id = l.used_account
        LEFT JOIN ledger_transfer t ON t.credit_account = a.id AND l.source <> 'paid'
             AND EXISTS (SELECT FROM ledger_tx x WHERE x.id = t.tx_id AND x.kind = 'grant')
        LEFT JOIN credit_adjustment j ON j.tx_id = t.tx_id
        WHERE (l.account_id IS NOT NULL OR starts_with(a.code, 'liability.credit_')) AND NOT coalesce(
            a.tenant_id = l.tenant_id AND (a.code, l.source, l.priority) IN (
                ('liability.credit_paid', 'paid', 100), ('liability.credit_promo', 'promo', 10),
                ('liability.credit_goodwill', 'goodwill', 20))
            AND CASE WHEN l.source = 'paid' THEN
                num_nulls(l.models, l.tiers, l.unearned_account, l.used_account) = 4
            ELSE (u.code, u.tenant_id, u.currency) = ('contra.promo_unearned', a.tenant_id, a.currency)
                 AND (d.code, d.tenant_id, d.currency) = ('contra.promo_used', a.tenant_id, a.currency)
                 AND (j.tenant_id, j.source, j.amount_pico) = (l.tenant_id, l.source, t.amount)
                 AND (j.expires_at, j.models, j.tiers) IS NOT DISTINCT FROM (l.expires_at, l.models, l.tiers)
            END, false)
        ORDER BY 1 LIMIT 1
    """,
    "ledger_balance": """
        SELECT a.id || ' (' || a.code || ')' AS row,
               'it says debit ' || coalesce(b.debit::text, 'nothing') || ' and credit '
               || coalesce(b.credit::text, 'nothing') || ', its transfers add up to ' || coalesce(t.debit, 0)
               || ' and ' || coalesce(t.credit, 0) AS problem
        FROM ledger_account a
        LEFT JOIN ledger_balance b ON b.account_id = a.id
        LEFT JOIN (
            SELECT account, sum(debit) AS debit, sum(credit) AS credit FROM (
                SELECT debit_account AS account, amount AS debit, 0 AS credit FROM ledger_transfer
                UNION ALL SELECT credit_account, 0, amount FROM ledger_transfer) s
            GROUP BY account
        ) t ON t.account = a.id
        WHERE (b.debit, b.credit) IS DISTINCT FROM (coalesce(t.debit, 0), coalesce(t.credit, 0))
        ORDER BY a.id LIMIT 1
    """,
    "ledger_balance bound": """
        SELECT b.account_id || ' (' || coalesce(a.code, 'no account') || ')' AS row,
               'it is beyond its bound, or its bound is not what its kind has' AS problem
        FROM ledger_balance b LEFT JOIN ledger_account a ON a.id = b.account_id
        WHERE a.id IS NULL
           OR b.bounded <> (a.code IN ('liability.credit_paid', 'liability.credit_promo', 'liability.credit_goodwill',
                                       'asset.unbilled'))
           OR (b.bounded AND b.debit > b.credit + b.credit_limit)
           OR (b.credit_limit <> 0 AND a.code <> 'asset.unbilled')
        ORDER BY a.id LIMIT 1
    """,
    "trial balance": """
        SELECT a.currency AS row, 'debits ' || sum(b.debit) || ' and credits ' || sum(b.credit) || ' differ' AS problem
        FROM ledger_balance b JOIN ledger_account a ON a.id = b.account_id
        GROUP BY a.currency HAVING sum(b.debit) <> sum(b.credit) ORDER BY a.currency LIMIT 1
    """,
    # Given credit that is neither used nor expired is what stands against it.
    "credit_lot": """
        SELECT p.tenant_id::text AS row,
               'its given credit comes to ' || coalesce(l.amount, 0) || ', not used and not expired is '
               || coalesce(u.amount, 0) AS problem
        FROM billing_profile p
        LEFT JOIN (SELECT a.tenant_id, sum(b.credit - b.debit) AS amount
                   FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id
                   WHERE a.code IN ('liability.credit_promo', 'liability.credit_goodwill') GROUP BY 1) l
                  USING (tenant_id)
        LEFT JOIN (SELECT a.tenant_id, sum(b.debit - b.credit) AS amount
                   FROM ledger_account a JOIN ledger_balance b ON b.account_id = a.id
                   WHERE a.code = 'contra.promo_unearned' GROUP BY 1) u USING (tenant_id)
        WHERE coalesce(l.amount, 0) <> coalesce(u.amount, 0) ORDER BY 1 LIMIT 1
    """,
    "ledger_period": """
        SELECT month::text AS row, 'it is no month, or the month before it is not closed' AS problem
        FROM ledger_period p WHERE extract(day FROM month) <> 1
           OR month > (SELECT min(month) FROM ledger_period)
              AND NOT EXISTS (SELECT FROM ledger_period o
                              WHERE o.month = p.month - interval '1 month' AND o.state = 'closed')
        ORDER BY month LIMIT 1
    """,
    "billing_profile accounts": """
        SELECT p.tenant_id::text AS row, 'an account of it is not the one its kind has' AS problem
        FROM billing_profile p LEFT JOIN ledger_account u ON u.id = p.unbilled_account
        LEFT JOIN ledger_account r ON r.id = p.revenue_account LEFT JOIN ledger_account o ON o.id = p.overrun_account
        LEFT JOIN ledger_account m ON m.id = p.min_charge_account
        WHERE NOT coalesce(
            (r.code, r.tenant_id, r.currency) = ('revenue.usage', p.tenant_id, p.currency)
            AND (m.code, m.tenant_id, m.currency) = ('revenue.min_charge', p.tenant_id, p.currency)
            AND (o.code, o.tenant_id, o.currency) = ('expense.overrun', p.tenant_id, p.currency)
            AND ((p.mode = 'prepaid' AND p.unbilled_account IS NULL)
                 OR (u.code, u.tenant_id, u.currency) = ('asset.unbilled', p.tenant_id, p.currency)), false)
        ORDER BY 1 LIMIT 1
    """,
    # How a tenant pays is what its newest terms say; terms have numbers without gaps, and each differs from the last.
    "billing_profile and credit_terms": """
        SELECT concat_ws(' ', coalesce(p.tenant_id, t.tenant_id), p.unbilled_account) AS row,
               'it pays in another way, or has another limit, than its terms say' AS problem
        FROM billing_profile p
        FULL JOIN (SELECT DISTINCT ON (tenant_id) * FROM credit_terms ORDER BY tenant_id, number DESC) t
            ON t.tenant_id = p.tenant_id
        LEFT JOIN (SELECT tenant_id, count(*) AS n, count(DISTINCT number) AS numbers,
                          bool_or(mode = 'postpaid') AS owed FROM credit_terms GROUP BY tenant_id) c
            ON c.tenant_id = t.tenant_id
        LEFT JOIN ledger_balance b ON b.account_id = p.unbilled_account
        WHERE NOT coalesce(
            t.mode = p.mode AND t.credit_limit = coalesce(b.credit_limit, 0) AND t.number = c.n AND c.numbers = c.n
            AND (p.unbilled_account IS NOT NULL) = c.owed AND p.prepaid_since IS NOT DISTINCT FROM
                CASE WHEN t.mode = 'prepaid' AND p.unbilled_account IS NOT NULL THEN t.since END, false)
           OR EXISTS (SELECT FROM credit_terms x JOIN credit_terms y ON y.tenant_id = x.tenant_id
                      WHERE x.tenant_id = p.tenant_id AND y.number = x.number + 1
                        AND (y.mode, y.credit_limit) = (x.mode, x.credit_limit))
        ORDER BY 1 LIMIT 1
    """,
    # Every transaction of a tenant raises the version by one, so a deleted one shows.
    "billing_profile": """
        SELECT p.tenant_id::text AS row,
               'its version is ' || p.version || ' after ' || coalesce(x.n, 0) || ' transactions' AS problem
        FROM billing_profile p
        LEFT JOIN (SELECT tenant_id, count(*) AS n FROM ledger_tx GROUP BY tenant_id) x ON x.tenant_id = p.tenant_id
        WHERE p.version <> 1 + coalesce(x.n, 0) ORDER BY p.tenant_id LIMIT 1
    """,
    # What an operator billed is an event; what an operator counted was decided on.
    "usage_decision": """
        SELECT coalesce(d.event_id, d.id, e.id)::text AS row,
               'a decision has no event or no quarantined usage of its own, or an event no decision' AS problem
        FROM (SELECT d.*, count(*) OVER (PARTITION BY d.event_id) AS times, q.id IS NOT NULL AS held,
                     EXISTS (SELECT FROM usage_day u WHERE u.state = 'dropped'
                             AND u.day = (uuid_extract_timestamp(d.event_id) AT TIME ZONE 'UTC')::date) AS dropped
              FROM usage_decision d LEFT JOIN usage_quarantine q ON q.tenant_id = d.tenant_id AND q.id = d.id) d
        FULL JOIN (SELECT id, tenant_id FROM usage_event WHERE count_source = 'operator') e
            ON e.id = d.event_id AND e.tenant_id = d.tenant_id
        WHERE NOT coalesce(d.held AND CASE d.action
            WHEN 'billed' THEN d.times = 1 AND (e.id IS NOT NULL OR d.dropped)
            WHEN 'dismissed' THEN d.event_id IS NULL END, false)
        ORDER BY 1 LIMIT 1
    """,
}
_CHECKS |= verify_rerating_queries.CHECKS
CHECKS = tuple(_CHECKS)


async def freeze(session: AsyncSession, *, read_only: bool = True) -> None:
    """Look at one instant of the database for the whole transaction, however long it takes."""
    access = "READ ONLY" if read_only else "READ WRITE"
    await session.execute(text(f"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, {access}"))
    await allow_time(session)


async def read_all(session: AsyncSession) -> None:
    """From here on whole tables are added up: no plan that looks rows up one by one is right, however few are expected.

    Memory is bounded: a sort or hash beyond `WORK_MEM` goes to disk.
    """
    for setting in ("enable_nestloop = off", f"work_mem = '{WORK_MEM}'"):
        await session.execute(text(f"SET LOCAL {setting}"))


async def allow_time(session: AsyncSession) -> None:
    """Let a statement of this transaction take as long as large books need."""
    await session.execute(text("SET LOCAL statement_timeout = '1h'"))


async def first_wrong(session: AsyncSession, check: str) -> Row[Any] | None:
    """Return row and problem of the first row that fails this one of `CHECKS`."""
    return (await session.execute(text(_CHECKS[check]))).first()


async def published_versions(session: AsyncSession) -> Sequence[Row[Any]]:
    """Return every published version with the hash it was given."""
    statement = """
        SELECT v.id, v.book_id, b.currency, v.effective_at, v.content_sha256
        FROM price_version v JOIN price_book b ON b.id = v.book_id WHERE v.state = 'published' ORDER BY v.id
    """
    return (await session.execute(text(statement))).all()


async def version_facts(session: AsyncSession, row: Row[Any]) -> PublishedVersion:
    """Return what the hash of one of `published_versions` is over.

    Raises:
        ValueError: its rows hold something that is no price.
    """
    if row.effective_at is None:
        raise ValueError("it takes effect at no instant")
    items = tuple(await price_queries.items(session, row.id))
    discounts = tuple(await price_queries.discounts(session, row.id))
    return PublishedVersion(row.id, row.book_id, Currency(row.currency), row.effective_at, items, discounts)


async def quarantine_after(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> Sequence[Row[Any]]:
    """Return the next page of the quarantine."""
    statement = """
        SELECT tenant_id, id, amount_pico, payload FROM usage_quarantine
        WHERE (tenant_id, id) > (:tenant, :id) ORDER BY tenant_id, id LIMIT :page
    """
    values = {"tenant": tenant_id, "id": event_id, "page": PAGE}
    return (await session.execute(text(statement), values)).all()


async def counts(session: AsyncSession) -> dict[str, int]:
    """Return how many rows the books have."""
    tables = ("price_version", "ledger_account", "ledger_tx", "ledger_transfer", "usage_event", "usage_rollup")
    found = {}
    for table in tables:
        found[table] = (await session.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()  # noqa: S608 - constants
    return found


def prices(version: PublishedVersion) -> VersionPrices:
    return VersionPrices(version.id, version.currency, version.items)
