"""Members, service accounts and projects, by their own organisation; people, by operators."""

import asyncio

import pytest
from sqlalchemy import text

from api.services import Services
from core import db
from tenants import api_keys, members, principals
from tenants.credentials import Peppers
from tenants.types import KeyOwner, OperatorRole, Person, Role
from tests.factories.browser import ADA, PASSWORD, Browser, Open, local_person
from tests.factories.people import operator_person
from tests.factories.tenants import PEPPER, Customer, customer

BOB = "bob@example.com"
CARL = "carl@example.com"


@pytest.fixture
async def acme(sessions: db.Sessions) -> Customer:
    return await customer(sessions)


def _of(made: Customer, rest: str) -> str:
    return f"/api/v1/tenants/ten_{made.tenant.id.hex}/{rest}"


async def _member(services: Services, made: Customer, email: str, role: Role, *, in_project: bool = False) -> Person:
    who = await local_person(services, email)
    async with db.transaction(services.sessions) as session:
        project_id = made.project.id if in_project else None
        await members.add(session, made.tenant.id, who.id, role, project_id=project_id)
    return who


async def _in(here: Browser, email: str) -> Browser:
    assert (await here.sign_in(email, PASSWORD)).status_code == 200
    return here


async def _id(here: Browser, made: Customer, email: str) -> str:
    items = (await here.get(_of(made, "members"))).json()["items"]
    return _of(made, f"members/{next(one['id'] for one in items if one['email'] == email)}")


async def _refusal(services: Services, secret: str) -> str | None:
    async with db.transaction(services.sessions) as session:
        found = await principals.find(session, Peppers(PEPPER), secret)
    return None if found is None else found.refusal


async def test_a_role_changes_at_once_and_the_trail_says_how(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.VIEWER)
    ada, bob = await _in(visit(), ADA), await _in(visit(), BOB)
    assert (await bob.post(_of(acme, "projects"), {"name": "new"})).status_code == 403
    changed = await ada.patch(await _id(ada, acme, BOB), {"role": "admin"})
    assert (changed.status_code, changed.json()["role"]) == (200, "admin")
    assert (await bob.post(_of(acme, "projects"), {"name": "new"})).status_code == 201
    async with db.transaction(at_desk.sessions) as session:
        query = text("SELECT details FROM audit_record WHERE action = 'member.update'")
        details = (await session.execute(query)).scalar_one()
    assert (details["before"]["role"], details["after"]["role"]) == ("viewer", "admin")


@pytest.mark.parametrize("change", [{"role": "admin"}, {"status": "suspended"}, None])
async def test_the_last_owner_stays(
    acme: Customer, at_desk: Services, visit: Open, change: dict[str, str] | None
) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.ADMIN)
    ada = await _in(visit(), ADA)
    mine = await _id(ada, acme, ADA)
    answer = await (ada.patch(mine, change) if change else ada.delete(mine))
    assert (answer.status_code, answer.json()["code"]) == (409, "LAST_OWNER")
    leaving = {"tenant_id": f"ten_{acme.tenant.id.hex}"}
    assert (await ada.post("/api/v1/me/leave", leaving)).json()["code"] == "LAST_OWNER"
    assert (await ada.post("/api/v1/me/delete", {"password": PASSWORD})).json()["code"] == "LAST_OWNER"
    await ada.patch(await _id(ada, acme, BOB), {"role": "owner"})
    assert (await (ada.patch(mine, change) if change else ada.delete(mine))).status_code in {200, 204}


async def test_two_owners_cannot_both_go_at_once(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.OWNER)
    ada, bob = await _in(visit(), ADA), await _in(visit(), BOB)
    leaving = {"tenant_id": f"ten_{acme.tenant.id.hex}"}
    answers = await asyncio.gather(*(who.post("/api/v1/me/leave", leaving) for who in (ada, bob)))
    assert sorted(answer.status_code for answer in answers) == [204, 409]
    gone = ada if answers[0].status_code == 204 else bob
    assert (await gone.post("/api/v1/me/leave", leaving)).status_code == 404


async def test_nobody_touches_a_role_above_their_own(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.ADMIN)
    await _member(at_desk, acme, CARL, Role.VIEWER)
    bob = await _in(visit(), BOB)
    owner, mine, carl = [await _id(bob, acme, email) for email in (ADA, BOB, CARL)]
    refused = [
        await bob.patch(owner, {"role": "viewer"}),
        await bob.patch(owner, {"status": "suspended"}),
        await bob.delete(owner),
        await bob.patch(mine, {"role": "owner"}),
        await bob.patch(carl, {"role": "owner"}),
    ]
    assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(403, "ROLE_ABOVE_YOURS")}
    assert (await bob.patch(carl, {"role": "finance"})).status_code == 200
    assert (await bob.delete(carl)).status_code == 204


