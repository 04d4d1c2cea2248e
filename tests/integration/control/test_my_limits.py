"""Members: what limits they see, which they may set themselves, and how they ask for higher ones."""

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from core import db
from tenants import api_keys, principals, projects
from tenants.types import DEFAULT_PLAN_ID, LimitLevel, LimitMetric, LimitSlot, Project, Role
from tests.factories.limits import limited, of_key, of_tenant
from tests.factories.people import member
from tests.factories.tenants import PEPPER, Customer, customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"


@dataclass(frozen=True)
class Org:
    """A tenant as one of its members meets it."""

    me: Client
    who: Customer
    paths: dict[str, str] = field(default_factory=dict)

    @property
    def tenant(self) -> str:
        return f"/api/v1/tenants/ten_{self.who.tenant.id.hex}"

    @property
    def project(self) -> str:
        return f"{self.tenant}/projects/prj_{self.who.project.id.hex}"

    @property
    def key(self) -> str:
        return f"{self.project}/keys/key_{self.who.key.id.hex}"

    async def put(self, path: str, **body: Any) -> httpx.Response:
        return await self.me.call("PUT", f"{path}/limits", json={"reason": "thrift", **body})

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.me.post(f"{self.tenant}/limit-requests", {"reason": "we grow", **body})


@pytest.fixture
async def org(anonymous: Client, sessions: db.Sessions) -> Org:
    who = await customer(sessions)
    return Org(anonymous.visited_by(await member(sessions, who.tenant.id, Role.ADMIN)), who)


async def held(sessions: db.Sessions, who: Customer) -> dict[tuple[str, str], int]:
    async with db.transaction(sessions) as session:
        principal = (await principals.load_all(session))[who.digest]
    return {(limit.level.value, limit.metric.value): limit.amount for limit in principal.limits}


async def test_a_tenant_narrows_its_own_keys_and_never_widens_them(org: Org, sessions: db.Sessions) -> None:
    await limited(sessions, of_key(org.who), 300)
    narrower = await org.put(org.key, metric="requests_per_minute", amount=20)
    assert (narrower.status_code, narrower.json()["set_by"]) == (200, "tenant")
    assert await held(sessions, org.who) == {("key", "requests_per_minute"): 20}
    wider = await org.put(org.key, metric="requests_per_minute", amount=301)
    assert (wider.status_code, wider.json()["code"], wider.json()["most"]) == (400, "LIMIT_TOO_HIGH", 300)
    await limited(sessions, of_key(org.who), 10)  # operators go below: the lower holds
    assert await held(sessions, org.who) == {("key", "requests_per_minute"): 10}
    rules = (await org.me.get(f"{org.key}/limits")).json()["items"]
    own = {rule["set_by"]: rule["id"] for rule in rules}
    refused = await org.me.call("DELETE", f"{org.project}/limits/{own['operator']}", params={"reason": "x"})
    assert (refused.status_code, refused.json()["code"]) == (403, "LIMIT_NOT_YOURS")
    done = await org.me.call("DELETE", f"{org.project}/limits/{own['tenant']}", params={"reason": "x"})
    assert done.status_code == 200
    assert await held(sessions, org.who) == {("key", "requests_per_minute"): 10}


async def test_no_part_is_given_more_than_the_whole(org: Org, sessions: db.Sessions) -> None:
    """A project of a tenant with 100 a minute is not given 200, and a model of a key not more than the key."""
    await limited(sessions, of_tenant(org.who), 100)
    for path in (org.project, org.key, org.tenant):
        refused = await org.put(path, metric="requests_per_minute", amount=101, model="")
        assert (refused.status_code, refused.json()["most"]) == (400, 100), path
        assert (await org.put(path, metric="requests_per_minute", amount=100)).status_code == 200
    every_key = await org.put(org.tenant, level="key", metric="requests_per_minute", amount=101)
    assert every_key.json()["code"] == "LIMIT_TOO_HIGH"
    free = await org.put(org.project, metric="spend_per_month", amount="5000")  # nobody limits that
    assert free.status_code == 200
    trial = await org.put(org.project, metric="concurrency", amount=5, mode="dark")
    assert (trial.status_code, trial.json()["param"]) == (400, "mode")


