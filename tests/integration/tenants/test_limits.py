"""Limits and plans on a real database: rules, their history, and undoing a change."""

from dataclasses import replace
from uuid import UUID

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from core import db
from core.errors import PlatformError
from core.ids import new_uuid
from core.settings import Database
from tenants import limits, plans, principals
from tenants.limits import RULES_MAX, Beside, LimitChange
from tenants.types import DEFAULT_PLAN_ID, Limit, LimitLevel, LimitMetric, LimitMode, LimitSlot, Principal
from tests.conftest import PostgresService
from tests.factories.limits import limited, of_key, of_tenant, why
from tests.factories.tenants import Customer, customer

RPM, DAY = LimitMetric.REQUESTS_PER_MINUTE, LimitMetric.SPEND_PER_DAY


async def held(sessions: db.Sessions, who: Customer) -> dict[tuple[LimitLevel, LimitMetric], int]:
    """The hard limits that a gateway would know of the key."""
    async with db.transaction(sessions) as session:
        principal = (await principals.load_all(session))[who.digest]
    return {(limit.level, limit.metric): limit.amount for limit in principal.limits}


async def history(sessions: db.Sessions, who: Customer) -> list[LimitChange]:
    async with db.transaction(sessions) as session:
        return list(await limits.list_changes(session, who.tenant.id, after=None, limit=99))


async def test_the_key_goes_before_the_tenant_and_the_tenant_before_the_plan(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 600_000}  # of the plan
    every_key = await limited(sessions, of_tenant(who, LimitLevel.KEY), 100)
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 100}
    own = await limited(sessions, of_key(who), 3_000)
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 3_000}
    await limited(sessions, of_tenant(who), 50)
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 3_000, (LimitLevel.TENANT, RPM): 50}
    async with db.transaction(sessions) as session:
        await limits.remove(session, own, why())
        await limits.remove(session, every_key, why())
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 600_000, (LimitLevel.TENANT, RPM): 50}


