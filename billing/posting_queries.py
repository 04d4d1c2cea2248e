"""Queries that write the ledger: set-based, one statement per table and batch."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from billing.types import Transaction

_DIGESTED = (
    "id, tenant_id, day, tx_id, project_id, key_id, model_id, version_id, deployment_id, price_version_id, model,"
    " endpoint, tier, currency, outcome, count_source, stream, http_status, input_uncached, input_cached,"
    " input_cache_write, output, reasoning, amount_pico, min_charge_pico, admitted_at, ended_at,"
    " queue_us, ttft_us, upstream_id"
)
_WASTE = "preemptions, waste_tokens, waste_us"  # set of those that were preempted, all three or none
_WAIT = "wait"  # set of those that waited
EVENT_COLUMNS = f"{_DIGESTED}, {_WASTE}, {_WAIT}"
# The digest of an event: over all its columns in Postgres' binary format (of its wire protocol, so that it stays), cut
# to 128 bits. What these columns are never changes: a later one that allows null is added behind them where it is set.
DIGEST = (
    f"substr(sha256(record_send(ROW({_DIGESTED}, posted_at))"
    f" || CASE WHEN num_nulls({_WASTE}) = 3 THEN ''::bytea ELSE record_send(ROW({_WASTE})) END"
    f" || CASE WHEN {_WAIT} IS NULL THEN ''::bytea ELSE record_send(ROW({_WAIT})) END), 1, 16)"
)
# And of a transaction: over those of the events it posted, all of one day.
TX_DIGEST = "sha256(string_agg(digest, ''::bytea ORDER BY id))"


def _joined(values: Iterable[UUID | int | str]) -> str:
    """Return a list as one text: the driver takes microseconds for each element of an array."""
    return ",".join(map(str, values))


async def lock_profiles(session: AsyncSession, tenant_ids: Iterable[UUID]) -> Sequence[Row[Any]]:
    """Lock the tenants' money in the order of their ids, and return how they pay."""
    statement = """
        SELECT tenant_id, currency, mode, revenue_account, min_charge_account, overrun_account
        FROM billing_profile
        WHERE tenant_id = ANY(CAST(string_to_array(:tenants, ',') AS uuid[])) ORDER BY tenant_id FOR NO KEY UPDATE
    """
    return (await session.execute(text(statement), {"tenants": _joined(tenant.hex for tenant in tenant_ids)})).all()


async def spendable(session: AsyncSession, tenant_ids: Iterable[UUID]) -> Sequence[Row[Any]]:
    """Return the accounts usage takes from, in the order in which it does: lots by priority, expiry and age.

    Expired lots are among them until their remainder is taken back: they pay what was admitted before. So does the
    account of unbilled usage of a tenant that pays in advance since.
    """
    statement = """
        SELECT l.tenant_id, l.account_id, b.credit - b.debit AS available, l.unearned_account, l.used_account,
               l.expires_at, l.models, l.tiers, l.priority
        FROM credit_lot l JOIN ledger_balance b ON b.account_id = l.account_id
        WHERE b.credit > b.debit AND l.tenant_id = ANY(CAST(string_to_array(:tenants, ',') AS uuid[]))
        UNION ALL
        SELECT p.tenant_id, p.unbilled_account, b.credit + b.credit_limit - b.debit, NULL, NULL, p.prepaid_since, NULL,
               NULL, 32767
        FROM billing_profile p JOIN ledger_balance b ON b.account_id = p.unbilled_account
        WHERE p.tenant_id = ANY(CAST(string_to_array(:tenants, ',') AS uuid[]))
        ORDER BY tenant_id, priority, expires_at NULLS LAST, account_id
    """
    return (await session.execute(text(statement), {"tenants": _joined(tenant.hex for tenant in tenant_ids)})).all()