async def test_members_see_where_each_limit_comes_from_and_undo_their_own(org: Org, sessions: db.Sessions) -> None:
    await org.put(org.project, metric="concurrency", amount=5)
    found = (await org.me.get(f"{org.key}/limits/effective")).json()["items"]
    assert [(i["level"], i["metric"], i["source"], i["set_by"]) for i in found] == [
        ("key", "requests_per_minute", "plan", "operator"),
        ("project", "concurrency", "project", "tenant"),
    ]
    assert (await org.me.get(f"{org.project}/limits/effective")).json()["items"] == found
    await limited(sessions, of_tenant(org.who), 100, "what operators say among themselves")
    (change,) = (await org.me.get(f"{org.tenant}/limit-changes")).json()["items"]
    assert (change["reason"], change["actor_kind"]) == ("thrift", "person")
    undone = await org.me.post(f"{org.tenant}/limit-changes/{change['id']}/revert", {"reason": "too few"})
    assert (undone.status_code, undone.json()["after"]) == (200, None)


async def test_what_operators_changed_is_not_undone_by_members(org: Org, sessions: db.Sessions, admin: Client) -> None:
    await limited(sessions, of_tenant(org.who), 100)
    of_operators = f"{ADMIN}/tenants/ten_{org.who.tenant.id.hex}/limit-changes"
    (change,) = (await admin.get(of_operators)).json()["items"]
    refused = await org.me.post(f"{org.tenant}/limit-changes/{change['id']}/revert", {"reason": "x"})
    assert refused.status_code == 404
    assert (await held(sessions, org.who))["tenant", "requests_per_minute"] == 100


async def test_an_undone_change_does_not_bring_back_more_than_is_allowed_by_now(
    org: Org, sessions: db.Sessions
) -> None:
    for amount in (90, 10):
        await org.put(org.key, metric="requests_per_minute", amount=amount)
    await limited(sessions, of_tenant(org.who), 50)
    last = (await org.me.get(f"{org.tenant}/limit-changes")).json()["items"][0]
    refused = await org.me.post(f"{org.tenant}/limit-changes/{last['id']}/revert", {"reason": "x"})
    assert (refused.status_code, refused.json()["code"]) == (409, "LIMIT_TOO_HIGH")


async def _other_project(sessions: db.Sessions, who: Customer) -> tuple[Project, str]:
    async with db.transaction(sessions) as session:
        project = await projects.create(session, who.tenant.id, name="other")
        key, _ = await api_keys.create(session, who.tenant.id, project.id, name="k", pepper=PEPPER)
    return project, f"key_{key.id.hex}"


