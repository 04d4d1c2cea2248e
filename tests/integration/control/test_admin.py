"""Operators make tenants, projects and keys."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

from core import db
from core.ids import IdKind, parse_id
from tenants import principals
from tenants.credentials import digest
from tests.factories.tenants import PEPPER, changed
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"


async def _tenant(admin: Client, **fields: Any) -> dict[str, Any]:
    answer = await admin.post(f"{ADMIN}/tenants", {"name": "Acme", "currency": "USD", **fields})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def _key(admin: Client, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Make tenant, project and key; return the path of the tenant and the answer with the secret."""
    tenant = f"{ADMIN}/tenants/{(await _tenant(admin))['id']}"
    project = (await admin.post(f"{tenant}/projects", {"name": "main"})).json()
    answer = await admin.post(f"{tenant}/projects/{project['id']}/keys", {"name": "first", **fields})
    assert answer.status_code == 201, answer.text
    return tenant, answer.json()


async def test_a_tenant_is_made_read_listed_and_changed(admin: Client) -> None:
    made = await _tenant(admin, tz="Asia/Shanghai", currency="CNY", billing_mode="postpaid")
    assert made["id"].startswith("ten_")
    assert {k: v for k, v in made.items() if k not in {"id", "created_at"}} == {
        "name": "Acme",
        "currency": "CNY",
        "tz": "Asia/Shanghai",
        "status": "active",
        "billing_mode": "postpaid",
        "plan_id": "pln_00000000000070008000000000000001",
    }
    path = f"{ADMIN}/tenants/{made['id']}"
    assert (await admin.get(path)).json() == made
    assert (await admin.get(f"{ADMIN}/tenants")).json() == {"items": [made], "next_after": None}
    changed = await admin.patch(path, {"status": "suspended"})
    assert changed.json() == {**made, "status": "suspended"}
    assert (await admin.get(path)).json() == changed.json()


async def test_the_secret_is_shown_once(admin: Client, sessions: db.Sessions) -> None:
    tenant, made = await _key(admin, model_patterns=["smol*"], tier_max="standard")
    key, secret = made["api_key"], made["secret"]
    assert (key["prefix"], key["last4"]) == (secret[:7], secret[-4:])
    for path in (f"{tenant}/keys", f"{tenant}/keys/{key['id']}", f"{ADMIN}/audit"):
        answer = await admin.get(path)
        assert answer.status_code == 200
        assert secret not in answer.text
    async with db.transaction(sessions) as session:
        principal = (await principals.load_all(session))[digest(PEPPER, secret)]
    assert (principal.model_patterns, principal.tier_max.label) == (("smol*",), "standard")


async def test_a_revoked_key_stops_working_and_gateways_are_told(admin: Client, sessions: db.Sessions) -> None:
    tenant, made = await _key(admin)
    key_id = made["api_key"]["id"]
    answer = await admin.post(f"{tenant}/keys/{key_id}/revoke")
    assert answer.status_code == 200
    assert answer.json()["revoked_at"] is not None
    assert (await admin.post(f"{tenant}/keys/{key_id}/revoke")).json() == answer.json()
    uuid = parse_id(IdKind.API_KEY, key_id)
    found = await changed(sessions, "api_key", uuid)
    async with db.transaction(sessions) as session:
        newest = (
            await session.execute(text("SELECT kind, entity_id FROM config_change ORDER BY revision DESC"))
        ).first()
    assert [value and value.refusal for value in found.values()] == ["KEY_REVOKED"]
    assert newest is not None
    assert tuple(newest) == ("api_key", uuid)


async def test_lists_are_paged_newest_first(admin: Client) -> None:
    made = [(await _tenant(admin, name=f"t{n}"))["name"] for n in range(5)][::-1]
    names, after, pages = [], None, 0
    while True:
        params = {"limit": 2} if after is None else {"limit": 2, "after": after}
        page = (await admin.get(f"{ADMIN}/tenants", params=params)).json()
        names += [item["name"] for item in page["items"]]
        after, pages = page["next_after"], pages + 1
        if after is None:
            break
    assert (names, pages) == (made, 3)


async def test_pages_are_bounded(admin: Client) -> None:
    for params in ({"limit": 0}, {"limit": 201}, {"limit": "x"}, {"after": "nonsense"}):
        answer = await admin.get(f"{ADMIN}/tenants", params=params)
        assert answer.status_code in {400, 422}, params
        assert answer.json()["code"] == "INVALID_REQUEST"


