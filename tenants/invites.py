"""Invites: a mailed link by which somebody becomes a member of a tenant, of one project, or an operator."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core import mail
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, new_uuid
from tenants import closing, credentials, letters, members, operators, people, projects, tenants, throttle
from tenants import invite_queries as queries
from tenants.credentials import Peppers
from tenants.errors import not_found
from tenants.roles import Permission, Rights, may_give
from tenants.tables import InviteRow
from tenants.types import Invite, InviteState, OperatorRole, Person, Role, Status, Tenant

PREFIX = "tgi_"
VALID = timedelta(days=7)
OPEN_MAX = 500  # of one tenant, or to become operators
PLATFORM = "the operators of this platform"


def invite_of(row: InviteRow, now: datetime) -> Invite:
    return Invite(
        id=row.id,
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        role=None if row.role is None else Role(row.role),
        operator_role=None if row.operator_role is None else OperatorRole(row.operator_role),
        email=row.email,
        state=_state(row, now),
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def _state(row: InviteRow, now: datetime) -> InviteState:
    if row.accepted_at is not None:
        return InviteState.ACCEPTED
    if row.revoked_at is not None:
        return InviteState.REVOKED
    return InviteState.EXPIRED if row.expires_at <= now else InviteState.OPEN


def require_giving(by: Rights, role: Role, project_id: UUID | None) -> None:
    """Refuse to whoever may not invite there, or not with that role.

    Raises:
        PlatformError: forbidden.
    """
    if not by.allow(Permission.MEMBER_WRITE, project_id):
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "Your role does not allow this there (member.write).")
    if not may_give(by, role, project_id):
        raise PlatformError("ROLE_ABOVE_YOURS", ErrorKind.FORBIDDEN, f"The role {role.value} may do more than you may.")


async def into_tenant(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    email: str,
    role: Role,
    project_id: UUID | None = None,
    by: Rights,
    invited_by: UUID | None,
    inviter: str,
    post: letters.Post,
    now: datetime,
) -> Invite:
    """Invite somebody into the tenant, or into one project of it; an open invite to the same place ends.

    Args:
        session: the transaction.
        tenant_id: into which tenant.
        email: who.
        role: with which role; nobody gives more than they have.
        project_id: into one project only.
        by: the rights of who invites.
        invited_by: the person or operator who invites.
        inviter: how the mail calls them.
        post: what the mail needs.
        now: the present.

    Raises:
        PlatformError: forbidden above one's rights; not_found for the project; invalid address; conflict for a member,
            with too many open invites, or into a closed tenant.
    """
    require_giving(by, role, project_id)
    tenant = await _inviting(session, tenant_id)
    place = tenant.name
    if project_id is not None:
        place = f"{tenant.name} / {(await projects.get(session, tenant_id, project_id)).name}"
    address = people.checked_email(email)
    known = await people.by_email(session, address)
    if known is not None and await members.is_member(session, tenant_id, known.id, project_id):
        raise PlatformError("MEMBER_EXISTS", ErrorKind.CONFLICT, "This person is a member already. Change the role.")
    if await queries.open_count(session, tenant_id, now) >= OPEN_MAX:
        raise _too_many()
    await queries.revoke_same(session, tenant_id, project_id, address, now)
    row = InviteRow(
        id=new_uuid(),
        tenant_id=tenant_id,
        project_id=project_id,
        role=role,
        email=address,
        invited_by=invited_by,
        created_at=now,
    )
    return await _send(session, row, place=place, inviter=inviter, post=post, now=now)


async def _inviting(session: AsyncSession, tenant_id: UUID) -> Tenant:
    tenant = await tenants.get(session, tenant_id)
    if tenant.status is Status.CLOSED:
        text = "This organisation is closed. Nobody can be invited into it."
        raise PlatformError("TENANT_CLOSED", ErrorKind.CONFLICT, text)
    return tenant


async def to_operators(
    session: AsyncSession,
    *,
    email: str,
    role: OperatorRole,
    invited_by: UUID | None,
    inviter: str,
    post: letters.Post,
    now: datetime,
) -> Invite:
    """Invite somebody to run the platform; an open invite of theirs ends.

    Raises:
        PlatformError: invalid address; conflict for an operator, or with too many open invites.
    """
    address = people.checked_email(email)
    known = await people.by_email(session, address)
    if known is not None:
        await _require_no_operator(session, known.id)
    if await queries.open_operator_count(session, now) >= OPEN_MAX:
        raise _too_many()
    await queries.revoke_same_operator(session, address, now)
    row = InviteRow(id=new_uuid(), operator_role=role, email=address, invited_by=invited_by, created_at=now)
    return await _send(session, row, place=PLATFORM, inviter=inviter, post=post, now=now)


async def _require_no_operator(session: AsyncSession, person_id: UUID) -> None:
    if await operators.was_person(session, person_id):
        raise PlatformError("OPERATOR_EXISTS", ErrorKind.CONFLICT, "This person is, or was, an operator.")


def _too_many() -> PlatformError:
    return PlatformError("TOO_MANY_INVITES", ErrorKind.CONFLICT, f"{OPEN_MAX} invites are open. Revoke some first.")


async def _send(
    session: AsyncSession, row: InviteRow, *, place: str, inviter: str, post: letters.Post, now: datetime
) -> Invite:
    """Give the invite a fresh token, which only the mail has, and seven days.

    Raises:
        PlatformError: rate_limited beyond some hundred mails an hour.
    """
    await throttle.take(session, now, throttle.of_invites(post.pepper, str(row.tenant_id)))
    token = credentials.mint(PREFIX)
    row.digest, row.expires_at = credentials.digest(post.pepper, token), now + VALID
    session.add(row)
    await session.flush()
    role = row.role or f"{row.operator_role} operator"
    letter = letters.invite(row.email, inviter=inviter, place=place, role=role, base_url=post.base_url, token=token)
    await mail.post(session, letter, sealing_key=post.sealing_key)
    return invite_of(row, now)


async def list_invites(
    session: AsyncSession,
    tenant_id: UUID,
    *,
    projects_: frozenset[UUID] | None,
    after: UUID | None,
    limit: int,
    now: datetime,
) -> Sequence[Invite]:
    """Return at most `limit` invites into the tenant, newest first; with `projects_` only those into these projects."""
    rows = await queries.invites(session, tenant_id, projects_, after, limit)
    return [invite_of(row, now) for row in rows]


async def list_operator_invites(
    session: AsyncSession, *, after: UUID | None, limit: int, now: datetime
) -> Sequence[Invite]:
    return [invite_of(row, now) for row in await queries.operator_invites(session, after, limit)]


async def get(session: AsyncSession, tenant_id: UUID | None, invite_id: UUID, now: datetime) -> Invite:
    """Return an invite into the tenant, or without one an invite to the operators.

    Raises:
        PlatformError: not_found.
    """
    return invite_of(await _found(session, tenant_id, invite_id), now)


async def _found(session: AsyncSession, tenant_id: UUID | None, invite_id: UUID) -> InviteRow:
    if tenant_id is None:
        row = await queries.operator_invite(session, invite_id)
    else:
        row = await queries.invite(session, tenant_id, invite_id)
    if row is None:
        raise not_found(IdKind.INVITE)
    return row


async def resend(
    session: AsyncSession,
    tenant_id: UUID | None,
    invite_id: UUID,
    *,
    inviter: str,
    post: letters.Post,
    now: datetime,
    vouched_by: UUID | None = None,
) -> Invite:
    """Mail a fresh link, good for seven days from now; the old one is good for nothing.

    `vouched_by` is who sends it, to whom an invite of an operator belongs from now on.

    Raises:
        PlatformError: not_found, conflict for one that was accepted or revoked, or into a closed tenant.
    """
    row = await _found(session, tenant_id, invite_id)
    if _state(row, now) in {InviteState.ACCEPTED, InviteState.REVOKED}:
        raise PlatformError("INVITE_CLOSED", ErrorKind.CONFLICT, "This invite is over. Make another one.")
    if tenant_id is None:
        row.invited_by = vouched_by
    place = PLATFORM if tenant_id is None else (await _inviting(session, tenant_id)).name
    return await _send(session, row, place=place, inviter=inviter, post=post, now=now)


async def revoke(session: AsyncSession, tenant_id: UUID | None, invite_id: UUID, *, now: datetime) -> Invite:
    """Make the link good for nothing; again is the same as once.

    Raises:
        PlatformError: not_found, conflict for one that was accepted.
    """
    row = await _found(session, tenant_id, invite_id)
    if row.accepted_at is not None:
        raise PlatformError("INVITE_CLOSED", ErrorKind.CONFLICT, "This invite was accepted. Remove the member instead.")
    row.revoked_at = row.revoked_at or now
    await session.flush()
    return invite_of(row, now)


async def find(session: AsyncSession, token: str, *, peppers: Peppers, now: datetime) -> Invite:
    """Return the open invite of a link.

    Raises:
        PlatformError: invalid for a link that is used, revoked, too old or unknown; forbidden into a closed tenant.
    """
    return invite_of(await _of_token(session, token, peppers, now), now)


async def _of_token(session: AsyncSession, token: str, peppers: Peppers, now: datetime) -> InviteRow:
    row = None
    if credentials.well_formed(PREFIX, token):
        row = await queries.lock_by_digest(session, peppers.digests(token))
    if row is None or _state(row, now) is not InviteState.OPEN:
        raise PlatformError(
            "INVITE_WRONG", ErrorKind.INVALID, "This invite is not valid any more. Ask for another one.", param="token"
        )
    if row.tenant_id is not None:
        await closing.require_open(session, row.tenant_id)
    return row


async def accept(session: AsyncSession, token: str, person: Person, *, peppers: Peppers, now: datetime) -> Invite:
    """Make the person what the invite says; the link is used up.

    Raises:
        PlatformError: as `find`; forbidden for somebody with another address; conflict for whom it changes nothing.
    """
    row = await _of_token(session, token, peppers, now)
    if row.email != person.email:
        raise PlatformError(
            "INVITE_FOR_ANOTHER", ErrorKind.FORBIDDEN, "This invite is for another address. Sign in with that one."
        )
    row.accepted_at = now
    await session.flush()
    if row.tenant_id is not None and row.role is not None:
        await members.add(session, row.tenant_id, person.id, Role(row.role), project_id=row.project_id)
    elif row.operator_role is not None:
        await _require_no_operator(session, person.id)
        vouched_by = None if row.invited_by == person.id else row.invited_by
        await operators.create_for(session, person, OperatorRole(row.operator_role), vouched_by=vouched_by)
    return invite_of(row, now)
