"""Queries of seals: which rows of money they cover, and each row's facts as one text.

Seals cover every transaction with its transfers, and as *records* the rows of other tables that do not change any more.
A record's facts are all columns of its row that are set, those a later migration adds too: these must allow null.
Both are named in `seal_queue` by triggers, in the transaction that writes them; a new kind of record needs one too.
What a kind of record covers never changes: what was sealed before would differ. A column that begins to change stands
in the facts with its first value, by which it was sealed (`first`); one that a migration fills in old rows is left out.
"""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

_SEAL_LOCK = 7481207


class Leaf(msgspec.Struct, frozen=True):
    """What a leaf is of: a transaction, or the row of a record's table that has this key."""

    tx_id: UUID | None
    record: str | None
    key: str | None
    hash: bytes
    place: int

    @property
    def row(self) -> str:
        return f"{self.record} {self.key}" if self.record else str(self.tx_id)


class Record(msgspec.Struct, frozen=True):
    """Rows that do not change once `when` holds, but for the columns in `without` and those in `first`.

    `key`: columns and their types. `first`: an expression, the object of columns with the value that they had first.
    """

    table: str
    key: tuple[tuple[str, str], ...]
    when: str = "true"
    without: tuple[str, ...] = ()
    first: str = "'{}'::jsonb"

    @property
    def facts(self) -> str:
        without = ", ".join(f"'{column}'" for column in self.without)
        return f"jsonb_strip_nulls((to_jsonb(t) - ARRAY[{without}]::text[]) || {self.first})::text"

    @property
    def name(self) -> str:
        return f"concat_ws(' ', {', '.join(f't.{column}' for column, _ in self.key)})"


_ID = (("id", "uuid"),)
# Of a profile and of the account of what is unbilled: as the terms said that it was opened with.
_OPENED = """coalesce((
    SELECT jsonb_build_object('mode', c.mode, 'prepaid_since', NULL, 'unbilled_account',
                              CASE c.mode WHEN 'postpaid' THEN t.unbilled_account END)
    FROM credit_terms c WHERE c.tenant_id = t.tenant_id ORDER BY c.number, c.id LIMIT 1), '{}')"""
_FIRST_LIMIT = """coalesce((
    SELECT jsonb_build_object('credit_limit', c.credit_limit)
    FROM ledger_account a JOIN credit_terms c ON c.tenant_id = a.tenant_id
    WHERE a.id = t.account_id AND a.code = 'asset.unbilled' AND c.mode = 'postpaid'
    ORDER BY c.number, c.id LIMIT 1), '{}')"""
_DECISION = ("state", "decided_by", "decided_person", "decided_at", "tx_id")
_EXECUTION = (
    "state",
    "needs_approval",
    "executed_by",
    "executed_answer",
    "executed_person",
    "executed_at",
    "finished_at",
)
_DROPPING = ("state", "dropped_at", "seq", "events", "kept_sha256", "prev_hash", "hash")
RECORDS = {
    "ledger_account": Record("ledger_account", _ID),
    "credit_terms": Record("credit_terms", _ID),  # before what is read from them, so that `verify` names the wrong one
    "ledger_balance": Record(
        "ledger_balance", (("account_id", "uuid"),), without=("debit", "credit"), first=_FIRST_LIMIT
    ),
    "billing_profile": Record("billing_profile", (("tenant_id", "uuid"),), without=("version",), first=_OPENED),
    "credit_lot": Record("credit_lot", (("account_id", "uuid"),)),
    "credit_adjustment": Record("credit_adjustment", _ID, without=_DECISION),
    "decision": Record("credit_adjustment", _ID, when="t.state <> 'pending'"),
    "price_book": Record("price_book", _ID),
    "price_version": Record("price_version", _ID, when="t.state = 'published'"),
    "usage_quarantine": Record("usage_quarantine", (("tenant_id", "uuid"), ("id", "uuid")), without=("seq",)),
    "rerating": Record("rerating", _ID, without=_EXECUTION),
    "rerating_tenant": Record("rerating_tenant", (("run_id", "uuid"), ("tenant_id", "uuid")), when="t.done"),
    "rerating_end": Record("rerating", _ID, when="t.state IN ('done', 'cancelled')"),
    "usage_decision": Record("usage_decision", (("tenant_id", "uuid"), ("id", "uuid"))),
    "usage_day": Record("usage_day", (("day", "date"),), without=_DROPPING),
    "dropped day": Record("usage_day", (("day", "date"),), when="t.state = 'dropped'"),
    "ledger_period": Record("ledger_period", (("month", "date"),), when="t.state = 'closed'"),
}

