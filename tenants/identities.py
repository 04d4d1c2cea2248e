"""Whom a provider vouches for: its subject becomes a person of ours, with the rights that its groups give now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.db import record_config_change
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id, new_uuid
from tenants import audit, identity_providers, people, people_queries
from tenants import identity_queries as queries
from tenants.identity_providers import IdentityProvider
from tenants.identity_tables import PersonIdentityRow
from tenants.oidc.claims import Given, Grant, email_of, given_by, groups_of, in_domains, name_of
from tenants.oidc.flow import Profile
from tenants.queries import operator_of_person
from tenants.tables import MemberRow, OperatorRow
from tenants.types import Actor, ActorKind, OperatorRole, Person, PersonStatus, Role, Status


@dataclass(frozen=True, slots=True)
class Recognised:
    """Who signed in. `changed` are the rights that this sign-in or refresh gave or took, for the audit trail."""

    person: Person
    created: bool
    linked: bool
    changed: dict[str, list[str]]


def _forbidden(code: str, message: str) -> PlatformError:
    return PlatformError(code, ErrorKind.FORBIDDEN, message)


async def recognise(
    session: AsyncSession, provider: IdentityProvider, profile: Profile, *, now: datetime
) -> Recognised:
    """Find or make the person behind a profile, and give the rights that its groups give now.

    Issuer and subject say who it is. By e-mail address an account is found only at the first sign-in, when the provider
    has verified the address and linking is allowed for it.

    Raises:
        PlatformError: forbidden for a suspended person, an address outside the provider's domains, or somebody new whom
            no group lets in; conflict for somebody new with the address of an account that may not be linked.
    """
    email, verified = email_of(profile.claims)
    if provider.email_domains and not (verified and in_domains(email, provider.email_domains)):
        raise _forbidden(
            "EMAIL_NOT_ALLOWED", "Your provider has not verified an e-mail address of a domain allowed here."
        )
    mappings = await identity_providers.mappings(session, provider.id)
    given = given_by(groups_of(profile.claims, provider.groups_claim), mappings, provider.default_grant)
    row = await queries.identity(session, provider.id, profile.subject)
    known = await people_queries.person(session, row.person_id) if row is not None else None
    person = None if known is None else people.person_of(known)
    created = linked = False
    if person is None or person.status is PersonStatus.DELETED:
        person, created = await _newcomer(session, provider, profile, given)
        linked = not created
    if person.status is not PersonStatus.ACTIVE:
        raise _forbidden("PERSON_SUSPENDED", "Your account is suspended.")
    if row is None:
        row = PersonIdentityRow(
            id=new_uuid(), provider_id=provider.id, subject=profile.subject, person_id=person.id, created_at=now
        )
        session.add(row)
    row.person_id, row.seen_at = person.id, now
    await session.flush()
    if created or linked:
        await record_config_change(session, "person", person.id)
    changed = await apply(session, provider, person, given, now=now)
    return Recognised(person, created, linked, changed)


async def _newcomer(
    session: AsyncSession, provider: IdentityProvider, profile: Profile, given: Given
) -> tuple[Person, bool]:
    """Return the account to link, or a new one, and whether it is new."""
    email, verified = email_of(profile.claims)
    if not email:
        raise _forbidden("EMAIL_MISSING", "Your provider tells no e-mail address. Ask for the scope email there.")
    known = await people.by_email(session, email)
    if known is None:
        if not given.any:
            raise _forbidden(
                "NO_ACCESS", "Nothing here is for you yet: none of your groups at the provider gives a role."
            )
        return await people.create(session, email=email, name=name_of(profile.claims)), True
    if not (verified and provider.link_by_email and await _may_link(session, provider, known)):
        raise PlatformError(
            "ACCOUNT_EXISTS",
            ErrorKind.CONFLICT,
            "There is an account with your address that signs in another way. Sign in that way, or ask an operator.",
        )
    return known, False


async def _may_link(session: AsyncSession, provider: IdentityProvider, person: Person) -> bool:
    """A tenant's own provider takes over nobody who is more than a member of that tenant."""
    if provider.tenant_id is None:
        return True
    if await operator_of_person(session, person.id) is not None:
        return False
    return await queries.member_tenants(session, person.id) <= {provider.tenant_id}


