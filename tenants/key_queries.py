"""Every query of API keys and their secrets. What a tenant owns takes `tenant_id` first."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    DateTime,
    LargeBinary,
    Row,
    Select,
    SQLColumnExpression,
    and_,
    bindparam,
    case,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from core import db
from core.reader import Reader
from tenants.key_types import KeyFilter, KeyReach, KeyState
from tenants.limit_tables import LimitRuleRow, PlanRow
from tenants.tables import (
    ApiKeyRow,
    ApiKeySecretRow,
    MemberRow,
    PersonRow,
    ProjectRow,
    ServiceAccountRow,
    TenantRow,
)
from tenants.types import PersonStatus, Role, Status

PrincipalRow = Row[*tuple[Any, ...]]
SECRETS_A_KEY = 5  # rows of one key, as a rule at most: two secrets under two peppers, and one that ended
SLICE = 200  # rows a gateway turns into principals before its loop has another turn

# A secret that ended longer ago is unknown to the gateways: their memory of dead keys stays bounded.
DEAD_KEY_MEMORY = func.make_interval(0, 0, 0, 30)

_ENDED_AT = func.least(
    ApiKeyRow.revoked_at, ApiKeyRow.expires_at, ApiKeySecretRow.revoked_at, ApiKeySecretRow.expires_at
)
_EXPIRES_AT = func.least(ApiKeyRow.expires_at, ApiKeySecretRow.expires_at)
_IS_FORGOTTEN = func.coalesce(func.now() - DEAD_KEY_MEMORY >= _ENDED_AT, False)
_IS_REVOKED = or_(ApiKeyRow.revoked_at.is_not(None), ApiKeySecretRow.revoked_at.is_not(None))


def _roles_of_person(
    tenant_id: SQLColumnExpression[Any], project_id: SQLColumnExpression[Any], person_id: SQLColumnExpression[Any]
) -> Select[str]:
    return select(MemberRow.role).where(
        PersonRow.id == person_id,
        PersonRow.status == PersonStatus.ACTIVE,
        MemberRow.person_id == PersonRow.id,
        MemberRow.tenant_id == tenant_id,
        MemberRow.status == Status.ACTIVE,
        or_(MemberRow.project_id.is_(None), MemberRow.project_id == project_id),
    )


def _role_of_account(
    tenant_id: SQLColumnExpression[Any], project_id: SQLColumnExpression[Any], account_id: SQLColumnExpression[Any]
) -> Select[str]:
    return select(ServiceAccountRow.role).where(
        ServiceAccountRow.id == account_id,
        ServiceAccountRow.tenant_id == tenant_id,
        ServiceAccountRow.project_id == project_id,
        ServiceAccountRow.status == Status.ACTIVE,
    )


# What the owner is where the key is; null without an owner. One who is suspended, deleted, or belongs neither to the
# tenant nor to the key's project, has no role there and owns no working key.
_OWNER_ROLES = case(
    (
        ApiKeyRow.owner_person_id.is_not(None),
        func.array(
            _roles_of_person(ApiKeyRow.tenant_id, ApiKeyRow.project_id, ApiKeyRow.owner_person_id).scalar_subquery()
        ),
    ),
    (
        ApiKeyRow.owner_service_account_id.is_not(None),
        func.array(
            _role_of_account(
                ApiKeyRow.tenant_id, ApiKeyRow.project_id, ApiKeyRow.owner_service_account_id
            ).scalar_subquery()
        ),
    ),
)

_TOUCHED_BY = {  # kind of a configuration change → whose keys it touches
    "api_key": ApiKeyRow.id,
    "project": ApiKeyRow.project_id,
    "tenant": ApiKeyRow.tenant_id,
    "person": ApiKeyRow.owner_person_id,  # also for what happens to a membership of theirs
    "service_account": ApiKeyRow.owner_service_account_id,
}
KINDS = frozenset(_TOUCHED_BY)


def _principals(*where: ColumnElement[bool]) -> Select[*tuple[Any, ...]]:
    return (
        select(
            ApiKeySecretRow.digest,
            ApiKeyRow.id,
            ApiKeyRow.tenant_id,
            ApiKeyRow.project_id,
            ApiKeyRow.owner_person_id,
            ApiKeyRow.owner_service_account_id,
            ApiKeyRow.scopes,
            ApiKeyRow.tier_default,
            ApiKeyRow.tier_max,
            ApiKeyRow.model_patterns,
            ApiKeyRow.allowed_networks,
            ApiKeyRow.status,
            _EXPIRES_AT.label("expires_at"),
            _IS_REVOKED.label("revoked"),
            func.coalesce(func.now() >= _EXPIRES_AT, False).label("expired"),
            _IS_FORGOTTEN.label("forgotten"),
            _OWNER_ROLES.label("owner_roles"),
            ProjectRow.status.label("project_status"),
            ProjectRow.keep_answers,
            TenantRow.status.label("tenant_status"),
            TenantRow.currency,
            TenantRow.tz,
            TenantRow.plan_id,
            PlanRow.price_book_id,
            TenantRow.cache_seed,
        )
        .join(ApiKeyRow, ApiKeyRow.id == ApiKeySecretRow.key_id)
        .join(ProjectRow, ProjectRow.id == ApiKeyRow.project_id)
        .join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)
        .join(PlanRow, PlanRow.id == TenantRow.plan_id)
        .where(*where)
    )


def _with_rules(query: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    """The same with the rules of each key, its project, tenant and plan: one a row, named ``rule_…``, null without."""
    rule = LimitRuleRow.__table__.c
    of_tenant = and_(
        rule.tenant_id == ApiKeyRow.tenant_id,
        or_(rule.project_id.is_(None), rule.project_id == ApiKeyRow.project_id),
        or_(rule.key_id.is_(None), rule.key_id == ApiKeyRow.id),
    )
    return query.outerjoin(LimitRuleRow, or_(of_tenant, rule.plan_id == TenantRow.plan_id)).add_columns(
        *(column.label(f"rule_{column.name}") for column in rule)
    )


# Made once: whoever is new here waits for the answer, and to put the statement together takes longer than to run it.
_DIGESTS = bindparam("digests", type_=ARRAY(LargeBinary))
_BY_DIGEST = _with_rules(_principals(ApiKeySecretRow.digest == func.any(_DIGESTS), ~_IS_FORGOTTEN))
_BY_DIGEST_WRITTEN = _BY_DIGEST.compile(dialect=db.driver_url("postgresql://").get_dialect()())
_UNDER = ApiKeySecretRow.pepper_id.in_(bindparam("peppers", expanding=True))
_OF = {kind: _principals(column.in_(bindparam("ids", expanding=True))) for kind, column in _TOUCHED_BY.items()}
_OF_UNDER = {kind: query.where(_UNDER) for kind, query in _OF.items()}


def _under(pepper_ids: Collection[str] | None) -> dict[str, Any]:
    """Digests that can be met under these peppers; those of before peppers had names may be any's."""
    return {} if pepper_ids is None else {"peppers": ["", *pepper_ids]}


