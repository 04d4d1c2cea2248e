"""`Idempotency-Key` on changes of the control plane: one effect, one answer, whatever is repeated, lost or refused."""

import asyncio
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import text
from starlette.requests import Request

from api import idempotency as edge
from api.app import ROUTERS, create_app
from api.deps import get_session
from api.permissions import RULES
from api.services import Services
from core import db, idempotency
from core.errors import PlatformError
from core.ids import IdKind, format_id
from core.settings import Database, Settings
from core.tasks import TaskContext
from tenants.types import Role
from tests.factories import fleet as fleets
from tests.factories.fleet import Member
from tests.factories.people import member
from tests.factories.tenants import Customer, changed, customer, operator
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
PROCESSES, REQUESTS = 3, 60


def _key(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Idempotency-Key": name}}


def _tenant(made: Customer) -> str:
    return f"/api/v1/tenants/{format_id(IdKind.TENANT, made.tenant.id)}"


async def _count(sessions: db.Sessions, statement: str, **values: Any) -> int:
    async with db.transaction(sessions) as session:
        found: int = (await session.execute(text(statement), values)).scalar_one()
        return found


async def _audited(sessions: db.Sessions, action: str) -> int:
    return await _count(sessions, "SELECT count(*) FROM audit_record WHERE action = :action", action=action)


async def test_a_repeat_gets_the_first_answer_and_changes_nothing(admin: Client, sessions: db.Sessions) -> None:
    body = {"name": "Acme", "currency": "USD"}
    first = await admin.post(f"{ADMIN}/tenants", body, **_key("order 1"))
    again = await admin.post(f"{ADMIN}/tenants", body, **_key("order 1"))
    assert (first.status_code, first.headers.get("idempotency-replayed")) == (201, None)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert await _count(sessions, "SELECT count(*) FROM tenant WHERE name = 'Acme'") == 1
    assert await _audited(sessions, "tenant.create") == 1

    path = f"{ADMIN}/tenants/{first.json()['id']}/suspend"
    empty = [await admin.post(path, **_key("order 1")) for _ in range(2)]  # another path: another key
    assert [(a.status_code, a.content, a.headers.get("idempotency-replayed")) for a in empty] == [
        (204, b"", None),
        (204, b"", "true"),
    ]


async def test_a_key_that_came_with_another_body_is_refused_and_has_no_effect(
    admin: Client, sessions: db.Sessions
) -> None:
    assert (await admin.post(f"{ADMIN}/tenants", {"name": "A", "currency": "USD"}, **_key("k"))).status_code == 201
    refused = await admin.post(f"{ADMIN}/tenants", {"name": "B", "currency": "USD"}, **_key("k"))
    assert (refused.status_code, refused.json()["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert refused.json()["param"] == "Idempotency-Key"
    assert await _count(sessions, "SELECT count(*) FROM tenant WHERE name = 'B'") == 0


async def test_what_was_refused_leaves_its_key_free(admin: Client, anonymous: Client, sessions: db.Sessions) -> None:
    """Midaz #709: there a key stayed taken by a request that failed validation."""
    assert (await admin.post(f"{ADMIN}/tenants", {"name": "Taken", "currency": "USD"})).status_code == 201
    tries = (
        (422, {"name": "New"}),  # the currency is missing
        (409, {"name": "Taken", "currency": "USD"}),
        (201, {"name": "New", "currency": "USD"}),
    )
    for status, body in tries:
        answer = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
        assert answer.status_code == status, answer.text
        assert "idempotency-replayed" not in answer.headers

    made = await customer(sessions)
    reader = anonymous.visited_by(await member(sessions, made.tenant.id, Role.VIEWER))
    owner = await member(sessions, made.tenant.id, Role.OWNER)
    path = f"{_tenant(made)}/projects"
    assert (await reader.post(path, {"name": "p"}, **_key("k"))).status_code == 403
    assert (await anonymous.visited_by(owner).post(path, {"name": "p"}, **_key("k"))).status_code == 201


async def test_a_failure_of_ours_leaves_the_key_free(admin: Client, postgres: Any, database: str) -> None:
    import psycopg

    body = {"name": "Acme", "currency": "USD"}
    with psycopg.connect(postgres.url("owner", database), autocommit=True) as owner:
        owner.execute("ALTER TABLE idempotency_answer ADD CONSTRAINT broken CHECK (status = 200)")
        failed = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
        assert (failed.status_code, failed.json()["code"]) == (500, "INTERNAL_ERROR")
        owner.execute("ALTER TABLE idempotency_answer DROP CONSTRAINT broken")
    made = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
    assert (made.status_code, made.headers.get("idempotency-replayed")) == (201, None)  # the effect was undone too


async def test_while_one_is_answered_its_repeats_are_told_to_come_back(
    admin: Client, services: Services, postgres: Any, database: str
) -> None:
    """Midaz #1023: there a repeat met a bare 'duplicate' with nothing to go by."""
    import psycopg

    body = {"name": "Acme", "currency": "USD"}
    with psycopg.connect(postgres.url("owner", database)) as blocker:
        blocker.execute("LOCK TABLE tenant IN ACCESS EXCLUSIVE MODE")
        running = asyncio.create_task(admin.post(f"{ADMIN}/tenants", body, **_key("k")))
        with psycopg.connect(postgres.url("owner", database), autocommit=True) as watcher:
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            async with asyncio.timeout(20):
                while watcher.execute(waits).fetchone() == (0,):  # noqa: ASYNC110 - of another program
                    await asyncio.sleep(0.01)
        busy = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
        assert (busy.status_code, busy.json()["code"]) == (409, "IDEMPOTENCY_IN_PROGRESS")
        assert int(busy.headers["retry-after"]) >= 1
        blocker.rollback()
    first = await running
    again = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
    assert (first.status_code, again.headers["idempotency-replayed"]) == (201, "true")
    assert again.content == first.content


async def test_one_effect_of_many_requests_at_once_over_several_processes(
    database_settings: Database, valkey: Path, sessions: db.Sessions, service_folder: Path
) -> None:
    folder = service_folder / "idem"
    folder.mkdir(mode=0o700)
    shared = fleets.environment(folder, database_settings, valkey)
    sockets = [folder / f"api{number}.sock" for number in range(PROCESSES)]
    members = [Member(path.stem, "api.app", {"TIDEGATE_CONTROL__SOCKET": str(path)}) for path in sockets]
    _, token = await operator(sessions)
    body = {"name": "Acme", "currency": "USD"}
    starting = fleets.running(folder, shared, members)
    await asyncio.to_thread(starting.__enter__)
    try:
        clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(path)),
                base_url="http://control",
                headers={"Authorization": f"Bearer {token}", "Idempotency-Key": "one"},
                timeout=30,
            )
            for path in sockets
        ]

        async def send(number: int) -> httpx.Response:
            client = clients[number % PROCESSES]
            while (answer := await client.post(f"{ADMIN}/tenants", json=body)).status_code == 409:
                assert answer.json()["code"] == "IDEMPOTENCY_IN_PROGRESS"
            return answer

        answers = await asyncio.gather(*map(send, range(REQUESTS)))
        for client in clients:
            await client.aclose()
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
    assert Counter((a.status_code, a.headers.get("idempotency-replayed")) for a in answers) == {
        (201, None): 1,
        (201, "true"): REQUESTS - 1,
    }
    assert len({answer.content for answer in answers}) == 1
    assert await _count(sessions, "SELECT count(*) FROM tenant WHERE name = 'Acme'") == 1
    assert await _audited(sessions, "tenant.create") == 1


