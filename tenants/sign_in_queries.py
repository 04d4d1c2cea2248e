"""Every query about signing in: tries, tokens, recovery codes and a person's sessions."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.tables import PersonRow, PersonTokenRow, RecoveryCodeRow, SessionRow

# Counts a try before it is made, unless locked: parallel tries cannot pass the limit. `free` tries are not slowed.
_TAKE_TRY = text(
    """
    INSERT INTO sign_in_throttle AS t (digest, tries, locked_until, tried_at) VALUES (:digest, 1, :now, :now)
    ON CONFLICT (digest) DO UPDATE SET
        tries = CASE WHEN t.tried_at < :forget_before THEN 1 ELSE t.tries + 1 END,
        locked_until = CASE WHEN t.tried_at < :forget_before OR t.tries + 1 < :free THEN :now
            ELSE :now + least(:first_s * 2 ^ least(t.tries + 1 - :free, 20), :most_s) * interval '1 second' END,
        tried_at = :now
    WHERE t.locked_until <= :now
    RETURNING tries
    """
)
_LOCKED_UNTIL = text("SELECT locked_until FROM sign_in_throttle WHERE digest = :digest")
_GIVE_BACK = text(
    "UPDATE sign_in_throttle SET tries = greatest(tries - 1, 0), locked_until = :now WHERE digest = :digest"
)
_CLEAR = text("DELETE FROM sign_in_throttle WHERE digest = :digest")
_FORGET_TRIES = text(
    """
    DELETE FROM sign_in_throttle WHERE digest IN (
        SELECT digest FROM sign_in_throttle WHERE tried_at < :before AND locked_until < :before LIMIT :most
    )
    """
)


async def take_try(
    session: AsyncSession,
    digest: bytes,
    now: datetime,
    *,
    forget_before: datetime,
    free: int,
    first_s: int,
    most_s: int,
) -> bool:
    """Count a try; False while locked."""
    values = {"digest": digest, "now": now, "forget_before": forget_before, "free": free}
    row = await session.execute(_TAKE_TRY, {**values, "first_s": first_s, "most_s": most_s})
    return row.one_or_none() is not None


async def locked_until(session: AsyncSession, digest: bytes) -> datetime | None:
    found: datetime | None = (await session.execute(_LOCKED_UNTIL, {"digest": digest})).scalar_one_or_none()
    return found


async def give_try_back(session: AsyncSession, digest: bytes, now: datetime) -> None:
    await session.execute(_GIVE_BACK, {"digest": digest, "now": now})


async def clear_tries(session: AsyncSession, digest: bytes) -> None:
    await session.execute(_CLEAR, {"digest": digest})


async def forget_tries(session: AsyncSession, before: datetime, most: int) -> None:
    await session.execute(_FORGET_TRIES, {"before": before, "most": most})


async def lock_person(session: AsyncSession, person_id: UUID) -> PersonRow | None:
    """Return the person, whom no other transaction can change until this one ends."""
    query = select(PersonRow).where(PersonRow.id == person_id).with_for_update(key_share=True)
    return (await session.scalars(query.execution_options(populate_existing=True))).one_or_none()


async def token(
    session: AsyncSession, digest: bytes, purpose: str, now: datetime
) -> tuple[PersonTokenRow, PersonRow] | None:
    """Return a token that is still good, and whose it is."""
    query = (
        select(PersonTokenRow, PersonRow)
        .join(PersonRow, PersonRow.id == PersonTokenRow.person_id)
        .where(
            PersonTokenRow.digest == digest,
            PersonTokenRow.purpose == purpose,
            PersonTokenRow.used_at.is_(None),
            PersonTokenRow.expires_at > now,
        )
    )
    row = (await session.execute(query)).one_or_none()
    return None if row is None else (row[0], row[1])


async def use_token(session: AsyncSession, token_id: UUID, now: datetime) -> bool:
    """Use a token up; False when somebody else just did."""
    statement = (
        update(PersonTokenRow)
        .where(PersonTokenRow.id == token_id, PersonTokenRow.used_at.is_(None))
        .values(used_at=now)
        .returning(PersonTokenRow.id)
    )
    return (await session.execute(statement)).one_or_none() is not None


async def use_tokens_of(session: AsyncSession, person_id: UUID, now: datetime) -> None:
    """Use up all tokens of a person."""
    await session.execute(
        update(PersonTokenRow)
        .where(PersonTokenRow.person_id == person_id, PersonTokenRow.used_at.is_(None))
        .values(used_at=now)
    )


async def tokens_since(session: AsyncSession, person_id: UUID, purpose: str, since: datetime) -> int:
    query = select(func.count()).where(
        PersonTokenRow.person_id == person_id, PersonTokenRow.purpose == purpose, PersonTokenRow.created_at > since
    )
    return (await session.execute(query)).scalar_one()


async def use_recovery_code(session: AsyncSession, person_id: UUID, digests: Sequence[bytes], now: datetime) -> bool:
    """Use a code up; False when the person has no such code left."""
    statement = (
        update(RecoveryCodeRow)
        .where(
            RecoveryCodeRow.person_id == person_id,
            RecoveryCodeRow.digest.in_(digests),
            RecoveryCodeRow.used_at.is_(None),
        )
        .values(used_at=now)
        .returning(RecoveryCodeRow.id)
    )
    return (await session.execute(statement)).one_or_none() is not None


async def delete_recovery_codes(session: AsyncSession, person_id: UUID) -> None:
    await session.execute(delete(RecoveryCodeRow).where(RecoveryCodeRow.person_id == person_id))


async def recovery_codes_left(session: AsyncSession, person_id: UUID) -> int:
    query = select(func.count()).where(RecoveryCodeRow.person_id == person_id, RecoveryCodeRow.used_at.is_(None))
    return (await session.execute(query)).scalar_one()


async def open_sessions(
    session: AsyncSession, person_id: UUID, now: datetime, seen_after: datetime
) -> Sequence[SessionRow]:
    """Return a person's sessions that are good now, newest first."""
    query = (
        select(SessionRow)
        .where(
            SessionRow.person_id == person_id,
            SessionRow.ended_at.is_(None),
            SessionRow.expires_at > now,
            SessionRow.seen_at > seen_after,
        )
        .order_by(SessionRow.id.desc())
    )
    return (await session.scalars(query)).all()


