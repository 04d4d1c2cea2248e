"""Operators say what tenants weigh and what they are promised: what is refused, kept, undone and left in the trail."""

import asyncio
from typing import Any

import pytest

from core import db
from core.ids import IdKind, format_id
from tenants import entitlements
from tests.factories.catalog import deploy
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
PLAN = f"{ADMIN}/plans/pln_00000000000070008000000000000001"


async def _tenant(sessions: db.Sessions) -> str:
    return f"{ADMIN}/tenants/{format_id(IdKind.TENANT, (await customer(sessions)).tenant.id)}"


async def _put(admin: Client, owner: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await admin.call("PUT", f"{owner}/entitlements", json={"reason": "as agreed", **body})
    return answer.status_code, answer.json()


async def test_an_entitlement_is_said_changed_undone_and_removed(admin: Client, sessions: db.Sessions) -> None:
    await deploy(sessions, "small", inflight_max=20)
    tenant = await _tenant(sessions)
    status, first = await _put(admin, tenant, model="small", guarantee=4, deserved=8, capability=12)
    assert (status, first["guarantee"], first["deserved"], first["capability"], first["weight"]) == (
        200,
        4,
        8,
        12,
        None,
    )
    _, second = await _put(admin, tenant, model="small", guarantee=2, weight=250)
    assert (second["id"], second["guarantee"], second["deserved"]) == (first["id"], 2, None)
    changes = (await admin.get(f"{tenant}/entitlement-changes")).json()["items"]
    assert [(c["before"] and c["before"]["guarantee"], c["after"]["guarantee"]) for c in changes] == [(4, 2), (None, 4)]
    assert {c["reason"] for c in changes} == {"as agreed"}
    undo = f"{tenant}/entitlement-changes/{changes[0]['id']}/revert"
    undone = await admin.post(undo, {"reason": "a mistake"})
    assert (undone.status_code, undone.json()["reverts"]) == (200, changes[0]["id"])
    (now,) = (await admin.get(f"{tenant}/entitlements")).json()["items"]
    assert (now["guarantee"], now["deserved"], now["capability"], now["weight"]) == (4, 8, 12, None)
    again = await admin.post(undo, {"reason": "a mistake"})
    assert (again.status_code, again.json()["code"]) == (409, "NOTHING_TO_REVERT")
    gone = await admin.call("DELETE", f"{tenant}/entitlements/{now['id']}", params={"reason": "over"})
    assert (gone.status_code, (await admin.get(f"{tenant}/entitlements")).json()["items"]) == (200, [])
    trail = (await admin.get(f"{ADMIN}/audit", params={"action": "entitlement."})).json()["items"]
    assert [record["action"] for record in trail] == [
        "entitlement.remove",
        "entitlement.revert",
        "entitlement.set",
        "entitlement.set",
    ]
    assert trail[2]["details"]["before"]["guarantee"] == 4
    assert trail[1]["target_id"] == undone.json()["id"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "weight"),
        ({"guarantee": 1}, "model"),
        ({"model": "small", "guarantee": 5, "deserved": 4}, "deserved"),
        ({"model": "small", "guarantee": 5, "capability": 4}, "capability"),
        ({"model": "small", "deserved": 5, "capability": 4}, "capability"),
        ({"model": "small", "capability": 0}, "capability"),
    ],
)
async def test_what_contradicts_itself_is_refused_by_name(
    admin: Client, sessions: db.Sessions, body: dict[str, Any], param: str
) -> None:
    await deploy(sessions, "small", inflight_max=20)
    status, told = await _put(admin, await _tenant(sessions), **body)
    assert (status, told["param"]) == (400, param)