async def test_a_suspended_member_sees_nothing_of_the_tenant_until_resumed(
    acme: Customer, at_desk: Services, visit: Open
) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.DEVELOPER)
    ada, bob = await _in(visit(), ADA), await _in(visit(), BOB)
    path = await _id(ada, acme, BOB)
    assert (await ada.patch(path, {"status": "suspended"})).status_code == 200
    assert (await bob.get(_of(acme, "members"))).status_code == 404
    assert (await bob.get("/api/v1/session")).json()["tenants"] == []
    assert (await ada.patch(path, {"status": "active"})).status_code == 200
    assert (await bob.get(_of(acme, "members"))).status_code == 200


async def test_a_member_of_a_project_sees_that_project_alone(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, acme, BOB, Role.ADMIN, in_project=True)
    ada, bob = await _in(visit(), ADA), await _in(visit(), BOB)
    other = (await ada.post(_of(acme, "projects"), {"name": "other"})).json()["id"]
    assert [one["name"] for one in (await bob.get(_of(acme, "projects"))).json()["items"]] == ["main"]
    assert len((await ada.get(_of(acme, "projects"))).json()["items"]) == 2
    assert [one["email"] for one in (await bob.get(_of(acme, "members"))).json()["items"]] == [BOB]
    assert (await bob.get(await _id(ada, acme, ADA))).status_code == 404
    assert (await bob.delete(await _id(ada, acme, ADA))).status_code == 404
    assert (await bob.get(_of(acme, f"projects/{other}"))).status_code == 403
    assert (await bob.post(_of(acme, f"projects/{other}/suspend"))).status_code == 403
    mine = _of(acme, f"projects/prj_{acme.project.id.hex}")
    assert (await bob.patch(mine, {"name": "renamed"})).json()["name"] == "renamed"