async def insert_transactions(session: AsyncSession, transactions: Sequence[Transaction]) -> None:
    statement = """
        INSERT INTO ledger_tx (id, tenant_id, kind, effective_at, usage_sha256)
        SELECT id, tenant_id, kind, coalesce(effective_at, clock_timestamp()), decode(sha256, 'hex')
        FROM unnest(CAST(string_to_array(:ids, ',') AS uuid[]), CAST(string_to_array(:tenants, ',') AS uuid[]),
            string_to_array(:kinds, ','), CAST(string_to_array(:effective, ',', '') AS timestamptz[]),
            string_to_array(:sha256s, ',', ''))
            AS t (id, tenant_id, kind, effective_at, sha256)
    """
    plain = [t for t in transactions if not _is_described(t)]
    if plain:
        values = {
            "ids": _joined(t.id.hex for t in plain),
            "tenants": _joined(t.tenant_id.hex for t in plain),
            "kinds": _joined(t.kind for t in plain),
            "effective": _joined(t.effective_at.isoformat() if t.effective_at else "" for t in plain),
            "sha256s": _joined(t.usage_sha256.hex() if t.usage_sha256 else "" for t in plain),
        }
        await session.execute(text(statement), values)
    for t in filter(_is_described, transactions):
        await _insert_described(session, t)
    rows = [
        (t.id.hex, seq, transfer.debit.hex, transfer.credit.hex, t.currency.value, transfer.amount)
        for t in transactions
        for seq, transfer in enumerate(t.transfers)
    ]
    if not rows:
        return
    statement = """
        INSERT INTO ledger_transfer (tx_id, seq, debit_account, credit_account, currency, amount)
        SELECT * FROM unnest(CAST(string_to_array(:tx, ',') AS uuid[]), CAST(string_to_array(:seq, ',') AS smallint[]),
            CAST(string_to_array(:debit, ',') AS uuid[]), CAST(string_to_array(:credit, ',') AS uuid[]),
            string_to_array(:currency, ','), CAST(string_to_array(:amount, ',') AS numeric[]))
    """
    names = ("tx", "seq", "debit", "credit", "currency", "amount")
    await session.execute(text(statement), dict(zip(names, map(_joined, zip(*rows, strict=True)), strict=True)))


def _is_described(t: Transaction) -> bool:
    return t.idempotency_key is not None or t.reverses_tx is not None or bool(t.actor or t.note)


async def _insert_described(session: AsyncSession, t: Transaction) -> None:
    statement = """
        INSERT INTO ledger_tx
            (id, tenant_id, kind, idempotency_key, body_sha256, actor, note, reverses_tx, effective_at)
        VALUES (:id, :tenant, :kind, :key, :body, :actor, :note, :reverses,
                coalesce(CAST(:effective AS timestamptz), clock_timestamp()))
    """
    values = {
        "id": t.id,
        "tenant": t.tenant_id,
        "kind": t.kind,
        "key": t.idempotency_key,
        "body": t.body_sha256,
        "actor": t.actor,
        "note": t.note,
        "reverses": t.reverses_tx,
        "effective": t.effective_at,
    }
    await session.execute(text(statement), values)


async def move_balances(session: AsyncSession, moves: Mapping[UUID, Sequence[int]]) -> None:
    """Add to debit and credit of each account. The limit check of the table refuses what a bound does not allow."""
    statement = """
        UPDATE ledger_balance b SET debit = b.debit + m.debit, credit = b.credit + m.credit
        FROM unnest(CAST(string_to_array(:accounts, ',') AS uuid[]),
            CAST(string_to_array(:debits, ',') AS numeric[]), CAST(string_to_array(:credits, ',') AS numeric[]))
             AS m (account_id, debit, credit)
        WHERE b.account_id = m.account_id
    """
    if moves:
        values = {
            "accounts": _joined(account.hex for account in moves),
            "debits": _joined(debit for debit, _ in moves.values()),
            "credits": _joined(credit for _, credit in moves.values()),
        }
        await session.execute(text(statement), values)