async def test_every_change_leaves_one_audit_record(admin: Client) -> None:
    tenant, made = await _key(admin)
    tenant_id = tenant.rpartition("/")[2]
    revoked = await admin.post(f"{tenant}/keys/{made['api_key']['id']}/revoke")
    await admin.patch(f"{tenant}/projects/{made['api_key']['project_id']}", {"status": "suspended"})
    records = (await admin.get(f"{ADMIN}/audit", params={"tenant_id": tenant_id})).json()["items"]
    assert [record["action"] for record in records] == [
        "project.update",
        "api_key.revoke",
        "api_key.create",
        "project.create",
        "tenant.create",
    ]
    assert {record["actor_kind"] for record in records} == {"operator"}
    assert all(record["actor_id"].startswith("opr_") for record in records)
    assert {record["tenant_id"] for record in records} == {tenant_id}
    assert records[1]["request_id"] == revoked.headers["x-request-id"]
    project_id = made["api_key"]["project_id"]
    targets = [project_id, made["api_key"]["id"], made["api_key"]["id"], project_id, tenant_id]
    assert [record["target_id"] for record in records] == targets
    assert all(record["id"].startswith("aud_") for record in records)
    older = await admin.get(f"{ADMIN}/audit", params={"after": records[1]["id"], "tenant_id": tenant_id})
    assert older.json()["items"] == records[2:]


async def test_a_refused_change_leaves_none(admin: Client) -> None:
    await _tenant(admin)
    refused = await admin.post(f"{ADMIN}/tenants", {"name": "Acme", "currency": "USD"})
    assert (refused.status_code, refused.json()["code"], refused.json()["param"]) == (409, "NAME_TAKEN", "name")
    assert len((await admin.get(f"{ADMIN}/audit")).json()["items"]) == 1


BAD_BODIES: tuple[Any, ...] = (
    {"name": "x", "currency": "EUR"},
    {"name": "x"},
    {"name": "", "currency": "USD"},
    {"name": "a\x01b", "currency": "USD"},
    {"name": " x ", "currency": "USD"},
    {"name": "x" * 121, "currency": "USD"},
    {"name": 5, "currency": "USD"},
    {"name": "x", "currency": "USD", "surprise": 1},
    {"name": "x", "currency": "USD", "tz": 7},
    {"name": "x", "currency": "USD", "credit_limit": 1.5},
    [],
    "x",
    None,
)


async def test_bad_bodies_are_named_and_never_quoted(admin: Client) -> None:
    for body in BAD_BODIES:
        answer = await admin.post(f"{ADMIN}/tenants", body)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (422, "INVALID_REQUEST"), body
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["errors"]
        assert all(set(error) == {"loc", "type", "message"} for error in problem["errors"])


async def test_what_is_wrong_is_said_in_words_of_the_api(admin: Client) -> None:
    """No pattern, no Python: `curl -d` sends JSON as a form, which is the first thing that goes wrong."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    form = await admin.call("POST", f"{ADMIN}/tenants", content=b'{"name":"x"}', headers=headers)
    assert form.json()["detail"] == "body: Send a JSON object, with the header Content-Type: application/json."
    spaces = (await admin.post(f"{ADMIN}/tenants", {"name": " x", "currency": "USD"})).json()["detail"]
    assert spaces.startswith("body.name: ")
    assert "pattern" not in spaces
    assert "/api/openapi.json" in spaces


async def test_a_secret_in_the_wrong_place_is_not_echoed(admin: Client) -> None:
    secret = "tg_verysecretverysecret"
    answer = await admin.post(f"{ADMIN}/tenants", {"name": [secret], "currency": secret, "tz": {"x": secret}})
    assert answer.status_code == 422
    assert secret not in answer.text


async def test_broken_json_is_a_client_error(admin: Client) -> None:
    for content in (b"{", b'{"name": "x"', b"\xff", b"nonsense", b'{"name": "\\ud800", "currency": "USD"}'):
        answer = await admin.call(
            "POST", f"{ADMIN}/tenants", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code in {400, 422}
        assert answer.json()["code"] == "INVALID_REQUEST"


async def test_a_body_beyond_the_limit_is_refused(admin: Client) -> None:
    answer = await admin.post(f"{ADMIN}/tenants", {"name": "x" * 1_000_001, "currency": "USD"})
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


async def test_a_body_without_a_length_is_counted(admin: Client) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 65_536

    answer = await admin.call("POST", f"{ADMIN}/tenants", content=endless())
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


async def test_a_key_that_would_have_expired_is_refused(admin: Client) -> None:
    tenant, made = await _key(admin, expires_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert made["api_key"]["expires_at"] is not None
    path = f"{tenant}/projects/{made['api_key']['project_id']}/keys"
    for instant in (datetime.now(UTC) - timedelta(seconds=1), datetime(2027, 1, 1)):  # the second has no zone
        answer = await admin.post(path, {"name": "late", "expires_at": instant.isoformat()})
        assert answer.status_code in {400, 422}
        assert "expires_at" in answer.json()["param"]