async def test_a_member_gets_a_role_in_a_further_project(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    bob = await _member(at_desk, acme, BOB, Role.VIEWER)
    stranger = await local_person(at_desk, CARL)
    here = await _in(visit(), ADA)
    body = {"role": "developer", "project_id": f"prj_{acme.project.id.hex}"}
    made = await here.post(_of(acme, "members"), {**body, "person_id": f"per_{bob.id.hex}"})
    assert (made.status_code, made.json()["project_id"]) == (201, body["project_id"])
    again = await here.post(_of(acme, "members"), {**body, "person_id": f"per_{bob.id.hex}"})
    assert (again.status_code, again.json()["code"]) == (409, "MEMBER_EXISTS")
    unknown = await here.post(_of(acme, "members"), {**body, "person_id": f"per_{stranger.id.hex}"})
    assert unknown.status_code == 404


async def test_projects_are_made_renamed_suspended_and_resumed(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.ADMIN)
    ada = await _in(visit(), ADA)
    made = await ada.post(_of(acme, "projects"), {"name": "red"})
    path = _of(acme, f"projects/{made.json()['id']}")
    assert (await ada.post(_of(acme, "projects"), {"name": "red"})).status_code == 409
    assert (await ada.patch(path, {"name": "main"})).status_code == 409
    assert (await ada.patch(path, {"name": "blue"})).json()["name"] == "blue"
    assert (await ada.post(f"{path}/suspend")).status_code == 204
    assert (await ada.get(path)).json()["status"] == "suspended"
    assert (await ada.post(f"{path}/resume")).status_code == 204
    assert (await ada.get(path)).json()["status"] == "active"
    renamed = await ada.patch(f"/api/v1/tenants/ten_{acme.tenant.id.hex}", {"name": "Acme & Sons"})
    assert renamed.json()["name"] == "Acme & Sons"


async def test_service_accounts_live_and_die_with_their_keys(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    ada = await _in(visit(), ADA)
    accounts = _of(acme, f"projects/prj_{acme.project.id.hex}/service-accounts")
    made = await ada.post(accounts, {"name": "ci"})
    assert (made.status_code, made.json()["role"], made.json()["status"]) == (201, "developer", "active")
    assert (await ada.post(accounts, {"name": "ci"})).status_code == 409
    path = _of(acme, f"service-accounts/{made.json()['id']}")
    from core.ids import IdKind, parse_id

    owner = KeyOwner(None, parse_id(IdKind.SERVICE_ACCOUNT, made.json()["id"]))
    async with db.transaction(at_desk.sessions) as session:
        _, secret = await api_keys.create(
            session, acme.tenant.id, acme.project.id, name="ci key", pepper=PEPPER, owner=owner
        )
    assert await _refusal(at_desk, secret) == ""
    assert (await ada.patch(path, {"status": "suspended"})).json()["status"] == "suspended"
    assert await _refusal(at_desk, secret) == "OWNER_SUSPENDED"
    assert (await ada.patch(path, {"status": "active", "name": "build"})).json()["name"] == "build"
    assert await _refusal(at_desk, secret) == ""
    assert (await ada.delete(path)).status_code == 204
    assert await _refusal(at_desk, secret) == "OWNER_SUSPENDED"
    assert (await ada.patch(path, {"status": "active"})).status_code == 404
    assert (await ada.post(accounts, {"name": "build"})).status_code == 201
    assert await _refusal(at_desk, secret) == "OWNER_SUSPENDED"
    assert [one["name"] for one in (await ada.get(_of(acme, "service-accounts"))).json()["items"]] == ["build"]


async def test_an_admin_makes_no_service_account_above_themself(acme: Customer, at_desk: Services, visit: Open) -> None:
    await _member(at_desk, acme, ADA, Role.ADMIN)
    ada = await _in(visit(), ADA)
    accounts = _of(acme, f"projects/prj_{acme.project.id.hex}/service-accounts")
    assert (await ada.post(accounts, {"name": "x", "role": "owner"})).json()["code"] == "ROLE_ABOVE_YOURS"
    made = (await ada.post(accounts, {"name": "x", "role": "admin"})).json()["id"]
    assert (await ada.patch(_of(acme, f"service-accounts/{made}"), {"role": "owner"})).status_code == 403


@pytest.mark.parametrize("how", ["removed", "suspended", "person suspended", "person deleted"])
async def test_keys_of_whoever_is_out_are_refused(acme: Customer, at_desk: Services, visit: Open, how: str) -> None:
    await _member(at_desk, acme, ADA, Role.OWNER)
    bob = await _member(at_desk, acme, BOB, Role.DEVELOPER)
    async with db.transaction(at_desk.sessions) as session:
        _, secret = await api_keys.create(
            session, acme.tenant.id, acme.project.id, name="bob's", pepper=PEPPER, owner=KeyOwner(bob.id, None)
        )
    assert await _refusal(at_desk, secret) == ""
    ada, root = await _in(visit(), ADA), visit()
    root.headers = dict((await operator_person(at_desk.sessions, OperatorRole.ADMIN)).headers)
    revisions = await _revisions(at_desk)
    if how == "removed":
        await ada.delete(await _id(ada, acme, BOB))
    elif how == "suspended":
        await ada.patch(await _id(ada, acme, BOB), {"status": "suspended"})
    elif how == "person suspended":
        await root.post(f"/api/v1/admin/people/per_{bob.id.hex}/suspend")
    else:
        await root.delete(f"/api/v1/admin/people/per_{bob.id.hex}")
    assert await _refusal(at_desk, secret) == "OWNER_SUSPENDED"
    assert (await _revisions(at_desk))[len(revisions) :] == [("person", bob.id)]
    assert len(revisions) < len(await _revisions(at_desk))
    await local_person(at_desk, f"x{BOB}")
    assert await _refusal(at_desk, secret) == "OWNER_SUSPENDED"


async def _revisions(services: Services) -> list[tuple[str, object]]:
    async with db.transaction(services.sessions) as session:
        rows = await session.execute(text("SELECT kind, entity_id FROM config_change ORDER BY revision"))
        return [(row.kind, row.entity_id) for row in rows]


async def test_operators_find_suspend_resume_and_delete_people(at_desk: Services, visit: Open) -> None:
    bob = await local_person(at_desk, BOB)
    here, root = await _in(visit(), BOB), visit()
    root.headers = dict((await operator_person(at_desk.sessions, OperatorRole.SUPPORT)).headers)
    path = f"/api/v1/admin/people/per_{bob.id.hex}"
    (found,) = (await root.get("/api/v1/admin/people", params={"email": "BOB@"})).json()["items"]
    assert (found["id"], found["status"]) == (f"per_{bob.id.hex}", "active")
    assert (await root.post(f"{path}/suspend")).status_code == 204
    assert not await here.signed_in()
    assert (await root.get(path)).json()["status"] == "suspended"
    assert (await root.post(f"{path}/resume")).status_code == 204
    assert (await here.sign_in(BOB, PASSWORD)).status_code == 200
    assert (await root.delete(path)).status_code == 403
    root.headers = dict((await operator_person(at_desk.sessions, OperatorRole.ADMIN)).headers)
    assert (await root.delete(path)).status_code == 204
    assert (await root.get(path)).status_code == 404
    assert (await root.post(f"{path}/resume")).status_code == 404
    assert (await root.get("/api/v1/admin/people", params={"email": BOB})).json()["items"] == []
    assert not await here.signed_in()


async def test_support_cannot_lock_an_operator_out(at_desk: Services, visit: Open) -> None:
    boss = await operator_person(at_desk.sessions, OperatorRole.ADMIN)
    root = visit()
    root.headers = dict((await operator_person(at_desk.sessions, OperatorRole.SUPPORT)).headers)
    assert (await root.post(f"/api/v1/admin/people/per_{boss.person.id.hex}/suspend")).status_code == 403
    root.headers = dict((await operator_person(at_desk.sessions, OperatorRole.ADMIN)).headers)
    assert (await root.post(f"/api/v1/admin/people/per_{boss.person.id.hex}/suspend")).status_code == 204


async def test_the_last_operator_with_every_right_keeps_it(at_desk: Services, visit: Open) -> None:
    boss = await operator_person(at_desk.sessions, OperatorRole.ADMIN)
    root = visit()
    root.headers = dict(boss.headers)
    (mine,) = (await root.get("/api/v1/admin/operators")).json()["items"]
    path = f"/api/v1/admin/operators/{mine['id']}"
    assert (await root.patch(path, {"role": "finance"})).json()["code"] == "LAST_OPERATOR"
    assert (await root.post(f"{path}/disable")).json()["code"] == "LAST_OPERATOR"
    program = await root.post("/api/v1/admin/operators", {"name": "billing job", "role": "finance"})
    assert (program.json()["role"], program.json()["person_id"]) == ("finance", None)
    token = (await root.post(f"/api/v1/admin/operators/{program.json()['id']}/tokens", {})).json()["token"]
    job = visit()
    job.headers = {"authorization": f"Bearer {token}"}
    tenants = "/api/v1/admin/tenants"
    assert (await job.get(tenants)).status_code == 200
    assert (await job.post(tenants, {"name": "x", "currency": "USD"})).status_code == 403
    promoted = await root.patch(f"/api/v1/admin/operators/{program.json()['id']}", {"role": "admin"})
    assert promoted.json()["role"] == "admin"
    assert (await job.post(tenants, {"name": "x", "currency": "USD"})).status_code == 201
    assert (await root.patch(path, {"role": "support"})).status_code == 200
    assert (await root.post(tenants, {"name": "y", "currency": "USD"})).status_code == 403


async def test_ids_of_another_tenant_and_of_nothing_look_alike(acme: Customer, at_desk: Services, visit: Open) -> None:
    """Every member's route with an id of its own: somebody else's is not found, in the same words as nobody's."""
    theirs = await customer(at_desk.sessions)
    await _member(at_desk, acme, ADA, Role.OWNER)
    await _member(at_desk, theirs, BOB, Role.OWNER)
    ada, bob = await _in(visit(), ADA), await _in(visit(), BOB)
    project = _of(theirs, f"projects/prj_{theirs.project.id.hex}")
    their_member = (await _id(bob, theirs, BOB)).rpartition("/")[2]
    their_account = (await bob.post(f"{project}/service-accounts", {"name": "ci"})).json()["id"]
    their_invite = (await bob.post(_of(theirs, "invites"), {"email": CARL, "role": "viewer"})).json()["id"]
    body = {"name": "x"}
    for method, path, theirs_id, sent in (
        ("GET", "members/{}", their_member, None),
        ("PATCH", "members/{}", their_member, {"role": "viewer"}),
        ("DELETE", "members/{}", their_member, None),
        ("PATCH", "service-accounts/{}", their_account, body),
        ("DELETE", "service-accounts/{}", their_account, None),
        ("POST", "invites/{}/resend", their_invite, None),
        ("POST", "invites/{}/revoke", their_invite, None),
        ("GET", "projects/{}", f"prj_{theirs.project.id.hex}", None),
        ("PATCH", "projects/{}", f"prj_{theirs.project.id.hex}", body),
        ("POST", "projects/{}/suspend", f"prj_{theirs.project.id.hex}", None),
        ("POST", "projects/{}/resume", f"prj_{theirs.project.id.hex}", None),
        ("POST", "projects/{}/service-accounts", f"prj_{theirs.project.id.hex}", body),
    ):
        nothing = f"{theirs_id[:4]}{'0' * 32}"
        answers = [await ada.call(method, _of(acme, path.format(one)), json=sent) for one in (theirs_id, nothing)]
        assert [answer.status_code for answer in answers] == [404, 404], (method, path)
        alike = [{k: v for k, v in answer.json().items() if k != "request_id"} for answer in answers]
        assert alike[0] == alike[1], (method, path)
    assert (await bob.get(project)).json()["status"] == "active"
    assert len((await bob.get(_of(theirs, "members"))).json()["items"]) == 1
