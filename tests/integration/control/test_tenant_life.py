"""Suspending, closing, and what invoices say."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from core import db
from tenants import closing
from tenants.types import Role
from tests.factories.people import member
from tests.factories.tenants import Customer, customer
from tests.integration.control.conftest import Client

PROFILE = {
    "legal_name": "Ångström & Söhne GmbH",
    "address": ["Hauptstraße 1", "10115 Berlin"],
    "country": "DE",
    "tax_id": "DE 136695976",
    "billing_email": "Books@Example.com",
    "language": "zh-CN",
}


def _admin(made: Customer) -> str:
    return f"/api/v1/admin/tenants/ten_{made.tenant.id.hex}"


def _mine(made: Customer) -> str:
    return f"/api/v1/tenants/ten_{made.tenant.id.hex}"


async def test_the_billing_profile_is_kept_as_written(admin: Client, anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    finance = anonymous.visited_by(await member(sessions, made.tenant.id, Role.FINANCE))
    empty = (await finance.get(f"{_mine(made)}/billing-profile")).json()
    assert empty["legal_name"] == ""
    assert empty["language"] == "en"
    put = await finance.call("PUT", f"{_mine(made)}/billing-profile", json=PROFILE)
    expected = {**PROFILE, "billing_email": "books@example.com"}
    assert (put.status_code, put.json()) == (200, expected)
    assert (await admin.get(f"{_admin(made)}/billing-profile")).json() == expected


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"country": "Germany"}, "country"),
        ({"language": "de"}, "language"),
        ({"billing_email": "nobody"}, "billing_email"),
        ({"address": ["x"] * 7}, "address"),
        ({"legal_name": "a\x00b"}, "U+0000"),
    ],
)
async def test_a_wrong_billing_profile_says_where(
    admin: Client, sessions: db.Sessions, change: dict[str, Any], param: str
) -> None:
    made = await customer(sessions)
    answer = await admin.call("PUT", f"{_admin(made)}/billing-profile", json={**PROFILE, **change})
    assert answer.status_code in {400, 422}
    assert param in answer.text


async def test_a_suspended_tenant_is_read_only_until_resumed(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    made = await customer(sessions)
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    key = anonymous.acting_as(made.secret)
    assert (await admin.post(f"{_admin(made)}/suspend")).status_code == 204
    assert (await key.get("/api/v1/balance")).json()["code"] == "TENANT_SUSPENDED"
    assert (await owner.get(_mine(made))).json()["status"] == "suspended"
    refused = await owner.call("PUT", f"{_mine(made)}/billing-profile", json=PROFILE)
    assert (refused.status_code, refused.json()["code"]) == (403, "TENANT_SUSPENDED")
    assert (await admin.post(f"{_admin(made)}/resume")).status_code == 204
    assert (await owner.call("PUT", f"{_mine(made)}/billing-profile", json=PROFILE)).status_code == 200
    assert (await key.get("/api/v1/balance")).json()["code"] != "TENANT_SUSPENDED"


async def test_a_suspended_project_refuses_its_keys_only(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    made = await customer(sessions)
    path = f"{_admin(made)}/projects/prj_{made.project.id.hex}"
    assert (await admin.post(f"{path}/suspend")).status_code == 204
    assert (await anonymous.acting_as(made.secret).get("/api/v1/usage")).json()["code"] == "PROJECT_SUSPENDED"
    assert (await admin.post(f"{path}/resume")).status_code == 204
    assert (await anonymous.acting_as(made.secret).get("/api/v1/usage")).status_code == 200


async def test_closing_wants_the_name_and_is_for_good(admin: Client, anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    wrong = await owner.post(f"{_mine(made)}/close", {"confirm_name": made.tenant.name + " "})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "NAME_NOT_CONFIRMED")
    assert (await owner.post(f"{_mine(made)}/close", {"confirm_name": made.tenant.name})).status_code == 204
    assert (await anonymous.acting_as(made.secret).get("/api/v1/usage")).json()["code"] == "TENANT_CLOSED"
    assert (await owner.get(f"{_mine(made)}/usage")).status_code == 200
    refused = await owner.call("PUT", f"{_mine(made)}/billing-profile", json=PROFILE)
    assert (refused.status_code, refused.json()["code"]) == (403, "TENANT_CLOSED")
    for path in ("resume", "suspend"):
        again = await admin.post(f"{_admin(made)}/{path}")
        assert (again.status_code, again.json()["code"]) == (409, "TENANT_CLOSED")
    invited = await admin.post(f"{_admin(made)}/invites", {"email": "late@example.com", "role": "viewer"})
    assert (invited.status_code, invited.json()["code"]) == (409, "TENANT_CLOSED")
    async with db.transaction(sessions) as session:
        live = await session.scalar(
            text("SELECT count(*) FROM api_key WHERE tenant_id = :tenant AND revoked_at IS NULL"),
            {"tenant": made.tenant.id},
        )
    assert live == 0


async def test_operators_change_nothing_of_a_closed_tenant_but_its_money(admin: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    assert (await admin.post(f"{_admin(made)}/close", {"confirm_name": made.tenant.name})).status_code == 204
    limit = {"metric": "requests_per_minute", "amount": 5, "reason": "too late"}
    for answer in (
        await admin.post(f"{_admin(made)}/projects", {"name": "late"}),
        await admin.call("PUT", f"{_admin(made)}/limits", json={**limit, "level": "tenant"}),
        await admin.patch(_admin(made), {"tz": "Europe/Berlin"}),
        await admin.call("PUT", f"{_admin(made)}/billing-profile", json=PROFILE),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "TENANT_CLOSED"), answer.text


@pytest.mark.parametrize("tz", ["posixrules", "right/UTC", "localtime", "Factory", "Mars/Olympus", "../etc/passwd"])
async def test_a_zone_that_depends_on_the_host_is_none(admin: Client, sessions: db.Sessions, tz: str) -> None:
    made = await customer(sessions)
    answer = await admin.patch(_admin(made), {"tz": tz})
    assert (answer.status_code, answer.json()["param"]) == (400, "tz")


async def test_only_an_owner_may_close(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    for role in Role:
        client = anonymous.visited_by(await member(sessions, made.tenant.id, role))
        answer = await client.post(f"{_mine(made)}/close", {"confirm_name": "not this"})
        assert answer.status_code == (400 if role is Role.OWNER else 403), role


async def test_people_of_a_closed_tenant_are_forgotten_when_due(sessions: db.Sessions) -> None:
    made, other = await customer(sessions), await customer(sessions)
    await member(sessions, made.tenant.id, Role.OWNER)
    await member(sessions, other.tenant.id, Role.OWNER)
    closed_at = datetime.now(UTC)
    async with db.transaction(sessions) as session:
        await closing.close(session, made.tenant.id, confirm_name=made.tenant.name, now=closed_at)
    keep = timedelta(days=90)
    for after, expected in ((timedelta(days=89), []), (timedelta(days=90), [made.tenant.id]), (keep, [])):
        async with db.transaction(sessions) as session:
            erased = await closing.erase_due(session, now=closed_at + after, keep=keep)
        assert [tenant for tenant in erased if tenant == made.tenant.id] == expected
    async with db.transaction(sessions) as session:
        members = await session.execute(
            text("SELECT tenant_id, count(*) FROM member WHERE tenant_id IN (:a, :b) GROUP BY tenant_id"),
            {"a": made.tenant.id, "b": other.tenant.id},
        )
        assert {row[0]: row[1] for row in members.all()} == {other.tenant.id: 1}
        name = await session.scalar(text("SELECT name FROM tenant WHERE id = :id"), {"id": made.tenant.id})
    assert name == f"erased {made.tenant.id}"


async def test_a_reason_for_suspending_stands_in_the_trail(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    """By every route that suspends; without one there is none."""
    made = await customer(sessions)
    owner = await member(sessions, made.tenant.id, Role.OWNER)
    somebody = await member(sessions, made.tenant.id, Role.VIEWER)
    mine = anonymous.visited_by(owner)
    project, key = f"projects/prj_{made.project.id.hex}", f"keys/key_{made.key.id.hex}"
    person = f"/api/v1/admin/people/per_{somebody.person.id.hex}"
    for client, path in (
        *(
            (client, f"{of}/{thing}")
            for client, of in ((admin, _admin(made)), (mine, _mine(made)))
            for thing in (project, key)
        ),
        (admin, person),
        (admin, _admin(made)),
    ):
        suspended = await client.post(f"{path}/suspend", {"reason": "unpaid"})
        assert suspended.status_code in {200, 204}, suspended.text
        assert (await client.post(f"{path}/resume")).status_code in {200, 204}
        assert (await client.post(f"{path}/suspend")).status_code in {200, 204}
        assert (await client.post(f"{path}/resume")).status_code in {200, 204}
        too_long = await client.post(f"{path}/suspend", {"reason": "x" * 501})
        assert too_long.status_code == 422
        trail = (await admin.get("/api/v1/admin/audit", params={"limit": 4})).json()["items"]
        assert [record["details"].get("reason") for record in trail] == [None, None, None, "unpaid"]
    for path in (_admin(made), f"{_admin(made)}/{project}"):
        await admin.patch(path, {"status": "suspended", "reason": "unpaid"})
        (newest,) = (await admin.get("/api/v1/admin/audit", params={"limit": 1})).json()["items"]
        assert (newest["details"]["status"]["to"], newest["details"]["reason"]) == ("suspended", "unpaid")
        await admin.patch(path, {"status": "active"})
    members = (await mine.get(f"{_mine(made)}/members")).json()["items"]
    (membership,) = [one["id"] for one in members if one["role"] == "viewer"]
    await mine.patch(f"{_mine(made)}/members/{membership}", {"status": "suspended", "reason": "on leave"})
    (newest,) = (await admin.get("/api/v1/admin/audit", params={"limit": 1})).json()["items"]
    assert (newest["action"], newest["details"]["reason"]) == ("member.update", "on leave")