async def _slices(
    session: AsyncSession, query: Select[*tuple[Any, ...]], values: Mapping[str, Any]
) -> AsyncIterator[Sequence[PrincipalRow]]:
    await session.execute(text("SET LOCAL cursor_tuple_fraction = 1"))  # all rows are wanted, not the first ones soon
    result = await session.stream(query, values, execution_options={"yield_per": SLICE})
    try:
        async for rows in result.partitions():
            yield rows
    finally:
        await result.close()


async def _at_once(
    session: AsyncSession, query: Select[*tuple[Any, ...]], values: Mapping[str, Any]
) -> AsyncIterator[Sequence[PrincipalRow]]:
    """The same of few rows: a cursor costs several round trips, and a key that was just made is waited for."""
    connection = await session.connection()
    yield (await connection.execute(query, values)).all()


def principal_rows(session: AsyncSession, pepper_ids: Collection[str] | None) -> AsyncIterator[Sequence[PrincipalRow]]:
    """Yield every secret that gateways should know, in slices."""
    query = _principals(~_IS_FORGOTTEN)
    return _slices(session, query if pepper_ids is None else query.where(_UNDER), _under(pepper_ids))


def principal_rows_of(
    session: AsyncSession, kind: str, entity_ids: Collection[UUID], pepper_ids: Collection[str] | None
) -> AsyncIterator[Sequence[PrincipalRow]]:
    """Yield the secrets that changes of these keys, projects, tenants or owners touch, forgotten ones too."""
    query = _OF[kind] if pepper_ids is None else _OF_UNDER[kind]
    values = {"ids": list(entity_ids), **_under(pepper_ids)}
    few = kind == "api_key" and len(entity_ids) <= SLICE // SECRETS_A_KEY
    return _at_once(session, query, values) if few else _slices(session, query, values)


