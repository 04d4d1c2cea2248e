"""What each kind of adjustment does when it is posted, at once or after a second person approved it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import credits as paid
from billing import errors, ledger, lot_queries, lots, quarantine, rerating_queries, terms
from billing.lots import Grant
from billing.types import BillingMode, Transaction, Transfer
from core.ids import IdKind, format_id, new_uuid
from core.money import Currency
from core.usage import TokenUsage


class NewTerms(msgspec.Struct, frozen=True):
    """How the tenant is to pay. Pico."""

    mode: BillingMode
    credit_limit_pico: int


class BilledUsage(msgspec.Struct, frozen=True):
    """The quarantined event that is to be billed, and with which counts."""

    event_id: UUID
    usage: TokenUsage


class Adjustment(msgspec.Struct, frozen=True):
    """An adjustment as it stands: pending, posted or declined. `replayed`: the same call came before.

    `amount_pico`: of terms, how much more may be owed.
    """

    id: UUID
    tenant_id: UUID
    kind: str  # grant, reversal, top_up, terms, usage
    amount_pico: int
    state: str
    note: str
    idempotency_key: str
    requested_by: UUID
    requested_people: tuple[UUID, ...] | None  # None: from before it was kept
    requested_at: datetime
    decided_by: UUID | None
    decided_at: datetime | None
    transaction_id: UUID | None
    reverses: UUID | None
    grant: Grant | None
    new_terms: NewTerms | None
    billed: BilledUsage | None
    expires_at: datetime | None = None  # of a top-up
    replayed: bool = False


async def post(session: AsyncSession, wanted: Adjustment, now: datetime) -> UUID | None:
    """Let it have its effect; return the transaction, where it has one of its own."""
    actor = f"operator:{format_id(IdKind.OPERATOR, wanted.requested_by)}"
    if wanted.grant is not None:
        return (await lots.post_grant(session, wanted.tenant_id, wanted.grant, actor=actor, note=wanted.note)).id
    if wanted.new_terms is not None:
        mode, limit_pico = wanted.new_terms.mode, wanted.new_terms.credit_limit_pico
        await terms.change(session, wanted.tenant_id, mode, limit_pico, by=actor, note=wanted.note, now=now)
        return None
    if wanted.billed is not None:
        await quarantine.bill(
            session,
            wanted.tenant_id,
            wanted.billed.event_id,
            wanted.billed.usage,
            reason=wanted.note,
            by=wanted.requested_by,
            now=now,
        )
        return None
    if wanted.reverses is not None:
        return (await _post_reversal(session, wanted, wanted.reverses, actor)).id
    done = await paid.top_up(
        session,
        wanted.tenant_id,
        wanted.amount_pico,
        idempotency_key=wanted.idempotency_key,
        actor=actor,
        note=wanted.note,
        expires_at=wanted.expires_at,
    )
    return done.transaction_id


async def reversible(session: AsyncSession, tenant_id: UUID, tx_id: UUID) -> Sequence[Row[Any]]:
    """Return the transfers of a transaction that can be reversed.

    Raises:
        PlatformError: NOT_FOUND, NOT_REVERSIBLE.
    """
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


async def _post_reversal(session: AsyncSession, wanted: Adjustment, reverses: UUID, actor: str) -> Transaction:
    transfers = await reversible(session, wanted.tenant_id, reverses)
    back = tuple(Transfer(row.credit_account, row.debit_account, int(row.amount)) for row in transfers)
    left = {lot.id: lot.available_pico for lot in await lots.all_of(session, wanted.tenant_id)}
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
        reverses_tx=reverses,
    )
    await ledger.post(session, [transaction])
    return transaction