async def end_session_of(session: AsyncSession, person_id: UUID, session_id: UUID, now: datetime) -> bool:
    """End one session of a person; False when there is no such session of theirs."""
    statement = (
        update(SessionRow)
        .where(SessionRow.id == session_id, SessionRow.person_id == person_id)
        .values(ended_at=func.coalesce(SessionRow.ended_at, now))
        .returning(SessionRow.id)
    )
    return (await session.execute(statement)).one_or_none() is not None


async def end_session_by_digest(session: AsyncSession, digest: bytes, now: datetime) -> None:
    await session.execute(
        update(SessionRow).where(SessionRow.digest == digest, SessionRow.ended_at.is_(None)).values(ended_at=now)
    )


async def end_sessions_of(session: AsyncSession, person_id: UUID, now: datetime) -> None:
    await session.execute(
        update(SessionRow).where(SessionRow.person_id == person_id, SessionRow.ended_at.is_(None)).values(ended_at=now)
    )


async def open_sessions_beyond(session: AsyncSession, person_id: UUID, kept: int) -> Sequence[UUID]:
    """Return the ids of the open sessions of a person beyond the newest `kept`."""
    query = (
        select(SessionRow.id)
        .where(SessionRow.person_id == person_id, SessionRow.ended_at.is_(None))
        .order_by(SessionRow.id.desc())
        .offset(kept)
    )
    return (await session.scalars(query)).all()


async def forget_sessions(session: AsyncSession, before: datetime) -> None:
    """Delete sessions and tokens that were over before."""
    await session.execute(delete(SessionRow).where(or_(SessionRow.expires_at < before, SessionRow.ended_at < before)))
    await session.execute(delete(PersonTokenRow).where(PersonTokenRow.expires_at < before))
