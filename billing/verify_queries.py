"""Queries that add the books up again. Each answers the first row that is wrong, and how, or nothing.

They repeat in SQL what the code computes in Python, on purpose: two ways to one figure, which must agree.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing import price_queries, verify_rerating_queries
from billing.price_table import PublishedVersion, VersionPrices
from billing.types import PriceSchedule, PriceStep
from core.money import Currency

PAGE = 1000
BIGINT_MAX = 2**63 - 1

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
                ('expiry', 'liability.credit_promo', 'contra.promo_unearned'),
                ('expiry', 'liability.credit_goodwill', 'contra.promo_unearned'))
                OR x.kind IN ('reversal', 'rerating')), false)
        ORDER BY t.tx_id, t.seq LIMIT 1
    """,
    # The hash of a top-up holds its amount and note.
    "ledger_tx": """
        SELECT x.id::text AS row,
               'its transfers are not what was asked for: ' || coalesce(t.amount::text, 'none') AS problem
        FROM ledger_tx x LEFT JOIN LATERAL (
            SELECT sum(amount) AS amount, count(*) AS n FROM ledger_transfer WHERE tx_id = x.id) t ON true
        WHERE x.kind = 'top_up'
          AND (t.n <> 1 OR x.body_sha256 IS DISTINCT FROM sha256(convert_to(t.amount || '|' || x.note, 'UTF8')))
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
            WHEN 'pending' THEN num_nulls(j.tx_id, j.decided_by, j.decided_at) = 3
            WHEN 'declined' THEN j.tx_id IS NULL AND j.decided_by <> j.requested_by
            WHEN 'posted' THEN x.tenant_id = j.tenant_id AND x.kind = j.kind AND t.amount = j.amount_pico
                 AND x.note = j.note AND x.reverses_tx IS NOT DISTINCT FROM j.reverses_tx
                 AND (NOT j.needs_approval OR j.decided_by <> j.requested_by) END, false)
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
                num_nulls(l.expires_at, l.models, l.tiers, l.unearned_account, l.used_account) = 5
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
        SELECT coalesce(p.tenant_id, t.tenant_id)::text AS row,
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
    "usage_event": """
        SELECT e.id::text AS row, 'its day, tenant, currency or transaction does not fit' AS problem
        FROM usage_event e
        LEFT JOIN billing_profile p ON p.tenant_id = e.tenant_id
        LEFT JOIN ledger_tx x ON x.id = e.tx_id AND x.tenant_id = e.tenant_id AND x.kind = 'usage'
        WHERE x.id IS NULL OR p.currency IS DISTINCT FROM e.currency
           OR e.day IS DISTINCT FROM (uuid_extract_timestamp(e.id) AT TIME ZONE 'UTC')::date
        ORDER BY e.id LIMIT 1
    """,
    "usage_event and ledger_transfer": """
        SELECT x.id::text AS row,
               'its events come to ' || coalesce(e.amount, 0) || ' and ' || coalesce(e.min_charge, 0)
               || ' of minimum charges, its transfers to ' || coalesce(t.amount, 0) || ' and '
               || coalesce(t.min_charge, 0) AS problem
        FROM ledger_tx x
        LEFT JOIN (SELECT tx_id, sum(amount_pico - min_charge_pico) AS amount, sum(min_charge_pico) AS min_charge
                   FROM usage_event GROUP BY tx_id) e ON e.tx_id = x.id
        LEFT JOIN (SELECT r.tx_id, sum(r.amount) FILTER (WHERE a.code = 'revenue.usage') AS amount,
                          sum(r.amount) FILTER (WHERE a.code = 'revenue.min_charge') AS min_charge
                   FROM ledger_transfer r JOIN ledger_account a ON a.id = r.credit_account
                   WHERE a.code IN ('revenue.usage', 'revenue.min_charge') GROUP BY r.tx_id) t ON t.tx_id = x.id
        WHERE x.kind = 'usage' AND (coalesce(e.amount, 0), coalesce(e.min_charge, 0))
                                   <> (coalesce(t.amount, 0), coalesce(t.min_charge, 0))
        ORDER BY x.id LIMIT 1
    """,
    "usage_rollup": """
        WITH events AS (
            SELECT tenant_id, date_trunc('minute', admitted_at, 'UTC') AS minute, project_id, key_id, model_id, model,
                   endpoint, tier, outcome, price_version_id, min(currency) AS currency, count(*)::numeric AS requests,
                   sum(input_uncached) AS input_uncached, sum(input_cached) AS input_cached,
                   sum(input_cache_write) AS input_cache_write, sum(output) AS output, sum(reasoning) AS reasoning,
                   sum(amount_pico) AS amount_pico, sum(min_charge_pico) AS min_charge_pico
            FROM usage_event GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
        )
        SELECT 'tenant ' || tenant_id || ' minute ' || minute || ' model ' || model AS row,
               'it says ' || coalesce(r.amount_pico::text, 'nothing') || ' for ' || coalesce(r.requests, 0)
               || ' requests, the events come to ' || coalesce(e.amount_pico::text, 'nothing') || ' for '
               || coalesce(e.requests, 0) || ', or tokens differ' AS problem
        FROM usage_rollup r FULL JOIN events e USING
            (tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome, price_version_id)
        WHERE (r.currency, r.requests, r.input_uncached, r.input_cached, r.input_cache_write, r.output, r.reasoning,
               r.amount_pico, r.min_charge_pico) IS DISTINCT FROM
              (e.currency, e.requests, e.input_uncached, e.input_cached, e.input_cache_write, e.output, e.reasoning,
               e.amount_pico, e.min_charge_pico)
        ORDER BY tenant_id, minute LIMIT 1
    """,
}
_CHECKS |= verify_rerating_queries.CHECKS
CHECKS = tuple(_CHECKS)

# A schedule is a row per step: it holds for more than `above` input tokens, up to `up_to`.
_RERATE = """
    WITH schedule AS (
        SELECT * FROM unnest(CAST(:version AS uuid[]), CAST(:model AS uuid[]), CAST(:tier AS smallint[]),
            CAST(:tenant AS uuid[]), CAST(:currency AS text[]), CAST(:above AS bigint[]), CAST(:up_to AS bigint[]),
            CAST(:input AS numeric[]), CAST(:cached AS numeric[]), CAST(:cache_write AS numeric[]),
            CAST(:output AS numeric[]), CAST(:reasoning AS numeric[]), CAST(:request AS numeric[]),
            CAST(:minimum AS numeric[]))
            AS s (version, model, tier, tenant, currency, above, up_to, input, cached, cache_write, output, reasoning,
                  request, minimum)
    ), priced AS (
        SELECT e.id, e.amount_pico, e.min_charge_pico, e.currency = s.currency AS fits, s.minimum, CASE
            WHEN e.outcome NOT IN ('completed', 'client_abort') THEN NULL
            WHEN e.outcome = 'client_abort' AND e.output + e.reasoning = 0 THEN NULL
            WHEN e.input_uncached + e.input_cached + e.input_cache_write + e.output + e.reasoning = 0 THEN NULL
            ELSE e.input_uncached * s.input + e.input_cached * s.cached + e.input_cache_write * s.cache_write
                 + e.output * s.output + e.reasoning * s.reasoning + s.request END AS usage_pico
        FROM usage_event e LEFT JOIN schedule s
          ON s.version = e.price_version_id AND s.model = e.model_id AND s.tier = e.tier AND s.tenant = e.tenant_id
             AND e.input_uncached + e.input_cached + e.input_cache_write > s.above
             AND e.input_uncached + e.input_cached + e.input_cache_write <= s.up_to
    ), rated AS (
        SELECT id, amount_pico, min_charge_pico, fits,
               CASE WHEN usage_pico IS NULL THEN 0 ELSE greatest(usage_pico, minimum) END AS right_pico,
               CASE WHEN usage_pico < minimum THEN minimum - usage_pico ELSE 0 END AS right_min_pico
        FROM priced
    )
    SELECT id::text AS row, CASE WHEN fits IS NULL THEN 'its price version has no price for it' ELSE
           'it is billed ' || amount_pico || ' pico with a minimum charge of ' || min_charge_pico
           || ', its price version gives ' || right_pico || ' with ' || right_min_pico END AS problem
    FROM rated
    WHERE (amount_pico, min_charge_pico) IS DISTINCT FROM (right_pico, right_min_pico) OR NOT coalesce(fits, false)
    ORDER BY id LIMIT 1