async def principal_rows_by_digest(
    session: AsyncSession, digests: Collection[bytes]
) -> Sequence[tuple[PrincipalRow, LimitRuleRow | None]]:
    """Return the secrets of these digests, each once with every rule that may hold for it, in one statement."""
    connection = await session.connection()
    rows = (await connection.execute(_BY_DIGEST, {"digests": list(digests)})).all()
    return [(row, _rule_beside(row)) for row in rows]


async def read_by_digest(
    reader: Reader, digests: Collection[bytes]
) -> Sequence[tuple[PrincipalRow, LimitRuleRow | None]]:
    """The same in a third of the time: for a request that waits."""
    values = {**_BY_DIGEST_WRITTEN.params, "digests": list(digests)}
    return [(row, _rule_beside(row)) for row in await reader.rows(str(_BY_DIGEST_WRITTEN), values)]


def _rule_beside(row: PrincipalRow) -> LimitRuleRow | None:
    if row.rule_id is None:
        return None
    return LimitRuleRow(**{column.name: getattr(row, f"rule_{column.name}") for column in LimitRuleRow.__table__.c})


async def api_key(session: AsyncSession, tenant_id: UUID, key_id: UUID, *, lock: bool = False) -> ApiKeyRow | None:
    query = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id)
    if lock:
        query = query.with_for_update(key_share=True)
    return (await session.scalars(query)).one_or_none()


async def secrets(session: AsyncSession, tenant_id: UUID, key_ids: Collection[UUID]) -> Sequence[ApiKeySecretRow]:
    """Return the secrets of these keys, oldest first; one stored under several peppers comes several times."""
    query = (
        select(ApiKeySecretRow)
        .where(ApiKeySecretRow.tenant_id == tenant_id, ApiKeySecretRow.key_id.in_(list(key_ids)))
        .order_by(ApiKeySecretRow.id)
    )
    return (await session.scalars(query)).all()


async def end_secrets(
    session: AsyncSession,
    tenant_id: UUID,
    key_id: UUID,
    secret_ids: Collection[UUID],
    **ends: datetime,
) -> None:
    """Set `expires_at` or `revoked_at` of these secrets of a key, under every pepper."""
    await session.execute(
        update(ApiKeySecretRow)
        .where(
            ApiKeySecretRow.tenant_id == tenant_id,
            ApiKeySecretRow.key_id == key_id,
            ApiKeySecretRow.id.in_(list(secret_ids)),
        )
        .values(**ends)
    )


_STATE: Mapping[KeyState, ColumnElement[bool]] = {
    KeyState.REVOKED: ApiKeyRow.revoked_at.is_not(None),
    KeyState.EXPIRED: and_(ApiKeyRow.revoked_at.is_(None), func.coalesce(ApiKeyRow.expires_at <= func.now(), False)),
    KeyState.SUSPENDED: and_(
        ApiKeyRow.revoked_at.is_(None),
        func.coalesce(ApiKeyRow.expires_at > func.now(), True),
        ApiKeyRow.status == "suspended",
    ),
    KeyState.ACTIVE: and_(
        ApiKeyRow.revoked_at.is_(None),
        func.coalesce(ApiKeyRow.expires_at > func.now(), True),
        ApiKeyRow.status == "active",
    ),
}


def _reached(reach: KeyReach | None) -> ColumnElement[bool]:
    if reach is None:
        return true()
    own: ColumnElement[bool] = false()
    if reach.owner.person_id is not None:
        own = ApiKeyRow.owner_person_id == reach.owner.person_id
    elif reach.owner.service_account_id is not None:
        own = ApiKeyRow.owner_service_account_id == reach.owner.service_account_id
    return or_(own, ApiKeyRow.project_id.in_(list(reach.project_ids)))


