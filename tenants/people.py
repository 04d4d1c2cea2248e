"""People: who signs in. One person may be a member of many tenants, and an operator."""

import re
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import people_queries as queries
from tenants.errors import invalid, not_found
from tenants.tables import PersonRow
from tenants.types import Person, PersonStatus

EMAIL_MAX = 254
# What browsers take for an address (HTML, `input type=email`), in lower case.
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_EMAIL = re.compile(rf"[a-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(?:\.{_LABEL})*")


def checked_email(text: str, *, param: str = "email") -> str:
    """Return the address in lower case, by which people are told apart.

    Raises:
        PlatformError: it is no address.
    """
    email = text.strip().lower()
    if len(email) > EMAIL_MAX or not _EMAIL.fullmatch(email):
        raise invalid(param, "This is not an e-mail address.")
    return email


def person_of(row: PersonRow) -> Person:
    return Person(
        id=row.id,
        email=row.email,
        name=row.name,
        language=row.language,
        status=PersonStatus(row.status),
        has_password=row.password_hash is not None,
        has_second_factor=row.totp_confirmed_at is not None,
        created_at=row.created_at,
    )


async def create(session: AsyncSession, *, email: str, name: str = "", language: str = "en") -> Person:
    """Make a person without any way to sign in yet.

    Raises:
        PlatformError: conflict for an address in use, invalid for none.
    """
    row = PersonRow(id=new_uuid(), email=checked_email(email), name=name, language=language)
    if not await queries.insert_person(session, row):
        raise PlatformError("EMAIL_TAKEN", ErrorKind.CONFLICT, "Somebody has this address already.", param="email")
    return person_of(row)


async def get(session: AsyncSession, person_id: UUID) -> Person:
    row = await queries.person(session, person_id)
    if row is None:
        raise not_found(IdKind.PERSON)
    return person_of(row)


async def get_present(session: AsyncSession, person_id: UUID) -> Person:
    """Return a person; one who was deleted is not found."""
    person = await get(session, person_id)
    if person.status is PersonStatus.DELETED:
        raise not_found(IdKind.PERSON)
    return person


async def update(
    session: AsyncSession, person_id: UUID, *, name: str | None = None, language: str | None = None
) -> Person:
    """Change what is not None.

    Raises:
        PlatformError: not_found.
    """
    row = await queries.person(session, person_id)
    if row is None:
        raise not_found(IdKind.PERSON)
    row.name = row.name if name is None else name
    row.language = row.language if language is None else language
    await session.flush()
    return person_of(row)


async def list_people(session: AsyncSession, *, email: str = "", after: UUID | None, limit: int) -> Sequence[Person]:
    """Return at most `limit` people, newest first, those whose address has `email` in it; deleted ones never."""
    return [person_of(row) for row in await queries.people(session, email.strip().lower(), after, limit)]


async def by_email(session: AsyncSession, email: str) -> Person | None:
    """Return who has this address now; a deleted person has none."""
    row = await queries.person_by_email(session, checked_email(email))
    return None if row is None else person_of(row)