"""


async def freeze(session: AsyncSession) -> None:
    """Look at one instant of the database for the whole transaction, however long it takes."""
    await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
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


async def priced_offers(session: AsyncSession) -> Sequence[Row[Any]]:
    """Return the distinct price version, model, tier and tenant of all events."""
    statement = "SELECT DISTINCT price_version_id, model_id, tier, tenant_id FROM usage_event"
    return (await session.execute(text(statement))).all()


async def first_misrated(
    session: AsyncSession, schedules: Sequence[tuple[UUID, UUID, PriceSchedule]]
) -> Row[Any] | None:
    """Rate all events again at `schedules` (tenant, model, prices); return the first whose amount differs."""
    bands = [(tenant, model, s, band) for tenant, model, s in schedules for band in _bands(s)]
    values: Mapping[str, list[Any]] = {
        "tenant": [tenant for tenant, _, _, _ in bands],
        "model": [model for _, model, _, _ in bands],
        "version": [s.price_version_id for _, _, s, _ in bands],
        "tier": [int(s.tier) for _, _, s, _ in bands],
        "currency": [s.currency.value for _, _, s, _ in bands],
        "above": [above for _, _, _, (above, _, _) in bands],
        "up_to": [up_to for _, _, _, (_, up_to, _) in bands],
        "input": [unit.input for _, _, _, (_, _, unit) in bands],
        "cached": [unit.cached_input for _, _, _, (_, _, unit) in bands],
        "cache_write": [unit.cache_write for _, _, _, (_, _, unit) in bands],
        "output": [unit.output for _, _, _, (_, _, unit) in bands],
        "reasoning": [unit.reasoning for _, _, _, (_, _, unit) in bands],
        "request": [s.request for _, _, s, _ in bands],
        "minimum": [s.minimum for _, _, s, _ in bands],
    }
    return (await session.execute(text(_RERATE), dict(values))).first()


def _bands(s: PriceSchedule) -> list[tuple[int, int, PriceSchedule | PriceStep]]:
    """Return for each set of unit prices more than how many input tokens, and up to how many, it is for."""
    starts = [-1, *(step.above for step in s.steps)]
    return list(zip(starts, [*starts[1:], BIGINT_MAX], (s, *s.steps), strict=True))


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
