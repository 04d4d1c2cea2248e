"""Invites: by whom, with which role, once, for seven days; and who they make of whom."""

from typing import Any

import pytest
from sqlalchemy import text

from api.services import Services
from core import db
from core.clock import ManualClock
from tenants import members, operators, person_status, throttle
from tenants.types import Person, Role
from tests.factories.browser import ADA, AUTH, OTHER, PASSWORD, Browser, Open, local_person, mails, token_in
from tests.factories.tenants import PEPPER, Customer, customer

EVE = "eve@example.com"
NEW = {"name": "Eve Eden", "password": OTHER}


@pytest.fixture
async def acme(sessions: db.Sessions) -> Customer:
    return await customer(sessions)


def _of(made: Customer, rest: str) -> str:
    return f"/api/v1/tenants/ten_{made.tenant.id.hex}/{rest}"


async def _as(
    services: Services, here: Browser, made: Customer, role: Role, email: str = ADA, *, in_project: bool = False
) -> Browser:
    """Sign in a member with this role."""
    who = await local_person(services, email)
    async with db.transaction(services.sessions) as session:
        project_id = made.project.id if in_project else None
        await members.add(session, made.tenant.id, who.id, role, project_id=project_id)
    await here.sign_in(email, PASSWORD)
    return here


async def _invite(here: Browser, made: Customer, email: str = EVE, role: str = "developer", **body: Any) -> Any:
    return await here.post(_of(made, "invites"), {"email": email, "role": role, **body})


async def test_somebody_new_accepts_and_is_signed_in_as_a_member(
    acme: Customer, at_desk: Services, visit: Open
) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    made = await _invite(owner, acme, " Eve@Example.com")
    assert (made.status_code, made.json()["state"], made.json()["email"]) == (201, "open", EVE)
    (kept,) = await mails(at_desk, EVE)
    token = token_in(kept)
    assert token not in made.text
    assert f'ada@example.com invites you to "{acme.tenant.name}" on Tidegate, as developer.' in kept.text
    assert f"http://127.0.0.1:8080/invite#{token}" in kept.text
    here = visit()
    accepted = await here.post(f"{AUTH}/invites/accept", {"token": token, **NEW})
    assert (accepted.status_code, accepted.json()["tenant_id"]) == (200, f"ten_{acme.tenant.id.hex}")
    (tenant,) = (await here.get("/api/v1/session")).json()["tenants"]
    assert (tenant["name"], tenant["roles"], tenant["projects"]) == (acme.tenant.name, ["developer"], [])
    assert "key.write_own" in tenant["permissions"]
    assert "member.write" not in tenant["permissions"]
    assert (await here.post(f"{AUTH}/sign-out")).status_code == 204
    assert (await here.sign_in(EVE, OTHER)).status_code == 200
    again = await visit().post(f"{AUTH}/invites/accept", {"token": token, **NEW})
    assert (again.status_code, again.json()["code"]) == (400, "INVITE_WRONG")
    (listed,) = (await owner.get(_of(acme, "invites"))).json()["items"]
    assert listed["state"] == "accepted"


