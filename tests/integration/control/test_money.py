"""Prices, credit, usage and receipts over the API."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from api.services import Services
from billing import credit_figures, price_book, tasks
from billing.metrics import poster_metrics
from billing.poster import Poster
from billing.types import PriceSchedule, UsageEvent
from core import db, outbox
from core.clock import SystemClock
from core.ids import IdKind, format_id, new_uuid, parse_id
from core.money import Currency
from core.settings import Database
from core.tasks import Job, TaskContext
from core.tiers import Tier
from tenants.types import KeyLimits, OperatorRole, Scope
from tests.factories import billing as make
from tests.factories import catalog
from tests.factories.billing_world import write
from tests.factories.credit_figures import figure_of
from tests.factories.people import operator_person
from tests.factories.tenants import customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
LIST = {"input": "2.00", "cached_input": "0.20", "output": "6.00"}


async def _created(answer_of: Any) -> dict[str, Any]:
    answer = await answer_of
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def _tenant(admin: Client, **fields: Any) -> str:
    made = await _created(admin.post(f"{ADMIN}/tenants", {"name": "Acme", "currency": "USD", **fields}))
    return f"{ADMIN}/tenants/{made['id']}"


async def _key(admin: Client, tenant: str, **fields: Any) -> dict[str, Any]:
    project = await _created(admin.post(f"{tenant}/projects", {"name": new_uuid().hex}))
    return await _created(admin.post(f"{tenant}/projects/{project['id']}/keys", {"name": "k", **fields}))


async def _top_up(admin: Client, tenant: str, amount: str, key: str, **fields: Any) -> Any:
    return await admin.post(f"{tenant}/credits", {"amount": amount, **fields}, headers={"idempotency-key": key})


@pytest.fixture(autouse=True)
async def known_model(sessions: db.Sessions) -> None:
    """Only what exists is priced."""
    await catalog.know(sessions, make.MODEL)


async def _publish(admin: Client, model_id: str) -> dict[str, Any]:
    book = await _created(admin.post(f"{ADMIN}/price-books", {"name": "list", "currency": "USD"}))
    items = [
        {"model_id": model_id, "tier": "standard", "meter": meter, "unit_price": price} for meter, price in LIST.items()
    ]
    draft = await _created(admin.post(f"{ADMIN}/price-books/{book['id']}/versions", {"items": items}))
    answer = await admin.post(f"{ADMIN}/price-versions/{draft['id']}/publish", {})
    assert answer.status_code == 200, answer.text
    published: dict[str, Any] = answer.json()
    return published


async def test_a_top_up_adds_once_however_often_it_is_sent(admin: Client, services: Services) -> None:
    tenant = await _tenant(admin)
    answers = await asyncio.gather(*(_top_up(admin, tenant, "12.50", "payment-1", note="wire") for _ in range(5)))
    answers.append(await _top_up(admin, tenant, "12.50", "payment-1", note="wire"))
    done = [answer for answer in answers if answer.status_code == 201]
    assert {answer.json().get("code") for answer in answers if answer not in done} <= {"IDEMPOTENCY_IN_PROGRESS"}
    assert len({answer.json()["transaction_id"] for answer in done}) == 1
    assert [answer.headers.get("idempotency-replayed") for answer in done].count(None) == 1
    assert answers[-1].headers["idempotency-replayed"] == "true"
    balance = (await admin.get(f"{tenant}/balance")).json()
    assert balance == {
        "currency": "USD",
        "billing_mode": "prepaid",
        "available": "12.500000000000",
        "credit_limit": "0.000000000000",
    }
    tenant_id = parse_id(IdKind.TENANT, tenant.rpartition("/")[2])
    assert (await figure_of(services.valkey, tenant_id)).available == 12_500_000_000


async def test_a_key_with_another_body_is_a_conflict(admin: Client) -> None:
    tenant = await _tenant(admin)
    assert (await _top_up(admin, tenant, "1", "k")).status_code == 201
    for amount, note in (("2", ""), ("1", "other")):
        refused = await _top_up(admin, tenant, amount, "k", note=note)
        assert (refused.status_code, refused.json()["code"]) == (409, "IDEMPOTENCY_KEY_REUSED")
    assert (await admin.get(f"{tenant}/balance")).json()["available"] == "1.000000000000"


async def test_a_top_up_expires_only_where_the_terms_allow_it(
    admin: Client, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, end = await _tenant(admin), "2100-01-01T00:00:00Z"
    refused = await _top_up(admin, tenant, "5", "k1", expires_at=end)
    assert (refused.status_code, refused.json()["code"]) == (409, "PAID_CREDIT_NEVER_EXPIRES")
    monkeypatch.setitem(services.settings.books.__dict__, "paid_credit_may_expire", True)
    for wrong in (
        "2020-01-01T00:00:00Z",
        "2100-01-01T00:00:01Z",
        "9000-01-01T00:00:00Z",
        "2100-01-01T00:00:00",
        "soon",
    ):
        assert (await _top_up(admin, tenant, "5", "k2", expires_at=wrong)).status_code in {400, 422}, wrong
    done = await _top_up(admin, tenant, "5", "k3", expires_at=end)
    assert (done.status_code, done.json()["balance"]) == (201, "5.000000000000")
    lots = (await admin.get(f"{tenant}/credit-lots")).json()["items"]
    assert [(lot["source"], lot["available"], lot["expires_at"]) for lot in lots] == [
        ("paid", "5.000000000000", end),
        ("paid", "0.000000000000", None),
    ]
    (asked,) = (await admin.get(f"{ADMIN}/adjustments")).json()["items"]
    assert asked["expires_at"] == end
    (record,) = (await admin.get(f"{ADMIN}/audit", params={"action": "credit.top_up"})).json()["items"]
    assert record["details"]["expires_at"] == "2100-01-01T00:00:00+00:00"


async def test_credit_given_above_the_limit_needs_another_person(
    anonymous: Client, sessions: db.Sessions, services: Services
) -> None:
    admin, other = [anonymous.visited_by(await operator_person(sessions, OperatorRole.ADMIN)) for _ in range(2)]
    tenant = await _tenant(admin)
    grant = {"amount": "1000.000000000001", "source": "goodwill", "note": "outage of 3 November"}
    answers = [await admin.post(f"{tenant}/grants", grant, headers={"idempotency-key": "g"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[1].headers["idempotency-replayed"] == "true"
    asked = answers[0].json()
    waiting = (await admin.get(f"{ADMIN}/adjustments", params={"pending": "true"})).json()["items"]
    assert [one["id"] for one in waiting] == [asked["id"]]
    decide = f"{tenant}/adjustments/{asked['id']}"
    alone = await admin.post(f"{decide}/approve")
    assert (alone.status_code, alone.json()["code"]) == (403, "SECOND_PERSON_NEEDED")
    posted = (await other.post(f"{decide}/approve")).json()
    assert (posted["state"], posted["amount"]) == ("posted", "1000.000000000001")
    assert posted["decided_by"] != posted["requested_by"]
    assert (await admin.get(f"{tenant}/balance")).json()["available"] == "1000.000000000001"
    tenant_id = parse_id(IdKind.TENANT, tenant.rpartition("/")[2])
    assert (await figure_of(services.valkey, tenant_id)).available == 1_000_000_000_000
    (lot,) = [lot for lot in (await admin.get(f"{tenant}/credit-lots")).json()["items"] if lot["source"] != "paid"]
    assert (lot["source"], lot["granted"], lot["available"]) == ("goodwill", posted["amount"], posted["amount"])

    undo = f"{tenant}/transactions/{posted['transaction_id']}/reverse"
    back = await admin.post(undo, {"note": "wrong tenant"}, headers={"idempotency-key": "r"})
    assert (back.status_code, back.json()["reverses"]) == (202, posted["transaction_id"])
    assert (await other.post(f"{tenant}/adjustments/{back.json()['id']}/approve")).status_code == 200
    assert (await admin.get(f"{tenant}/balance")).json()["available"] == "0.000000000000"
    trail = (await admin.get(f"{ADMIN}/audit", params={"action": "adjustment.approve"})).json()["items"]
    assert [record["details"]["kind"] for record in trail] == ["reversal", "grant"]


async def test_top_ups_that_cannot_be_are_refused(admin: Client) -> None:
    tenant = await _tenant(admin)
    missing = await admin.post(f"{tenant}/credits", {"amount": "1"})
    assert missing.status_code == 422
    assert missing.json()["param"] == "header.Idempotency-Key"
    for amount in ("0", "-1", "1e3", "NaN", "", "0.0000000000001", "1000000001", 5, 1.5, " 1"):
        answer = await _top_up(admin, tenant, amount, "k")  # type: ignore[arg-type]  # wrong on purpose
        assert answer.status_code in {400, 422}, amount
    negative = (await _top_up(admin, tenant, "-1", "k")).json()
    assert (
        negative["detail"]
        == 'body.amount: Give a decimal as text, not negative, like "12.50", with at most 12 decimals.'
    )
    postpaid = await _tenant(admin, name="Later", billing_mode="postpaid", credit_limit="500")
    assert (await _top_up(admin, postpaid, "1", "k")).json()["code"] == "NOT_PREPAID"
    assert (await admin.get(f"{postpaid}/balance")).json()["credit_limit"] == "500.000000000000"
    bad = await admin.post(f"{ADMIN}/tenants", {"name": "x", "currency": "USD", "credit_limit": "5"})
    assert (bad.status_code, bad.json()["code"]) == (400, "INVALID_AMOUNT")


async def test_valkey_away_does_not_lose_a_top_up(admin: Client, services: Services) -> None:
    tenant = await _tenant(admin)
    await services.valkey.close()
    assert (await _top_up(admin, tenant, "3", "k")).status_code == 201
    assert (await admin.get(f"{tenant}/balance")).json()["available"] == "3.000000000000"

    context = TaskContext(services.settings, services.sessions, services.clock)  # the worker comes by
    jobs = {task.name: task for task in tasks.TASKS if isinstance(task, Job)}
    (row,) = await outbox.claim(context)
    assert await outbox.execute(context, jobs, row) is outbox.Outcome.DONE
    tenant_id = parse_id(IdKind.TENANT, tenant.rpartition("/")[2])
    async with context.valkey() as client:
        assert (await figure_of(client, tenant_id)).available == 3_000_000_000


async def test_the_hourly_verification_names_a_wrong_row(
    admin: Client, services: Services, database_settings: Database
) -> None:
    tenant = await _tenant(admin)
    await _top_up(admin, tenant, "3", "k")
    context = TaskContext(services.settings, services.sessions, services.clock)
    await tasks.verify_ledger(context)
    assert database_settings.owner_url is not None
    owner = db.create_engine(Database(url=database_settings.owner_url))
    async with db.transaction(db.create_sessions(owner)) as session:
        await session.execute(text("UPDATE ledger_balance SET credit = credit + 1 WHERE credit > 0"))
    await owner.dispose()
    with pytest.raises(tasks.LedgerWrongError, match="balance"):
        await tasks.verify_ledger(context)


async def test_prices_are_drafted_changed_and_published_for_good(admin: Client, sessions: db.Sessions) -> None:
    model_id = format_id(IdKind.MODEL, make.MODEL)
    published = await _publish(admin, model_id)
    assert published["state"] == "published"
    assert len(published["content_sha256"]) == 64
    path = f"{ADMIN}/price-versions/{published['id']}"
    changed = {"model_id": model_id, "tier": "standard", "meter": "output", "unit_price": "7"}
    frozen = await admin.patch(path, {"items": [changed]})
    assert (frozen.status_code, frozen.json()["code"]) == (409, "PRICE_VERSION_PUBLISHED")
    assert (await admin.post(f"{path}/publish", {})).status_code == 409

    versions = f"{ADMIN}/price-books/{published['book_id']}/versions"
    draft = await _created(admin.post(versions, {"items": [], "note": "autumn"}))
    prices = (await admin.patch(f"{ADMIN}/price-versions/{draft['id']}", {"items": [changed]})).json()["items"]
    assert {item["meter"]: item["unit_price"] for item in prices} == {
        "input": "2.000000",
        "cached_input": "0.200000",
        "output": "7.000000",
    }
    late = datetime.now(UTC) + timedelta(days=1)
    answer = await admin.post(f"{ADMIN}/price-versions/{draft['id']}/publish", {"effective_at": late.isoformat()})
    assert datetime.fromisoformat(answer.json()["effective_at"]) == late
    assert [item["state"] for item in (await admin.get(versions)).json()["items"]] == ["published", "published"]
    async with db.transaction(sessions) as session:
        table = await price_book.load_table(session, datetime.now(UTC))
    now = table.schedule(make.MODEL, Tier.STANDARD, Currency.USD, new_uuid())
    assert now is not None
    assert (now.input, now.output) == (2_000_000, 6_000_000)


async def test_prices_that_cannot_be_are_named(admin: Client) -> None:
    book = await _created(admin.post(f"{ADMIN}/price-books", {"name": "list", "currency": "USD"}))
    assert (await admin.post(f"{ADMIN}/price-books", {"name": "two", "currency": "USD"})).status_code == 409
    versions = f"{ADMIN}/price-books/{book['id']}/versions"
    good = {"model_id": format_id(IdKind.MODEL, make.MODEL), "tier": "standard", "meter": "input", "unit_price": "1"}
    for wrong in (
        {"unit_price": "0.0000001"},
        {"unit_price": "-1"},
        {"unit_price": 1},
        {"meter": "thoughts"},
        {"tier": "gold"},
        {"model_id": "mdl_x"},
    ):
        answer = await admin.post(versions, {"items": [{**good, **wrong}]})
        assert answer.status_code in {400, 404, 422}, wrong
    draft = await _created(admin.post(versions, {"items": []}))
    empty = await admin.post(f"{ADMIN}/price-versions/{draft['id']}/publish", {})
    assert (empty.status_code, empty.json()["code"]) == (400, "INVALID_PRICE")


async def _posted(services: Services, folder: Path, events: list[UsageEvent]) -> None:
    await write(folder / "r1", events)
    metrics = poster_metrics(CollectorRegistry())
    await Poster(services.sessions, services.valkey, folder, SystemClock(), metrics).step()


def _schedule(version_id: str) -> PriceSchedule:
    return PriceSchedule(
        price_version_id=parse_id(IdKind.PRICE_VERSION, version_id),
        currency=Currency.USD,
        tier=Tier.STANDARD,
        input=2_000_000,
        cached_input=200_000,
        cache_write=2_000_000,
        output=6_000_000,
        reasoning=6_000_000,
    )


async def test_a_call_becomes_pending_then_a_receipt_usage_and_less_balance(
    admin: Client, anonymous: Client, services: Services, tmp_path: Path
) -> None:
    tenant = await _tenant(admin)
    made = await _key(admin, tenant)
    await _top_up(admin, tenant, "1", "k")
    version = await _publish(admin, format_id(IdKind.MODEL, make.MODEL))
    tenant_id = parse_id(IdKind.TENANT, tenant.rpartition("/")[2])
    event = make.event(tenant_id, _schedule(version["id"]))
    event = msgspec.structs.replace(event, key_id=parse_id(IdKind.API_KEY, made["api_key"]["id"]))
    asking = await _key(admin, tenant)
    client = anonymous.acting_as(asking["secret"])
    path = f"/v1/generations/{format_id(IdKind.GENERATION, event.id)}"

    assert (await client.get(path)).status_code == 404
    await credit_figures.register(services.valkey, [event])
    pending = await client.get(path)
    assert (pending.status_code, pending.json()["state"]) == (202, "pending")
    assert int(pending.headers["retry-after"]) >= 1

    await _posted(services, tmp_path, [event])
    receipt = await client.get(path)
    assert receipt.status_code == 200
    found = receipt.json()
    assert (found["amount"], found["currency"], found["price_version_id"]) == ("0.012258000000", "USD", version["id"])
    assert [(line["meter"], line["quantity"], line["amount"]) for line in found["lines"]] == [
        ("input", 2105, "0.004210000000"),
        ("cached_input", 10240, "0.002048000000"),
        ("output", 360, "0.002160000000"),
        ("reasoning", 640, "0.003840000000"),
    ]
    assert (await client.get("/api/v1/balance")).json()["available"] == "0.987742000000"
    usage = (await client.get("/api/v1/usage")).json()
    assert usage["tz"] == "UTC"
    assert len(usage["rows"]) == 1
    row = usage["rows"][0]
    assert (row["requests"], row["input_cached"], row["amount"]) == (1, 10240, "0.012258000000")
    assert (await admin.get(f"{tenant}/usage")).json() == usage

    key = f"{tenant}/keys/{made['api_key']['id']}"
    assert (await admin.get(key)).json()["last_used_at"] is None
    await tasks.note_key_use(TaskContext(services.settings, services.sessions, services.clock))
    used = datetime.fromisoformat((await admin.get(key)).json()["last_used_at"])
    admitted = datetime.fromisoformat(found["admitted_at"])
    assert used == admitted.replace(second=0, microsecond=0)
    asked = (await admin.get(f"{tenant}/keys/{asking['api_key']['id']}")).json()["last_used_at"]
    assert datetime.fromisoformat(asked) >= datetime.fromisoformat(asking["api_key"]["created_at"])  # by control calls


async def test_receipts_are_for_the_tenant_and_for_the_key_that_called(
    admin: Client, anonymous: Client, services: Services, sessions: db.Sessions, tmp_path: Path
) -> None:
    tenant = await _tenant(admin)
    caller = await _key(admin, tenant, scopes=["inference"])
    colleague = await _key(admin, tenant, scopes=["inference"])
    reader = await _key(admin, tenant, scopes=["usage.read"])
    stranger = await customer(sessions, KeyLimits(scopes=frozenset(Scope) - {Scope.MANAGE}))
    version = await _publish(admin, format_id(IdKind.MODEL, make.MODEL))
    await _top_up(admin, tenant, "1", "k")
    tenant_id = parse_id(IdKind.TENANT, tenant.rpartition("/")[2])
    event = make.event(tenant_id, _schedule(version["id"]))
    event = msgspec.structs.replace(event, key_id=parse_id(IdKind.API_KEY, caller["api_key"]["id"]))
    await _posted(services, tmp_path, [event])
    path = f"/v1/generations/{format_id(IdKind.GENERATION, event.id)}"
    seen = {
        name: (await anonymous.acting_as(secret).get(path)).status_code
        for name, secret in (
            ("caller", caller["secret"]),
            ("colleague", colleague["secret"]),
            ("reader", reader["secret"]),
            ("stranger", stranger.secret),
        )
    }
    assert seen == {"caller": 200, "colleague": 404, "reader": 200, "stranger": 404}


async def test_usage_ranges_are_bounded(admin: Client) -> None:
    tenant = await _tenant(admin)
    for params in (
        {"start": "2026-11-30", "end": "2026-11-29"},
        {"start": "2020-01-01", "end": "2026-01-01"},
        {"start": "x"},
        {"end": "0001-01-01"},
        {"start": "9999-12-31", "end": "9999-12-31"},
    ):
        answer = await admin.get(f"{tenant}/usage", params=params)
        assert answer.status_code in {400, 422}, params
    assert (await admin.get(f"{tenant}/usage", params={"start": "2026-11-01", "end": "2026-11-30"})).json()[
        "rows"
    ] == []


async def test_ids_of_no_receipt_are_not_found(admin: Client, anonymous: Client) -> None:
    made = await _key(admin, await _tenant(admin))
    for generation_id in (new_uuid(), UUID(int=0), UUID(int=2**128 - 1)):
        path = f"/v1/generations/{format_id(IdKind.GENERATION, generation_id)}"
        assert (await anonymous.acting_as(made["secret"]).get(path)).status_code == 404
