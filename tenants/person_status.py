"""Suspending people, letting them in again, and deleting them for ever."""

from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.ids import IdKind
from tenants import identity_queries, members, people_queries, sessions
from tenants import sign_in_queries as queries
from tenants.errors import not_found
from tenants.people import person_of
from tenants.tables import PersonRow
from tenants.types import Person, PersonStatus


async def _locked(session: AsyncSession, person_id: UUID) -> PersonRow:
    row = await queries.lock_person(session, person_id)
    if row is None or row.status == PersonStatus.DELETED:
        raise not_found(IdKind.PERSON)
    return row


async def suspend(session: AsyncSession, person_id: UUID, *, now: datetime) -> Person:
    """Refuse a person, their sessions and their API keys until resumed; nothing is lost. Again is the same as once.

    Raises:
        PlatformError: not_found.
    """
    row = await _locked(session, person_id)
    if row.status != PersonStatus.SUSPENDED:
        row.status = PersonStatus.SUSPENDED
        await session.flush()
        await sessions.end_all(session, person_id, now)
        await record_config_change(session, "person", person_id)
    return person_of(row)


async def resume(session: AsyncSession, person_id: UUID) -> Person:
    """Let a person in again; they sign in anew.

    Raises:
        PlatformError: not_found, also for somebody who was deleted.
    """
    row = await _locked(session, person_id)
    if row.status != PersonStatus.ACTIVE:
        row.status = PersonStatus.ACTIVE
        await session.flush()
        await record_config_change(session, "person", person_id)
    return person_of(row)


async def leave(session: AsyncSession, person_id: UUID, *, now: datetime) -> None:
    """Delete oneself; see `delete`.

    Raises:
        PlatformError: conflict for the last owner of a tenant.
    """
    await members.require_other_owners(session, person_id)
    await delete(session, person_id, now=now)


async def delete(session: AsyncSession, person_id: UUID, *, now: datetime) -> None:
    """Forget who a person is.

    The id stays, for records, and names nobody else ever; whoever gets the address later is somebody else, who
    inherits nothing.

    Raises:
        PlatformError: not_found, also for somebody who was deleted.
    """
    row = await _locked(session, person_id)
    row.status, row.deleted_at = PersonStatus.DELETED, now
    row.email, row.name = f"{person_id.hex}@deleted.invalid", ""
    row.password_hash, row.totp_secret, row.totp_confirmed_at = None, None, None
    await session.flush()
    await sessions.end_all(session, person_id, now)
    await queries.use_tokens_of(session, person_id, now)
    await queries.delete_recovery_codes(session, person_id)
    await identity_queries.delete_identities(session, person_id)
    await people_queries.delete_memberships(session, person_id)
    await people_queries.revoke_invites_by(session, person_id, now)
    await people_queries.disable_operator_of(session, person_id, now)
    await record_config_change(session, "person", person_id)
