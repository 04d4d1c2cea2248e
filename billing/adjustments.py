"""What operators do to a tenant's money beside payments: give credit, and reverse a transaction.

Each is asked for once per idempotency key. Up to a limit it is posted at once; above it, it waits until a second
person approves or declines it. The limit is for all that one person adjusts of a tenant within 24 hours, by whichever
operators and tokens, so that a large amount in small parts does not pass it. The database keeps who asked from
deciding.
"""

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credit_alerts, errors, ledger, lot_queries, lots, posting_queries, rerating_queries, two_people
from billing.lots import Grant, LotSource
from billing.types import Transaction, Transfer
from core.idempotency import KEY_MAX_CHARS, key_reused
from core.ids import IdKind, format_id, new_uuid
from core.money import Currency
from core.tiers import Tier
from tenants.types import Responsible


class Adjustment(msgspec.Struct, frozen=True):
    """An adjustment as it stands: pending, posted or declined. `replayed`: the same call came before."""

    id: UUID
    tenant_id: UUID
    kind: str  # grant, reversal
    amount_pico: int
    state: str
    note: str
    requested_by: UUID
    requested_people: tuple[UUID, ...] | None  # None: from before it was kept
    requested_at: datetime
    decided_by: UUID | None
    decided_at: datetime | None
    transaction_id: UUID | None
    reverses: UUID | None
    grant: Grant | None
    replayed: bool = False


class Asked(msgspec.Struct, frozen=True):
    """Who asks for an adjustment, why, and above which sum in 24 hours somebody else must agree (pico)."""

    by: Responsible
    note: str
    idempotency_key: str
    alone_max_pico: int
    now: datetime


async def give(session: AsyncSession, tenant_id: UUID, grant: Grant, asked: Asked) -> Adjustment:
    """Give credit, once per idempotency key. After the commit, refresh the tenant's figure.

    Raises:
        PlatformError: NOT_FOUND, INVALID_AMOUNT, INVALID_GRANT, IDEMPOTENCY_KEY_REUSED, NOBODY_ANSWERS.
    """
    body = _digest("grant", msgspec.json.encode(grant).decode(), asked.note)
    before = await _begin(session, tenant_id, asked, body)
    if before is not None:
        return before
    lots.check(grant, asked.now)
    values = {
        "kind": "grant",
        "amount": grant.amount_pico,
        "source": grant.source.value,
        "expires_at": grant.expires_at,
        "models": list(grant.models) or None,
        "tiers": [int(tier) for tier in grant.tiers] or None,
        "reverses": None,
    }
    return await _ask(session, tenant_id, values, asked, body)


async def reverse(session: AsyncSession, tenant_id: UUID, tx_id: UUID, asked: Asked) -> Adjustment:
    """Undo a transaction by one that moves the same back; each is reversed once, and a reversal never.

    Raises:
        PlatformError: NOT_FOUND, NOT_REVERSIBLE, CREDIT_SPENT, IDEMPOTENCY_KEY_REUSED, NOBODY_ANSWERS.
    """
    body = _digest("reversal", tx_id.hex, asked.note)
    before = await _begin(session, tenant_id, asked, body)
    if before is not None:
        return before
    transfers = await _reversible(session, tenant_id, tx_id)
    values = {
        **dict.fromkeys(("source", "expires_at", "models", "tiers")),
        "kind": "reversal",
        "amount": sum(int(row.amount) for row in transfers),
        "reverses": tx_id,
    }
    return await _ask(session, tenant_id, values, asked, body)


def _digest(*parts: str) -> bytes:
    return sha256("|".join(parts).encode()).digest()