def _conditions(tenant_id: UUID, wanted: KeyFilter) -> list[ColumnElement[bool]]:
    of_key = (ApiKeySecretRow.tenant_id == ApiKeyRow.tenant_id, ApiKeySecretRow.key_id == ApiKeyRow.id)
    used_at = func.coalesce(ApiKeyRow.last_used_at, ApiKeyRow.created_at)
    asked: tuple[tuple[object, Callable[[], ColumnElement[bool]]], ...] = (
        (wanted.project_id, lambda: ApiKeyRow.project_id == wanted.project_id),
        (wanted.owner_person_id, lambda: ApiKeyRow.owner_person_id == wanted.owner_person_id),
        (
            wanted.owner_service_account_id,
            lambda: ApiKeyRow.owner_service_account_id == wanted.owner_service_account_id,
        ),
        (wanted.state, lambda: _STATE[KeyState(str(wanted.state))]),
        (wanted.name, lambda: ApiKeyRow.name.icontains(wanted.name, autoescape=True)),
        (wanted.expiring_before, lambda: ApiKeyRow.expires_at < wanted.expiring_before),
        (wanted.unused_since, lambda: used_at < wanted.unused_since),
        (
            wanted.prefix,
            lambda: exists().where(*of_key, ApiKeySecretRow.prefix.startswith(wanted.prefix, autoescape=True)),
        ),
        (wanted.reach, lambda: _reached(wanted.reach)),
        (wanted.last4, lambda: exists().where(*of_key, ApiKeySecretRow.last4 == wanted.last4)),
    )
    return [ApiKeyRow.tenant_id == tenant_id, *(make() for value, make in asked if value)]


async def api_keys(
    session: AsyncSession, tenant_id: UUID, wanted: KeyFilter, after: UUID | None, limit: int
) -> Sequence[ApiKeyRow]:
    """Return at most `limit` keys, newest first."""
    query = select(ApiKeyRow).where(*_conditions(tenant_id, wanted)).order_by(ApiKeyRow.id.desc()).limit(limit)
    if after is not None:
        query = query.where(ApiKeyRow.id < after)
    return (await session.scalars(query)).all()


async def living_keys(
    session: AsyncSession, tenant_id: UUID, wanted: KeyFilter, limit: int, *, lock: bool
) -> Sequence[ApiKeyRow]:
    """Return at most `limit` keys that are not revoked yet, oldest first, locked when they are to be changed."""
    query = (
        select(ApiKeyRow)
        .where(*_conditions(tenant_id, wanted), ApiKeyRow.revoked_at.is_(None))
        .order_by(ApiKeyRow.id)
        .limit(limit)
    )
    if lock:
        query = query.with_for_update(key_share=True)
    return (await session.scalars(query)).all()


async def record_changes(session: AsyncSession, tenant_id: UUID, key_ids: Sequence[UUID], kind: str) -> None:
    """Tell every gateway of all these keys of a tenant, with one statement."""
    statement = text(
        "SELECT count(record_config_change(:kind, id)) FROM api_key WHERE tenant_id = :tenant AND id = ANY(:ids)"
    )
    await session.execute(statement, {"kind": kind, "tenant": tenant_id, "ids": list(key_ids)})


async def mark_used(session: AsyncSession, uses: Sequence[tuple[UUID, UUID, datetime]]) -> None:
    """Move the last use of keys forward, never back; each is tenant, key, instant."""
    newest = func.greatest(ApiKeyRow.last_used_at, bindparam("used_at", type_=DateTime(timezone=True)))
    statement = (
        update(ApiKeyRow)
        .where(ApiKeyRow.tenant_id == bindparam("of_tenant"), ApiKeyRow.id == bindparam("of_key"))
        .values(last_used_at=newest)
    )
    values = [{"of_tenant": tenant_id, "of_key": key_id, "used_at": at} for tenant_id, key_id, at in uses]
    connection = await session.connection()
    await connection.execute(statement, values)


