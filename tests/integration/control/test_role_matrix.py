"""Every route for every role: what the table says is what happens, for members and for operators."""

import re
from collections.abc import Mapping

import httpx
import pytest

from api.permissions import MY_TENANT, RULES, CallerKind, Rule
from core import db
from core.ids import IdKind
from tenants.roles import OPERATOR_PERMISSIONS, PERMISSIONS
from tenants.types import OperatorRole, Role
from tests.factories.people import member, operator_person, person
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

NOTHING = "0" * 32


def _routes(kind: CallerKind) -> list[tuple[str, str, Rule]]:
    return [(method, path, rule) for (method, path), rule in RULES.items() if rule.caller is kind]


def _path(template: str, known: Mapping[str, str] | None = None) -> str:
    """Fill a template with ids: those that are known, else ids of nothing of any kind."""
    return re.sub(r"\{(\w+)\}", lambda match: (known or {}).get(match[1], f"xxx_{NOTHING}"), template)


async def _ask(client: Client, method: str, path: str) -> httpx.Response:
    """Call with a body that no schema allows: only the door may answer before it is looked at."""
    return await client.call(method, path, content=b"{not json")


def _refused(answer: httpx.Response) -> bool:
    """The door's own refusal, not one of the route behind it."""
    return answer.status_code == 403 and "role" in answer.json()["detail"]


@pytest.mark.parametrize("role", list(Role))
async def test_members_do_what_their_role_allows(anonymous: Client, sessions: db.Sessions, role: Role) -> None:
    made = await customer(sessions)
    client = anonymous.visited_by(await member(sessions, made.tenant.id, role))
    known = {"tenant_id": f"ten_{made.tenant.id.hex}", "project_id": f"prj_{made.project.id.hex}"}
    for method, path, rule in _routes(CallerKind.MEMBER):
        assert rule.permission is not None, path
        answer = await _ask(client, method, _path(path, known))
        assert answer.status_code != 401, path
        assert _refused(answer) == (rule.permission not in PERMISSIONS[role]), (method, path, answer.text)


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_in_one_project_reaches_no_other(anonymous: Client, sessions: db.Sessions, role: Role) -> None:
    """What needs the whole tenant is refused; what is a project's is allowed in the own one only."""
    made, other = await customer(sessions), await customer(sessions)
    client = anonymous.visited_by(await member(sessions, made.tenant.id, role, project_id=made.project.id))
    for method, path, rule in _routes(CallerKind.MEMBER):
        allowed = rule.permission in PERMISSIONS[role]
        tenant = {"tenant_id": f"ten_{made.tenant.id.hex}"}
        if "{project_id}" in path:
            mine = await _ask(client, method, _path(path, {**tenant, "project_id": f"prj_{made.project.id.hex}"}))
            assert _refused(mine) != allowed, (method, path)
            theirs = await _ask(client, method, _path(path, {**tenant, "project_id": f"prj_{other.project.id.hex}"}))
            assert _refused(theirs), (method, path)
        else:
            answer = await _ask(client, method, _path(path, tenant))
            assert _refused(answer) != (rule.in_any_project and allowed), (method, path)


@pytest.mark.parametrize("role", list(OperatorRole))
async def test_operators_do_what_their_role_allows(
    anonymous: Client, sessions: db.Sessions, role: OperatorRole
) -> None:
    client = anonymous.visited_by(await operator_person(sessions, role))
    for method, path, rule in _routes(CallerKind.OPERATOR):
        assert rule.operator is not None, path
        answer = await _ask(client, method, _path(path))
        assert answer.status_code != 401, path
        assert _refused(answer) == (rule.operator not in OPERATOR_PERMISSIONS[role]), (method, path, answer.text)


async def test_members_are_no_operators_and_operators_no_members(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
    for method, path, _ in _routes(CallerKind.OPERATOR):
        answer = await _ask(owner, method, _path(path, {"tenant_id": f"ten_{made.tenant.id.hex}"}))
        assert answer.status_code == 403, (method, path)
    operator = anonymous.visited_by(await operator_person(sessions, OperatorRole.ADMIN))
    for method, path, _ in _routes(CallerKind.MEMBER):
        answer = await _ask(operator, method, _path(path, {"tenant_id": f"ten_{made.tenant.id.hex}"}))
        assert answer.status_code == 404, (method, path)


async def test_a_tenant_of_others_is_not_there_for_any_role(anonymous: Client, sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    client = anonymous.visited_by(await member(sessions, mine.tenant.id, Role.OWNER))
    for method, path, _ in _routes(CallerKind.MEMBER):
        assert path.startswith(MY_TENANT), path
        answers = [
            await _ask(client, method, _path(path, {"tenant_id": tenant}))
            for tenant in (f"ten_{theirs.tenant.id.hex}", f"ten_{NOTHING}")
        ]
        assert [answer.status_code for answer in answers] == [404, 404], (method, path)
        alike = [{k: v for k, v in answer.json().items() if k != "request_id"} for answer in answers]
        assert alike[0] == alike[1]
        assert alike[0]["code"] == "NOT_FOUND"


async def test_an_inference_key_manages_nothing(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    client = anonymous.acting_as(made.secret)
    for kind in (CallerKind.MEMBER, CallerKind.PERSON, CallerKind.OPERATOR):
        for method, path, _ in _routes(kind):
            answer = await _ask(client, method, _path(path, {"tenant_id": f"ten_{made.tenant.id.hex}"}))
            assert answer.status_code == 403, (method, path)


async def test_somebody_without_a_membership_sees_no_tenant(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions)
    client = anonymous.visited_by(await person(sessions))
    answer = await client.get(_path(MY_TENANT, {"tenant_id": f"ten_{made.tenant.id.hex}"}))
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    "name", ["x-forwarded-user", "x-remote-user", "x-tidegate-tenant", "x-operator", "remote-user"]
)
async def test_headers_that_claim_an_identity_are_nobody(anonymous: Client, name: str) -> None:
    answer = await anonymous.get("/api/v1/admin/tenants", headers={name: "admin"})
    assert answer.status_code == 401


@pytest.mark.parametrize("host", ["control/api/health?", "control#", "a@control", "control/../api/health"])
async def test_a_strange_host_opens_no_other_route(anonymous: Client, host: str) -> None:
    """CVE-2026-48710: a path made from Host passed for a public one."""
    answer = await anonymous.get("/api/v1/admin/tenants", headers={"host": host})
    assert answer.status_code in {400, 401}


def test_every_kind_of_id_is_told_apart() -> None:
    assert len({kind.value for kind in IdKind}) == len(IdKind)
