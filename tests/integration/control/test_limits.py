"""Operators set limits and plans: what the routes take, answer and leave behind."""

from dataclasses import dataclass
from typing import Any

import pytest

from catalog import models
from catalog.types import NewVersion
from core import db
from core.clock import SystemClock
from core.ids import new_uuid
from core.money import Currency
from tenants import refusals
from tenants.refusals import Refusal
from tests.factories.tenants import Customer, customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
DEFAULT_PLAN = "pln_00000000000070008000000000000001"


@dataclass(frozen=True)
class World:
    """An operator and a tenant."""

    admin: Client
    who: Customer

    @property
    def tenant(self) -> str:
        return f"{ADMIN}/tenants/ten_{self.who.tenant.id.hex}"

    @property
    def key(self) -> str:
        return f"{self.tenant}/keys/key_{self.who.key.id.hex}"

    @property
    def project(self) -> str:
        return f"{self.tenant}/projects/prj_{self.who.project.id.hex}"

    async def put(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.admin.call("PUT", f"{path}/limits", json={"reason": "because", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def items(self, path: str) -> list[dict[str, Any]]:
        answer = await self.admin.get(path)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["items"]
        return found


@pytest.fixture
async def world(admin: Client, sessions: db.Sessions) -> World:
    return World(admin, await customer(sessions, currency=Currency.CNY))


async def test_limits_are_set_listed_and_removed(world: World) -> None:
    made = await world.put(world.key, metric="spend_per_month", amount="250.00")
    assert (made["level"], made["amount"], made["mode"], made["set_by"]) == (
        "key",
        "250.000000000000",
        "hard",
        "operator",
    )
    assert await world.items(f"{world.key}/limits") == [made]
    again = await world.put(world.key, metric="spend_per_month", amount="300")
    assert (again["id"], again["amount"]) == (made["id"], "300.000000000000")
    removed = await world.admin.call("DELETE", f"{world.tenant}/limits/{made['id']}", params={"reason": "wrong key"})
    assert removed.status_code == 200
    assert await world.items(f"{world.key}/limits") == []
    gone = await world.admin.call("DELETE", f"{world.tenant}/limits/{made['id']}", params={"reason": "again"})
    assert (gone.status_code, gone.json()["code"]) == (404, "NOT_FOUND")


async def test_the_effective_view_says_where_each_limit_comes_from(world: World) -> None:
    await world.put(world.tenant, level="project", metric="concurrency", amount=8)
    await world.put(world.tenant, metric="spend_per_day", amount="9")
    await world.put(world.key, metric="output_tokens_per_minute", amount=5_000, mode="soft")
    found = await world.items(f"{world.key}/limits/effective")
    assert [(i["level"], i["metric"], i["amount"], i["mode"], i["source"]) for i in found] == [
        ("key", "requests_per_minute", 600_000, "hard", "plan"),
        ("key", "output_tokens_per_minute", 5_000, "soft", "key"),
        ("project", "concurrency", 8, "hard", "tenant"),
        ("tenant", "spend_per_day", "9.000000000000", "hard", "tenant"),
    ]
    of_project = await world.items(f"{world.project}/limits/effective")
    assert [i["source"] for i in of_project] == ["plan", "tenant", "tenant"]  # not that key's


BAD = (
    {"metric": "requests_per_minute", "amount": 1},
    {"metric": "requests_per_minute", "amount": 1, "reason": ""},
    {"metric": "requests_per_minute", "amount": 1, "reason": "  \n"},
    {"metric": "requests_per_minute", "amount": 1, "reason": "x" * 501},
    {"metric": "requests_per_minute", "amount": True, "reason": "x"},
    {"metric": "requests_per_minute", "amount": 1.5, "reason": "x"},
    {"metric": "requests_per_minute", "amount": "1", "reason": "x"},
    {"metric": "requests_per_minute", "amount": -1, "reason": "x"},
    {"metric": "spend_per_day", "amount": 5, "reason": "x"},
    {"metric": "spend_per_day", "amount": "5.", "reason": "x"},
    {"metric": "spend_per_day", "amount": "NaN", "reason": "x"},
    {"metric": "spend_per_day", "amount": "9000001", "reason": "x"},
    {"metric": "spend_per_year", "amount": "1", "reason": "x"},
    {"metric": "concurrency", "amount": 1, "reason": "x", "mode": "maybe"},
    {"metric": "concurrency", "amount": 1, "reason": "x", "key_id": "key_x"},
)


async def test_impossible_limits_are_refused_and_change_nothing(world: World) -> None:
    for body in BAD:
        answer = await world.admin.call("PUT", f"{world.key}/limits", json=body)
        assert answer.status_code in {400, 422}, (body, answer.text)
        assert "constrained" not in answer.text, body  # whichever way an amount was read is our own affair
    missing = await world.admin.call(
        "PUT", f"{world.key}/limits", json={"metric": "concurrency", "amount": 1, "reason": "x", "model": "typo"}
    )
    assert (missing.status_code, missing.json()["param"]) == (404, "model")
    assert await world.items(f"{world.key}/limits") == []
    assert await world.items(f"{world.tenant}/limit-changes") == []


async def test_a_limit_of_a_model_is_kept_by_its_own_name(world: World, sessions: db.Sessions) -> None:
    now = SystemClock().now()
    async with db.transaction(sessions) as session:
        model = await models.create_model(session, name="smol-135m", now=now)
        version = await models.add_version(session, model, NewVersion(context_max=2048), now=now)
        await models.set_alias(session, "smol", version, now=now)
    made = await world.put(world.key, metric="concurrency", amount=1, model="smol")
    assert made["model"] == "smol-135m"
    assert (await world.put(world.key, metric="concurrency", amount=2, model="smol-135m"))["id"] == made["id"]


async def test_history_shows_before_and_after_and_a_change_is_undone(world: World) -> None:
    await world.put(world.key, metric="concurrency", amount=5, reason="flood on Monday")
    await world.put(world.key, metric="concurrency", amount=50, reason="it was a test")
    last, first = await world.items(f"{world.tenant}/limit-changes")
    assert [(c["before"], c["after"], c["reason"]) for c in (first, last)] == [
        (None, 5, "flood on Monday"),
        (5, 50, "it was a test"),
    ]
    assert last["actor_id"].startswith("opr_")
    undo = f"{world.tenant}/limit-changes/{first['id']}/revert"
    refused = await world.admin.post(undo, {"reason": "calm again"})
    assert (refused.status_code, refused.json()["code"], refused.json()["amount"]) == (409, "LIMIT_CHANGED_SINCE", 50)
    done = await world.admin.post(undo, {"reason": "calm again", "force": True})
    assert (done.json()["before"], done.json()["after"], done.json()["reverts"]) == (50, None, first["id"])
    assert await world.items(f"{world.key}/limits") == []
    records = await world.items(f"{ADMIN}/audit")
    changes = [(r["action"], r["details"]) for r in records if r["action"].startswith("limit.")]
    assert [action for action, _ in changes] == ["limit.revert", "limit.set", "limit.set"]
    assert {k: changes[1][1][k] for k in ("level", "metric", "before", "after")} == {
        "level": "key",
        "metric": "concurrency",
        "before": 5,
        "after": 50,
    }


async def test_a_plan_is_made_filled_given_and_deleted(world: World) -> None:
    admin = world.admin
    made = (await admin.post(f"{ADMIN}/plans", {"name": "gold", "description": "For many calls"})).json()
    plan = f"{ADMIN}/plans/{made['id']}"
    assert (await admin.get(plan)).json() == made
    assert [p["name"] for p in await world.items(f"{ADMIN}/plans")] == ["gold", "default"]
    rule = await world.put(plan, level="key", metric="requests_per_minute", amount=900)
    assert (rule["plan_id"], rule["tenant_id"]) == (made["id"], None)
    moved = await admin.call("PUT", f"{world.tenant}/plan", json={"plan_id": made["id"], "reason": "signed"})
    assert moved.json() == made
    assert (await admin.get(world.tenant)).json()["plan_id"] == made["id"]
    found = await world.items(f"{world.key}/limits/effective")
    assert [(i["amount"], i["source"], i["limit_id"]) for i in found] == [(900, "plan", rule["id"])]
    refused = await admin.call("DELETE", plan, params={"reason": "x"})
    assert (refused.status_code, refused.json()["code"], refused.json()["tenants"]) == (409, "PLAN_IN_USE", 1)
    (change,) = await world.items(f"{plan}/limit-changes")
    assert (await admin.post(f"{plan}/limit-changes/{change['id']}/revert", {"reason": "no"})).json()["after"] is None
    await admin.call("PUT", f"{world.tenant}/plan", json={"plan_id": DEFAULT_PLAN, "reason": "left"})
    assert (await admin.call("DELETE", plan, params={"reason": "x"})).status_code == 200
    assert (await admin.get(plan)).status_code == 404
    record = next(r for r in await world.items(f"{ADMIN}/audit") if r["action"] == "tenant.put_on_plan")
    assert record["details"] == {"reason": "left", "before": made["id"], "after": DEFAULT_PLAN}


async def test_a_plan_takes_only_a_price_book_made_for_plans(world: World) -> None:
    admin = world.admin
    books = [
        (await admin.post(f"{ADMIN}/price-books", {"name": "b", "currency": "USD", "for_plan": for_plan})).json()["id"]
        for for_plan in (False, True, True)
    ]
    plan = f"{ADMIN}/plans/{(await admin.post(f'{ADMIN}/plans', {'name': 'gold'})).json()['id']}"
    refused = await admin.patch(plan, {"price_book_id": books[0]})
    assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_PRICE")
    assert (await admin.patch(plan, {"price_book_id": books[1]})).json()["price_book_id"] == books[1]
    assert (await admin.patch(plan, {"description": "x"})).json()["price_book_id"] == books[1]
    assert (await admin.patch(plan, {"price_book_id": None})).json()["price_book_id"] is None
    tenants_own = {"model_id": f"mdl_{'0' * 32}", "tier": "standard", "meter": "input", "unit_price": "1"}
    tenants_own["tenant_id"] = world.tenant.rpartition("/")[2]
    draft = await admin.post(f"{ADMIN}/price-books/{books[1]}/versions", {"items": [tenants_own]})
    assert (draft.status_code, draft.json()["code"]) == (400, "INVALID_PRICE")


def _met(world: World, level: str, mode: str, requests: int, **changes: Any) -> Refusal:
    now = int(SystemClock().now().timestamp())
    values: dict[str, Any] = {
        "id": new_uuid(),
        "at_s": now - 60,
        "span_s": 1,
        "tenant_id": world.who.tenant.id,
        "project_id": world.who.project.id,
        "key_id": world.who.key.id,
        "model_id": new_uuid(),
        "model": "sim",
        "code": "CONCURRENCY_LIMITED",
        "level": level,
        "metric": "concurrency",
        "limit_model": "",
        "mode": mode,
        "requests": requests,
        "input_tokens": 0,
        "output_tokens": 0,
        "sample_request_id": new_uuid(),
        **changes,
    }
    return Refusal(**values)


async def test_a_trial_shows_what_it_would_have_refused_and_becomes_hard_in_one_call(
    world: World, sessions: db.Sessions
) -> None:
    await world.put(world.key, metric="concurrency", amount=3, mode="dark")
    await world.put(world.tenant, metric="concurrency", amount=9)
    other_key, day_s = new_uuid(), 86_400
    met = [
        _met(world, "key", "dark", 7),
        _met(world, "key", "dark", 30, key_id=other_key),
        _met(world, "key", "dark", 500, at_s=int(SystemClock().now().timestamp()) - day_s - 60),
        _met(world, "tenant", "hard", 2, key_id=other_key),
    ]
    async with db.transaction(sessions) as session:
        await refusals.write(session, met)

    async def shown(path: str) -> list[tuple[str, str, int]]:
        items = await world.items(f"{path}/limits/effective")
        return [(i["level"], i["mode"], i["met_24h"]) for i in items if i["metric"] == "concurrency"]

    assert await shown(world.key) == [("key", "dark", 7), ("tenant", "hard", 2)]
    assert await shown(world.project) == [("tenant", "hard", 2)]
    hard = await world.put(world.key, metric="concurrency", amount=4, mode="hard", replaces="dark", reason="7 is few")
    assert [rule["id"] for rule in await world.items(f"{world.key}/limits")] == [hard["id"]]
    newest, _, _, *rest = await world.items(f"{world.tenant}/limit-changes")
    assert (newest["mode"], newest["before"], newest["after"], newest["reason"]) == ("hard", None, 4, "7 is few")
    assert newest["beside"] == {"mode": "dark", "before": 3, "after": None}
    assert rest == []  # the two before are the trial's and the tenant's own
    trail = (await world.admin.get(f"{ADMIN}/audit", params={"action": "limit."})).json()["items"]
    assert [(record["details"]["reason"], record["details"]["after"]) for record in trail[:2]] == [
        ("7 is few", 4),
        ("because", 9),
    ]
    assert trail[0]["target_id"] == hard["id"]
    for replaces in ("dark", "hard"):
        refused = await world.admin.call(
            "PUT",
            f"{world.key}/limits",
            json={"metric": "concurrency", "amount": 5, "replaces": replaces, "reason": "x"},
        )
        assert (refused.status_code, refused.json()["param"]) == (400, "replaces")


async def test_the_trail_says_why_a_limit_was_removed_and_put_back(world: World) -> None:
    made = await world.put(world.key, metric="concurrency", amount=3)
    await world.admin.call("DELETE", f"{world.tenant}/limits/{made['id']}", params={"reason": "wrong key"})
    change = (await world.items(f"{world.tenant}/limit-changes"))[0]
    undone = await world.admin.post(
        f"{world.tenant}/limit-changes/{change['id']}/revert", {"reason": "it was the right key"}
    )
    assert undone.status_code == 200, undone.text
    trail = (await world.admin.get(f"{ADMIN}/audit", params={"action": "limit."})).json()["items"]
    assert [(record["action"], record["target_id"], record["details"]["reason"]) for record in trail] == [
        ("limit.revert", undone.json()["id"], "it was the right key"),
        ("limit.remove", made["id"], "wrong key"),
        ("limit.set", made["id"], "because"),
    ]
