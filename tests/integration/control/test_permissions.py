"""Every route, every sort of caller: one table decides, and it is complete."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from api.app import ROUTERS, create_app
from api.audit_trail import kind_of_target
from api.deps import get_session
from api.guard import GuardedRoute
from api.permissions import RULES, UNRECORDED, CallerKind, Rule, rule_of
from api.services import Services
from core import db
from core.clock import SystemClock
from tenants import api_keys, operators, projects, tenants
from tenants.types import KeyLimits, Scope
from tests.factories.tenants import PEPPER, Customer, customer
from tests.integration.control.conftest import Client

ALL_SCOPES = KeyLimits(scopes=frozenset(Scope) - {Scope.MANAGE})
WELL_FORMED_ID = "0" * 32
PREFIXES = {
    "tenant_id": "ten",
    "project_id": "prj",
    "member_id": "mem",
    "invite_id": "inv",
    "service_account_id": "sva",
    "session_id": "ses",
    "person_id": "per",
    "key_id": "key",
    "generation_id": "gen",
    "model_id": "mdl",
    "version_id": "mver",
    "intake_id": "itk",
    "deployment_id": "dep",
    "rollout_id": "rol",
    "book_id": "pbk",
    "operator_id": "opr",
    "identity_provider_id": "idp",
    "price_version_id": "pver",
    "limit_id": "lim",
    "limit_change_id": "lch",
    "limit_request_id": "lrq",
    "plan_id": "pln",
    "adjustment_id": "adj",
    "transaction_id": "txn",
}


def _path(template: str, **known: str) -> str:
    """Fill a template: known ids as given, the others well-formed and of nothing."""
    return re.sub(
        r"\{(\w+)\}",
        lambda match: known.get(match[1]) or f"{PREFIXES.get(match[1], 'x')}_{WELL_FORMED_ID}",
        template,
    )


def _routes() -> Iterator[tuple[str, str, Rule]]:
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in sorted(route.methods or ()):
                yield method, route.path_format, rule_of(method, route.path_format)


ROUTES = sorted(_routes(), key=lambda route: route[:2])
GUARDED = [route for route in ROUTES if route[2].caller is not CallerKind.PUBLIC]


def test_the_table_and_the_routes_are_the_same_set(services: Services) -> None:
    assert {(method, path) for method, path, _ in ROUTES} == set(RULES)
    described = create_app(services).openapi()["paths"]
    assert {(m.upper(), path) for path, item in described.items() for m in item} == set(RULES)


def test_every_route_has_the_door() -> None:
    for router in ROUTERS:
        assert all(isinstance(route, GuardedRoute) for route in router.routes)


def test_a_route_without_a_rule_does_not_start() -> None:
    async def surprise() -> None: ...

    with pytest.raises(LookupError, match=r"GET /api/v1/surprise has no rule"):
        GuardedRoute("/api/v1/surprise", surprise, methods=["GET"])


def test_every_change_has_an_action_and_no_read_has_one() -> None:
    for method, path, rule in ROUTES:
        assert bool(rule.action) == (method != "GET" and (method, path) not in UNRECORDED), (method, path)


def _depends_on(dependant: Dependant, call: object) -> bool:
    return any(found.call is call or _depends_on(found, call) for found in dependant.dependencies)


def test_every_change_is_in_an_audited_transaction_and_no_read_is() -> None:
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            audited = _depends_on(route.dependant, get_session)
            unrecorded = {(method, route.path_format) for method in route.methods or ()} <= UNRECORDED
            assert audited == (route.methods != {"GET"} and not unrecorded), route.path


async def _every(client: Client, headers: dict[str, str] | None = None) -> list[tuple[str, str, httpx.Response]]:
    """Call every guarded route with a body that no schema allows: the door must answer before it is looked at."""
    return [
        (method, path, await client.call(method, _path(path), content=b"{not json", headers=headers or {}))
        for method, path, _ in GUARDED
    ]


async def test_without_a_credential_every_route_answers_401(anonymous: Client) -> None:
    for method, path, answer in await _every(anonymous):
        assert answer.status_code == 401, (method, path, answer.text)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["code"] == "INVALID_API_KEY"


async def test_what_is_no_credential_of_ours_answers_401(anonymous: Client) -> None:
    for text in (
        "",
        "Bearer",
        "Bearer ",
        "Basic dTpw",
        "Bearer nonsense",
        "Bearer tg_x",
        f"Bearer tg_{'0' * 46}",
        "tg_x",
    ):
        answer = await anonymous.get("/api/v1/admin/tenants", headers={"authorization": text})
        assert answer.status_code == 401, text


async def test_unknown_but_well_formed_credentials_answer_401(anonymous: Client) -> None:
    for credential in (api_keys.mint(), operators.mint()):
        for method, path, answer in await _every(anonymous.acting_as(credential)):
            assert answer.status_code == 401, (method, path)


async def test_a_credential_of_the_wrong_kind_answers_403(
    anonymous: Client, admin: Client, sessions: db.Sessions
) -> None:
    made = await customer(sessions, ALL_SCOPES)
    tenant = anonymous.acting_as(made.secret)
    for kind, client in ((CallerKind.OPERATOR, tenant), (CallerKind.KEY, admin)):
        for method, path, rule in GUARDED:
            if rule.caller is kind:
                answer = await client.call(method, _path(path, tenant_id=f"ten_{made.tenant.id.hex}"))
                assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), (method, path)


async def test_a_key_without_the_scope_answers_403(anonymous: Client, sessions: db.Sessions) -> None:
    made = await customer(sessions, KeyLimits(scopes=frozenset({Scope.INFERENCE})))
    client = anonymous.acting_as(made.secret)
    for method, path, rule in GUARDED:
        if rule.scope is Scope.USAGE_READ:
            answer = await client.call(method, _path(path))
            assert (answer.status_code, answer.json()["code"]) == (403, "SCOPE_MISSING"), (method, path)


async def test_ids_of_nothing_and_of_others_look_alike(admin: Client, sessions: db.Sessions) -> None:
    mine, theirs = await customer(sessions), await customer(sessions)
    of_mine = {
        "tenant_id": f"ten_{mine.tenant.id.hex}",
        "project_id": f"prj_{mine.project.id.hex}",
        "key_id": f"key_{mine.key.id.hex}",
    }
    limit = {"metric": "concurrency", "amount": 1, "reason": "x"}
    bodies: dict[str, object] = {"PATCH": {"status": "active"}, "POST": {"name": "x"}, "PUT": limit}
    endings: dict[str, object] = {"/rotate": {"overlap_s": 0}, "/suspend": {}, "/resume": {}, "/revoke": {}}
    endings["/keys/{key_id}"] = {"name": "x"}
    for method, path, rule in GUARDED:
        if rule.caller is not CallerKind.OPERATOR:
            continue
        body = next((body for end, body in endings.items() if path.endswith(end)), bodies.get(method))
        for name in re.findall(r"\{(project_id|key_id)\}", path):
            theirs_id = {"project_id": f"prj_{theirs.project.id.hex}", "key_id": f"key_{theirs.key.id.hex}"}[name]
            of_nothing = await admin.call(
                method, _path(path, **{**of_mine, name: f"{PREFIXES[name]}_{WELL_FORMED_ID}"}), json=body
            )
            of_others = await admin.call(method, _path(path, **{**of_mine, name: theirs_id}), json=body)
            assert of_nothing.status_code == of_others.status_code == 404, (method, path, of_others.text)
            alike = [{k: v for k, v in a.json().items() if k != "request_id"} for a in (of_nothing, of_others)]
            assert alike[0] == alike[1]


async def test_well_formed_ids_of_nothing_are_not_found(admin: Client) -> None:
    for method, path, rule in GUARDED:
        if method == "GET" and "{" in path and rule.caller is CallerKind.OPERATOR:
            answer = await admin.get(_path(path))
            assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND"), path


async def test_ids_of_another_shape_are_not_found(admin: Client) -> None:
    for text in ("nonsense", "ten_", "prj_" + WELL_FORMED_ID, "ten_" + "z" * 32, "ten_%00", "%2e%2e"):
        assert (await admin.get(f"/api/v1/admin/tenants/{text}")).status_code == 404, text


async def _dead(sessions: db.Sessions, made: Customer, how: str) -> None:
    async with db.transaction(sessions) as session:
        if how == "revoked":
            await api_keys.revoke(session, made.tenant.id, made.key.id, clock=SystemClock())
        elif how == "tenant":
            await tenants.suspend(session, made.tenant.id)
        elif how == "project":
            await projects.suspend(session, made.tenant.id, made.project.id)


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ("revoked", 401, "KEY_REVOKED"),
        ("expired", 401, "KEY_EXPIRED"),
        ("tenant", 403, "TENANT_SUSPENDED"),
        ("project", 403, "PROJECT_SUSPENDED"),
    ],
)
async def test_dead_keys_are_refused_by_their_reason(
    anonymous: Client, sessions: db.Sessions, how: str, status: int, code: str
) -> None:
    expires = datetime.now(UTC) - timedelta(seconds=1) if how == "expired" else None
    made = await customer(sessions, KeyLimits(scopes=frozenset(Scope) - {Scope.MANAGE}, expires_at=expires))
    await _dead(sessions, made, how)
    answer = await anonymous.acting_as(made.secret).get("/api/v1/admin/tenants")
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_a_disabled_operator_is_locked_out(admin: Client, anonymous: Client, sessions: db.Sessions) -> None:
    async with db.transaction(sessions) as session:
        made = await operators.create(session, name="leaver")
        token = await operators.issue_token(session, made.id, pepper=PEPPER)
    assert (await anonymous.acting_as(token).get("/api/v1/admin/tenants")).status_code == 200
    async with db.transaction(sessions) as session:
        await operators.disable(session, made.id, clock=SystemClock())
    assert (await anonymous.acting_as(token).get("/api/v1/admin/tenants")).status_code == 401
    assert (await admin.get("/api/v1/admin/tenants")).status_code == 200


def test_every_action_in_the_trail_is_about_something_with_a_typed_id() -> None:
    """Name in `api/audit_trail.py` what a new action is about, where its first word is no kind of id."""
    actions = {rule.action for rule in RULES.values() if rule.action}
    assert [action for action in sorted(actions) if kind_of_target(action, UUID(int=1)) is None] == []
    told = {"api_key.revoke": "key", "limit.revert": "lch", "model_alias.set": "mver", "session.end": "ses"}
    assert {action: kind_of_target(action, None) for action in told} == told
    assert (kind_of_target("limit.preview", UUID(int=1)), kind_of_target("limit.preview", None)) == ("ten", "pln")
