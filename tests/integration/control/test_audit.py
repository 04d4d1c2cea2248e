"""The audit trail as operators search and export it."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from starlette.requests import Request

from api.deps import client_ip_of, differences
from core import db
from tenants import audit
from tenants.types import SYSTEM, Actor, ActorKind, AuditFilter, Role
from tests.factories.people import member
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

AUDIT = "/api/v1/admin/audit"
ACME, OTHER, KEY = UUID(int=1), UUID(int=2), UUID(int=3)


async def fill(sessions: db.Sessions) -> None:
    acts: tuple[tuple[Actor, str, UUID | None, UUID | None, dict[str, Any]], ...] = (
        (Actor(ActorKind.OPERATOR, UUID(int=9)), "tenant.create", ACME, ACME, {"name": "Acme, \"Inc.\"\n'50 %'"}),
        (Actor(ActorKind.API_KEY, UUID(int=8)), "api_key.revoke", ACME, KEY, {}),
        (Actor(ActorKind.OPERATOR, UUID(int=9)), "api_key.create", OTHER, None, {"name": "50x"}),
        (SYSTEM, "seed", None, None, {}),
    )
    for actor, action, tenant, target, details in acts:
        async with db.transaction(sessions) as session:
            audit.record(session, actor, action, tenant_id=tenant, target_id=target, details=details)


def lines_of(text: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, text.splitlines())


@pytest.mark.parametrize(
    ("params", "actions"),
    [
        ({}, ["seed", "api_key.create", "api_key.revoke", "tenant.create"]),
        ({"tenant_id": f"ten_{ACME.hex}"}, ["api_key.revoke", "tenant.create"]),
        ({"actor_id": f"opr_{UUID(int=9).hex}"}, ["api_key.create", "tenant.create"]),
        ({"target_id": f"key_{KEY.hex}"}, ["api_key.revoke"]),
        ({"target_id": KEY.hex}, ["api_key.revoke"]),
        ({"action": "api_key."}, ["api_key.create", "api_key.revoke"]),
        ({"action": "pi_key."}, []),
        ({"text": "acme"}, ["tenant.create"]),
        ({"text": "50 %"}, ["tenant.create"]),
        ({"text": "50%"}, []),
        ({"text": "5_x"}, []),
        ({"action": "api_key.", "tenant_id": f"ten_{OTHER.hex}"}, ["api_key.create"]),
    ],
)
async def test_records_are_found_by_what_is_known_of_them(
    admin: Client, sessions: db.Sessions, params: dict[str, str], actions: list[str]
) -> None:
    await fill(sessions)
    answer = await admin.get(AUDIT, params=params)
    assert answer.status_code == 200, answer.text
    assert [record["action"] for record in answer.json()["items"]] == actions


async def test_records_are_found_by_time_and_paged(admin: Client, sessions: db.Sessions) -> None:
    await fill(sessions)
    at = (await admin.get(AUDIT, params={"action": "api_key.revoke"})).json()["items"][0]["recorded_at"]
    late = (await admin.get(AUDIT, params={"since": at})).json()["items"]
    early = (await admin.get(AUDIT, params={"until": at})).json()["items"]
    assert [record["seq"] for record in late] == [4, 3, 2]
    assert [record["seq"] for record in early] == [1]
    seen, after = [], None
    while page := (await admin.get(AUDIT, params={"limit": 1, **({"after": after} if after else {})})).json():
        seen += [record["seq"] for record in page["items"]]
        after = page["next_after"]
        if after is None:
            break
    assert seen == [4, 3, 2, 1]


async def test_a_search_for_text_is_bounded(admin: Client, sessions: db.Sessions) -> None:
    for params in (
        {"text": "x" * 101},
        {"text": "x", "since": "2020-01-01T00:00:00Z"},
        {"tenant_id": "ten_x"},
        {"actor_id": "opr_x"},
        {"since": "yesterday"},
    ):
        answer = await admin.get(AUDIT, params=params)
        assert answer.status_code in {400, 404, 422}, params
    bounded = audit.checked(AuditFilter(text="x"), at := (await _now(sessions)))
    assert bounded.since == at - timedelta(days=92)


async def _now(sessions: db.Sessions) -> Any:
    async with db.transaction(sessions) as session:
        audit.record(session, SYSTEM, "seed")
    async with db.transaction(sessions) as session:
        return (await audit.search(session, AuditFilter(), after=None, limit=1))[0].recorded_at


def rehash(row: dict[str, str]) -> str:
    """What a stranger with the file and the ADR computes."""
    fields: list[Any] = [int(row["seq"]), row["prev_hash"], row["id"], row["recorded_at"], row["actor_kind"]]
    fields += [row["actor_id"] or None, row["client_ip"], row["tenant_id"] or None, row["action"]]
    fields += [row["target_id"] or None, row["request_id"], row["details"]]
    return hashlib.sha256(json.dumps(fields, ensure_ascii=False).encode()).hexdigest()


async def test_an_exported_csv_is_verified_by_a_stranger(admin: Client, sessions: db.Sessions) -> None:
    await fill(sessions)
    answer = await admin.get(f"{AUDIT}/export", params={"format": "csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="audit.csv"'
    *body, manifest = answer.text.splitlines(keepends=True)
    rows = list(csv.DictReader(io.StringIO("".join(body))))
    before = "00" * 32
    for row in rows:
        assert row["prev_hash"] == before
        assert row["hash"] == rehash(row)
        before = row["hash"]
    assert [row["seq"] for row in rows] == ["1", "2", "3", "4"]
    assert manifest == f"# records=4 last_seq=4 last_hash={before} complete=True\n"
    assert (await admin.get(f"{AUDIT}/export", params={"format": "csv"})).text == answer.text


async def test_an_exported_jsonl_has_the_same_records(admin: Client, sessions: db.Sessions) -> None:
    await fill(sessions)
    answer = await admin.get(f"{AUDIT}/export", params={"tenant_id": f"ten_{ACME.hex}"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *rows, last = lines_of(answer.text)
    assert [(row["seq"], row["action"]) for row in rows] == [(1, "tenant.create"), (2, "api_key.revoke")]
    assert rows[0]["details"] == {"name": "Acme, \"Inc.\"\n'50 %'"}
    for row in rows:
        text = json.dumps(row["details"], ensure_ascii=False)
        assert row["hash"] == rehash(row | {"details": text})
    manifest = {"records": 2, "last_seq": 2, "last_hash": rows[1]["hash"], "complete": True}
    assert last == {"manifest": manifest}


async def test_a_long_export_goes_on_where_it_stopped(
    admin: Client, sessions: db.Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "EXPORT_PAGE", 2)
    monkeypatch.setattr(audit, "EXPORT_MAX", 2)
    await fill(sessions)
    seen, after_seq, complete = [], 0, False
    while not complete:
        answer = await admin.get(f"{AUDIT}/export", params={"after_seq": after_seq})
        *rows, last = lines_of(answer.text)
        seen += [row["seq"] for row in rows]
        after_seq, complete = last["manifest"]["last_seq"], last["manifest"]["complete"]
        assert len(rows) <= 2
    assert seen == [1, 2, 3, 4]


async def test_an_empty_export_has_its_manifest(admin: Client) -> None:
    answer = await admin.get(f"{AUDIT}/export", params={"action": "nothing"})
    [last] = lines_of(answer.text)
    assert last == {"manifest": {"records": 0, "last_seq": 0, "last_hash": "00" * 32, "complete": True}}


async def test_what_a_change_changed_is_in_its_record(admin: Client) -> None:
    made = (await admin.post("/api/v1/admin/tenants", {"name": "Acme", "currency": "USD"})).json()
    await admin.patch(f"/api/v1/admin/tenants/{made['id']}", {"status": "suspended", "tz": "UTC"})
    [record] = (await admin.get(AUDIT, params={"action": "tenant.update"})).json()["items"]
    assert record["details"] == {"status": {"from": "active", "to": "suspended"}}
    assert record["client_ip"] == "127.0.0.1"


async def test_members_read_the_trail_of_their_own_organisation(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    """With what they did themselves in full, and of operators only that they acted."""
    mine, theirs = await customer(sessions), await customer(sessions)
    owner = await member(sessions, mine.tenant.id, Role.OWNER)
    client, tenant = anonymous.visited_by(owner), f"/api/v1/tenants/ten_{mine.tenant.id.hex}"
    profile = {"legal_name": "Acme Inc.", "country": "DE"}
    assert (await client.call("PUT", f"{tenant}/billing-profile", json=profile)).status_code == 200
    for made in (mine, theirs):
        await admin.patch(f"/api/v1/admin/tenants/ten_{made.tenant.id.hex}", {"tz": "Europe/Berlin"})
    found = (await client.get(f"{tenant}/audit", params={"tenant_id": f"ten_{theirs.tenant.id.hex}"})).json()["items"]
    assert [(r["action"], r["actor_kind"], r["client_ip"], r["details"]) for r in found] == [
        ("tenant.update", "operator", "", {}),
        ("billing_profile.put", "person", "127.0.0.1", {"changed": ["country", "legal_name"]}),
    ]
    assert [record["actor_id"] for record in found] == [None, f"per_{owner.person.id.hex}"]
    by_me = await client.get(f"{tenant}/audit", params={"actor_id": f"per_{owner.person.id.hex}"})
    assert [record["action"] for record in by_me.json()["items"]] == ["billing_profile.put"]
    for text, actions in (("Berlin", []), ("legal_name", ["billing_profile.put"])):
        searched = await client.get(f"{tenant}/audit", params={"text": text})
        assert [record["action"] for record in searched.json()["items"]] == actions
    viewer = anonymous.visited_by(await member(sessions, mine.tenant.id, Role.VIEWER))
    assert (await viewer.get(f"{tenant}/audit")).status_code == 403


def test_a_difference_hides_what_looks_like_a_secret() -> None:
    before = {"url": "http://u:p4ss@host/", "args": {"api_key": "x", "port": 1}, "same": 1}
    after = {"url": "http://host/", "args": {"api_key": "y", "port": 2}, "same": 1, "new": None}
    assert differences(before, after) == {
        "url": {"from": "http://u:***@host/", "to": "http://host/"},
        "args": {"from": {"api_key": "***", "port": 1}, "to": {"api_key": "***", "port": 2}},
    }


@pytest.mark.parametrize(
    ("client", "shown"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:DB8::1", 1), "2001:db8::1"),
        (("fe80::1%eth0", 0), "fe80::1"),
        (("testclient", 1), ""),
        (("", 0), ""),
        (None, ""),
    ],
)
def test_the_address_is_an_address_or_nothing(client: tuple[str, int] | None, shown: str) -> None:
    assert client_ip_of(Request({"type": "http", "client": client})) == shown
