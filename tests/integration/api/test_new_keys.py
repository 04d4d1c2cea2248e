"""A key works from the moment it was made, whether or not the follower has brought it."""

import asyncio
from datetime import timedelta

import httpx

from api.inference.directory import Directory
from api.inference.new_keys import ABSENT_S, AT_ONCE_MAX, PER_S_MAX, NewKeys
from core import db
from core.clock import ManualClock, SystemClock
from tenants import api_keys
from tenants.api_keys import mint
from tenants.credentials import Peppers
from tests.factories.gateway import rig
from tests.factories.tenants import PEPPER, customer

PEPPERS = Peppers(PEPPER)


def _keys(directory: Directory, sessions: db.Sessions, clock: ManualClock | None = None) -> NewKeys:
    return NewKeys(directory, sessions, PEPPERS, clock or ManualClock())


async def test_a_key_is_found_before_the_follower_brings_it(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    directory = Directory()
    keys = _keys(directory, sessions)
    await asyncio.gather(*(keys.find(made.secret, made.digest) for _ in range(50)))
    assert directory.principals[made.digest].key_id == made.key.id


async def test_a_key_that_is_nowhere_is_refused_and_asked_for_once_a_second(sessions: db.Sessions) -> None:
    directory, clock = Directory(), ManualClock()
    keys = _keys(directory, sessions, clock)
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


async def test_a_flood_of_keys_that_look_right_asks_postgres_so_often_and_no_more(sessions: db.Sessions) -> None:
    keys = _keys(Directory(), sessions)
    asked = 0
    for _ in range(3 * PER_S_MAX // AT_ONCE_MAX):
        secrets = [mint() for _ in range(AT_ONCE_MAX + 4)]
        results = [asyncio.ensure_future(keys.find(text, api_keys.digest(PEPPER, text))) for text in secrets]
        await asyncio.sleep(0)
        asked += len(keys._looks)
        assert len(keys._looks) <= AT_ONCE_MAX
        assert not any(await asyncio.gather(*results))
    assert asked == PER_S_MAX


async def test_news_that_come_while_a_key_is_read_are_not_overwritten(sessions: db.Sessions) -> None:
    """The read may be older than what the follower applied meanwhile: it is done again."""
    made = await customer(sessions)
    directory = Directory()
    keys = _keys(directory, sessions)
    directory.following = True  # the follower is at work: what is read now may be overtaken
    look = asyncio.ensure_future(keys.find(made.secret, made.digest))
    done, _ = await asyncio.wait({look}, timeout=0.1)
    assert not done
    assert made.digest not in directory.principals
    async with db.transaction(sessions) as session:
        await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
    directory.news += 1
    directory.following = False
    await look
    assert directory.principals[made.digest].refusal == "KEY_REVOKED"


async def test_a_new_key_is_served_over_the_wire(sessions: db.Sessions) -> None:
    made = await customer(sessions)
    async with rig({}) as gateway_rig:
        gateway = gateway_rig.gateway
        gateway.pepper = PEPPER
        gateway.new_keys = _keys(gateway.directory, sessions)
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
