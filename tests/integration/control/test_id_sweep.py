"""Every id in every path, swapped for somebody else's: 404, and not to be told from an id of nothing."""

import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry

from api.permissions import MY_TENANT, RULES, TENANT, CallerKind
from billing import ledger
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.types import PriceSchedule
from core import db
from core.clock import SystemClock
from core.ids import IdKind, format_id, new_uuid, parse_id
from core.money import Currency
from core.tiers import Tier
from tenants.types import OperatorRole, Role
from tests.factories import billing as make
from tests.factories.people import member, operator_person
from tests.factories.tenants import Customer, customer
from tests.integration.control.conftest import Client

Ids = dict[str, str]
# What a required member of a body is given, by its name: enough to pass the schema, so that the id is looked up.
VALUES: Mapping[str, Any] = {
    "amount": 5,
    "billing_mode": "prepaid",
    "confirm_name": "x",
    "email": "somebody@example.com",
    "metric": "requests_per_minute",
    "name": "x",
    "note": "n",
    "overlap_s": 0,
    "reason": "because",
    "role": "viewer",
    "usage": {},
}


def _sample(document: dict[str, Any], operation: dict[str, Any]) -> Any:
    """Return a body with the members that the operation's schema requires."""
    body = operation.get("requestBody")
    if body is None:
        return None
    schema = body["content"]["application/json"]["schema"]
    name = schema.get("$ref", "").rpartition("/")[2]
    required = document["components"]["schemas"][name].get("required", []) if name else []
    return {member: VALUES[member] for member in required}


async def _made(owner: Client, made: Customer, sessions: db.Sessions) -> Ids:
    """Make one of everything that a tenant has, by the routes of its owner."""
    tenant = f"/api/v1/tenants/ten_{made.tenant.id.hex}"
    ids = {
        "tenant_id": f"ten_{made.tenant.id.hex}",
        "project_id": f"prj_{made.project.id.hex}",
        "key_id": f"key_{made.key.id.hex}",
    }
    limit = {"metric": "requests_per_minute", "amount": 5, "reason": "a test"}
    put = await owner.call("PUT", f"{tenant}/projects/{ids['project_id']}/limits", json=limit)
    assert put.status_code == 200, put.text
    ids["limit_id"] = put.json()["id"]
    changes = await owner.get(f"{tenant}/limit-changes")
    ids["limit_change_id"] = changes.json()["items"][0]["id"]
    asked = await owner.post(f"{tenant}/limit-requests", {**limit, "amount": 700_000, "key_id": ids["key_id"]})
    assert asked.status_code == 201, asked.text
    ids["limit_request_id"] = asked.json()["id"]
    members = await owner.get(f"{tenant}/members")
    ids["member_id"] = members.json()["items"][0]["id"]
    invited = await owner.post(f"{tenant}/invites", {"email": f"{made.tenant.id.hex}@example.com", "role": "viewer"})
    assert invited.status_code == 201, invited.text
    ids["invite_id"] = invited.json()["id"]
    account = await owner.post(
        f"{tenant}/projects/{ids['project_id']}/service-accounts", {"name": "robot", "role": "developer"}
    )
    assert account.status_code == 201, account.text
    ids["service_account_id"] = account.json()["id"]
    return ids


async def _money(admin: Client, sessions: db.Sessions, tenant: str) -> Ids:
    """Make what a tenant's books have, by the routes of operators."""
    async with db.transaction(sessions) as session:
        await ledger.open_tenant(session, parse_id(IdKind.TENANT, tenant), Currency.USD)
    base = TENANT.format(tenant_id=tenant)
    paid = await admin.post(f"{base}/credits", {"amount": "5"}, headers={"idempotency-key": "paid"})
    grant = {"amount": "5000", "source": "promo", "note": "n"}
    given = await admin.post(f"{base}/grants", grant, headers={"idempotency-key": "given"})
    assert (paid.status_code, given.status_code) == (201, 202), (paid.text, given.text)
    return {
        "transaction_id": paid.json()["transaction_id"],
        "adjustment_id": given.json()["id"],
        "generation_id": format_id(IdKind.GENERATION, await _quarantined(sessions, tenant)),
    }