async def test_the_same_key_of_two_callers_never_meets(admin: Client, anonymous: Client, sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    made = set()
    for tenant in (mine, theirs):
        owner = anonymous.visited_by(await member(sessions, tenant.tenant.id, Role.OWNER))
        if tenant is theirs:
            assert (await owner.post(f"{_tenant(mine)}/projects", {"name": "p"}, **_key("k"))).status_code == 404
        answer = await owner.post(f"{_tenant(tenant)}/projects", {"name": "p"}, **_key("k"))
        assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (201, None)
        made.add(answer.json()["id"])
    assert len(made) == 2
    other = anonymous.acting_as((await operator(sessions))[1])
    for one in (admin, other):
        made_too = await one.post(f"{ADMIN}/tenants", {"name": f"of {id(one)}", "currency": "USD"}, **_key("k"))
        assert (made_too.status_code, made_too.headers.get("idempotency-replayed")) == (201, None)


async def test_money_moves_once_for_ever_whoever_sends_the_key(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    tenant = f"{ADMIN}/tenants/{(await admin.post(f'{ADMIN}/tenants', {'name': 'A', 'currency': 'USD'})).json()['id']}"
    first = await admin.post(f"{tenant}/credits", {"amount": "5"}, **_key("wire 7"))
    other = anonymous.acting_as((await operator(sessions))[1])
    async with db.transaction(sessions) as session:
        await session.execute(text("DELETE FROM idempotency_answer"))  # as after 24 hours
    for caller in (admin, other):
        again = await caller.post(f"{tenant}/credits", {"amount": "5"}, **_key("wire 7"))
        assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        assert again.json() == first.json()
    refused = await other.post(f"{tenant}/credits", {"amount": "6"}, **_key("wire 7"))
    assert (refused.status_code, refused.json()["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert (await admin.get(f"{tenant}/balance")).json()["available"] == "5.000000000000"


async def test_a_secret_shown_once_is_kept_sealed_and_forgotten_after_a_day(
    anonymous: Client, sessions: db.Sessions, services: Services, settings: Settings
) -> None:
    made = await customer(sessions)
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    path = f"{_tenant(made)}/projects/{format_id(IdKind.PROJECT, made.project.id)}/keys"
    first = await owner.post(path, {"name": "ci"}, **_key("k"))
    again = await owner.post(path, {"name": "ci"}, **_key("k"))
    secret = first.json()["secret"]
    assert again.json()["secret"] == secret
    async with db.transaction(sessions) as session:
        row = (await session.execute(text("SELECT * FROM idempotency_answer"))).one()
        assert secret.encode() not in bytes(row.sealed)
        age = row.expires_at - services.clock.now()
        assert timedelta(hours=23, minutes=59) < age <= timedelta(hours=24)
        await session.execute(text("UPDATE idempotency_answer SET expires_at = now() - interval '1 second'"))
    expired = await owner.post(path, {"name": "ci"}, **_key("k"))  # the key means nothing any more
    assert (expired.status_code, expired.headers.get("idempotency-replayed")) == (201, None)
    assert expired.json()["secret"] != secret
    async with db.transaction(sessions) as session:
        await session.execute(text("UPDATE idempotency_answer SET expires_at = now() - interval '1 second'"))
    await idempotency.forget(TaskContext(settings, sessions, services.clock))
    assert await _count(sessions, "SELECT count(*) FROM idempotency_answer") == 0


async def test_answers_expire_in_bounded_batches(
    sessions: db.Sessions, services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "FORGET_AT_ONCE", 10)
    monkeypatch.setattr(idempotency, "FORGET_ROUNDS_MAX", 3)
    async with db.transaction(sessions) as session:
        await session.execute(
            text(
                "INSERT INTO idempotency_answer SELECT sha256(n::text::bytea), sha256('b'), 200, 's',"
                " now() + CASE WHEN n > 45 THEN interval '1 hour' ELSE interval '-1 hour' END"
                " FROM generate_series(1, 50) AS n"
            )
        )
    context = TaskContext(settings, sessions, services.clock)
    for left in (20, 5, 5):
        await idempotency.forget(context)
        assert await _count(sessions, "SELECT count(*) FROM idempotency_answer") == left


async def test_what_cannot_be_shown_again_is_not_done_again(admin: Client, sessions: db.Sessions) -> None:
    body = {"name": "Acme", "currency": "USD"}
    assert (await admin.post(f"{ADMIN}/tenants", body, **_key("k"))).status_code == 201
    for sealed in (b"of another sealing secret", b""):  # b"": the answer was too large to be kept
        async with db.transaction(sessions) as session:
            await session.execute(text("UPDATE idempotency_answer SET sealed = :sealed"), {"sealed": sealed})
        refused = await admin.post(f"{ADMIN}/tenants", body, **_key("k"))
        assert (refused.status_code, refused.json()["code"]) == (409, "IDEMPOTENCY_ANSWER_NOT_KEPT")
    assert await _count(sessions, "SELECT count(*) FROM tenant WHERE name = 'Acme'") == 1


async def test_a_body_is_known_again_under_a_previous_pepper(sessions: db.Sessions, services: Services) -> None:
    old, new = b"o" * 32, b"n" * 32
    now, sealing = services.clock.now(), services.sealing_key
    kept = idempotency.Kept(201, {}, b"{}")
    before = idempotency.asked(("operator", "1"), "k", b"body", [old])
    async with db.transaction(sessions) as session:
        assert await idempotency.claim(session, before, now=now, sealing_key=sealing) is None
        await idempotency.keep(session, before, kept, now=now, sealing_key=sealing, nonce=b"n" * 12)
    for content, expected in ((b"body", kept), (b"other", None)):
        after = idempotency.asked(("operator", "1"), "k", content, [new, old])
        async with db.transaction(sessions) as session:
            if expected is not None:
                assert await idempotency.claim(session, after, now=now, sealing_key=sealing) == expected
                continue
            with pytest.raises(PlatformError) as refused:
                await idempotency.claim(session, after, now=now, sealing_key=sealing)
            assert refused.value.code == "IDEMPOTENCY_KEY_REUSED"


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "caf\xe9"])
async def test_a_key_of_another_form_is_refused(admin: Client, key: str) -> None:
    headers = {"Idempotency-Key": key.encode("latin-1")}
    refused = await admin.post(f"{ADMIN}/tenants", {"name": "A", "currency": "USD"}, headers=headers)
    assert (refused.status_code, refused.json()["param"]) == (400, "Idempotency-Key")


async def test_two_keys_are_none(admin: Client) -> None:
    headers = [*admin.headers.items(), ("idempotency-key", "a"), ("idempotency-key", "b")]
    refused = await admin.http.post(f"{ADMIN}/tenants", json={"name": "A", "currency": "USD"}, headers=headers)
    assert (refused.status_code, refused.json()["param"]) == (400, "Idempotency-Key")


async def test_of_an_answer_that_is_too_large_only_the_fact_is_kept(sessions: db.Sessions, services: Services) -> None:
    now, sealing = services.clock.now(), services.sealing_key
    for size, code in ((1_000_000, ""), (1_000_001, "IDEMPOTENCY_ANSWER_NOT_KEPT")):
        asked = idempotency.asked(("operator", str(size)), "k", b"body", [b"p" * 32])
        kept = idempotency.Kept(200, {}, b"x" * size)
        async with db.transaction(sessions) as session:
            await idempotency.keep(session, asked, kept, now=now, sealing_key=sealing, nonce=b"n" * 12)
        async with db.transaction(sessions) as session:
            if not code:
                assert await idempotency.claim(session, asked, now=now, sealing_key=sealing) == kept
                continue
            with pytest.raises(PlatformError) as refused:
                await idempotency.claim(session, asked, now=now, sealing_key=sealing)
            assert refused.value.code == code


async def test_every_route_that_changes_something_takes_the_header_or_is_exempt_by_name(services: Services) -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    document = create_app(services).openapi()
    exempt = set()
    for route in routes:
        for method in route.methods or ():
            rule = RULES[method, route.path_format]
            described = document["paths"][route.path_format][method.lower()].get("parameters", [])
            shown = [one for one in described if one["name"].lower() == "idempotency-key"]
            if edge.takes_key(route.path_format, rule):
                assert len(shown) == 1
                assert get_session in _dependencies(route.dependant)
                assert "409" in document["paths"][route.path_format][method.lower()]["responses"]
            else:
                assert not shown
                if rule.action:
                    exempt.add(route.path_format)
    auth, me = "/api/v1/auth", "/api/v1/me"
    assert exempt == {
        *(f"{auth}/{name}" for name in ("password", "totp", "password-reset", "password-reset/confirm")),
        *(f"{auth}/{name}" for name in ("invites/accept", "sign-out", "sign-out-everywhere", "oidc/sign-out")),
        *(f"{me}/{name}" for name in ("password", "totp", "totp/confirm", "totp/remove", "recovery-codes", "delete")),
    }
    assert edge.once_of(Request({"type": "http", "state": {}})) is None


def _dependencies(dependant: Any) -> set[Any]:
    found = {dependant.call}
    for child in dependant.dependencies:
        found |= _dependencies(child)
    return found


async def test_members_turn_the_keeping_of_answers_on_and_gateways_follow(
    anonymous: Client, sessions: db.Sessions
) -> None:
    made = await customer(sessions)
    path = f"{_tenant(made)}/projects/{format_id(IdKind.PROJECT, made.project.id)}"
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    viewer = anonymous.visited_by(await member(sessions, made.tenant.id, Role.VIEWER))
    assert (await viewer.get(path)).json()["keep_answers"] is False
    assert (await viewer.patch(path, {"keep_answers": True})).status_code == 403
    for on in (True, False):
        answer = await owner.patch(path, {"keep_answers": on})
        assert (answer.status_code, answer.json()["keep_answers"], answer.json()["name"]) == (200, on, "main")
        (found,) = (await changed(sessions, "project", made.project.id)).values()
        assert found is not None
        assert found.keep_answers is on
    newest = "SELECT kind FROM config_change ORDER BY revision DESC LIMIT 2"
    async with db.transaction(sessions) as session:
        assert [row.kind for row in await session.execute(text(newest))] == ["project", "project"]
        query = "SELECT details FROM audit_record WHERE action = 'project.update' ORDER BY recorded_at"
        details = [row.details for row in await session.execute(text(query))]
    assert details == [{"keep_answers": {"from": not on, "to": on}} for on in (True, False)]
