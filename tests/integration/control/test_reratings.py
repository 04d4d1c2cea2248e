"""Re-rating as operators do it: ask, look, execute, by the worker's job."""

from typing import Any
from uuid import UUID

import pytest

from api.services import Services
from billing import credit_figures, rerating, tasks
from core import db, outbox
from core.ids import IdKind, format_id
from core.tasks import Job, TaskContext
from tenants import audit
from tenants.types import AuditFilter, OperatorRole
from tests.factories import billing as make
from tests.factories.credit_figures import figure_of
from tests.factories.people import operator_person
from tests.integration.billing.test_price_preview import NOON, at, post
from tests.integration.billing.test_rerating import two
from tests.integration.control.conftest import Client

RUNS = "/api/v1/admin/reratings"
JOBS = {task.name: task for task in tasks.TASKS if isinstance(task, Job)}


async def _work(services: Services) -> None:
    """Do what the worker does until the outbox is empty."""
    context = TaskContext(services.settings, services.sessions, services.clock)
    while rows := await outbox.claim(context):
        for row in rows:
            assert await outbox.execute(context, JOBS, row) is outbox.Outcome.DONE


async def _wrong(sessions: db.Sessions, count: int) -> tuple[dict[str, Any], UUID]:
    wrong, right = await two(sessions)
    tenant_id = await make.tenant(sessions, "1")
    await post(sessions, *(at(make.event(tenant_id, make.schedule(wrong, tenant_id)), NOON) for _ in range(count)))
    body = {
        "wrong_version_ids": [format_id(IdKind.PRICE_VERSION, wrong.version_id)],
        "right_version_id": format_id(IdKind.PRICE_VERSION, right.version_id),
        "since": "2025-11-01T00:00:00Z",
        "until": "2025-12-01T00:00:00Z",
        "note": "the list had 3.00 in place of 2.00",
    }
    return body, tenant_id


async def test_from_the_question_to_the_figure(admin: Client, services: Services) -> None:
    body, tenant_id = await _wrong(services.sessions, 3)
    await credit_figures.refresh(services.valkey, services.sessions, tenant_id)
    key = {"idempotency-key": "wrong-list"}
    asked = await admin.post(RUNS, body, headers=key)
    assert (asked.status_code, asked.json()["state"]) == (202, "counting"), asked.text
    assert (await admin.post(RUNS, body, headers=key)).json()["id"] == asked.json()["id"]
    other = await admin.post(RUNS, {**body, "note": "another"}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    path = f"{RUNS}/{asked.json()['id']}"
    early = await admin.post(f"{path}/execute")
    assert (early.status_code, early.json()["code"]) == (409, "RERATING_NOT_COUNTED")
    await _work(services)
    counted = (await admin.get(path)).json()
    assert (counted["state"], counted["events"], counted["credit"]) == ("counted", 3, "0.006315000000")
    assert counted["credited"] == "0.000000000000"
    (part,) = (await admin.get(f"{path}/tenants")).json()["items"]
    assert (part["tenant_id"], part["credit"]) == (format_id(IdKind.TENANT, tenant_id), "0.006315000000")
    assert (await admin.post(f"{path}/execute")).status_code == 202
    await _work(services)
    done = (await admin.get(path)).json()
    assert (done["state"], done["done_events"], done["given"]) == ("done", 3, "0.006315000000")
    nano = (await figure_of(services.valkey, tenant_id)).available
    assert nano == 1_000_000_000 - 3 * 12_258_000
    assert [one["id"] for one in (await admin.get(RUNS)).json()["items"]] == [done["id"]]
    late = await admin.post(f"{path}/cancel")
    assert (late.status_code, late.json()["code"]) == (409, "RERATING_OVER")
    async with db.transaction(services.sessions) as session:
        trail = await audit.search(session, AuditFilter(action="rerating."), after=None, limit=50)
    actions = [record.action for record in trail]
    assert actions == ["rerating.finish", "rerating.post", "rerating.execute", "rerating.ask"]


async def test_two_people_above_the_limit(
    anonymous: Client, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, other = [anonymous.visited_by(await operator_person(services.sessions, OperatorRole.ADMIN)) for _ in "12"]
    monkeypatch.setitem(services.settings.books.__dict__, "adjust_alone_max", 0)
    body, _ = await _wrong(services.sessions, 1)
    asked = await admin.post(RUNS, body, headers={"idempotency-key": "two"})
    await _work(services)
    path = f"{RUNS}/{asked.json()['id']}"
    assert (await admin.get(path)).json()["needs_approval"]
    made = (await admin.post("/api/v1/admin/operators", {"name": "program"})).json()
    token = (await admin.post(f"/api/v1/admin/operators/{made['id']}/tokens", {})).json()["token"]
    for same in (admin, anonymous.acting_as(token)):
        alone = await same.post(f"{path}/execute")
        assert (alone.status_code, alone.json()["code"]) == (403, "SECOND_PERSON_NEEDED")
    second = await other.post(f"{path}/execute")
    assert second.status_code == 202
    await _work(services)
    done = (await admin.get(path)).json()
    assert (done["state"], done["credited"]) == ("done", "0.002105000000")
    assert done["executed_by"] != done["requested_by"]


async def test_what_is_no_re_rating_is_refused(admin: Client, services: Services) -> None:
    body, _ = await _wrong(services.sessions, 1)
    nothing = "pver_" + "0" * 32
    for number, (change, status) in enumerate(
        (
            ({"right_version_id": nothing}, 404),
            ({"right_version_id": body["wrong_version_ids"][0]}, 400),
            ({"until": body["since"]}, 400),
            ({"meters": ["tokens"]}, 422),
            ({"note": ""}, 422),
            ({"wrong_version_ids": []}, 422),
        )
    ):
        answer = await admin.post(RUNS, {**body, **change}, headers={"idempotency-key": f"bad-{number}"})
        assert answer.status_code == status, answer.text
    assert (await admin.post(RUNS, body)).status_code == 422  # without a key
    assert (await admin.get(RUNS)).json()["items"] == []
    assert rerating.JOB in JOBS