async def _begin(session: AsyncSession, tenant_id: UUID, asked: Asked, body: bytes) -> Adjustment | None:
    """Lock the tenant's money; return what the key stands for already."""
    if not await posting_queries.lock_profiles(session, [tenant_id]):
        raise errors.no_account(tenant_id)
    if not 0 < len(asked.note) <= lots.NOTE_MAX_CHARS:
        raise errors.invalid_grant(f"Say why, in 1 to {lots.NOTE_MAX_CHARS} characters.", "note")
    if not 0 < len(asked.idempotency_key) <= KEY_MAX_CHARS:
        raise errors.invalid_amount(f"An idempotency key has 1 to {KEY_MAX_CHARS} characters.")
    row = await lot_queries.adjustment_of_key(session, tenant_id, asked.idempotency_key)
    if row is None:
        return None
    if bytes(row.body_sha256) != body:
        raise key_reused()
    return msgspec.structs.replace(_adjustment(row), replayed=True)


async def _ask(session: AsyncSession, tenant_id: UUID, values: dict[str, Any], asked: Asked, body: bytes) -> Adjustment:
    adjustment_id = new_uuid()
    since = asked.now - two_people.ALONE_WINDOW
    alone = await lot_queries.asked_alone_pico(session, tenant_id, asked.by.answers, since)
    needs_approval = alone + values["amount"] > asked.alone_max_pico
    if needs_approval:
        two_people.require_answer(asked.by)
    await lot_queries.insert_adjustment(
        session,
        tenant_id,
        {
            **values,
            "id": adjustment_id,
            "note": asked.note,
            "key": asked.idempotency_key,
            "body": body,
            "by": asked.by.operator_id,
            "people": list(asked.by.people),
            "answers": asked.by.answers,
            "at": asked.now,
            "needs_approval": needs_approval,
        },
    )
    if not needs_approval:
        await _post(session, await get(session, tenant_id, adjustment_id), None, asked.now)
    return await get(session, tenant_id, adjustment_id)


async def get(session: AsyncSession, tenant_id: UUID, adjustment_id: UUID) -> Adjustment:
    """Return an adjustment.

    Raises:
        PlatformError: NOT_FOUND.
    """
    row = await lot_queries.adjustment(session, tenant_id, adjustment_id)
    if row is None:
        raise errors.no_adjustment()
    return _adjustment(row)


async def search(
    session: AsyncSession, tenant_id: UUID | None, *, pending: bool, after: UUID | None, limit: int
) -> Sequence[Adjustment]:
    """Return adjustments of a tenant or of all, newest first."""
    rows = await lot_queries.adjustments(session, tenant_id, pending=pending, after=after, limit=limit)
    return [_adjustment(row) for row in rows]


async def approve(
    session: AsyncSession, tenant_id: UUID, adjustment_id: UUID, *, by: Responsible, now: datetime
) -> Adjustment:
    """Post a pending adjustment. Doing it again changes nothing.

    Raises:
        PlatformError: NOT_FOUND, SECOND_PERSON_NEEDED, SIGN_IN_TO_DECIDE, OPERATOR_NOT_CONFIRMED, ADJUSTMENT_DECIDED,
            INVALID_GRANT, NOT_REVERSIBLE, CREDIT_SPENT.
    """
    found = await _pending(session, tenant_id, adjustment_id, by, "posted")
    if found.state == "pending":
        if not found.requested_people:
            raise errors.asked_by_nobody()
        if found.grant is not None:
            lots.check(found.grant, now)
        await _post(session, found, by, now)
    return await get(session, tenant_id, adjustment_id)


async def decline(
    session: AsyncSession, tenant_id: UUID, adjustment_id: UUID, *, by: Responsible, now: datetime
) -> Adjustment:
    """Turn a pending adjustment down for good. Doing it again changes nothing.

    Raises:
        PlatformError: NOT_FOUND, SECOND_PERSON_NEEDED, SIGN_IN_TO_DECIDE, OPERATOR_NOT_CONFIRMED, ADJUSTMENT_DECIDED.
    """
    found = await _pending(session, tenant_id, adjustment_id, by, "declined")
    if found.state == "pending":
        await lot_queries.decide(session, tenant_id, adjustment_id, _decision("declined", None, by, now))
    return await get(session, tenant_id, adjustment_id)


