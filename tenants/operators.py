"""Operators: the people and programs that run the platform, and their tokens (``tgo_…``)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.clock import Clock
from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import credentials, queries
from tenants.credentials import OPERATOR_PREFIX, Peppers, pepper_id
from tenants.errors import not_found
from tenants.tables import OperatorRow, OperatorTokenRow
from tenants.types import Operator, OperatorRole, Person

VISIBLE_PREFIX = len(OPERATOR_PREFIX) + 4


def mint() -> str:
    """Return a fresh token: ``tgo_``, 40 random base62 characters, 6 of their CRC-32."""
    return credentials.mint(OPERATOR_PREFIX)


def well_formed(text: str) -> bool:
    """Say offline whether `text` can be an operator token of ours."""
    return credentials.well_formed(OPERATOR_PREFIX, text)


def _operator(row: OperatorRow) -> Operator:
    return Operator(
        id=row.id,
        name=row.name,
        role=OperatorRole(row.role),
        person_id=row.person_id,
        created_at=row.created_at,
        disabled_at=row.disabled_at,
        vouched_by=row.vouched_by,
        confirmed_at=row.confirmed_at,
    )


async def create(
    session: AsyncSession,
    *,
    name: str,
    role: OperatorRole = OperatorRole.ADMIN,
    person_id: UUID | None = None,
    vouched_by: UUID | None = None,
) -> Operator:
    """Make an operator without any token; with a person, that person signs in as this operator.

    Raises:
        PlatformError: conflict for a name in use.
    """
    row = OperatorRow(id=new_uuid(), name=name, role=role, person_id=person_id, vouched_by=vouched_by)
    await queries.insert_named(session, row, "operator")
    return _operator(row)


async def list_operators(session: AsyncSession, *, after: UUID | None, limit: int) -> Sequence[Operator]:
    """Return at most `limit` operators, newest first, disabled ones too."""
    return [_operator(row) for row in await queries.operators(session, after, limit)]


async def get(session: AsyncSession, operator_id: UUID) -> Operator:
    """Return an operator, locked out or not.

    Raises:
        PlatformError: not_found.
    """
    row = await queries.operator(session, operator_id)
    if row is None:
        raise not_found(IdKind.OPERATOR)
    return _operator(row)


async def by_name(session: AsyncSession, name: str) -> Operator | None:
    row = await queries.operator_by_name(session, name)
    return None if row is None else _operator(row)


async def issue_token(
    session: AsyncSession,
    operator_id: UUID,
    *,
    pepper: bytes,
    token: str | None = None,
    expires_at: datetime | None = None,
    issued_by: UUID | None = None,
) -> str:
    """Give the operator a token and return it, once.

    `issued_by` answers for what it does; nobody issues a token of another person's operator. `token` is given only by
    the embedded runtime, which keeps the first one in a file of mode 600.

    Raises:
        PlatformError: not_found; forbidden for another person's.
    """
    row = await queries.operator(session, operator_id)
    if row is None:
        raise not_found(IdKind.OPERATOR)
    if row.person_id is not None and row.person_id != issued_by:
        text = "This operator is a person, who alone can issue tokens of it. Make one for the program instead."
        raise PlatformError("NOT_YOUR_OPERATOR", ErrorKind.FORBIDDEN, text)
    secret = mint() if token is None else token
    if not well_formed(secret):
        raise ValueError("an operator token is made by mint()")
    session.add(
        OperatorTokenRow(
            id=new_uuid(),
            operator_id=operator_id,
            issued_by=issued_by,
            prefix=secret[:VISIBLE_PREFIX],
            last4=secret[-4:],
            digest=credentials.digest(pepper, secret),
            pepper_id=pepper_id(pepper),
            expires_at=expires_at,
        )
    )
    await session.flush()
    await record_config_change(session, "operator", operator_id)
    return secret


async def revoke_tokens(session: AsyncSession, operator_id: UUID) -> None:
    """End all tokens of the operator.

    Raises:
        PlatformError: not_found.
    """
    if await queries.operator(session, operator_id) is None:
        raise not_found(IdKind.OPERATOR)
    await queries.revoke_operator_tokens(session, operator_id)
    await record_config_change(session, "operator", operator_id)


async def disable(session: AsyncSession, operator_id: UUID, *, clock: Clock) -> Operator:
    """Lock the operator out; again is the same as once.

    Raises:
        PlatformError: not_found; conflict for the last one with every right.
    """
    row = await queries.operator(session, operator_id)
    if row is None:
        raise not_found(IdKind.OPERATOR)
    if row.disabled_at is None:
        await _require_another_admin(session, operator_id)
        row.disabled_at = clock.now()
        await session.flush()
        await record_config_change(session, "operator", operator_id)
    return _operator(row)


async def find(session: AsyncSession, peppers: Peppers, token: str) -> Operator | None:
    """Return the operator whose live token this is; one met under an old pepper is stored under the current one too."""
    current, *previous = peppers.digests(token)
    found = await queries.operator_by_digest(session, current)
    for older in previous if found is None else ():
        found = await queries.operator_by_digest(session, older)
        if found is not None:
            await queries.rehash_operator_token(session, older, current, new_uuid(), peppers.ids[0])
            break
    return None if found is None else replace(_operator(found[0]), token_issued_by=found[1])


async def of_person(session: AsyncSession, person_id: UUID) -> Operator | None:
    """Return the operator that this person signs in as, unless locked out."""
    row = await queries.operator_of_person(session, person_id)
    return None if row is None or row.disabled_at is not None else _operator(row)


async def link(session: AsyncSession, operator_id: UUID, person_id: UUID, *, now: datetime) -> None:
    """Let a person sign in as this operator, and answer for its tokens; done on the host, so they are confirmed.

    Raises:
        PlatformError: not_found.
    """
    row = await queries.operator(session, operator_id)
    if row is None:
        raise not_found(IdKind.OPERATOR)
    row.person_id, row.confirmed_at = person_id, now
    await session.flush()
    await queries.answer_for_tokens(session, operator_id, person_id)


async def addresses_of_others(session: AsyncSession, emails: Iterable[str], person_id: UUID | None) -> frozenset[str]:
    """Return which of these addresses belong to operators beside this person, or to whom others invite to be one."""
    return frozenset(await queries.addresses_of_other_operators(session, list(emails), person_id))


async def was_person(session: AsyncSession, person_id: UUID) -> bool:
    """Say whether this person is an operator, or was one before being locked out."""
    return await queries.operator_of_person(session, person_id) is not None


async def create_for(session: AsyncSession, person: Person, role: OperatorRole, *, vouched_by: UUID | None) -> Operator:
    """Make an invited person an operator, named by their address, and by their id too when the name is in use."""
    name = person.email
    if await queries.operator_by_name(session, name) is not None:
        name = f"{person.email[:80]} {person.id.hex}"
    return await create(session, name=name, role=role, person_id=person.id, vouched_by=vouched_by)


async def change_role(session: AsyncSession, operator_id: UUID, role: OperatorRole) -> tuple[Operator, Operator]:
    """Give the operator another role; return it as it was and as it is.

    Raises:
        PlatformError: not_found; conflict for the last one with every right.
    """
    row = await queries.operator(session, operator_id)
    if row is None:
        raise not_found(IdKind.OPERATOR)
    before = _operator(row)
    if role is not OperatorRole.ADMIN:
        await _require_another_admin(session, operator_id)
    row.role = role
    await session.flush()
    await record_config_change(session, "operator", operator_id)
    return before, _operator(row)


async def _require_another_admin(session: AsyncSession, operator_id: UUID) -> None:
    if list(await queries.lock_admins(session)) == [operator_id]:
        raise PlatformError(
            "LAST_OPERATOR", ErrorKind.CONFLICT, "This is the last operator with every right. Make another one first."
        )