async def test_guarantees_fit_in_the_cap_of_each_deployment(admin: Client, sessions: db.Sessions) -> None:
    """The sum over tenants, however it comes to be too much: by a guarantee, an undone change, or a lower cap."""
    one, other = await _tenant(sessions), await _tenant(sessions)
    deployment = await deploy(sessions, "small", inflight_max=10)
    assert (await _put(admin, one, model="small", guarantee=6))[0] == 200
    status, told = await _put(admin, other, model="small", guarantee=5)
    assert (status, told["code"], told["guaranteed"], told["inflight_max"]) == (409, "OVERPROMISED", 11, 10)
    assert (await _put(admin, other, model="small", guarantee=4))[0] == 200
    path = f"{ADMIN}/deployments/{format_id(IdKind.DEPLOYMENT, deployment)}"
    for cap, code in ((9, "OVERPROMISED"), (0, "NO_CAP")):
        refused = await admin.call("PATCH", path, json={"inflight_max": cap})
        assert (refused.status_code, refused.json()["code"]) == (409, code)
    assert (await admin.call("PATCH", path, json={"inflight_max": 10})).status_code == 200
    assert (await _put(admin, one, model="small", guarantee=1))[0] == 200
    assert (await _put(admin, other, model="small", guarantee=9))[0] == 200
    change = (await admin.get(f"{one}/entitlement-changes")).json()["items"][0]["id"]
    undo = await admin.post(f"{one}/entitlement-changes/{change}/revert", {"reason": "r"})
    assert (undo.status_code, undo.json()["code"]) == (409, "OVERPROMISED")


async def test_a_plan_says_a_weight_and_goes_with_it(admin: Client, sessions: db.Sessions) -> None:
    made = (await admin.post(f"{ADMIN}/plans", {"name": "gold"})).json()
    plan = f"{ADMIN}/plans/{made['id']}"
    assert (await _put(admin, plan, weight=300))[1]["weight"] == 300
    assert (await _put(admin, plan, weight=0))[0] == 422
    assert (await _put(admin, plan, weight=1001))[0] == 422
    assert (await admin.call("DELETE", plan, params={"reason": "over"})).status_code == 200


async def test_the_nearest_weight_counts_and_nothing_is_promised_to_who_may_not_call(
    admin: Client, sessions: db.Sessions
) -> None:
    """The tenant's for the model ▸ the tenant's ▸ the plan's for the model ▸ the plan's ▸ 100."""
    await deploy(sessions, "small", inflight_max=10)
    who = (await customer(sessions)).tenant
    tenant = f"{ADMIN}/tenants/{format_id(IdKind.TENANT, who.id)}"

    async def book() -> entitlements.EntitlementBook:
        async with db.transaction(sessions) as session:
            return await entitlements.load(session)

    weights = [(await book()).weight(who.id, who.plan_id, "small")]
    for owner, body in (
        (PLAN, {"weight": 2}),
        (PLAN, {"weight": 3, "model": "small"}),
        (tenant, {"weight": 4}),
        (tenant, {"weight": 5, "model": "small", "guarantee": 3}),
    ):
        assert (await _put(admin, owner, **body))[0] == 200
        weights.append((await book()).weight(who.id, who.plan_id, "small"))
    assert weights == [100, 2, 3, 4, 5]
    assert [figures.guarantee for _, figures in (await book()).promised("small")] == [3]
    assert (await admin.call("PATCH", tenant, json={"status": "suspended", "reason": "r"})).status_code == 200
    assert list((await book()).promised("small")) == []


async def test_a_cap_and_guarantees_set_at_once_wait_for_each_other(admin: Client, sessions: db.Sessions) -> None:
    """Whatever comes first, the sum fits in the cap afterwards, and nobody gets a 503."""
    deployment = await deploy(sessions, "small", inflight_max=10)
    path = f"{ADMIN}/deployments/{format_id(IdKind.DEPLOYMENT, deployment)}"
    tenants = [await _tenant(sessions) for _ in range(3)]
    for cap in (3, 10, 3, 10):
        calls = [_put(admin, tenant, model="small", guarantee=3 + (cap == 3)) for tenant in tenants]
        patch = admin.call("PATCH", path, json={"inflight_max": cap})
        answers, changed = await asyncio.gather(asyncio.gather(*calls), patch)
        assert {status for status, _ in answers} | {changed.status_code} <= {200, 409}
        now = [(await admin.get(f"{tenant}/entitlements")).json()["items"] for tenant in tenants]
        guaranteed = sum(item["guarantee"] for items in now for item in items)
        assert guaranteed <= (await admin.get(path)).json()["inflight_max"]