async def raise_versions(session: AsyncSession, tenant_ids: Iterable[UUID]) -> None:
    """Raise each tenant's version by as often as it is named: once per transaction."""
    statement = """
        UPDATE billing_profile p SET version = p.version + t.n
        FROM (SELECT CAST(id AS uuid) AS id, count(*) AS n FROM string_to_table(:tenants, ',') AS id GROUP BY 1) t
        WHERE p.tenant_id = t.id
    """
    await session.execute(text(statement), {"tenants": _joined(tenant.hex for tenant in tenant_ids)})


async def ensure_partition(session: AsyncSession, day: date) -> bool:
    """Make the partition of usage events of that day unless it is there; tells whether it made one."""
    made: bool = (await session.execute(text("SELECT ensure_usage_partition(:day)"), {"day": day})).scalar_one()
    return made


async def copy_incoming(session: AsyncSession, lines: bytes) -> None:
    """Load events, as lines of COPY's text format in the order of the columns, into a table of this transaction."""
    await session.execute(
        text(
            "CREATE TEMPORARY TABLE IF NOT EXISTS incoming ON COMMIT DELETE ROWS AS"  # noqa: S608 - a constant
            f" SELECT {EVENT_COLUMNS} FROM usage_event WITH NO DATA"
        )
    )
    connection = await (await session.connection()).get_raw_connection()
    driver = connection.driver_connection
    if not isinstance(driver, psycopg.AsyncConnection):
        raise TypeError("COPY needs psycopg's own connection")
    async with driver.cursor() as cursor, cursor.copy("COPY incoming FROM STDIN") as copy:
        await copy.write(lines)


KEY = "tenant_id, minute, project_id, key_id, model_id, model, endpoint, tier, outcome, price_version_id"
SUMS = (
    "requests",
    "input_uncached",
    "input_cached",
    "input_cache_write",
    "output",
    "reasoning",
    "amount_pico",
    "min_charge_pico",
)
ROLL_UP = f"""
    INSERT INTO usage_rollup AS r ({KEY}, currency, {", ".join(SUMS)})
    SELECT tenant_id, date_trunc('minute', admitted_at, 'UTC'), project_id, key_id, model_id, model, endpoint,
           tier, outcome, price_version_id, min(currency), count(*), {", ".join(f"sum({c})" for c in SUMS[1:])}
    FROM {{source}} GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
    ON CONFLICT ({KEY}) DO UPDATE SET {", ".join(f"{c} = r.{c} + excluded.{c}" for c in SUMS)}
"""  # noqa: S608 - built of constants
_INSERT_INCOMING = f"""
    WITH inserted AS (
        INSERT INTO usage_event ({EVENT_COLUMNS}, posted_at, digest) SELECT {EVENT_COLUMNS}, posted_at, {DIGEST}
        FROM (SELECT *, statement_timestamp() AS posted_at FROM incoming i
              WHERE NOT EXISTS (SELECT FROM usage_quarantine q WHERE q.tenant_id = i.tenant_id AND q.id = i.id)) i
        ON CONFLICT (tenant_id, id, day) DO NOTHING
        RETURNING *
    ), rolled AS ({ROLL_UP.format(source="inserted")}
    ), digested AS (SELECT tx_id, {TX_DIGEST} AS usage_sha256 FROM inserted GROUP BY 1)
    SELECT tenant_id, tx_id, model_id, tier, date_trunc('minute', admitted_at, 'UTC') AS minute, count(*) AS events,
           sum(amount_pico) AS amount, sum(min_charge_pico) AS min_charge, usage_sha256
    FROM inserted JOIN digested USING (tx_id) GROUP BY 1, 2, 3, 4, 5, 9 ORDER BY 1, 5, 3, 4
"""  # noqa: S608 - built of constants


async def insert_incoming(session: AsyncSession) -> Sequence[Row[Any]]:
    """Insert the loaded events that are new and not in quarantine, and add them to the rollup.

    Returns:
        per tenant, transaction id, model, tier and minute of admission, in the order in which they are charged: how
        many were new, their amount, what of it is minimum charges, and the digest of all of the transaction's.
    """
    return (await session.execute(text(_INSERT_INCOMING))).all()
