"""API keys through the control API: by operators, and by members who reach what their role lets them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from api.services import Services
from core import db
from core.ids import IdKind, format_id
from core.settings import Settings
from tenants import api_keys, principals, projects
from tenants.key_types import KeyPolicy
from tenants.types import KeyLimits, KeyOwner, Role, Scope
from tests.factories.people import Visitor, member
from tests.factories.tenants import PEPPER, Customer, customer
from tests.integration.control.conftest import Client


def _tenant(made: Customer, admin: bool = False) -> str:
    return f"/api/v1/{'admin/' if admin else ''}tenants/{format_id(IdKind.TENANT, made.tenant.id)}"


def _project(made: Customer) -> str:
    return format_id(IdKind.PROJECT, made.project.id)


def _person(visitor: Visitor) -> str:
    return format_id(IdKind.PERSON, visitor.person.id)


async def _make(client: Client, made: Customer, **members: Any) -> httpx.Response:
    return await client.post(f"{_tenant(made)}/projects/{_project(made)}/keys", {"name": "k", **members})


async def _audited(sessions: db.Sessions, action: str) -> list[dict[str, Any]]:
    async with db.transaction(sessions) as session:
        query = text("SELECT details FROM audit_record WHERE action = :action ORDER BY recorded_at")
        return [dict(row[0]) for row in await session.execute(query, {"action": action})]


async def test_an_operator_makes_changes_rotates_and_ends_a_key(admin: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    owner = await member(sessions, made.tenant.id, Role.DEVELOPER)
    path = _tenant(made, admin=True)
    body = {"name": "ci", "owner_person_id": _person(owner), "scopes": ["batch", "inference"], "tier_max": "standard"}
    created = await admin.post(f"{path}/projects/{_project(made)}/keys", body)
    assert created.status_code == 201, created.text
    key = created.json()["api_key"]
    assert (key["owner_person_id"], key["scopes"], key["status"]) == (_person(owner), ["batch", "inference"], "active")
    path = f"{path}/keys/{key['id']}"

    networks = {"allowed_networks": ["10.0.0.0/8"], "model_patterns": ["smol*"], "owner_person_id": None}
    changed = (await admin.patch(path, {"name": "ci 2", **networks})).json()
    assert (changed["name"], changed["owner_person_id"], changed["tier_max"]) == ("ci 2", None, "standard")
    assert (await admin.get(path)).json() == changed
    details = (await _audited(sessions, "api_key.update"))[0]
    assert details["name"] == {"from": "ci", "to": "ci 2"}
    assert details["allowed_networks"] == {"from": [], "to": ["10.0.0.0/8"]}
    assert "scopes" not in details

    rotated = (await admin.post(f"{path}/rotate", {"overlap_s": 3600})).json()
    assert rotated["secret"] != created.json()["secret"]
    assert [s["last4"] for s in rotated["api_key"]["secrets"]] == [
        rotated["secret"][-4:],
        created.json()["secret"][-4:],
    ]
    ends = datetime.fromisoformat(rotated["api_key"]["secrets"][1]["expires_at"])
    assert timedelta(minutes=59) < ends - datetime.now(UTC) <= timedelta(hours=1)
    assert (await admin.post(f"{path}/rotate", {"overlap_s": 2_592_001})).status_code == 422

    assert (await admin.post(f"{path}/suspend")).json()["status"] == "suspended"
    assert (await admin.post(f"{path}/resume")).json()["status"] == "active"
    assert (await admin.post(f"{path}/revoke", {"hard": True})).json()["revoked_at"] is not None
    for action in ("suspend", "resume", "rotate"):
        again = await admin.post(f"{path}/{action}", {"overlap_s": 0} if action == "rotate" else None)
        assert (again.status_code, again.json()["code"]) == (409, "KEY_REVOKED")
    async with db.transaction(sessions) as session:
        kinds = (await session.execute(text("SELECT kind FROM config_change ORDER BY revision DESC LIMIT 2"))).scalars()
        assert list(kinds) == ["api_key.end", "api_key"]


async def test_a_developer_has_keys_of_their_own_and_sees_no_others(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    mine, other = [await member(sessions, made.tenant.id, Role.DEVELOPER) for _ in range(2)]
    me, them = anonymous.visited_by(mine), anonymous.visited_by(other)
    created = await _make(me, made)
    assert created.status_code == 201, created.text
    key = created.json()["api_key"]
    assert key["owner_person_id"] == _person(mine)
    keys = f"{_tenant(made)}/keys"
    assert [k["id"] for k in (await me.get(keys)).json()["items"]] == [key["id"]]
    assert (await them.get(keys)).json()["items"] == []
    for method, path, body in (
        ("GET", "", None),
        ("PATCH", "", {"name": "mine now"}),
        ("POST", "/rotate", {"overlap_s": 0}),
        ("POST", "/revoke", None),
    ):
        answer = await them.call(method, f"{keys}/{key['id']}{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND"), (method, path)
    renamed = await me.patch(f"{keys}/{key['id']}", {"name": "renamed"})
    assert (renamed.status_code, renamed.json()["name"]) == (200, "renamed")
    for owner in (_person(other), None):
        assert (await me.patch(f"{keys}/{key['id']}", {"owner_person_id": owner})).status_code == 403
    assert (await _make(me, made, owner_person_id=_person(other))).status_code == 403
    for path, body in (("/suspend", None), ("/resume", None)):
        assert (await me.post(f"{keys}/{key['id']}{path}", body)).status_code == 403
    assert (await me.post(f"{keys}/revoke", {"filter": {"name": "r"}})).status_code == 403
    assert (await me.post(f"{keys}/{key['id']}/rotate", {"overlap_s": 0})).status_code == 200
    assert (await me.post(f"{keys}/{key['id']}/revoke")).status_code == 200


async def test_scopes_are_those_of_the_role_at_every_change(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    visitor = await member(sessions, made.tenant.id, Role.DEVELOPER)
    me, boss = anonymous.visited_by(visitor), anonymous.visited_by(await member(sessions, made.tenant.id, Role.ADMIN))
    refused = await _make(me, made, scopes=["manage"])
    assert (refused.status_code, refused.json()["code"]) == (403, "SCOPE_NOT_ALLOWED")
    assert (await _make(me, made, scopes=["inference", "batch", "usage.read"])).status_code == 201
    beyond = await _make(boss, made, scopes=["manage"], owner_person_id=_person(visitor))  # its owner may not manage
    assert (beyond.status_code, beyond.json()["code"]) == (403, "SCOPE_NOT_ALLOWED")
    role = text("UPDATE member SET role = :role WHERE person_id = :id")
    async with db.transaction(sessions) as session:
        await session.execute(role, {"role": "admin", "id": visitor.person.id})
    given = await _make(boss, made, scopes=["manage"], owner_person_id=_person(visitor))
    assert given.status_code == 201, given.text
    async with db.transaction(sessions) as session:
        await session.execute(role, {"role": "developer", "id": visitor.person.id})
    path = f"{_tenant(made)}/keys/{given.json()['api_key']['id']}"
    kept = await me.patch(path, {"name": "mine"})  # their own, with a scope they may not give
    assert (kept.status_code, kept.json()["code"]) == (403, "SCOPE_NOT_ALLOWED")
    assert (await me.patch(path, {"scopes": ["usage.read"]})).status_code == 200
    both = await _make(boss, made, scopes=["manage", "inference"])
    assert (both.status_code, both.json()["code"]) == (400, "INVALID_REQUEST")


async def test_an_admin_of_one_project_has_all_keys_of_it_alone(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        second = await projects.create(session, made.tenant.id, name="second")
        elsewhere, _ = await api_keys.create(session, made.tenant.id, second.id, name="elsewhere", pepper=PEPPER)
    client = anonymous.visited_by(await member(sessions, made.tenant.id, Role.ADMIN, project_id=made.project.id))
    keys = f"{_tenant(made)}/keys"
    assert [key["name"] for key in (await client.get(keys)).json()["items"]] == ["first"]
    foreign = f"{keys}/{format_id(IdKind.API_KEY, elsewhere.id)}"
    for path in (f"{foreign}/suspend", f"{foreign}/revoke"):
        assert (await client.post(path)).status_code == 404
    found = (await client.post(f"{keys}/revoke", {"filter": {"status": "active"}})).json()
    assert [key["name"] for key in found["keys"]] == ["first"]
    there = await client.post(f"{_tenant(made)}/projects/{format_id(IdKind.PROJECT, second.id)}/keys", {"name": "x"})
    assert there.status_code == 403
    for action, status in (("suspend", "suspended"), ("resume", "active")):
        path = f"{keys}/{format_id(IdKind.API_KEY, made.key.id)}/{action}"
        assert (await client.post(path)).json()["status"] == status


async def test_a_key_that_manages_acts_for_its_owner(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    visitor = await member(sessions, made.tenant.id, Role.ADMIN)
    async with db.transaction(sessions) as session:
        _, secret = await api_keys.create(
            session,
            made.tenant.id,
            made.project.id,
            name="terraform",
            pepper=PEPPER,
            limits=KeyLimits(scopes=frozenset({Scope.MANAGE})),
            owner=KeyOwner(person_id=visitor.person.id),
        )
    robot = anonymous.acting_as(secret)
    created = await _make(robot, made, name="by robot")
    assert created.status_code == 201, created.text
    assert created.json()["api_key"]["owner_person_id"] == _person(visitor)
    async with db.transaction(sessions) as session:
        await session.execute(text("UPDATE member SET role = 'viewer' WHERE person_id = :p"), {"p": visitor.person.id})
    assert (await _make(robot, made)).status_code == 403  # at once, with the owner's present rights
    async with db.transaction(sessions) as session:
        await session.execute(text("DELETE FROM member WHERE person_id = :p"), {"p": visitor.person.id})
    gone = await _make(robot, made)
    assert (gone.status_code, gone.json()["code"]) == (403, "OWNER_SUSPENDED")


async def test_many_are_ended_with_the_count_that_was_seen_and_one_record(admin: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    path = f"{_tenant(made, admin=True)}/keys"
    names = ["ci 1", "ci 2"]
    for name in names:
        await admin.post(f"{_tenant(made, admin=True)}/projects/{_project(made)}/keys", {"name": name})
    body = {"filter": {"name": "CI"}}
    seen = (await admin.post(f"{path}/revoke", body)).json()
    assert (seen["done"], seen["count"], [key["name"] for key in seen["keys"]]) == (False, 2, names)
    for wrong, status, code in (
        ({}, 400, "INVALID_REQUEST"),
        ({"expected_count": 3}, 409, "COUNT_CHANGED"),
    ):
        answer = await admin.post(f"{path}/revoke", {**body, "dry_run": False, **wrong})
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert (await admin.post(f"{path}/revoke", {"filter": {}})).status_code == 400
    done = (await admin.post(f"{path}/revoke", {**body, "dry_run": False, "expected_count": 2})).json()
    assert (done["done"], done["keys"]) == (True, seen["keys"])
    records = await _audited(sessions, "api_key.revoke_matching")
    assert [record["keys"] for record in records if not record["dry_run"]] == [[key["id"] for key in seen["keys"]]]
    listed = (await admin.get(f"{path}?status=revoked&name=ci&limit=1")).json()
    assert [key["name"] for key in listed["items"]] == ["ci 2"]
    rest = (await admin.get(f"{path}?status=revoked&name=ci&limit=1&after={listed['next_after']}")).json()
    assert ([key["name"] for key in rest["items"]], rest["next_after"]) == (["ci 1"], None)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    control = settings.control.model_copy(update={"keys_max_days": 30})
    return settings.model_copy(update={"control": control})


async def test_the_platforms_maximum_holds_at_making_changing_and_rotating(
    admin: Client, sessions: db.Sessions, services: Services
) -> None:
    made, now = await customer(sessions), services.clock.now()
    path = _tenant(made, admin=True)
    created = (await admin.post(f"{path}/projects/{_project(made)}/keys", {"name": "k"})).json()
    ends = datetime.fromisoformat(created["api_key"]["expires_at"])
    assert timedelta(days=29, hours=23) < ends - now < timedelta(days=30, hours=1)
    late = (now + timedelta(days=31)).isoformat()
    refused = await admin.post(f"{path}/projects/{_project(made)}/keys", {"name": "k", "expires_at": late})
    assert (refused.status_code, refused.json()["param"]) == (400, "expires_at")
    old = f"{path}/keys/{format_id(IdKind.API_KEY, made.key.id)}"  # made without an end
    assert (await admin.patch(old, {"expires_at": late})).status_code == 400
    assert (await admin.get(old)).json()["expires_at"] is None
    assert (await admin.post(f"{old}/rotate", {"overlap_s": 0})).json()["api_key"]["expires_at"] is not None
    assert KeyPolicy(now).max_days == 0


async def test_the_peppers_are_shown_by_name(admin: Client, sessions: db.Sessions, anonymous: Client) -> None:
    await customer(sessions)
    (pepper,) = (await admin.get("/api/v1/admin/secrets")).json()["peppers"]
    assert (pepper["current"], pepper["configured"], pepper["api_key_secrets"], pepper["operator_tokens"]) == (
        True,
        True,
        1,
        1,
    )
    assert pepper["name"] not in PEPPER.hex()


@pytest.mark.parametrize("end", ["9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+23:59"])
async def test_an_end_in_a_year_that_cannot_be_read_back_is_refused(
    anonymous: Client, sessions: db.Sessions, end: str
) -> None:
    """Postgres takes the year 10000; no gateway could load its keys any more."""
    made = await customer(sessions)
    dev = await member(sessions, made.tenant.id, Role.DEVELOPER)
    client = anonymous.visited_by(dev)
    key = (await _make(client, made)).json()["api_key"]
    assert (await _make(client, made, expires_at=end)).status_code == 422
    assert (await client.patch(f"{_tenant(made)}/keys/{key['id']}", {"expires_at": end})).status_code == 422
    async with db.transaction(sessions) as session:
        assert await principals.load_all(session)


async def test_a_key_that_reads_usage_sees_no_more_than_its_owner(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    scopes = ["usage.read"]
    seen = {}
    for name, role, project_id in (
        ("finance", Role.FINANCE, None),
        ("developer", Role.DEVELOPER, None),
        ("of one project", Role.DEVELOPER, made.project.id),
    ):
        owner = await member(sessions, made.tenant.id, role, project_id=project_id)
        admin = anonymous.visited_by(await member(sessions, made.tenant.id, Role.ADMIN))
        key = await _make(admin, made, scopes=scopes, owner_person_id=_person(owner))
        assert key.status_code == 201, key.text
        client = anonymous.acting_as(key.json()["secret"])
        seen[name] = [(await client.get(f"/api/v1/{what}")).status_code != 403 for what in ("usage", "balance")]
    assert seen == {"finance": [True, True], "developer": [True, False], "of one project": [False, False]}
