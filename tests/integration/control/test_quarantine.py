"""The operators' queue of usage that was kept from billing, over the API."""

from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from api.services import Services
from billing import ledger
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.types import UsageEvent
from core import db
from core.clock import SystemClock
from core.ids import IdKind, format_id
from core.money import Currency
from core.usage import TokenUsage
from tenants.types import OperatorRole
from tests.factories import billing as make
from tests.factories.people import operator_person
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
NEGATIVE = TokenUsage(-4, 10, 0, 5, 0)


async def _held(sessions: db.Sessions, count: int) -> tuple[str, list[UsageEvent]]:
    """A tenant with credit of 1 and that many events in quarantine; returns its path."""
    made = await customer(sessions)
    async with db.transaction(sessions) as session:
        await ledger.open_tenant(session, made.tenant.id, Currency.USD)
    await make.add_credit(sessions, made.tenant.id, "1", "first")
    s = make.schedule(await make.publish_prices(sessions), made.tenant.id)
    odd = [
        make.event(made.tenant.id, s, NEGATIVE, amount_pico=3, quarantine="the engine counted -4 tokens")
        for _ in range(count)
    ]
    posting = Posting(sessions, SystemClock(), poster_metrics(CollectorRegistry()))
    assert (await posting.post(odd))[0].quarantined == count
    return f"{ADMIN}/tenants/{format_id(IdKind.TENANT, made.tenant.id)}", odd


def _name(event_id: UUID) -> str:
    return format_id(IdKind.GENERATION, event_id)


async def test_a_large_bill_waits_for_a_second_person(
    anonymous: Client, sessions: db.Sessions, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(services.settings.books.__dict__, "adjust_alone_max", 0)
    tenant, (event,) = await _held(sessions, 1)
    ann, bob = [anonymous.visited_by(await operator_person(sessions, OperatorRole.FINANCE)) for _ in "12"]
    path, body = f"{tenant}/quarantine/{_name(event.id)}", {"usage": {"input_uncached": 1_000}, "reason": "counted"}
    asked = [await ann.post(f"{path}/bill", body) for _ in range(2)]
    assert [answer.status_code for answer in asked] == [202, 202], asked[0].text
    (waiting,) = {answer.json()["waiting"] for answer in asked}
    assert asked[0].json()["state"] == "waiting"
    for who, verb, other in ((bob, "dismiss", {"reason": "x"}), (ann, "bill", body | {"reason": "another"})):
        answer = await who.post(f"{path}/{verb}", other)
        assert (answer.status_code, answer.json()["code"]) == (409, "DECISION_WAITS")
    assert (await ann.post(f"{tenant}/adjustments/{waiting}/approve")).json()["code"] == "SECOND_PERSON_NEEDED"
    posted = await bob.post(f"{tenant}/adjustments/{waiting}/approve")
    assert (posted.status_code, posted.json()["amount"]) == (200, "0.002000000000"), posted.text
    assert posted.json()["usage"]["counts"]["input_uncached"] == 1_000
    found = (await ann.get(path)).json()
    assert (found["state"], found["decision"]["reason"]) == ("billed", "counted")
    assert (await ann.get(f"{tenant}/balance")).json()["available"] == "0.998000000000"


async def test_finance_works_off_the_queue(anonymous: Client, sessions: db.Sessions) -> None:
    tenant, (first, second, third) = await _held(sessions, 3)
    finance = anonymous.visited_by(await operator_person(sessions, OperatorRole.FINANCE))
    page = (await finance.get(f"{ADMIN}/quarantine", params={"limit": 2})).json()
    assert [item["id"] for item in page["items"]] == [_name(first.id), _name(second.id)]
    rest = (await finance.get(f"{ADMIN}/quarantine", params={"after": page["next_after"]})).json()
    assert ([item["id"] for item in rest["items"]], rest["next_after"]) == ([_name(third.id)], None)
    detail = (await finance.get(f"{tenant}/quarantine/{_name(first.id)}")).json()
    assert (detail["state"], detail["reason"]) == ("waiting", "the engine counted -4 tokens")
    assert detail["usage"]["input_uncached"] == -4
    assert (detail["would_be"], detail["would_be_problem"]) == (None, "a token count is negative")

    billed = await finance.post(
        f"{tenant}/quarantine/{_name(first.id)}/bill",
        {"usage": {"input_uncached": 1_000, "output": 100}, "reason": "counted from the log"},
    )
    assert billed.status_code == 200, billed.text
    assert billed.json()["decision"]["reason"] == "counted from the log"
    dismissed = await finance.post(f"{tenant}/quarantine/{_name(second.id)}/dismiss", {"reason": "a test of ours"})
    assert (dismissed.status_code, dismissed.json()["state"]) == (200, "dismissed")
    for action, body in (("bill", {"usage": {}, "reason": "x"}), ("dismiss", {"reason": "x"})):
        again = await finance.post(f"{tenant}/quarantine/{_name(first.id)}/{action}", body)
        assert (again.status_code, again.json()["code"]) == (409, "ALREADY_DECIDED")
    waiting = (await finance.get(f"{ADMIN}/quarantine", params={"state": "waiting"})).json()["items"]
    assert [item["id"] for item in waiting] == [_name(third.id)]
    # 1,000 at 2.00 and 100 at 6.00 per million
    assert (await finance.get(f"{tenant}/balance")).json()["available"] == "0.997400000000"
    async with db.transaction(sessions) as session:
        rows = await session.execute(
            text("SELECT action, details FROM audit_record WHERE action LIKE 'quarantine.%' ORDER BY action")
        )
        trail = {row.action: row.details for row in rows}
    assert trail["quarantine.dismiss"]["reason"] == "a test of ours"
    assert trail["quarantine.bill"]["usage"]["input_uncached"] == 1_000


async def test_support_sees_the_queue_and_decides_nothing(anonymous: Client, sessions: db.Sessions) -> None:
    tenant, (event,) = await _held(sessions, 1)
    support = anonymous.visited_by(await operator_person(sessions, OperatorRole.SUPPORT))
    path = f"{tenant}/quarantine/{_name(event.id)}"
    assert (await support.get(path)).status_code == 200
    assert (await support.post(f"{path}/dismiss", {"reason": "x"})).status_code == 403


async def test_counts_have_bounds(anonymous: Client, sessions: db.Sessions) -> None:
    tenant, (event,) = await _held(sessions, 1)
    finance = anonymous.visited_by(await operator_person(sessions, OperatorRole.FINANCE))
    path = f"{tenant}/quarantine/{_name(event.id)}/bill"
    for usage in ({"output": -1}, {"output": 10**9 + 1}, {"output": 1.5}, {"tokens": 1}):
        answer = await finance.post(path, {"usage": usage, "reason": "x"})
        assert answer.status_code == 422, usage
