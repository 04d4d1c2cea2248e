"""Budgets as they stand, crossings, alerts on credit and their settings, over the API."""

from datetime import datetime, timedelta

from api.services import Services
from billing import credit_alerts, crossings
from core import db
from core.clock import ManualClock
from core.money import parse_pico
from tenants import api_keys, projects
from tenants.types import LimitLevel, LimitMetric, LimitMode, Role
from tests.factories.credit_figures import figure_of
from tests.factories.people import member
from tests.factories.spending import Spender, budget, spender, used
from tests.factories.tenants import PEPPER
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin/tenants"


def paths(who: Spender) -> tuple[str, str]:
    return f"/api/v1/tenants/ten_{who.tenant.id.hex}", f"{ADMIN}/ten_{who.tenant.id.hex}"


async def with_a_crossing(sessions: db.Sessions, now: datetime) -> Spender:
    """5.00 of 10.00 a day used by a key, and by another project's key 3.00; both are in the tenant's 100.00 a month."""
    who = await spender(sessions, credit="20")
    async with db.transaction(sessions) as session:
        other = await projects.create(session, who.tenant.id, name="other")
        key, _ = await api_keys.create(session, who.tenant.id, other.id, name="theirs", pepper=PEPPER)
    await budget(sessions, who, "10", LimitMetric.SPEND_PER_DAY, LimitLevel.KEY, mode=LimitMode.HARD)
    await budget(sessions, who, "100", LimitMetric.SPEND_PER_MONTH)
    minute = now.replace(second=0, microsecond=0).isoformat()
    await used(sessions, who.tenant.id, minute, "5", **who.whose)
    await used(sessions, who.tenant.id, minute, "3", project=other.id, key=key.id)
    assert await crossings.sweep(sessions, ManualClock(now)) == 1
    return who


async def test_budgets_and_crossings_are_shown_to_whom_they_concern(
    admin: Client, anonymous: Client, sessions: db.Sessions, services: Services
) -> None:
    now = services.clock.now()
    who = await with_a_crossing(sessions, now)
    mine, theirs = paths(who)
    finance = anonymous.visited_by(await member(sessions, who.tenant.id, Role.FINANCE))
    inside = anonymous.visited_by(await member(sessions, who.tenant.id, Role.VIEWER, project_id=who.project.id))
    for client, base, seen in ((admin, theirs, 3), (finance, mine, 3), (inside, mine, 1)):
        answer = (await client.get(f"{base}/budgets")).json()
        assert (answer["currency"], answer["tz"], answer["total"]) == ("USD", "UTC", seen)
        first = answer["items"][0]
        assert (first["level"], first["owner_id"]) == ("key", f"key_{who.key.id.hex}")
        assert (first["limit"], first["spent"], first["percent"]) == ("10.000000000000", "5.000000000000", 50)
        assert datetime.fromisoformat(first["period_end"]) - datetime.fromisoformat(first["period_start"]) == timedelta(
            days=1
        )
        (crossing,) = (await client.get(f"{base}/budget-crossings")).json()["items"]
        assert (crossing["threshold_percent"], crossing["spent"]) == (50, "5.000000000000")
        assert (crossing["project_id"], crossing["owner_id"]) == (f"prj_{who.project.id.hex}", first["owner_id"])
    month = (await finance.get(f"{mine}/budgets", params={"limit": 3})).json()["items"][2]
    assert (month["level"], month["spent"], month["percent"]) == ("tenant", "8.000000000000", 8)
    elsewhere = anonymous.visited_by(await member(sessions, (await spender(sessions)).tenant.id, Role.OWNER))
    assert (await elsewhere.get(f"{mine}/budgets")).status_code == 404


async def test_crossings_come_in_pages(admin: Client, sessions: db.Sessions, services: Services) -> None:
    who = await spender(sessions)
    await budget(sessions, who, "1")
    now = services.clock.now()
    await used(sessions, who.tenant.id, now.replace(second=0, microsecond=0).isoformat(), "1", **who.whose)
    assert await crossings.sweep(sessions, ManualClock(now)) == 3
    _, base = paths(who)
    seen, after = [], None
    while True:
        params = {"limit": "2"} | ({"after": after} if after else {})
        page = (await admin.get(f"{base}/budget-crossings", params=params)).json()
        seen += [item["threshold_percent"] for item in page["items"]]
        after = page["next_after"]
        if after is None:
            break
    assert sorted(seen) == [50, 80, 100]