_READ: dict[str, Callable[[str], object]] = {"uuid": UUID, "date": date.fromisoformat}

# All fields of a transaction and of its transfers, in one row of text. What came later stands behind, where it is set.
_FACTS = """
    SELECT x.id, json_build_array(
        x.id, x.tenant_id, x.kind, x.idempotency_key, encode(x.body_sha256, 'hex'), x.actor, x.note, x.reverses_tx,
        to_char(x.effective_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'),
        to_char(x.booked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), x.period,
        (SELECT json_agg(json_build_array(t.seq, t.debit_account, d.code, d.tenant_id, t.credit_account, c.code,
                                          c.tenant_id, t.currency, t.amount::text) ORDER BY t.seq)
         FROM ledger_transfer t JOIN ledger_account d ON d.id = t.debit_account
         JOIN ledger_account c ON c.id = t.credit_account WHERE t.tx_id = x.id))::text
        || coalesce(' ' || encode(x.usage_sha256, 'hex'), '') AS facts
    FROM ledger_tx x
"""


async def lock_seals(session: AsyncSession) -> None:
    await session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SEAL_LOCK})


async def unsealed(session: AsyncSession, limit: int) -> Sequence[Row[Any]]:
    """Return transactions that wait for their seal, in the order of their ids, with all their facts."""
    queue = "SELECT tx_id FROM seal_queue WHERE tx_id IS NOT NULL ORDER BY tx_id LIMIT :limit"
    ids = list((await session.scalars(text(queue), {"limit": limit})).all())
    if not ids:
        return []
    # two statements, since what was last counted of a queue says nothing: no plan may read the whole ledger for it
    return (await session.execute(text(f"{_FACTS} WHERE x.id = ANY(:ids) ORDER BY x.id"), {"ids": ids})).all()


async def unsealed_records(session: AsyncSession, record: str, limit: int) -> list[tuple[str, str]]:
    """Return key and facts of rows of one of `RECORDS` that wait for their seal, in the order of their keys."""
    queue = "SELECT key FROM seal_queue WHERE record = :record ORDER BY key LIMIT :limit"
    keys = list((await session.scalars(text(queue), {"record": record, "limit": limit})).all())
    return sorted((await record_facts(session, record, keys)).items()) if keys else []


async def leave_queue(session: AsyncSession, leaves: Sequence[Leaf]) -> None:
    """Take out of the queue what has a leaf now; the table refuses any other."""
    await session.execute(
        text("DELETE FROM seal_queue WHERE tx_id = ANY(:ids)"), {"ids": [leaf.tx_id for leaf in leaves if leaf.tx_id]}
    )
    keys: dict[str, list[str]] = {}
    for leaf in leaves:
        if leaf.record is not None and leaf.key is not None:
            keys.setdefault(leaf.record, []).append(leaf.key)
    for record, wanted in keys.items():
        statement = "DELETE FROM seal_queue WHERE record = :record AND key = ANY(:keys)"
        await session.execute(text(statement), {"record": record, "keys": wanted})


async def waiting(session: AsyncSession) -> int:
    """Return how many rows wait for their seal."""
    return int((await session.execute(text("SELECT count(*) FROM seal_queue"))).scalar_one())


def _skipped(table: str, key: str, when: str, leaf: str) -> str:
    return f"""
        (SELECT r.key FROM (SELECT {key} AS key FROM {table} t WHERE {when}) r
         WHERE NOT EXISTS (SELECT FROM ledger_leaf f WHERE {leaf.format("f")})
           AND NOT EXISTS (SELECT FROM seal_queue f WHERE {leaf.format("f")}) ORDER BY r.key LIMIT 1)
    """  # noqa: S608 - built of constants