async def test_a_spend_is_kept_in_pico_and_enforced_in_whole_nano_below(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    amount = limits.parse_amount(DAY, "12.345678901999")
    rule = await limited(sessions, of_key(who, DAY), amount)
    assert limits.amount_out(DAY, rule.amount) == "12.345678901999"
    assert (await held(sessions, who))[LimitLevel.KEY, DAY] == 12_345_678_901


IMPOSSIBLE = (
    (RPM, "100"),
    (RPM, -1),
    (RPM, 10_000_001),
    (LimitMetric.CONCURRENCY, 1_000_001),
    (DAY, 100),
    (DAY, "-1"),
    (DAY, "9000000.000000000001"),
    (DAY, "1e3.5"),
    (DAY, "0.0000000000001"),
)


@pytest.mark.parametrize(("metric", "amount"), IMPOSSIBLE)
def test_impossible_amounts_are_named(metric: LimitMetric, amount: int | str) -> None:
    with pytest.raises(PlatformError) as caught:
        limits.parse_amount(metric, amount)
    assert (caught.value.kind, caught.value.param) == ("invalid", "amount")


@pytest.mark.parametrize(
    ("metric", "amount", "stored"),
    [(RPM, 0, 0), (RPM, 10_000_000, 10**7), (DAY, "0", 0), (DAY, "9000000", 9 * 10**18), (DAY, "12.50", 125 * 10**11)],
)
def test_the_bounds_themselves_are_allowed(metric: LimitMetric, amount: int | str, stored: int) -> None:
    assert limits.parse_amount(metric, amount) == stored


async def test_every_change_says_who_why_and_what_it_was(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    slot = of_key(who)
    await limited(sessions, slot, 10, "too many calls")
    await limited(sessions, slot, 10, "again the same: no change")
    rule = await limited(sessions, slot, 20, "they paid")
    async with db.transaction(sessions) as session:
        await limits.remove(session, rule, why("trusted now"))
    found = await history(sessions, who)
    assert [(c.reason, c.before, c.after, c.actor_kind) for c in found] == [
        ("trusted now", 20, None, "operator"),
        ("they paid", 10, 20, "operator"),
        ("too many calls", None, 10, "operator"),
    ]
    assert {change.slot for change in found} == {slot}


async def revert(sessions: db.Sessions, who: Customer, change: LimitChange, *, force: bool = False) -> LimitChange:
    async with db.transaction(sessions) as session:
        again = await limits.get_change(session, who.tenant.id, change.id)
        return await limits.revert(session, again, why("back"), force=force)


async def test_a_change_is_undone_in_one_call_and_that_is_a_change_itself(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    slot = of_key(who)
    for amount in (10, 20):
        await limited(sessions, slot, amount)
    second, first = await history(sessions, who)
    undone = await revert(sessions, who, second)
    assert (undone.before, undone.after, undone.reverts) == (20, 10, second.id)
    assert (await held(sessions, who))[LimitLevel.KEY, RPM] == 10
    undone = await revert(sessions, who, first)
    assert (undone.before, undone.after) == (10, None)
    assert (await held(sessions, who))[LimitLevel.KEY, RPM] == 600_000
    again = await revert(sessions, who, undone)
    assert (again.before, again.after) == (None, 10)


async def test_what_was_changed_since_is_undone_only_by_force(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    slot = of_key(who)
    for amount in (10, 20, 30):
        await limited(sessions, slot, amount)
    _, second, _ = await history(sessions, who)
    with pytest.raises(PlatformError) as caught:
        await revert(sessions, who, second)
    assert (caught.value.code, caught.value.kind, caught.value.fields) == (
        "LIMIT_CHANGED_SINCE",
        "conflict",
        {"amount": 30},
    )
    assert (await held(sessions, who))[LimitLevel.KEY, RPM] == 30
    assert (await revert(sessions, who, second, force=True)).after == 10
    with pytest.raises(PlatformError, match="as it was"):
        await revert(sessions, who, second, force=True)


async def test_history_only_grows(sessions: db.Sessions, database_settings: Database) -> None:
    who = await customer(sessions)
    await limited(sessions, of_key(who), 10)
    with pytest.raises(DBAPIError, match="permission denied"):
        async with db.transaction(sessions) as session:
            await session.execute(text("UPDATE limit_change SET reason = 'x'"))
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    with pytest.raises(DBAPIError, match="append-only"):
        async with db.transaction(db.create_sessions(owner)) as session:
            await session.execute(text("DELETE FROM limit_change"))
    await owner.dispose()


async def test_rules_of_one_target_are_bounded(sessions: db.Sessions) -> None:
    who, other = await customer(sessions), await customer(sessions)
    async with db.transaction(sessions) as session:
        for number in range(RULES_MAX):
            await limits.set_limit(session, of_key(who, model=f"m{number}"), 1, why())
        with pytest.raises(PlatformError) as caught:
            await limits.set_limit(session, of_key(who), 1, why())
        assert (caught.value.code, caught.value.kind) == ("TOO_MANY_LIMITS", "conflict")
        await limits.set_limit(session, of_key(who, model="m0"), 2, why())  # one that is there may change
        await limits.set_limit(session, of_key(other), 1, why())
        assert len(await limits.list_at(session, tenant_id=who.tenant.id, key_id=who.key.id)) == RULES_MAX


async def test_one_tenant_cannot_reach_anothers_limits(sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    rule = await limited(sessions, of_key(theirs), 10)
    (change,) = await history(sessions, theirs)
    async with db.transaction(sessions) as session:
        for call in (
            lambda: limits.set_limit(session, of_key(theirs, tenant_id=mine.tenant.id), 1, why()),
            lambda: limits.set_limit(
                session, of_tenant(mine, LimitLevel.PROJECT, project_id=theirs.project.id), 1, why()
            ),
            lambda: limits.get(session, mine.tenant.id, rule.id),
            lambda: limits.get_change(session, mine.tenant.id, change.id),
            lambda: limits.list_at(session, tenant_id=mine.tenant.id, key_id=theirs.key.id),
            lambda: limits.set_limit(session, LimitSlot(LimitLevel.KEY, RPM, plan_id=new_uuid()), 1, why()),
            lambda: limits.set_limit(session, LimitSlot(LimitLevel.KEY, RPM, tenant_id=new_uuid()), 1, why()),
        ):
            with pytest.raises(PlatformError) as caught:
                await call()
            assert caught.value.kind == "not_found"


async def _patched(sessions: db.Sessions, kind: str, entity: UUID, known: Principal) -> Principal:
    async with db.transaction(sessions) as session:
        return (await principals.load_limits(session, kind, entity)).apply(known)


async def test_a_patch_of_limits_says_the_same_as_reading_everything(sessions: db.Sessions) -> None:
    who, other = await customer(sessions), await customer(sessions)
    async with db.transaction(sessions) as session:
        before = await principals.load_all(session)
    await limited(sessions, of_key(who), 10)
    await limited(sessions, of_tenant(who, mode=LimitMode.DARK), 20)
    plan_rule = LimitSlot(LimitLevel.PROJECT, RPM, plan_id=DEFAULT_PLAN_ID)
    await limited(sessions, plan_rule, 30)
    async with db.transaction(sessions) as session:
        after = await principals.load_all(session)
    assert after[who.digest].limits == (
        Limit(LimitLevel.KEY, RPM, 10),
        Limit(LimitLevel.PROJECT, RPM, 30),
        Limit(LimitLevel.TENANT, RPM, 20, LimitMode.DARK),
    )
    for digest in (who.digest, other.digest):
        patched = await _patched(sessions, "plan", DEFAULT_PLAN_ID, before[digest])
        assert patched == after[digest]
        assert await _patched(sessions, "tenant_limits", who.tenant.id, patched) is patched
    assert await _patched(sessions, "tenant_limits", who.tenant.id, before[who.digest]) == after[who.digest]
    assert await _patched(sessions, "tenant_limits", who.tenant.id, before[other.digest]) is before[other.digest]


async def test_a_tenant_is_put_on_a_plan_and_keeps_its_own_limits(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    async with db.transaction(sessions) as session:
        gold = await plans.create(session, name="gold", description="For those who pay")
        await limits.set_limit(session, LimitSlot(LimitLevel.TENANT, RPM, plan_id=gold.id), 5_000, why())
        await limits.set_limit(session, of_tenant(who, LimitLevel.PROJECT), 70, why())
        before, after = await plans.put_tenant(session, who.tenant.id, gold.id)
        assert (before.name, after.name) == ("default", "gold")
    assert await held(sessions, who) == {(LimitLevel.TENANT, RPM): 5_000, (LimitLevel.PROJECT, RPM): 70}
    async with db.transaction(sessions) as session:
        for plan_id, message in ((gold.id, "1 tenants are on this plan"), (DEFAULT_PLAN_ID, "has to stay")):
            with pytest.raises(PlatformError, match=message):
                await plans.delete(session, plan_id, why())
        await plans.put_tenant(session, who.tenant.id, DEFAULT_PLAN_ID)
        await plans.delete(session, gold.id, why("nobody wants it"))
        with pytest.raises(PlatformError, match="no such plan"):
            await plans.get(session, gold.id)
        (removed, _) = await limits.list_changes_of_plan(session, gold.id, after=None, limit=9)
    assert (removed.before, removed.after, removed.reason) == (5_000, None, "nobody wants it")
    assert await held(sessions, who) == {(LimitLevel.KEY, RPM): 600_000, (LimitLevel.PROJECT, RPM): 70}


OLD_ROWS = """
    INSERT INTO tenant (id, name, currency, concurrency_limit, cache_seed)
        VALUES ('00000000-0000-0000-0000-00000000000a', 'old', 'USD', 16, decode(repeat('00', 32), 'hex'));
    INSERT INTO project (id, tenant_id, name, rpm_limit, concurrency_limit)
        VALUES ('00000000-0000-0000-0000-00000000000b', '00000000-0000-0000-0000-00000000000a', 'p', 600, 0);
    INSERT INTO api_key (id, tenant_id, project_id, name, prefix, last4, digest, scopes, rpm_limit, concurrency_limit)
        SELECT (id || '000000-0000-0000-0000-000000000000')::uuid, '00000000-0000-0000-0000-00000000000a',
            '00000000-0000-0000-0000-00000000000b', 'k', 'tg_x', 'last', decode(repeat(id, 32), 'hex'), '{inference}',
            rpm, concurrency
        FROM (VALUES ('01', 600000, 0), ('02', 60, 4)) AS old (id, rpm, concurrency);
"""


def test_limits_that_were_columns_become_rules(postgres: PostgresService, database: str) -> None:
    """A key that had what every key got has it from its plan from now on."""
    name = f"{database}_old"
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    config = Config("alembic.ini")
    config.set_main_option("script_location", "migrations")
    config.attributes["url"] = db.driver_url(postgres.url("owner", name))
    command.upgrade(config, "0007_tenant_life")
    with psycopg.connect(postgres.url("owner", name)) as connection:
        connection.execute(OLD_ROWS)
    command.upgrade(config, "head")
    with psycopg.connect(postgres.url("owner", name)) as connection:
        found = connection.execute(
            "SELECT level, metric, amount::int, mode, coalesce(key_id::text, '') FROM limit_rule"
            " WHERE tenant_id IS NOT NULL"
        ).fetchall()
        plan = connection.execute("SELECT DISTINCT plan_id FROM tenant").fetchall()
    with psycopg.connect(postgres.url("owner", "postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    key = "02000000-0000-0000-0000-000000000000"
    assert sorted(found) == [
        ("key", "concurrency", 4, "hard", key),
        ("key", "requests_per_minute", 60, "hard", key),
        ("project", "requests_per_minute", 600, "hard", ""),
        ("tenant", "concurrency", 16, "hard", ""),
    ]
    assert plan == [(DEFAULT_PLAN_ID,)]


async def _amounts(sessions: db.Sessions, who: Customer) -> dict[LimitMode, int]:
    async with db.transaction(sessions) as session:
        return {rule.slot.mode: rule.amount for rule in await limits.list_at(session, tenant_id=who.tenant.id)}


async def _newest(sessions: db.Sessions, who: Customer) -> LimitChange:
    return (await history(sessions, who))[0]


async def test_a_limit_in_the_place_of_a_trial_is_one_change_and_undone_as_one(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    hard, dark = of_tenant(who), replace(of_tenant(who), mode=LimitMode.DARK)
    await limited(sessions, dark, 7)
    async with db.transaction(sessions) as session:
        await limits.set_limit(session, hard, 4, why(), replaces=LimitMode.DARK)
    made = await _newest(sessions, who)
    assert (made.slot.mode, made.before, made.after) == (LimitMode.HARD, None, 4)
    assert made.beside == Beside(LimitMode.DARK, 7, None)
    assert await _amounts(sessions, who) == {LimitMode.HARD: 4}
    async with db.transaction(sessions) as session:
        undone = await limits.revert(session, made, why(), force=False)
    assert await _amounts(sessions, who) == {LimitMode.DARK: 7}
    assert (undone.before, undone.after, undone.beside) == (4, None, Beside(LimitMode.DARK, None, 7))
    async with db.transaction(sessions) as session:
        await limits.revert(session, undone, why(), force=False)
    assert await _amounts(sessions, who) == {LimitMode.HARD: 4}
    assert len(await history(sessions, who)) == 4  # the trial, the limit, undone, done again
    async with db.transaction(sessions) as session:
        with pytest.raises(PlatformError, match="as it was before"):
            await limits.revert(session, undone, why(), force=False)


async def test_what_changed_since_is_put_back_only_by_force_and_told_as_it_was(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    hard, dark = of_tenant(who), replace(of_tenant(who), mode=LimitMode.DARK)
    await limited(sessions, dark, 7)
    async with db.transaction(sessions) as session:
        rule, _ = await limits.set_limit(session, hard, 4, why(), replaces=LimitMode.DARK)
        await limits.remove(session, rule, why())
    made = (await history(sessions, who))[1]
    async with db.transaction(sessions) as session:
        with pytest.raises(PlatformError, match="changed again since"):
            await limits.revert(session, made, why(), force=False)
    async with db.transaction(sessions) as session:
        undone = await limits.revert(session, made, why(), force=True)
    assert await _amounts(sessions, who) == {LimitMode.DARK: 7}
    assert (undone.slot.mode, undone.before, undone.after, undone.beside) == (LimitMode.DARK, None, 7, None)


async def test_the_same_amount_in_the_place_of_a_trial_keeps_the_rule(sessions: db.Sessions) -> None:
    who = await customer(sessions)
    hard, dark = of_tenant(who), replace(of_tenant(who), mode=LimitMode.DARK)
    kept = await limited(sessions, hard, 4)
    await limited(sessions, dark, 7)
    async with db.transaction(sessions) as session:
        rule, before = await limits.set_limit(session, hard, 4, why(), replaces=LimitMode.DARK)
    assert (rule.id, before) == (kept.id, 4)
    newest = await _newest(sessions, who)
    assert (newest.before, newest.after, newest.beside) == (4, 4, Beside(LimitMode.DARK, 7, None))
    async with db.transaction(sessions) as session:
        undone = await limits.revert(session, newest, why(), force=False)
    assert (undone.slot.mode, undone.before, undone.after) == (LimitMode.DARK, None, 7)
    assert await _amounts(sessions, who) == {LimitMode.HARD: 4, LimitMode.DARK: 7}