async def note_use(session: AsyncSession, tenant_id: UUID, key_id: UUID, now: datetime, unless_after: datetime) -> None:
    """Move the last use of a key to now, unless it lies after `unless_after`."""
    await session.execute(
        update(ApiKeyRow)
        .where(
            ApiKeyRow.tenant_id == tenant_id,
            ApiKeyRow.id == key_id,
            func.coalesce(ApiKeyRow.last_used_at < unless_after, True),
        )
        .values(last_used_at=now)
    )


_REHASH = """
    INSERT INTO api_key_secret (digest, id, tenant_id, key_id, prefix, last4, pepper_id, created_at, expires_at,
                                revoked_at)
    SELECT pair.new, old.id, old.tenant_id, old.key_id, old.prefix, old.last4, :pepper, old.created_at, old.expires_at,
           old.revoked_at
    FROM unnest(CAST(:old AS bytea[]), CAST(:new AS bytea[])) AS pair (old, new)
    JOIN api_key_secret old ON old.digest = pair.old
    ON CONFLICT DO NOTHING
    RETURNING key_id
"""


async def rehash(session: AsyncSession, pairs: Mapping[bytes, bytes], pepper_id: str) -> Sequence[UUID]:
    """Store secrets, each found by its old digest, under a new one as well; return the keys they are of."""
    values = {"old": list(pairs), "new": list(pairs.values()), "pepper": pepper_id}
    return (await session.execute(text(_REHASH), values)).scalars().all()


_BY_PEPPER = """
    SELECT pepper_id, count(*) FROM (
        SELECT DISTINCT ON (s.id) s.pepper_id
        FROM api_key_secret s JOIN api_key k ON k.id = s.key_id
        WHERE k.revoked_at IS NULL AND s.revoked_at IS NULL
          AND coalesce(least(k.expires_at, s.expires_at) > now(), true)
        ORDER BY s.id, array_position(CAST(:peppers AS text[]), s.pepper_id)
    ) AS living GROUP BY pepper_id
"""


async def secrets_by_pepper(session: AsyncSession, pepper_ids: Sequence[str]) -> dict[str, int]:
    """Count the living secrets by the newest of the peppers that they are stored under."""
    rows = await session.execute(text(_BY_PEPPER), {"peppers": list(pepper_ids)})
    return {row[0]: row[1] for row in rows}


_TOKENS_BY_PEPPER = """
    SELECT pepper_id, count(*) FROM (
        SELECT DISTINCT ON (operator_id, prefix, last4, created_at) pepper_id
        FROM operator_token
        WHERE revoked_at IS NULL AND coalesce(expires_at > now(), true)
        ORDER BY operator_id, prefix, last4, created_at, array_position(CAST(:peppers AS text[]), pepper_id)
    ) AS living GROUP BY pepper_id
"""


async def operator_tokens_by_pepper(session: AsyncSession, pepper_ids: Sequence[str]) -> dict[str, int]:
    """Count the living operator tokens in the same way."""
    rows = await session.execute(text(_TOKENS_BY_PEPPER), {"peppers": list(pepper_ids)})
    return {row[0]: row[1] for row in rows}


async def owner_roles(
    session: AsyncSession, tenant_id: UUID, project_id: UUID, person_id: UUID | None, service_account_id: UUID | None
) -> Sequence[str]:
    """Return what this person or service account is in the project; nothing when no key of it may be theirs."""
    query = _roles_of_person(literal(tenant_id), literal(project_id), literal(person_id))
    if person_id is None:
        query = _role_of_account(literal(tenant_id), literal(project_id), literal(service_account_id))
    return (await session.scalars(query)).all()


async def service_account_role(
    session: AsyncSession, tenant_id: UUID, service_account_id: UUID
) -> tuple[UUID, Role] | None:
    """Return the project and role of an active service account."""
    query = select(ServiceAccountRow).where(
        ServiceAccountRow.tenant_id == tenant_id,
        ServiceAccountRow.id == service_account_id,
        ServiceAccountRow.status == Status.ACTIVE,
    )
    row = (await session.scalars(query)).one_or_none()
    return None if row is None else (row.project_id, Role(row.role))
