"""A key works from the moment it was made, whether or not the follower has brought it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta

import httpx
import psycopg
import pytest

from api.inference.directory import Directory
from api.inference.new_keys import ABSENT_S, AT_ONCE_MAX, PER_S_MAX, NewKeys
from core import db
from core.clock import ManualClock, SystemClock
from core.errors import PlatformError
from core.reader import Reader
from core.settings import Database
from tenants import api_keys, limits, principals
from tenants.api_keys import mint
from tenants.credentials import Peppers
from tenants.types import LimitLevel, LimitMetric, LimitSlot
from tests.factories.gateway import rig
from tests.factories.tenants import PEPPER, changed, customer

PEPPERS = Peppers(PEPPER)


Look = Callable[..., NewKeys]


def _code(answer: bytes | BaseException) -> str:
    return answer.code if isinstance(answer, PlatformError) else ""


@pytest.fixture
async def keys_of(database_settings: Database) -> AsyncIterator[Look]:
    """Makes the looks for a directory; they and their connections are closed at the end."""
    made: list[NewKeys] = []

    def make(directory: Directory, clock: ManualClock | None = None, peppers: Peppers = PEPPERS) -> NewKeys:
        reader = Reader(database_settings, name="test")
        made.append(NewKeys(directory, reader, peppers, clock or ManualClock()))
        return made[-1]

    yield make
    for keys in made:
        await keys.close()


async def test_a_key_is_found_before_the_follower_brings_it(sessions: db.Sessions, keys_of: Look) -> None:
    made = await customer(sessions)
    directory = Directory()
    keys = keys_of(directory)
    await asyncio.gather(*(keys.find(made.secret, made.digest) for _ in range(50)))
    assert directory.principals[made.digest].key_id == made.key.id


async def test_a_key_that_is_nowhere_is_refused_and_asked_for_once_a_second(
    sessions: db.Sessions, keys_of: Look
) -> None:
    directory, clock = Directory(), ManualClock()
    keys = keys_of(directory, clock)
    secret = mint()
    digest = api_keys.digest(PEPPER, secret)
    assert not await keys.find(secret, digest)
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        await api_keys.create(session, made.tenant.id, made.project.id, name="late", pepper=PEPPER, secret=secret)
    assert not await keys.find(secret, digest)
    clock.advance(timedelta(seconds=ABSENT_S).total_seconds())
    assert await keys.find(secret, digest)
    assert digest in directory.principals


async def test_a_flood_of_keys_that_look_right_asks_postgres_so_often_and_no_more(keys_of: Look) -> None:
    keys = keys_of(Directory())
    asked = 0
    for _ in range(3 * PER_S_MAX // AT_ONCE_MAX):
        secrets = [mint() for _ in range(AT_ONCE_MAX + 4)]
        results = [asyncio.ensure_future(keys.find(text, api_keys.digest(PEPPER, text))) for text in secrets]
        await asyncio.sleep(0)
        asked += len(keys._looks)
        assert len(keys._looks) <= AT_ONCE_MAX
        answers = await asyncio.gather(*results, return_exceptions=True)
        assert set(map(_code, answers)) <= {"", "SERVICE_UNAVAILABLE"}  # not found, or not looked for
    assert asked == PER_S_MAX


async def test_news_that_come_while_a_key_is_read_are_not_overwritten(sessions: db.Sessions, keys_of: Look) -> None:
    """The read may be older than what the follower applied meanwhile: it is done again."""
    made = await customer(sessions)
    directory = Directory()
    keys = keys_of(directory)
    directory.settled.clear()  # the follower is at work: what is read now may be overtaken
    look = asyncio.ensure_future(keys.find(made.secret, made.digest))
    done, _ = await asyncio.wait({look}, timeout=0.1)
    assert not done
    assert made.digest not in directory.principals
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    directory.news += 1
    directory.settled.set()
    await look
    assert directory.principals[made.digest].refusal == "KEY_REVOKED"


async def test_a_new_key_is_served_over_the_wire(sessions: db.Sessions, keys_of: Look) -> None:
    made = await customer(sessions)
    async with rig({}) as gateway_rig:
        gateway = gateway_rig.gateway
        gateway.pepper = PEPPER
        gateway.new_keys = keys_of(gateway.directory)
        headers = {"Authorization": f"Bearer {made.secret}"}
        async with httpx.AsyncClient(base_url=gateway_rig.url, headers=headers) as client:
            body = {"model": "none", "messages": [{"role": "user", "content": "x"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")
            assert (await client.get("/v1/models")).status_code == 200
            unknown = {"Authorization": f"Bearer {mint()}"}
            answer = await client.post("/v1/chat/completions", json=body, headers=unknown)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "INVALID_API_KEY")
            assert (await client.get("/v1/models", headers=unknown)).status_code == 401


async def test_a_key_that_nobody_can_look_up_now_is_told_to_come_back_and_not_that_it_is_wrong() -> None:
    nowhere = Database.model_validate({"url": "postgresql://nobody@127.0.0.1:1/none"})
    async with rig({}) as gateway_rig:
        gateway = gateway_rig.gateway
        gateway.new_keys = NewKeys(gateway.directory, Reader(nowhere, name="test"), PEPPERS, ManualClock())
        headers = {"Authorization": f"Bearer {mint()}"}
        async with httpx.AsyncClient(base_url=gateway_rig.url, headers=headers) as client:
            body = {"model": "none", "messages": [{"role": "user", "content": "x"}]}
            for answer in (await client.post("/v1/chat/completions", json=body), await client.get("/v1/models")):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            typo = {"Authorization": "Bearer tg_not_a_key"}
            assert (await client.post("/v1/chat/completions", json=body, headers=typo)).status_code == 401


async def test_a_key_that_was_looked_up_is_what_the_follower_would_have_brought(
    sessions: db.Sessions, keys_of: Look
) -> None:
    """Rules of the key, its project, its tenant and its plan, and none of its neighbours'."""
    made = await customer(sessions)
    why = limits.system_why("test", SystemClock())
    async with db.transaction(sessions) as session:
        other, _ = await api_keys.create(session, made.tenant.id, made.project.id, name="other", pepper=PEPPER)
        slot = LimitSlot(LimitLevel.TENANT, LimitMetric.CONCURRENCY, tenant_id=made.tenant.id)
        of_key, of_project = replace(slot, level=LimitLevel.KEY), replace(slot, level=LimitLevel.PROJECT)
        await limits.set_limit(session, replace(of_key, key_id=made.key.id), 10, why)
        await limits.set_limit(session, replace(of_key, key_id=other.id), 20, why)
        await limits.set_limit(session, replace(of_project, project_id=made.project.id), 30, why)
        await limits.set_limit(session, slot, 40, why)
    directory = Directory()
    assert await keys_of(directory).find(made.secret, made.digest) == made.digest
    async with db.transaction(sessions) as session:
        assert directory.principals[made.digest] == (await principals.load_all(session))[made.digest]
    held = [limit.amount for limit in directory.principals[made.digest].limits]
    assert sorted(held) == [10, 30, 40, 600_000]  # the last is of the plan