async def test_settings_of_alerts_are_the_tenants_and_audited(
    admin: Client, anonymous: Client, sessions: db.Sessions
) -> None:
    who = await spender(sessions, credit="20")
    mine, theirs = paths(who)
    finance = anonymous.visited_by(await member(sessions, who.tenant.id, Role.FINANCE))
    viewer = anonymous.visited_by(await member(sessions, who.tenant.id, Role.VIEWER))
    defaults = {"thresholds_percent": [50, 80, 100], "low_balance": None, "days_left": 3}
    assert (await finance.get(f"{mine}/alert-settings")).json() == defaults
    wanted = {"thresholds_percent": [90, 25, 90], "low_balance": "20.00", "days_left": None}
    put = await finance.call("PUT", f"{mine}/alert-settings", json=wanted)
    right = {"thresholds_percent": [25, 90], "low_balance": "20.000000000000", "days_left": None}
    assert (put.status_code, put.json()) == (200, right)
    assert (await admin.get(f"{theirs}/alert-settings")).json() == right
    assert (await viewer.call("PUT", f"{mine}/alert-settings", json=wanted)).status_code == 403
    for wrong in (
        {"thresholds_percent": [0]},
        {"low_balance": "0"},
        {"days_left": 0},
        {"thresholds_percent": [50] * 11},
    ):
        assert (await finance.call("PUT", f"{mine}/alert-settings", json=wrong)).status_code in {400, 422}, wrong
    trail = (await admin.get("/api/v1/admin/audit", params={"action": "alert_settings.put"})).json()["items"]
    assert trail[0]["details"]["low_balance"] == {"from": None, "to": "20.000000000000"}

    assert await credit_alerts.sweep(sessions, ManualClock()) == 1
    (alert,) = (await finance.get(f"{mine}/credit-alerts")).json()["items"]
    assert (alert["kind"], alert["threshold"], alert["ended_at"]) == ("low_balance", "20.000000000000", None)
    paid = await admin.post(f"{theirs}/credits", {"amount": "5"}, headers={"idempotency-key": "p"})
    assert paid.status_code == 201, paid.text
    (alert,) = (await admin.get(f"{theirs}/credit-alerts")).json()["items"]
    assert alert["ended_at"] is not None
    assert parse_pico(alert["available"]) == parse_pico("20")


async def test_how_a_tenant_pays_is_changed_by_operators_and_audited(
    admin: Client, sessions: db.Sessions, services: Services
) -> None:
    who = await spender(sessions, credit="20")
    _, theirs = paths(who)
    wanted = {"billing_mode": "postpaid", "credit_limit": "100", "note": "contract 7"}
    put = await admin.call("PUT", f"{theirs}/billing-terms", json=wanted)
    assert (put.status_code, put.json()["credit_limit"]) == (200, "100.000000000000"), put.text
    assert (await admin.get(f"{theirs}/balance")).json()["available"] == "120.000000000000"
    assert (await admin.get(theirs)).json()["billing_mode"] == "postpaid"
    assert (await figure_of(services.valkey, who.tenant.id)).available == 120_000_000_000
    wrong = await admin.call("PUT", f"{theirs}/billing-terms", json=wanted | {"billing_mode": "prepaid"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "INVALID_AMOUNT")
    back = await admin.call("PUT", f"{theirs}/billing-terms", json={"billing_mode": "prepaid", "note": "end of it"})
    assert back.status_code == 200, back.text
    assert (await figure_of(services.valkey, who.tenant.id)).available == 20_000_000_000
    kept = (await admin.get(f"{theirs}/billing-terms")).json()["items"]
    assert [(one["billing_mode"], one["note"]) for one in kept] == [
        ("prepaid", "end of it"),
        ("postpaid", "contract 7"),
        ("prepaid", "opened"),
    ]
    trail = (await admin.get("/api/v1/admin/audit", params={"action": "billing_terms.put"})).json()["items"]
    assert trail[0]["details"]["billing_mode"] == {"from": "postpaid", "to": "prepaid"}