async def test_whoever_has_an_account_accepts_signed_in(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    await local_person(at_desk, EVE, OTHER)
    await _invite(owner, acme, role="viewer", project_id=f"prj_{acme.project.id.hex}")
    token = token_in((await mails(at_desk, EVE))[0])
    first = await visit().post(f"{AUTH}/invites/accept", {"token": token, **NEW})
    assert (first.status_code, first.json()["code"]) == (409, "SIGN_IN_FIRST")
    other = await owner.post("/api/v1/me/invites/accept", {"token": token})
    assert (other.status_code, other.json()["code"]) == (403, "INVITE_FOR_ANOTHER")
    here = visit()
    await here.sign_in(EVE, OTHER)
    assert (await here.post("/api/v1/me/invites/accept", {"token": token})).status_code == 200
    (tenant,) = (await here.get("/api/v1/session")).json()["tenants"]
    assert (tenant["roles"], tenant["permissions"]) == ([], [])
    assert [(p["id"], p["roles"]) for p in tenant["projects"]] == [(f"prj_{acme.project.id.hex}", ["viewer"])]


@pytest.mark.parametrize(
    ("mine", "allowed"),
    [
        (Role.OWNER, {"owner", "admin", "developer", "finance", "viewer"}),
        (Role.ADMIN, {"admin", "developer", "finance", "viewer"}),
        (Role.DEVELOPER, set()),
        (Role.FINANCE, set()),
        (Role.VIEWER, set()),
    ],
)
async def test_nobody_invites_above_their_own_role(
    acme: Customer, at_desk: Services, visit: Open, mine: Role, allowed: set[str]
) -> None:
    here = await _as(at_desk, visit(), acme, mine)
    statuses = {role.value: (await _invite(here, acme, f"{role}@example.com", role)).status_code for role in Role}
    assert statuses == {role.value: 201 if role in allowed else 403 for role in Role}


async def test_an_admin_of_one_project_invites_into_that_one_alone(
    acme: Customer, at_desk: Services, visit: Open
) -> None:
    here = await _as(at_desk, visit(), acme, Role.ADMIN, in_project=True)
    assert (await _invite(here, acme)).status_code == 403
    assert (await _invite(here, acme, project_id=f"prj_{acme.project.id.hex}")).status_code == 201
    assert (await _invite(here, acme, role="owner", project_id=f"prj_{acme.project.id.hex}")).status_code == 403
    theirs = await customer(at_desk.sessions)
    assert (await _invite(here, acme, project_id=f"prj_{theirs.project.id.hex}")).status_code == 403


async def test_a_project_of_another_tenant_is_not_found(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    theirs = await customer(at_desk.sessions)
    assert (await _invite(owner, acme, project_id=f"prj_{theirs.project.id.hex}")).status_code == 404
    assert await mails(at_desk, EVE) == []


async def test_links_end_by_time_by_revoking_and_by_sending_again(
    acme: Customer, at_desk: Services, visit: Open, clock: ManualClock
) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)

    async def works(token: str) -> bool:
        answer = await visit().post(f"{AUTH}/invites/accept", {"token": token, "name": "Eve", "password": "x" * 20})
        assert answer.status_code == 400
        return bool(answer.json()["code"] != "INVITE_WRONG")  # else it is the password that is bad

    invite = _of(acme, f"invites/{(await _invite(owner, acme)).json()['id']}")
    first = token_in((await mails(at_desk, EVE))[0])
    assert await works(first)
    clock.advance(1)
    assert (await owner.post(f"{invite}/resend")).status_code == 200
    second = token_in((await mails(at_desk, EVE))[0])
    assert (first != second, await works(first), await works(second)) == (True, False, True)
    clock.advance(7 * 86_400 - 1)
    assert await works(second)
    clock.advance(1)
    assert not await works(second)
    clock.advance(1)
    await owner.sign_in(ADA, PASSWORD)
    assert (await owner.post(f"{invite}/resend")).json()["state"] == "open"
    third = token_in((await mails(at_desk, EVE))[0])
    assert await works(third)
    assert (await owner.post(f"{invite}/revoke")).json()["state"] == "revoked"
    assert not await works(third)
    assert (await owner.post(f"{invite}/resend")).status_code == 409


async def test_inviting_again_replaces_the_open_invite(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    await _invite(owner, acme, role="admin")
    await _invite(owner, acme, role="viewer")
    states = [(one["role"], one["state"]) for one in (await owner.get(_of(acme, "invites"))).json()["items"]]
    assert states == [("viewer", "open"), ("admin", "revoked")]


async def test_a_member_is_not_invited_again(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    answer = await _invite(owner, acme, ADA)
    assert (answer.status_code, answer.json()["code"]) == (409, "MEMBER_EXISTS")


@pytest.mark.parametrize("how", ["removed", "suspended", "demoted", "deleted", "removed, with a key"])
async def test_whoever_is_out_leaves_no_open_invite_behind(
    acme: Customer, at_desk: Services, visit: Open, how: str, ada: Person
) -> None:
    async with db.transaction(at_desk.sessions) as session:
        await members.add(session, acme.tenant.id, ada.id, Role.OWNER)
    owner = visit()
    await owner.sign_in(ADA, PASSWORD)
    leaver = await _as(at_desk, visit(), acme, Role.ADMIN, "leaver@example.com")
    if how.endswith("key"):
        made = await leaver.post(
            _of(acme, f"projects/prj_{acme.project.id.hex}/keys"), {"name": "hr", "scopes": ["manage"]}
        )
        here = visit()
        here.headers["authorization"] = f"Bearer {made.json()['secret']}"
        assert (await _invite(here, acme, EVE, "admin")).status_code == 201
    else:
        await _invite(leaver, acme, EVE, "admin")
    token = token_in((await mails(at_desk, EVE))[0])
    items = (await owner.get(_of(acme, "members"))).json()["items"]
    found = next(one for one in items if one["email"] == "leaver@example.com")
    if how.startswith("removed"):
        assert (await owner.delete(_of(acme, f"members/{found['id']}"))).status_code == 204
    elif how == "suspended":
        assert (await owner.patch(_of(acme, f"members/{found['id']}"), {"status": "suspended"})).status_code == 200
    elif how == "demoted":
        assert (await owner.patch(_of(acme, f"members/{found['id']}"), {"role": "viewer"})).status_code == 200
    else:
        assert (await leaver.post("/api/v1/me/delete", {"password": PASSWORD})).status_code == 204
    answer = await visit().post(f"{AUTH}/invites/accept", {"token": token, **NEW})
    assert answer.json()["code"] == "INVITE_WRONG"


async def test_a_weak_password_uses_no_invite_up(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    await _invite(owner, acme)
    token = token_in((await mails(at_desk, EVE))[0])
    weak = await visit().post(f"{AUTH}/invites/accept", {"token": token, "name": "Eve", "password": "evepassword1"})
    assert (weak.status_code, weak.json()["param"]) == (400, "password")
    assert (await visit().post(f"{AUTH}/invites/accept", {"token": token, **NEW})).status_code == 200


async def test_a_suspended_tenant_takes_nobody_in(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    await _invite(owner, acme)
    token = token_in((await mails(at_desk, EVE))[0])
    async with db.transaction(at_desk.sessions) as session:
        await session.execute(text("UPDATE tenant SET status = 'suspended'"))
    answer = await visit().post(f"{AUTH}/invites/accept", {"token": token, **NEW})
    assert (answer.status_code, answer.json()["code"]) == (403, "TENANT_SUSPENDED")


async def _operator(services: Services, here: Browser) -> Browser:
    async with db.transaction(services.sessions) as session:
        made = await operators.create(session, name="root")
        token = await operators.issue_token(session, made.id, pepper=PEPPER)
    here.headers = {"authorization": f"Bearer {token}"}
    return here


async def test_an_operator_invites_a_tenant_s_first_owner(acme: Customer, at_desk: Services, visit: Open) -> None:
    root = await _operator(at_desk, visit())
    path = f"/api/v1/admin/tenants/ten_{acme.tenant.id.hex}/invites"
    assert (await root.post(path, {"email": EVE, "role": "owner"})).status_code == 201
    here = visit()
    body = {"token": token_in((await mails(at_desk, EVE))[0]), **NEW}
    assert (await here.post(f"{AUTH}/invites/accept", body)).status_code == 200
    assert (await _invite(here, acme, "next@example.com", "owner")).status_code == 201
    (listed,) = (await root.get(f"/api/v1/admin/tenants/ten_{acme.tenant.id.hex}/members")).json()["items"]
    assert (listed["email"], listed["role"]) == (EVE, "owner")


@pytest.mark.parametrize(
    ("role", "may"),
    [
        ("admin", {"tenants": 200, "operators": 200, "people": 200, "mail": 200, "price-books": 200}),
        ("finance", {"tenants": 200, "operators": 403, "people": 200, "mail": 403, "price-books": 200}),
        ("support", {"tenants": 200, "operators": 403, "people": 200, "mail": 403, "price-books": 200}),
    ],
)
async def test_an_operator_invites_others_with_a_role(
    at_desk: Services, visit: Open, role: str, may: dict[str, int]
) -> None:
    root = await _operator(at_desk, visit())
    made = await root.post("/api/v1/admin/operator-invites", {"email": EVE, "role": role})
    assert (made.status_code, made.json()["operator_role"]) == (201, role)
    here = visit()
    body = {"token": token_in((await mails(at_desk, EVE))[0]), **NEW}
    assert (await here.post(f"{AUTH}/invites/accept", body)).json()["tenant_id"] is None
    operator = (await here.get("/api/v1/session")).json()["operator"]
    assert operator["role"] == role
    assert {path: (await here.get(f"/api/v1/admin/{path}")).status_code for path in may} == may
    again = await root.post("/api/v1/admin/operator-invites", {"email": EVE, "role": "admin"})
    assert (again.status_code, again.json()["code"]) == (409, "OPERATOR_EXISTS")


async def test_an_operators_invite_is_no_tenant_s(acme: Customer, at_desk: Services, visit: Open) -> None:
    root = await _operator(at_desk, visit())
    made = (await root.post("/api/v1/admin/operator-invites", {"email": EVE, "role": "support"})).json()["id"]
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    assert (await owner.post(_of(acme, f"invites/{made}/revoke"))).status_code == 404
    assert (await owner.post(_of(acme, f"invites/{made}/resend"))).status_code == 404
    assert (await root.post(f"/api/v1/admin/operator-invites/{made}/revoke")).status_code == 200


async def test_another_person_with_the_same_address_inherits_nothing(
    acme: Customer, at_desk: Services, visit: Open
) -> None:
    """Delete a user and create another: no session, no membership, no operator, no invite, no second factor."""
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    old = await _as(at_desk, visit(), acme, Role.ADMIN, EVE)
    old_id = (await old.get("/api/v1/session")).json()["person"]["id"]
    async with db.transaction(at_desk.sessions) as session:
        from core.ids import IdKind, parse_id

        await operators.create(session, name=EVE, person_id=parse_id(IdKind.PERSON, old_id))
        await person_status.delete(session, parse_id(IdKind.PERSON, old_id), now=at_desk.clock.now())
    assert not await old.signed_in()
    assert (await visit().sign_in(EVE, PASSWORD)).status_code == 401
    await _invite(owner, acme, role="viewer")
    fresh = visit()
    body = {"token": token_in((await mails(at_desk, EVE))[0]), **NEW}
    assert (await fresh.post(f"{AUTH}/invites/accept", body)).status_code == 200
    me = (await fresh.get("/api/v1/session")).json()
    assert me["person"]["id"] != old_id
    assert [tenant["roles"] for tenant in me["tenants"]] == [["viewer"]]
    assert me["operator"] is None
    assert me["person"]["has_second_factor"] is False
    assert not await old.signed_in()
    items = (await owner.get(_of(acme, "members"))).json()["items"]
    assert {one["email"]: one["role"] for one in items} == {ADA: "owner", EVE: "viewer"}


async def test_a_tenant_mails_a_hundred_invites_and_then_waits(acme: Customer, at_desk: Services, visit: Open) -> None:
    owner = await _as(at_desk, visit(), acme, Role.OWNER)
    async with db.transaction(at_desk.sessions) as session:
        for _ in range(99):
            await throttle.take(session, at_desk.clock.now(), throttle.of_invites(PEPPER, str(acme.tenant.id)))
    assert (await _invite(owner, acme)).status_code == 201
    refused = await _invite(owner, acme)
    assert (refused.status_code, refused.json()["code"]) == (429, "TOO_MANY_INVITES")
    assert refused.headers["retry-after"] == "30"
    assert len(await mails(at_desk, EVE)) == 1