async def _entitled(admin: Client, tenant: str) -> Ids:
    base = TENANT.format(tenant_id=tenant)
    put = await admin.call("PUT", f"{base}/entitlements", json={"weight": 5, "reason": "a test"})
    changes = await admin.get(f"{base}/entitlement-changes")
    return {"entitlement_id": put.json()["id"], "entitlement_change_id": changes.json()["items"][0]["id"]}


async def _quarantined(sessions: db.Sessions, tenant: str) -> UUID:
    """Keep one event of the tenant from billing; returns its id."""
    schedule = PriceSchedule(new_uuid(), Currency.USD, Tier.STANDARD, 1, 1, 1, 1, 1)
    event = make.event(parse_id(IdKind.TENANT, tenant), schedule, quarantine="odd")
    posting = Posting(sessions, SystemClock(), poster_metrics(CollectorRegistry()))
    assert [posted.quarantined for posted in await posting.post([event])] == [1]
    return event.id


@pytest.fixture
async def worlds(anonymous: Client, sessions: db.Sessions) -> tuple[Client, Ids, Ids]:
    """The owner of one tenant, what that tenant has, and what another has."""
    found = []
    for _ in range(2):
        made = await customer(sessions)
        owner = anonymous.visited_by(await member(sessions, made.tenant.id, Role.OWNER))
        found.append((owner, await _made(owner, made, sessions)))
    (owner, mine), (_, theirs) = found
    return owner, mine, theirs


async def _sweep(client: Client, base: str, mine: Ids, theirs: Ids) -> int:
    """Swap each id of each route below `base`; returns how many swaps were tried."""
    document = (await client.get("/api/openapi.json")).json()
    swaps = 0
    for (method, path), rule in RULES.items():
        names = [name for name in re.findall(r"\{(\w+)\}", path) if name != "tenant_id"]
        if not names or not path.startswith(f"{base}/") or rule.caller not in {CallerKind.MEMBER, CallerKind.OPERATOR}:
            continue
        body = _sample(document, document["paths"][path][method.lower()])
        for name in names:
            nothing = theirs[name].partition("_")[0] + "_" + "0" * 32
            answers = [
                await client.call(
                    method,
                    path.format(**{**mine, name: other}),
                    json=body,
                    params=_query(method),
                    headers={"idempotency-key": "swept"} if method == "POST" else {},
                )
                for other in (theirs[name], nothing)
            ]
            told = (method, path, name, answers[0].text)
            assert [answer.status_code for answer in answers] == [404, 404], told
            alike = [{k: v for k, v in answer.json().items() if k != "request_id"} for answer in answers]
            assert alike[0] == alike[1], told
            swaps += 1
    return swaps


def _query(method: str) -> dict[str, str]:
    return {"reason": "because"} if method == "DELETE" else {}


async def test_an_owner_reaches_nothing_of_others(worlds: tuple[Client, Ids, Ids]) -> None:
    owner, mine, theirs = worlds
    assert await _sweep(owner, MY_TENANT, mine, theirs) >= 15


async def test_an_operator_reaches_a_thing_only_through_its_own_tenant(
    worlds: tuple[Client, Ids, Ids], anonymous: Client, sessions: db.Sessions
) -> None:
    _, mine, theirs = worlds
    admin = anonymous.visited_by(await operator_person(sessions, OperatorRole.ADMIN))
    for ids in (mine, theirs):
        ids.update(await _entitled(admin, ids["tenant_id"]))
        ids.update(await _money(admin, sessions, ids["tenant_id"]))
    assert await _sweep(admin, TENANT, mine, theirs) >= 15


async def test_the_swept_things_are_there(worlds: tuple[Client, Ids, Ids]) -> None:
    """Else a 404 would say nothing: every id that can be read alone is read by its owner."""
    owner, mine, _ = worlds
    read = 0
    for method, path in RULES:
        if method == "GET" and path.startswith(f"{MY_TENANT}/") and re.search(r"_id\}$", path):
            answer = await owner.get(path.format(**mine))
            assert answer.status_code == 200, (path, answer.text)
            read += 1
    assert read >= 2