async def test_a_key_of_an_old_pepper_is_entered_where_its_revocation_will_find_it(
    sessions: db.Sessions, keys_of: Look
) -> None:
    made = await customer(sessions)
    directory, turned = Directory(), Peppers(bytes(32), (PEPPER,))
    keys = keys_of(directory, peppers=turned)
    assert await keys.find(made.secret, api_keys.digest(turned.current, made.secret)) == made.digest
    assert set(directory.principals) == {made.digest}
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    assert set(await changed(sessions, "api_key", made.key.id)) == {made.digest}


async def test_a_revoked_key_is_known_as_revoked(sessions: db.Sessions, keys_of: Look) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    directory = Directory()
    assert await keys_of(directory).find(made.secret, made.digest) == made.digest
    assert directory.principals[made.digest].refusal == "KEY_REVOKED"


async def test_what_the_follower_brings_while_a_key_waits_is_not_read_again(
    sessions: db.Sessions, keys_of: Look
) -> None:
    made = await customer(sessions)
    directory = Directory()
    keys = keys_of(directory)
    directory.settled.clear()
    look = asyncio.ensure_future(keys.find(made.secret, made.digest))
    await asyncio.sleep(0)
    async with db.transaction(sessions) as session:
        brought = (await principals.load_all(session))[made.digest]
    directory.principals[made.digest] = brought
    directory.settled.set()
    assert await look == made.digest
    assert directory.principals[made.digest] is brought


async def test_a_look_is_one_statement_and_survives_a_lost_connection(
    sessions: db.Sessions, keys_of: Look, database_settings: Database
) -> None:
    made = [await customer(sessions) for _ in range(3)]
    directory = Directory()
    keys = keys_of(directory)
    assert await keys.find(made[0].secret, made[0].digest)
    owner = database_settings.owner_url
    assert owner is not None
    ours = "FROM pg_stat_activity WHERE application_name = 'test' AND datname = current_database()"
    async with await psycopg.AsyncConnection.connect(owner.get_secret_value(), autocommit=True) as admin:
        seen = await (await admin.execute(f"SELECT state, query {ours}")).fetchall()
        assert [state for state, _ in seen] == ["idle"]  # in no transaction, and nothing came after this:
        assert seen[0][1].startswith("SELECT api_key_secret.digest")
        await admin.execute(f"SELECT pg_terminate_backend(pid) {ours}")
    assert await keys.find(made[1].secret, made[1].digest)
    assert await keys.find(made[2].secret, made[2].digest)
    assert set(directory.principals) == {each.digest for each in made}


async def test_postgres_away_refuses_and_is_asked_again(keys_of: Look, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    directory, clock = Directory(), ManualClock()
    nowhere = Database.model_validate({"url": "postgresql://nobody@127.0.0.1:1/none"})
    away = NewKeys(directory, Reader(nowhere, name="test"), PEPPERS, clock)
    with pytest.raises(PlatformError, match="looked up now") as refused:
        await away.find(made.secret, made.digest)
    assert (refused.value.code, refused.value.retry_after_s) == ("SERVICE_UNAVAILABLE", 2)
    assert directory.principals == {}
    assert away._absent == {}  # nobody knows whether there is such a key
    assert await keys_of(directory, clock).find(made.secret, made.digest) == made.digest
