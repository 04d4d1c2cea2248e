"""The door for people: the cookie, the token against forged requests, roles, and other people's tenants."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from core import db
from tenants import people
from tenants.sessions import open_session
from tenants.types import OperatorRole, Role, SignInMethod
from tests.factories.people import DAY_S, Visitor, member, operator_person, person
from tests.factories.tenants import PEPPER, customer
from tests.integration.control.conftest import Client


def _path(tenant_id: str) -> str:
    return f"/api/v1/tenants/ten_{tenant_id}"


@pytest.mark.parametrize("role", list(Role))
async def test_every_member_sees_the_tenant(anonymous: Client, sessions: db.Sessions, role: Role) -> None:
    made = await customer(sessions)
    visitor = await member(sessions, made.tenant.id, role)
    answer = await anonymous.visited_by(visitor).get(_path(made.tenant.id.hex))
    assert (answer.status_code, answer.json()["name"]) == (200, made.tenant.name)


async def test_a_member_of_one_project_sees_the_tenant_too(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    visitor = await member(sessions, made.tenant.id, Role.VIEWER, project_id=made.project.id)
    assert (await anonymous.visited_by(visitor).get(_path(made.tenant.id.hex))).status_code == 200


async def test_somebody_elses_tenant_and_none_look_alike(anonymous: Client, sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    client = anonymous.visited_by(await member(sessions, mine.tenant.id, Role.OWNER))
    answers = [await client.get(_path(tenant)) for tenant in (theirs.tenant.id.hex, "0" * 32)]
    assert [answer.status_code for answer in answers] == [404, 404]
    alike = [{k: v for k, v in answer.json().items() if k != "request_id"} for answer in answers]
    assert alike[0] == alike[1]


async def test_a_session_does_operators_work_by_its_role(anonymous: Client, sessions: db.Sessions) -> None:
    admin, finance = [
        anonymous.visited_by(await operator_person(sessions, role))
        for role in (OperatorRole.ADMIN, OperatorRole.FINANCE)
    ]
    body = {"name": "by a person", "currency": "USD"}
    assert (await admin.post("/api/v1/admin/tenants", body)).status_code == 201
    assert (await finance.get("/api/v1/admin/tenants")).status_code == 200
    refused = await finance.post("/api/v1/admin/tenants", {**body, "name": "another"})
    assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    somebody = anonymous.visited_by(await person(sessions))
    assert (await somebody.get("/api/v1/admin/tenants")).status_code == 403


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-csrf-token": ""}, "CSRF_TOKEN_WRONG"),
        ({"x-csrf-token": "0" * 48}, "CSRF_TOKEN_WRONG"),
        ({"x-csrf-token": "\u00e9"}, "CSRF_TOKEN_WRONG"),
        ({"origin": "https://evil.example"}, "FOREIGN_ORIGIN"),
        ({"origin": "null"}, "FOREIGN_ORIGIN"),
        ({"origin": "http://[::1"}, "FOREIGN_ORIGIN"),
        ({"sec-fetch-site": "cross-site"}, "FOREIGN_ORIGIN"),
        ({"sec-fetch-site": "same-site"}, "FOREIGN_ORIGIN"),
    ],
)
async def test_a_forged_change_is_refused(
    anonymous: Client, sessions: db.Sessions, headers: dict[str, str], code: str
) -> None:
    client = anonymous.visited_by(await operator_person(sessions, OperatorRole.ADMIN))
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await client.post("/api/v1/admin/tenants", {"name": "forged", "currency": "USD"}, headers=encoded)
    assert (answer.status_code, answer.json()["code"]) == (403, code)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"email": "a\\u0000@b.de", "password": "x"}', 400),
        (b'{"email": "a\\\\\\u0000@b.de", "password": "x"}', 400),  # a backslash, then the character
        (b'{"email": "a\\\\u0000@b.de", "password": "x"}', 401),  # only looks like it
    ],
)
async def test_text_that_postgres_cannot_hold_is_refused(anonymous: Client, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    answer = await anonymous.call("POST", "/api/v1/auth/password", content=body, headers=headers)
    assert answer.status_code == status, answer.text


async def test_a_search_for_text_that_postgres_cannot_hold_is_refused(admin: Client) -> None:
    assert (await admin.get("/api/v1/admin/people?q=a%00b&email=%00")).status_code == 400


async def test_our_own_page_may_change_things(anonymous: Client, sessions: db.Sessions) -> None:
    client = anonymous.visited_by(await operator_person(sessions, OperatorRole.ADMIN))
    headers = {"origin": "http://control", "sec-fetch-site": "same-origin"}
    body = {"name": "from our page", "currency": "USD"}
    assert (await client.post("/api/v1/admin/tenants", body, headers=headers)).status_code == 201


async def _opened(sessions_: db.Sessions, visitor: Visitor, opened_at: datetime, seen_at: datetime) -> Visitor:
    async with db.transaction(sessions_) as session:
        token = await open_session(
            session,
            visitor.person.id,
            pepper=PEPPER,
            now=opened_at,
            absolute_s=7 * DAY_S,
            method=SignInMethod.PASSWORD,
        )
        await session.execute(
            text("UPDATE person_session SET seen_at = :seen WHERE created_at = :opened"),
            {"seen": seen_at, "opened": opened_at},
        )
    return Visitor(visitor.person, token)


async def test_sessions_end_when_idle_or_old(anonymous: Client, sessions: db.Sessions) -> None:
    now = datetime.now(UTC)
    visitor = await operator_person(sessions, OperatorRole.ADMIN)
    for opened, seen, status in (
        (timedelta(hours=13), timedelta(hours=11), 200),
        (timedelta(hours=13), timedelta(hours=13), 401),
        (timedelta(days=7, minutes=1), timedelta(minutes=1), 401),
    ):
        client = anonymous.visited_by(await _opened(sessions, visitor, now - opened, now - seen))
        answer = await client.get("/api/v1/admin/tenants")
        assert answer.status_code == status, (opened, seen)
        if status == 401:
            assert answer.json()["code"] == "SESSION_ENDED"


async def test_two_people_cannot_have_one_address(sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        await people.create(session, email="Ada@Example.com")
        assert (await people.by_email(session, " ada@example.COM ")) is not None
        with pytest.raises(Exception, match="address already"):
            await people.create(session, email="ada@example.com")
