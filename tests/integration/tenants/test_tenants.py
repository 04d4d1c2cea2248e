"""Tenants, projects, keys, operators and the audit trail on a real database."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from core import db
from core.clock import ManualClock, SystemClock
from core.errors import PlatformError
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from tenants import api_keys, audit, operators, principals, projects, tenants
from tenants import limits as limit_rules
from tenants.credentials import Peppers, digest
from tenants.types import (
    DEFAULT_PLAN_ID,
    SYSTEM,
    Actor,
    ActorKind,
    AuditFilter,
    KeyLimits,
    Limit,
    LimitLevel,
    LimitMetric,
    LimitSlot,
    Principal,
    Scope,
    Status,
)
from tests.factories.tenants import PEPPER, PEPPERS, Customer, changed, customer, operator

NOBODY = UUID(int=404)


async def _load(sessions: db.Sessions) -> dict[bytes, Principal]:
    async with db.transaction(sessions) as session:
        return await principals.load_all(session)


async def _changes(sessions: db.Sessions) -> list[tuple[str, UUID]]:
    async with db.transaction(sessions) as session:
        return [
            tuple(row) for row in await session.execute(text("SELECT kind, entity_id FROM config_change ORDER BY 1"))
        ]


async def test_a_key_becomes_a_principal_with_all_its_limits(sessions: db.Sessions) -> None:
    expires = datetime(2027, 3, 1, 12, tzinfo=UTC)
    limits = KeyLimits(
        scopes=frozenset({Scope.INFERENCE, Scope.USAGE_READ}),
        tier_default=Tier.BATCH,
        tier_max=Tier.STANDARD,
        model_patterns=("smol*",),
        allowed_networks=("10.0.0.0/8", "fd00::/8"),
        expires_at=expires,
    )
    made = await customer(sessions, limits, currency=Currency.CNY)
    tenant, project, key = made.tenant.id, made.project.id, made.key.id
    wanted = (
        (LimitSlot(LimitLevel.KEY, LimitMetric.REQUESTS_PER_MINUTE, key_id=key, tenant_id=tenant), 60),
        (LimitSlot(LimitLevel.PROJECT, LimitMetric.CONCURRENCY, project_id=project, tenant_id=tenant), 8),
        (LimitSlot(LimitLevel.TENANT, LimitMetric.CONCURRENCY, tenant_id=tenant), 16),
    )
    async with db.transaction(sessions) as session:
        await tenants.update(session, tenant, tz="Europe/Berlin")
        for slot, amount in wanted:
            await limit_rules.set_limit(session, slot, amount, limit_rules.system_why("test", SystemClock()))
    principal = (await _load(sessions))[made.digest]
    assert len(principal.cache_salt) == 32
    assert principal == Principal(
        tenant_id=made.tenant.id,
        project_id=made.project.id,
        key_id=made.key.id,
        currency=Currency.CNY,
        scopes=frozenset({"inference", "usage.read"}),
        tier_default=Tier.BATCH,
        tier_max=Tier.STANDARD,
        model_patterns=("smol*",),
        allowed_networks=("10.0.0.0/8", "fd00::/8"),
        expires_at_us=1_803_902_400_000_000,  # 2027-03-01T12:00:00Z
        limits=(  # the key's own stands instead of its plan's
            Limit(LimitLevel.KEY, LimitMetric.REQUESTS_PER_MINUTE, 60),
            Limit(LimitLevel.PROJECT, LimitMetric.CONCURRENCY, 8),
            Limit(LimitLevel.TENANT, LimitMetric.CONCURRENCY, 16),
        ),
        tz="Europe/Berlin",
        plan_id=DEFAULT_PLAN_ID,
        cache_salt=principal.cache_salt,
    )


async def test_the_secret_is_stored_nowhere(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        line = "to_jsonb(k)::text || to_jsonb(s)::text"
        query = f"SELECT {line} AS line, digest FROM api_key k JOIN api_key_secret s ON s.key_id = k.id"
        row = (await session.execute(text(query))).one()
    assert made.secret not in row.line
    assert made.secret[7:-4] not in row.line
    assert row.digest == digest(PEPPER, made.secret)
    assert (made.key.prefix, made.key.last4) == (made.secret[:7], made.secret[-4:])


async def test_salts_differ_between_tenants_and_agree_within_one(sessions: db.Sessions) -> None:
    one, two = await customer(sessions), await customer(sessions)
    async with db.transaction(sessions) as session:
        _, second = await api_keys.create(session, one.tenant.id, one.project.id, name="second", pepper=PEPPER)
    loaded = await _load(sessions)
    assert loaded[one.digest].cache_salt == loaded[digest(PEPPER, second)].cache_salt
    assert loaded[one.digest].cache_salt != loaded[two.digest].cache_salt


async def test_revocation_is_announced_and_seen_in_the_change(sessions: db.Sessions) -> None:
    made, other = await customer(sessions), await customer(sessions)
    async with db.transaction(sessions) as session:
        revoked = await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
        again = await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    assert revoked.revoked_at is not None
    assert again.revoked_at == revoked.revoked_at
    assert (await _changes(sessions)).count(("api_key", made.key.id)) == 2  # made, revoked once
    found = await changed(sessions, "api_key", made.key.id)
    assert {key: value and value.refusal for key, value in found.items()} == {made.digest: "KEY_REVOKED"}
    assert (await _load(sessions))[other.digest].refusal == ""


async def test_long_dead_keys_are_forgotten(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    clock = ManualClock(datetime.now(UTC) - timedelta(days=31))
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=clock)
    assert await changed(sessions, "api_key", made.key.id) == {made.digest: None}
    assert await _load(sessions) == {}


async def test_the_last_use_only_moves_forward(sessions: db.Sessions) -> None:
    made, other = await customer(sessions), await customer(sessions)
    early, late = datetime(2026, 11, 30, 12, tzinfo=UTC), datetime(2026, 11, 30, 13, tzinfo=UTC)
    for at in (early, late, early):
        async with db.transaction(sessions) as session:
            await api_keys.mark_used(session, [(made.tenant.id, made.key.id, at), (made.tenant.id, other.key.id, at)])
    async with db.transaction(sessions) as session:
        await api_keys.mark_used(session, [])
        assert (await api_keys.get(session, made.tenant.id, made.key.id)).last_used_at == late
        assert (await api_keys.get(session, other.tenant.id, other.key.id)).last_used_at is None


async def test_an_expired_key_says_so(sessions: db.Sessions) -> None:
    made = await customer(sessions, KeyLimits(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    assert (await _load(sessions))[made.digest].refusal == "KEY_EXPIRED"


@pytest.mark.parametrize("kind", ["tenant", "project"])
async def test_suspension_reaches_every_key_and_ends_again(sessions: db.Sessions, kind: str) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        _, second = await api_keys.create(session, made.tenant.id, made.project.id, name="second", pepper=PEPPER)

    async def set_status(status: Status) -> None:
        async with db.transaction(sessions) as session:
            if kind == "tenant":
                await tenants.update(session, made.tenant.id, status=status)
            else:
                await projects.update(session, made.tenant.id, made.project.id, status=status)

    entity = made.tenant.id if kind == "tenant" else made.project.id
    keys = {made.digest, digest(PEPPER, second)}
    for status, refusal in ((Status.SUSPENDED, f"{kind.upper()}_SUSPENDED"), (Status.ACTIVE, "")):
        await set_status(status)
        assert (await _changes(sessions))[-1] == (kind, entity)
        found = await changed(sessions, kind, entity)
        assert {key: value and value.refusal for key, value in found.items()} == dict.fromkeys(keys, refusal)


async def test_changes_of_other_kinds_touch_no_key(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    assert not {"catalog", "prices", "operator"} & principals.KEY_KINDS
    assert set(await changed(sessions, "api_key", made.key.id)) == {made.digest}


async def test_one_tenant_cannot_reach_anothers_things(sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    async with db.transaction(sessions) as session:
        for call in (
            lambda: api_keys.get(session, mine.tenant.id, theirs.key.id),
            lambda: api_keys.revoke(session, mine.tenant.id, theirs.key.id, clock=SystemClock()),
            lambda: projects.get(session, mine.tenant.id, theirs.project.id),
            lambda: projects.suspend(session, mine.tenant.id, theirs.project.id),
            lambda: api_keys.create(session, mine.tenant.id, theirs.project.id, name="x", pepper=PEPPER),
            lambda: tenants.get(session, NOBODY),
            lambda: projects.create(session, NOBODY, name="x"),
        ):
            with pytest.raises(PlatformError) as caught:
                await call()
            assert caught.value.kind == "not_found"
        assert [key.id for key in await api_keys.list_keys(session, mine.tenant.id, after=None, limit=9)] == [
            mine.key.id
        ]
    assert (await _load(sessions))[theirs.digest].refusal == ""


async def test_lists_page_newest_first(sessions: db.Sessions) -> None:
    made = [(await customer(sessions)).tenant.id for _ in range(5)][::-1]
    async with db.transaction(sessions) as session:
        first = await tenants.list_tenants(session, after=None, limit=2)
        rest = await tenants.list_tenants(session, after=first[-1].id, limit=9)
    assert [t.id for t in (*first, *rest)] == made


IMPOSSIBLE_LIMITS = (
    (KeyLimits(tier_default=Tier.PRIORITY, tier_max=Tier.STANDARD), "tier_default"),
    (KeyLimits(scopes=frozenset()), "scopes"),
    (KeyLimits(model_patterns=("",)), "model_patterns"),
    (KeyLimits(model_patterns=("m",) * 65), "model_patterns"),
    (KeyLimits(allowed_networks=("10.0.0.1/8",)), "allowed_networks"),
    (KeyLimits(allowed_networks=("10.0.0.0/8",) * 65), "allowed_networks"),
)


async def test_impossible_limits_are_named(sessions: db.Sessions) -> None:
    for limits, param in IMPOSSIBLE_LIMITS:
        with pytest.raises(PlatformError) as caught:
            await customer(sessions, limits)
        assert (caught.value.kind, caught.value.param) == ("invalid", param)


async def test_unknown_time_zones_are_refused(sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        for zone in ("Mars/Olympus", "../etc/passwd", "/etc/passwd", "", "America", "a\0b"):
            with pytest.raises(PlatformError) as caught:
                await tenants.create(session, name="t", currency=Currency.USD, tz=zone)
            assert caught.value.param == "tz"


async def _take_names_again(sessions: db.Sessions, made: Customer, kind: str) -> None:
    async with db.transaction(sessions) as session:
        if kind == "tenant":
            await tenants.create(session, name=made.tenant.name, currency=Currency.USD)
        elif kind == "project":
            await projects.create(session, made.tenant.id, name="main")
        else:
            await operators.create(session, name="o")
            await operators.create(session, name="o")


@pytest.mark.parametrize("kind", ["tenant", "project", "operator"])
async def test_names_are_unique_where_they_must_be(sessions: db.Sessions, kind: str) -> None:
    made = await customer(sessions)
    with pytest.raises(PlatformError) as caught:
        await _take_names_again(sessions, made, kind)
    assert (caught.value.code, caught.value.kind) == ("NAME_TAKEN", "conflict")


async def test_operator_tokens_work_until_revoked_or_disabled(sessions: db.Sessions) -> None:
    made, token = await operator(sessions)
    await operator(sessions)  # somebody has to stay
    async with db.transaction(sessions) as session:
        second = await operators.issue_token(
            session, made.id, pepper=PEPPER, expires_at=datetime.now(UTC) - timedelta(seconds=1)
        )
        assert await operators.find(session, PEPPERS, token) == made
        assert await operators.find(session, PEPPERS, second) is None  # expired
        assert await operators.find(session, Peppers(bytes(32)), token) is None  # another installation's pepper
        await operators.revoke_tokens(session, made.id)
        assert await operators.find(session, PEPPERS, token) is None
        third = await operators.issue_token(session, made.id, pepper=PEPPER)
        assert await operators.find(session, PEPPERS, third) is not None
        await operators.disable(session, made.id, clock=SystemClock())
        assert await operators.find(session, PEPPERS, third) is None


async def test_the_embedded_first_token_must_be_well_formed(sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        made = await operators.create(session, name="first")
        with pytest.raises(ValueError, match="mint"):
            await operators.issue_token(session, made.id, pepper=PEPPER, token="tgo_short")
        token = operators.mint()
        assert await operators.issue_token(session, made.id, pepper=PEPPER, token=token) == token
        assert await operators.by_name(session, "first") == made


@pytest.mark.parametrize("statement", ["UPDATE audit_record SET action = 'x'", "DELETE FROM audit_record"])
async def test_the_audit_trail_only_grows(sessions: db.Sessions, database_settings: Database, statement: str) -> None:
    actor = Actor(ActorKind.OPERATOR, UUID(int=5), "req_1")
    async with db.transaction(sessions) as session:
        audit.record(session, actor, "tenant.create", tenant_id=UUID(int=6), target_id=UUID(int=6), details={"a": 1})
        audit.record(session, SYSTEM, "seed")
    async with db.transaction(sessions) as session:
        first = await audit.search(session, AuditFilter(UUID(int=6)), after=None, limit=9)
        assert [(r.actor, r.action, r.details) for r in first] == [(actor, "tenant.create", {"a": 1})]
        assert len(await audit.search(session, AuditFilter(), after=None, limit=9)) == 2
    with pytest.raises(DBAPIError, match="permission denied"):
        async with db.transaction(sessions) as session:
            await session.execute(text(statement))
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    with pytest.raises(DBAPIError, match="append-only"):
        async with db.transaction(db.create_sessions(owner)) as session:
            await session.execute(text(statement))
    await owner.dispose()