async def apply(
    session: AsyncSession, provider: IdentityProvider, person: Person, given: Given, *, now: datetime
) -> dict[str, list[str]]:
    """Make the rights that come from this provider those of `given`, and say what changed; others stay.

    A membership that somebody suspended is kept, suspended, so that leaving a group and coming back does not lift it.
    """
    rows = {
        Grant(row.tenant_id, row.project_id, Role(row.role)): row
        for row in await queries.given_members(session, person.id, provider.origin)
    }
    removed = [grant for grant, row in rows.items() if grant not in given.grants and row.status == Status.ACTIVE]
    added = [grant for grant in given.grants if grant not in rows]
    suspended_in = {grant.tenant_id for grant, row in rows.items() if row.status == Status.SUSPENDED}
    for grant in removed:
        await session.delete(rows[grant])
    for grant in added:
        status = Status.SUSPENDED if grant.tenant_id in suspended_in else Status.ACTIVE
        session.add(
            MemberRow(
                id=new_uuid(),
                tenant_id=grant.tenant_id,
                project_id=grant.project_id,
                person_id=person.id,
                role=grant.role,
                status=status,
                origin=provider.origin,
            )
        )
    await session.flush()
    operator_before, operator_after = await _apply_operator(session, provider, person, given.operator_role, now=now)
    if removed or added:
        await _tell(session, provider, person, removed, added, now=now)
    changed = {"roles_added": _words(added), "roles_removed": _words(removed)}
    if operator_before is not operator_after:
        changed |= {"operator_role": [operator_before or "", operator_after or ""]}
    return {name: words for name, words in changed.items() if words}


async def _tell(
    session: AsyncSession,
    provider: IdentityProvider,
    person: Person,
    removed: Sequence[Grant],
    added: Sequence[Grant],
    *,
    now: datetime,
) -> None:
    """Tell gateways, and each tenant's trail; whoever left a tenant leaves no open invites there."""
    await record_config_change(session, "person", person.id)
    for tenant_id in sorted({grant.tenant_id for grant in (*removed, *added)}):
        gone, new = ([grant for grant in grants if grant.tenant_id == tenant_id] for grants in (removed, added))
        audit.record(
            session,
            Actor(ActorKind.PERSON, person.id),
            "member.follow_provider",
            tenant_id=tenant_id,
            target_id=person.id,
            details={
                "provider": format_id(IdKind.IDENTITY_PROVIDER, provider.id),
                "roles_added": _words(new),
                "roles_removed": _words(gone),
            },
        )
        if gone and not new:
            await people_queries.revoke_invites_by(session, person.id, now, tenant_id)


async def _apply_operator(
    session: AsyncSession, provider: IdentityProvider, person: Person, role: OperatorRole | None, *, now: datetime
) -> tuple[OperatorRole | None, OperatorRole | None]:
    """Return the role among the operators before and after.

    An operator of another origin, or whom somebody locked out, is left alone. One whose group is gone is retired for
    good, tokens and all; should the group come back, there is a new one.
    """
    row = await operator_of_person(session, person.id)
    if row is not None and (row.origin != provider.origin or row.disabled_at is not None):
        return None, None
    before = None if row is None else OperatorRole(row.role)
    if before is role:
        return before, role
    if row is None:
        operator_id = new_uuid()
        name = f"{person.email[:100]} {operator_id.hex[-8:]}"
        row = OperatorRow(id=operator_id, name=name, role=role, person_id=person.id, origin=provider.origin)
        session.add(row)
    elif role is None:
        row.disabled_at, row.person_id = now, None
    else:
        row.role = role
    await session.flush()
    await record_config_change(session, "operator", row.id)
    return before, role


def _words(grants: Iterable[Grant]) -> list[str]:
    return sorted(f"{grant.role.value} in {_place(grant.tenant_id, grant.project_id)}" for grant in grants)


def _place(tenant_id: UUID, project_id: UUID | None) -> str:
    place = format_id(IdKind.TENANT, tenant_id)
    return place if project_id is None else f"{place}/{format_id(IdKind.PROJECT, project_id)}"