async def _pending(
    session: AsyncSession, tenant_id: UUID, adjustment_id: UUID, by: Responsible, wanted: str
) -> Adjustment:
    await posting_queries.lock_profiles(session, [tenant_id])
    found = await get(session, tenant_id, adjustment_id)
    if found.state not in ("pending", wanted):
        raise errors.adjustment_decided(found.state)
    if found.state == "pending":
        two_people.require_other(by, found.requested_by, found.requested_people)
    return found


def _decision(state: str, tx_id: UUID | None, by: Responsible | None, now: datetime) -> dict[str, Any]:
    if by is None:
        return {"state": state, "tx": tx_id, "by": None, "person": None, "at": None}
    return {"state": state, "tx": tx_id, "by": by.operator_id, "person": by.answers, "at": now}


async def _post(session: AsyncSession, wanted: Adjustment, by: Responsible | None, now: datetime) -> None:
    actor = f"operator:{format_id(IdKind.OPERATOR, wanted.requested_by)}"
    if wanted.grant is not None:
        posted = await lots.post_grant(session, wanted.tenant_id, wanted.grant, actor=actor, note=wanted.note)
    else:
        posted = await _post_reversal(session, wanted, actor)
    await lot_queries.decide(session, wanted.tenant_id, wanted.id, _decision("posted", posted.id, by, now))
    await credit_alerts.end_risen(session, wanted.tenant_id)


async def _reversible(session: AsyncSession, tenant_id: UUID, tx_id: UUID) -> Sequence[Row[Any]]:
    found = await lot_queries.transaction_row(session, tenant_id, tx_id)
    if found is None:
        raise errors.no_transaction()
    if found.reversed_by is not None:
        raise errors.not_reversible("It is reversed already.")
    if found.kind == "reversal":
        raise errors.not_reversible("A reversal is not reversed; post what is right anew.")
    if found.kind == "rerating":
        raise errors.not_reversible("Rate the usage again at the prices before.")
    if await rerating_queries.is_rerated(session, tenant_id, tx_id):
        raise errors.not_reversible("Its usage was rated again since.")
    transfers = await lot_queries.transfers(session, tenant_id, tx_id)
    if not transfers:
        raise errors.not_reversible("It moved nothing.")
    return transfers


async def _post_reversal(session: AsyncSession, wanted: Adjustment, actor: str) -> Transaction:
    if wanted.reverses is None:
        raise LookupError("a reversal names what it reverses")
    transfers = await _reversible(session, wanted.tenant_id, wanted.reverses)
    back = tuple(Transfer(row.credit_account, row.debit_account, int(row.amount)) for row in transfers)
    left = {source.account: source.available for source in await _left(session, wanted.tenant_id)}
    for transfer in back:
        if transfer.debit in left and transfer.amount > left[transfer.debit]:
            raise errors.credit_spent()
    transaction = Transaction(
        new_uuid(),
        wanted.tenant_id,
        "reversal",
        Currency(transfers[0].currency),
        back,
        actor=actor,
        note=wanted.note,
        reverses_tx=wanted.reverses,
    )
    await ledger.post(session, [transaction])
    return transaction


async def _left(session: AsyncSession, tenant_id: UUID) -> Sequence[ledger.Source]:
    """What is in every lot of the tenant, the empty ones too."""
    return [ledger.Source(lot.id, lot.available_pico) for lot in await lots.all_of(session, tenant_id)]


def _adjustment(row: Row[Any]) -> Adjustment:
    grant = None
    if row.kind == "grant":
        grant = Grant(
            int(row.amount_pico),
            LotSource(row.source),
            row.expires_at,
            tuple(row.models or ()),
            tuple(map(Tier, row.tiers or ())),
        )
    return Adjustment(
        row.id,
        row.tenant_id,
        row.kind,
        int(row.amount_pico),
        row.state,
        row.note,
        row.requested_by,
        None if row.requested_people is None else tuple(row.requested_people),
        row.requested_at,
        row.decided_by,
        row.decided_at,
        row.tx_id,
        row.reverses_tx,
        grant,
    )
