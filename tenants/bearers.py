"""What gateways need to know of people who call with a token of their provider instead of an API key.

A person's membership stands where a key would: its id is the `key_id` of limits, usage and receipts.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from core.money import Currency
from core.tiers import Tier
from core.unreadable import log_unreadable
from tenants import credentials, limit_queries
from tenants import identity_queries as queries
from tenants.errors import not_found
from tenants.identity_providers import mapping_of
from tenants.limit_merge import LimitBook, UnreadableLimitError
from tenants.limits import take_rules
from tenants.oidc.claims import Grant, GroupMapping, given_by
from tenants.principals import UNREADABLE
from tenants.roles import SCOPES
from tenants.types import PersonStatus, Principal, Role, Scope, Status

PROJECTS_NAMED = 20
Identity = tuple[UUID, str]
"""Provider and subject."""


class BearerProvider(msgspec.Struct, frozen=True):
    """A provider whose tokens gateways take."""

    id: UUID
    tenant_id: UUID | None
    issuer: str
    audience: str
    groups_claim: str
    mappings: tuple[GroupMapping, ...]
    default: Grant | None

    @property
    def origin(self) -> str:
        return f"oidc:{self.id.hex}"


class Place(msgspec.Struct, frozen=True):
    """A project in which somebody may call, and the membership that says so."""

    grant: Grant
    origin: str
    principal: Principal


class Access(msgspec.Struct, frozen=True):
    """Where an identity may call. Without a person, nobody has signed in here with it yet."""

    person_id: UUID | None = None
    refusal: str = ""
    places: tuple[Place, ...] = ()


async def load_providers(session: AsyncSession) -> tuple[BearerProvider, ...]:
    """Return the providers whose tokens gateways take."""
    rows = await queries.gateway_providers(session)
    mappings: dict[UUID, list[GroupMapping]] = {}
    for row in await queries.mappings(session, [row.id for row in rows]):
        mappings.setdefault(row.provider_id, []).append(mapping_of(row))
    return tuple(
        BearerProvider(
            id=row.id,
            tenant_id=row.tenant_id,
            issuer=row.issuer,
            audience=row.gateway_audience,
            groups_claim=row.groups_claim,
            mappings=tuple(mappings.get(row.id, ())),
            default=Grant(row.tenant_id, None, Role(row.default_role)) if row.tenant_id and row.default_role else None,
        )
        for row in rows
    )


async def load_access(session: AsyncSession, wanted: Sequence[Identity]) -> dict[Identity, Access]:
    """Return where each of these identities may call, in the order of its memberships, those of one project first."""
    people = await queries.identities_in(session, wanted)
    rows = await queries.bearer_rows(session, [person_id for _, _, person_id, _ in people])
    book = await _book_of(session, rows)
    places: dict[UUID, list[Place]] = {}
    for row in rows:
        if Scope.INFERENCE in SCOPES[Role(row.role)]:
            grant = Grant(row.tenant_id, row.member_project_id, Role(row.role))
            places.setdefault(row.person_id, []).append(Place(grant, row.origin, _principal_or_refusal(row, book)))
    found = dict.fromkeys(wanted, Access())
    for provider_id, subject, person_id, status in people:
        refusal = "" if status == PersonStatus.ACTIVE else "PERSON_SUSPENDED"
        found[provider_id, subject] = Access(person_id, refusal, tuple(places.get(person_id, ())))
    return found


async def _book_of(session: AsyncSession, rows: Iterable[Any]) -> LimitBook:
    tenant_ids, plan_ids = {row.tenant_id for row in rows}, {row.plan_id for row in rows}
    return take_rules(LimitBook(), await limit_queries.rules_for(session, tenant_ids, plan_ids), log_unreadable)


def _principal_or_refusal(row: Any, book: LimitBook) -> Principal:
    """As with keys: without all of its limits known nobody calls."""
    try:
        return _principal(row, book)
    except UnreadableLimitError:
        return msgspec.structs.replace(_principal(row, LimitBook()), refusal=UNREADABLE)


def _principal(row: Any, book: LimitBook) -> Principal:
    return Principal(
        tenant_id=row.tenant_id,
        project_id=row.project_id,
        key_id=row.member_id,
        currency=Currency(row.currency),
        scopes=frozenset({Scope.INFERENCE}),
        tier_default=Tier.STANDARD,
        tier_max=Tier.PRIORITY,
        limits=book.limits(row.plan_id, row.tenant_id, row.project_id, row.member_id),
        tz=sys.intern(row.tz),
        plan_id=row.plan_id,
        price_book_id=row.price_book_id,
        cache_salt=credentials.cache_salt(row.cache_seed, row.tenant_id.bytes),
        refusal=_refusal(row),
        keep_answers=row.keep_answers,
    )


def _refusal(row: Any) -> str:
    if row.tenant_status != Status.ACTIVE:
        return "TENANT_CLOSED" if row.tenant_status == Status.CLOSED else "TENANT_SUSPENDED"
    if row.project_status != Status.ACTIVE:
        return "PROJECT_SUSPENDED"
    return "" if row.member_status == Status.ACTIVE else "MEMBER_SUSPENDED"


async def touched_by(
    session: AsyncSession, kind: str, entity_id: UUID | None, known: Mapping[Identity, Access]
) -> set[Identity]:
    """Return which of the known identities a configuration change may concern."""
    if entity_id is None:
        return set(known)
    match kind:
        case "person":
            return {identity for identity, access in known.items() if access.person_id in {None, entity_id}}
        case "member":
            people = set(await queries.people_of_member(session, entity_id))
            return {
                identity
                for identity, access in known.items()
                if access.person_id in people or any(place.principal.key_id == entity_id for place in access.places)
            }
        case "identity_provider":
            return {identity for identity in known if identity[0] == entity_id}
        case "tenant" | "tenant_limits" | "plan" | "project":
            owner = entity_id if kind != "project" else await queries.tenant_of_project(session, entity_id)
            return {
                identity
                for identity, access in known.items()
                if any(owner in {place.principal.tenant_id, place.principal.plan_id} for place in access.places)
            }
    return set()


def choose(
    access: Access, provider: BearerProvider, groups: frozenset[str] | None, project_id: UUID | None
) -> Principal:
    """Return as whom a token calls, by the project that its request names, or else by its only one.

    What this provider's groups gave counts only when the token, if it tells groups at all, still tells them.

    Raises:
        PlatformError: forbidden when the person may call nowhere, not_found for a project that is not theirs, invalid
            when they have several and name none.
    """
    if access.person_id is None:
        raise _forbidden(
            "NOT_SIGNED_IN_YET", "Sign in to the console once before you call with a token of your provider."
        )
    if access.refusal:
        raise _forbidden(access.refusal, "Your account is suspended.")
    given = None if groups is None else given_by(groups, provider.mappings, provider.default).grants
    found: dict[UUID, Principal] = {}
    for place in access.places:
        outside = provider.tenant_id is not None and place.grant.tenant_id != provider.tenant_id
        gone = place.origin == provider.origin and given is not None and place.grant not in given
        known = found.get(place.principal.project_id)
        if not outside and not gone and (known is None or (known.refusal and not place.principal.refusal)):
            found[place.principal.project_id] = place.principal
    if not found:
        raise _forbidden("NO_ACCESS", "Your roles let you call models in no project; developer is the least that does.")
    if project_id is not None:
        principal = found.get(project_id)
        if principal is None:
            raise not_found(IdKind.PROJECT)
        return principal
    if len(found) > 1:
        names = ", ".join(sorted(format_id(IdKind.PROJECT, project) for project in list(found)[:PROJECTS_NAMED]))
        message = f"You may call in several projects. Name one in the header OpenAI-Project: {names}."
        raise PlatformError("INVALID_REQUEST", ErrorKind.INVALID, message, param="OpenAI-Project")
    return next(iter(found.values()))


def _forbidden(code: str, message: str) -> PlatformError:
    return PlatformError(code, ErrorKind.FORBIDDEN, message)
