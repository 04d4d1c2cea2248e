"""What operators do to a tenant's money, each asked for once, and above a limit decided on by a second person.

That is: credit that was paid for or is given, a transaction reversed, more that may be owed, and quarantined usage that
is billed. Up to a limit it is posted at once; above it, it waits until a second person approves or declines it. The
limit is for all that one person adjusts of a tenant within 24 hours, by whichever operators and tokens, so that a large
amount in small parts does not pass it. The database keeps who asked from deciding. ADR 0030.
"""

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    adjustment_kinds,
    credit_alerts,
    errors,
    lot_queries,
    lots,
    posting_queries,
    quarantine,
    terms,
    two_people,
)
from billing import credits as paid
from billing.adjustment_kinds import Adjustment, BilledUsage, NewTerms
from billing.lots import Grant, LotSource
from billing.types import BillingMode
from core.idempotency import KEY_MAX_CHARS, key_reused
from core.ids import new_uuid
from core.money import format_pico
from core.tiers import Tier
from tenants.types import Responsible


class Asked(msgspec.Struct, frozen=True):
    """Who asks for an adjustment, why, and above which sum in 24 hours somebody else must agree (pico).

    Without an idempotency key, what is asked for says itself whether it was asked for before.
    """

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
    transfers = await adjustment_kinds.reversible(session, tenant_id, tx_id)
    amount = sum(int(row.amount) for row in transfers)
    return await _ask(session, tenant_id, {"kind": "reversal", "amount": amount, "reverses": tx_id}, asked, body)


async def top_up(
    session: AsyncSession,
    tenant_id: UUID,
    amount_pico: int,
    asked: Asked,
    *,
    expires_at: datetime | None = None,
    may_expire: bool = False,
) -> Adjustment:
    """Add credit that was paid for, once per idempotency key. After the commit, refresh the tenant's figure.

    Args:
        session: the transaction.
        tenant_id: whose credit.
        amount_pico: how much.
        asked: who asks, and why.
        expires_at: a whole minute in the future, after which the rest is the platform's; None: never.
        may_expire: whether this installation's terms allow that.

    Raises:
        PlatformError: NOT_FOUND, NOT_PREPAID, INVALID_AMOUNT, INVALID_EXPIRY, PAID_CREDIT_NEVER_EXPIRES,
            IDEMPOTENCY_KEY_REUSED, NOBODY_ANSWERS.
    """
    body = paid.body_digest(amount_pico, asked.note, expires_at)
    before = await _begin(session, tenant_id, asked, body, may_be_silent=True)
    if before is not None:
        return before
    if expires_at is not None:
        if not may_expire:
            raise errors.paid_credit_never_expires()
        lots.check_paid_expiry(expires_at, asked.now)
    await paid.check(session, tenant_id, amount_pico, asked.idempotency_key, body)
    values = {"kind": "top_up", "amount": amount_pico, "expires_at": expires_at}
    return await _ask(session, tenant_id, values, asked, body)


async def change_terms(session: AsyncSession, tenant_id: UUID, new: NewTerms, asked: Asked) -> Adjustment | None:
    """Change how a tenant pays; None when it pays so already. The amount is how much more it may owe.

    The same that waits for a decision is not asked for twice. After the commit, refresh its figure with `correct`.

    Raises:
        PlatformError: NOT_FOUND, INVALID_AMOUNT, INVALID_GRANT, CREDIT_LIMIT_TOO_LOW, NOBODY_ANSWERS.
    """
    body = _digest("terms", msgspec.json.encode(new).decode(), asked.note)
    await _begin(session, tenant_id, asked, body)
    now = await terms.checked(session, tenant_id, new.mode, new.credit_limit_pico)
    if now is None:
        return None
    waiting = await _waiting(session, tenant_id, "terms", body)
    if waiting is not None:
        return waiting
    before_pico = now.credit_limit_pico if now.mode is BillingMode.POSTPAID else 0
    values = {
        "kind": "terms",
        "amount": max(0, new.credit_limit_pico - before_pico),
        "details": msgspec.json.encode(new).decode(),
    }
    return await _ask(session, tenant_id, values, asked, body)


async def count_opening(session: AsyncSession, tenant_id: UUID, new: NewTerms, asked: Asked) -> None:
    """Count the limit that a tenant is opened with to what its opener does alone.

    Raises:
        PlatformError: SECOND_PERSON_NEEDED, for a limit above it: it is asked for when the tenant is open.
    """
    if new.credit_limit_pico > asked.alone_max_pico:
        raise errors.opened_too_high(format_pico(asked.alone_max_pico))
    if new.credit_limit_pico:
        body = _digest("terms", msgspec.json.encode(new).decode(), asked.note)
        details = msgspec.json.encode(new).decode()
        values = {"kind": "terms", "amount": new.credit_limit_pico, "details": details}
        adjustment_id = await _insert(session, tenant_id, values, asked, body, needs_approval=False)
        await lot_queries.decide(session, tenant_id, adjustment_id, _decision("posted", None, None, asked.now))