async def test_a_key_is_reached_through_its_own_project_only(
    anonymous: Client, sessions: db.Sessions, org: Org
) -> None:
    """Whoever rules one project sets nothing in another by naming its key under the own path."""
    _, foreign = await _other_project(sessions, org.who)
    visitor = await member(sessions, org.who.tenant.id, Role.ADMIN, project_id=org.who.project.id)
    mine = Org(anonymous.visited_by(visitor), org.who)
    path = f"{org.project}/keys/{foreign}"
    answers = [
        await mine.put(path, metric="concurrency", amount=1),
        await mine.me.get(f"{path}/limits"),
        await mine.me.get(f"{path}/limits/effective"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert (await mine.put(org.key, metric="concurrency", amount=1)).status_code == 200
    rule = (await org.put(org.tenant, metric="concurrency", amount=9)).json()
    gone = await mine.me.call("DELETE", f"{org.project}/limits/{rule['id']}", params={"reason": "x"})
    assert gone.status_code == 404


async def test_an_increase_is_asked_for_granted_with_a_note_and_holds(
    org: Org, admin: Client, sessions: db.Sessions
) -> None:
    key_id = f"key_{org.who.key.id.hex}"
    await limited(sessions, of_key(org.who, LimitMetric.SPEND_PER_DAY), 10 * 10**12)
    made = await org.ask(metric="spend_per_day", amount="25.00", key_id=key_id)
    assert made.status_code == 201, made.text
    asked = made.json()
    assert (asked["state"], asked["amount"], asked["level"]) == ("open", "25.000000000000", "key")
    assert [r["id"] for r in (await admin.get(f"{ADMIN}/limit-requests?state=open")).json()["items"]] == [asked["id"]]
    path = f"{ADMIN}/tenants/{asked['tenant_id']}/limit-requests/{asked['id']}"
    assert (await admin.post(f"{path}/approve", {"amount": "20"})).status_code == 422  # a note is due
    granted = (await admin.post(f"{path}/approve", {"note": "20 until you have paid", "amount": "20"})).json()
    assert (granted["state"], granted["granted"]) == ("approved", "20.000000000000")
    seen = (await org.me.get(f"{org.tenant}/limit-requests/{asked['id']}")).json()
    assert (seen["state"], seen["note"]) == ("approved", "20 until you have paid")
    assert (await held(sessions, org.who))["key", "spend_per_day"] == 20 * 10**9
    history = (await admin.get(f"{ADMIN}/tenants/{asked['tenant_id']}/limit-changes")).json()["items"]
    assert (history[0]["reason"], history[0]["before"], history[0]["after"]) == (
        "20 until you have paid",
        "10.000000000000",
        "20.000000000000",
    )
    again = await admin.post(f"{path}/decline", {"note": "no"})
    assert (again.status_code, again.json()["code"]) == (409, "ALREADY_DECIDED")


async def test_a_plans_limit_is_raised_for_the_one_who_asks(org: Org, admin: Client, sessions: db.Sessions) -> None:
    other = await customer(sessions)
    await limited(sessions, LimitSlot(LimitLevel.PROJECT, LimitMetric.CONCURRENCY, plan_id=DEFAULT_PLAN_ID), 4)
    asked = (await org.ask(metric="concurrency", amount=8, project_id=f"prj_{org.who.project.id.hex}")).json()
    await admin.post(f"{ADMIN}/tenants/{asked['tenant_id']}/limit-requests/{asked['id']}/approve", {"note": "yes"})
    assert (await held(sessions, org.who))["project", "concurrency"] == 8
    assert (await held(sessions, other))["project", "concurrency"] == 4


async def test_a_declined_request_changes_nothing_and_says_why(org: Org, admin: Client, sessions: db.Sessions) -> None:
    before = await held(sessions, org.who)
    asked = (await org.ask(metric="requests_per_minute", amount=700_000, key_id=f"key_{org.who.key.id.hex}")).json()
    path = f"{ADMIN}/tenants/{asked['tenant_id']}/limit-requests/{asked['id']}"
    assert (await admin.post(f"{path}/decline", {"note": "pay first"})).json()["state"] == "declined"
    seen = (await org.me.get(f"{org.tenant}/limit-requests")).json()["items"]
    assert [(r["state"], r["note"], r["granted"]) for r in seen] == [("declined", "pay first", None)]
    assert await held(sessions, org.who) == before


async def test_what_is_allowed_already_or_not_limited_is_not_asked_for(org: Org) -> None:
    key_id = f"key_{org.who.key.id.hex}"
    low = await org.ask(metric="requests_per_minute", amount=600_000, key_id=key_id)
    assert (low.status_code, low.json()["param"]) == (400, "amount")
    none = await org.ask(metric="concurrency", amount=5, key_id=key_id)
    assert (none.status_code, none.json()["param"]) == (400, "metric")


async def test_a_developer_asks_for_the_own_project_and_sees_the_own_requests(
    anonymous: Client, sessions: db.Sessions, org: Org
) -> None:
    project, foreign = await _other_project(sessions, org.who)
    visitor = await member(sessions, org.who.tenant.id, Role.DEVELOPER, project_id=org.who.project.id)
    mine = Org(anonymous.visited_by(visitor), org.who)
    for where in ({"key_id": foreign}, {"project_id": f"prj_{project.id.hex}"}, {}):
        refused = await mine.ask(metric="requests_per_minute", amount=700_000, **where)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    both = {"key_id": foreign, "project_id": f"prj_{org.who.project.id.hex}"}  # the key's own project counts
    assert (await mine.ask(metric="requests_per_minute", amount=700_000, **both)).status_code == 403
    made = await mine.ask(metric="requests_per_minute", amount=700_000, key_id=f"key_{org.who.key.id.hex}")
    theirs = (await org.ask(metric="requests_per_minute", amount=800_000, key_id=foreign)).json()
    assert [r["id"] for r in (await mine.me.get(f"{org.tenant}/limit-requests")).json()["items"]] == [made.json()["id"]]
    assert (await mine.me.get(f"{org.tenant}/limit-requests/{theirs['id']}")).status_code == 404
    assert len((await org.me.get(f"{org.tenant}/limit-requests")).json()["items"]) == 2


async def test_open_requests_are_bounded(org: Org) -> None:
    key_id = f"key_{org.who.key.id.hex}"
    for number in range(50):
        made = await org.ask(metric="requests_per_minute", amount=700_000 + number, key_id=key_id)
        assert made.status_code == 201
    more = await org.ask(metric="requests_per_minute", amount=900_000, key_id=key_id)
    assert (more.status_code, more.json()["code"]) == (409, "TOO_MANY_REQUESTS_OPEN")
