"""Which people answer for what an operator does, and who is known to be a person of their own (ADR 0030).

A person proves to be there by a session that the own password opened. A provider's session proves nobody here:
operators set providers up. A token stands for who issued it. Whoever invited an operator answers for it, until somebody
confirmed who is neither of them confirms that it is a person of its own, or it is confirmed on the host.
"""

from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind
from tenants import people, queries
from tenants.errors import not_found
from tenants.tables import OperatorRow
from tenants.types import Operator, Responsible, SignedIn, SignInMethod

CHAIN_MAX = 32  # of who vouches for whom; beyond it nobody answers


def who(operator: Operator, signed_in: SignedIn | None) -> UUID | None:
    """Return the person who does it, or who issued the token it is done with; None: nobody is proved."""
    if signed_in is None:
        return operator.token_issued_by
    return signed_in.person.id if signed_in.method is SignInMethod.PASSWORD else None


async def responsible(session: AsyncSession, operator: Operator, signed_in: SignedIn | None) -> Responsible:
    """Return the people who answer for what this operator does now."""
    chain = await _chain(session, who(operator, signed_in))
    return Responsible(operator.id, *chain, signed_in is not None and len(chain[0]) == 1 and chain[1] is not None)


async def _chain(session: AsyncSession, first: UUID | None) -> tuple[tuple[UUID, ...], UUID | None]:
    """The people from the first to who answers, and who that is; None when the chain leads to nobody."""
    found: list[UUID] = []
    at = first
    while at is not None and at not in found and len(found) < CHAIN_MAX:
        found.append(at)
        row = await queries.operator_of_person(session, at)
        if row is not None and row.confirmed_at is not None:
            return tuple(found), at
        at = None if row is None else row.vouched_by
    return tuple(found), None


async def confirm(session: AsyncSession, operator_id: UUID, by: Responsible, *, now: datetime) -> None:
    """Say that an operator is a person of its own.

    Where nobody answers for it yet, who says so does from now on, and another must confirm it. Doing it again changes
    nothing.

    Raises:
        PlatformError: not_found; NOT_A_PERSON for a program; forbidden unless a confirmed person says it who is signed
            in and did not vouch for them.
    """
    require_person(by)
    row = await _locked(session, operator_id)
    if row.confirmed_at is not None:
        return
    people_, answers = await _chain(session, row.person_id)
    if by.answers in people_:
        raise PlatformError(
            "SECOND_PERSON_NEEDED",
            ErrorKind.FORBIDDEN,
            "You answer for this operator. Another confirmed person must confirm it, or `tidegate operators confirm` "
            "on the host.",
        )
    if answers is None:
        row.vouched_by = by.answers
    else:
        row.confirmed_by, row.confirmed_at = by.answers, now
    await session.flush()


async def confirm_on_host(session: AsyncSession, email: str, *, now: datetime) -> UUID:
    """Confirm who signs in with this address, and return the operator; for whoever has the host.

    Raises:
        PlatformError: not_found, for who is no operator.
    """
    person = await people.by_email(session, email)
    found = None if person is None else await queries.operator_of_person(session, person.id)
    if found is None:
        raise not_found(IdKind.OPERATOR)
    row = await _locked(session, found.id)
    row.confirmed_at = row.confirmed_at or now
    await session.flush()
    return row.id


async def _locked(session: AsyncSession, operator_id: UUID) -> OperatorRow:
    row = await queries.lock_operator(session, operator_id)
    if row is None or row.disabled_at is not None:
        raise not_found(IdKind.OPERATOR)
    if row.person_id is None:
        text = "This operator is a program. Whoever issued its token answers for what it does."
        raise PlatformError("NOT_A_PERSON", ErrorKind.CONFLICT, text)
    return row


def require_person(by: Responsible) -> None:
    """Let in who is there, and known to be a person of their own.

    Raises:
        PlatformError: forbidden, saying what is missing.
    """
    if by.signed_in:
        return
    if not by.people or (by.answers is not None and len(by.people) == 1):
        text = "A person must do this: sign in with your own password. A token cannot, nor a provider's sign-in."
        raise PlatformError("SIGN_IN_TO_DECIDE", ErrorKind.FORBIDDEN, text)
    raise PlatformError(
        "OPERATOR_NOT_CONFIRMED",
        ErrorKind.FORBIDDEN,
        "Nobody confirmed yet that you are a person of your own. Ask a confirmed operator who did not invite you, or "
        "run `tidegate operators confirm` with your address on the host.",
    )