async def first_skipped(session: AsyncSession) -> str | None:
    """Return a row that no seal covers and that does not wait for one: looked for in all there are."""
    branches = [("", _skipped("ledger_tx", "t.id", "true", "{0}.tx_id = r.key"))]
    for record, one in RECORDS.items():
        leaf = f"{{0}}.record = '{record}' AND {{0}}.key = r.key"
        branches.append((f"{record} ", _skipped(one.table, one.name, one.when, leaf)))
    named = [f"SELECT '{name}' || s.key AS row FROM {branch} s" for name, branch in branches]  # noqa: S608 - constants
    found: str | None = (await session.scalars(text(" UNION ALL ".join(named) + " LIMIT 1"))).first()
    return found


async def last_seal(session: AsyncSession) -> Row[Any] | None:
    return (await session.execute(text("SELECT * FROM ledger_seal ORDER BY seq DESC LIMIT 1"))).one_or_none()


async def seal_after(session: AsyncSession, seq: int) -> Row[Any] | None:
    """Return the next seal."""
    statement = "SELECT * FROM ledger_seal WHERE seq > :seq ORDER BY seq LIMIT 1"
    return (await session.execute(text(statement), {"seq": seq})).one_or_none()


async def leaves(session: AsyncSession, seal_seq: int) -> list[tuple[Leaf, str | None]]:
    """Return a seal's leaves in their order; with each transaction's facts as they are now, None where it is gone."""
    statement = f"""
        SELECT f.tx_id, f.record, f.key, f.hash, f.place, x.facts
        FROM ledger_leaf f LEFT JOIN ({_FACTS}) x ON x.id = f.tx_id
        WHERE f.seal_seq = :seq ORDER BY f.place
    """  # noqa: S608 - built of constants
    rows = await session.execute(text(statement), {"seq": seal_seq})
    return [(Leaf(row.tx_id, row.record, row.key, bytes(row.hash), row.place), row.facts) for row in rows]


async def record_facts(session: AsyncSession, record: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the facts of a record's rows as they are now; those that are gone are left out."""
    one = RECORDS[record]
    parts = [key.split(" ") for key in keys if _is_key(one, key)]
    arrays = ", ".join(f"CAST(:k{n} AS {kind}[])" for n, (_, kind) in enumerate(one.key))
    columns = ", ".join(f"t.{column}" for column, _ in one.key)
    statement = f"""
        SELECT {one.name} AS key, {one.facts} AS facts FROM {one.table} t
        WHERE ({columns}) IN (SELECT * FROM unnest({arrays})) AND {one.when}
    """  # noqa: S608 - built of constants
    values = {f"k{n}": [part[n] for part in parts] for n in range(len(one.key))}
    return {row.key: row.facts for row in await session.execute(text(statement), values)}


def _is_key(record: Record, key: str) -> bool:
    parts = key.split(" ")
    try:
        for part, (_, kind) in zip(parts, record.key, strict=True):
            _READ[kind](part)
    except ValueError:
        return False
    return True


async def insert_seal(session: AsyncSession, seq: int, count: int, *, root: bytes, prev: bytes, sha256: bytes) -> None:
    statement = """
        INSERT INTO ledger_seal (seq, leaves, merkle_root, prev_hash, hash) VALUES (:seq, :n, :root, :prev, :hash)
    """
    values = {"seq": seq, "n": count, "root": root, "prev": prev, "hash": sha256}
    await session.execute(text(statement), values)


async def insert_leaves(session: AsyncSession, seal_seq: int, leaves: Sequence[Leaf]) -> None:
    statement = """
        INSERT INTO ledger_leaf (seal_seq, place, tx_id, record, key, hash)
        VALUES (:seq, :place, :tx, :record, :key, :hash)
    """
    rows = [
        {"seq": seal_seq, "place": one.place, "tx": one.tx_id, "record": one.record, "key": one.key, "hash": one.hash}
        for one in leaves
    ]
    await session.execute(text(statement), rows)