async def bill(session: AsyncSession, tenant_id: UUID, billed: BilledUsage, asked: Asked) -> Adjustment:
    """Bill quarantined usage with corrected counts. The same that waits for a decision is not asked for twice.

    Raises:
        PlatformError: NOT_FOUND, ALREADY_DECIDED, NOT_BILLABLE, DECISION_WAITS, NOBODY_ANSWERS.
    """
    body = _digest("usage", msgspec.json.encode(billed).decode(), asked.note)
    await _begin(session, tenant_id, asked, body)
    amount = await quarantine.amount(session, tenant_id, billed.event_id, billed.usage)
    waiting = await _waiting(session, tenant_id, "usage", body)
    if waiting is not None:
        return waiting
    await require_undecided(session, tenant_id, billed.event_id)
    values = {"kind": "usage", "amount": amount, "details": msgspec.json.encode(billed).decode()}
    return await _ask(session, tenant_id, values, asked, body)


async def require_undecided(session: AsyncSession, tenant_id: UUID, event_id: UUID) -> None:
    """Refuse another decision on quarantined usage while its bill waits for a second person.

    Raises:
        PlatformError: DECISION_WAITS.
    """
    await posting_queries.lock_profiles(session, [tenant_id])
    if await lot_queries.usage_waits(session, tenant_id, event_id):
        raise errors.decision_waits()


def _digest(*parts: str) -> bytes:
    return sha256("|".join(parts).encode()).digest()


async def _begin(
    session: AsyncSession, tenant_id: UUID, asked: Asked, body: bytes, *, may_be_silent: bool = False
) -> Adjustment | None:
    """Lock the tenant's money; return what the key stands for already."""
    if not await posting_queries.lock_profiles(session, [tenant_id]):
        raise errors.no_account(tenant_id)
    if not (0 if may_be_silent else 1) <= len(asked.note) <= lots.NOTE_MAX_CHARS:
        raise errors.invalid_grant(f"Say why, in 1 to {lots.NOTE_MAX_CHARS} characters.", "note")
    if not 0 < len(asked.idempotency_key) <= KEY_MAX_CHARS:
        raise errors.invalid_amount(f"An idempotency key has 1 to {KEY_MAX_CHARS} characters.")
    row = await lot_queries.adjustment_of_key(session, tenant_id, asked.idempotency_key)
    if row is None:
        return None
    if bytes(row.body_sha256) != body:
        raise key_reused()
    return msgspec.structs.replace(_adjustment(row), replayed=True)


async def _waiting(session: AsyncSession, tenant_id: UUID, kind: str, body: bytes) -> Adjustment | None:
    row = await lot_queries.waiting_adjustment(session, tenant_id, kind, body)
    return None if row is None else msgspec.structs.replace(_adjustment(row), replayed=True)


async def _ask(session: AsyncSession, tenant_id: UUID, values: dict[str, Any], asked: Asked, body: bytes) -> Adjustment:
    since = asked.now - two_people.ALONE_WINDOW
    alone = await lot_queries.asked_alone_pico(session, tenant_id, asked.by.answers, since)
    needs_approval = values["amount"] > 0 and alone + values["amount"] > asked.alone_max_pico
    if needs_approval:
        two_people.require_answer(asked.by)
    adjustment_id = await _insert(session, tenant_id, values, asked, body, needs_approval=needs_approval)
    if not needs_approval:
        await _post(session, await get(session, tenant_id, adjustment_id), None, asked.now)
    return await get(session, tenant_id, adjustment_id)


async def _insert(
    session: AsyncSession, tenant_id: UUID, values: dict[str, Any], asked: Asked, body: bytes, *, needs_approval: bool
) -> UUID:
    adjustment_id = new_uuid()
    unset = dict.fromkeys(("source", "expires_at", "models", "tiers", "reverses", "details"))
    who = {"by": asked.by.operator_id, "people": list(asked.by.people), "answers": asked.by.answers}
    facts = {"note": asked.note, "key": asked.idempotency_key, "body": body, "at": asked.now}
    await lot_queries.insert_adjustment(
        session,
        tenant_id,
        {**unset, **values, **who, **facts, "id": adjustment_id, "needs_approval": needs_approval},
    )
    return adjustment_id


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
        PlatformError: NOT_FOUND, SECOND_PERSON_NEEDED, SIGN_IN_TO_DECIDE, OPERATOR_NOT_CONFIRMED, ADJUSTMENT_DECIDED;
            what its kind refuses, where something changed since it was asked for.
    """
    found = await _pending(session, tenant_id, adjustment_id, by, "posted")
    if found.state == "pending":
        if not found.requested_people:
            raise errors.asked_by_nobody()
        if found.grant is not None:
            lots.check(found.grant, now)
        if found.expires_at is not None:
            lots.check_paid_expiry(found.expires_at, now)
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
    tx_id = await adjustment_kinds.post(session, wanted, now)
    await lot_queries.decide(session, wanted.tenant_id, wanted.id, _decision("posted", tx_id, by, now))
    await credit_alerts.end_risen(session, wanted.tenant_id)


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
        row.idempotency_key,
        row.requested_by,
        None if row.requested_people is None else tuple(row.requested_people),
        row.requested_at,
        row.decided_by,
        row.decided_at,
        row.tx_id,
        row.reverses_tx,
        grant,
        msgspec.convert(row.details, NewTerms) if row.kind == "terms" else None,
        msgspec.convert(row.details, BilledUsage) if row.kind == "usage" else None,
        row.expires_at if row.kind == "top_up" else None,
    )
