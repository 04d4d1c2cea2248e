"""Limits tried on recorded traffic: exact numbers, nothing saved, and by what it rests on."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from prometheus_client import CollectorRegistry

from billing import ledger, quarantine, traffic
from billing.metrics import poster_metrics
from billing.posting import Posting
from billing.types import PriceSchedule, UsageEvent
from catalog import models
from catalog.types import NewVersion
from core import db
from core.clock import ManualClock, SystemClock
from core.ids import new_uuid
from core.money import Currency
from core.settings import Database
from core.tiers import Tier
from core.usage import TokenUsage
from tenants import refusals
from tenants.refusals import Refusal
from tenants.types import Role
from tests.factories import billing as make
from tests.factories.people import member
from tests.factories.tenants import Customer, customer
from tests.integration.control.conftest import Client

ADMIN = "/api/v1/admin"
DEFAULT_PLAN = f"{ADMIN}/plans/pln_00000000000070008000000000000001"
USAGE = TokenUsage(100, 0, 0, 50, 0)  # at 2.00 and 6.00 per million: 0.0005
S = 1_000_000


@dataclass
class World:
    """A tenant with a priced model, whose usage the test writes. `start` is the beginning of a minute, hours ago."""

    admin: Client
    sessions: db.Sessions
    who: Customer
    model_id: UUID
    schedule: PriceSchedule
    start: datetime
    posting: Posting = field(init=False)

    def __post_init__(self) -> None:
        self.posting = Posting(self.sessions, SystemClock(), poster_metrics(CollectorRegistry()))

    @property
    def tenant(self) -> str:
        return f"{ADMIN}/tenants/ten_{self.who.tenant.id.hex}"

    def event(self, seconds: float, **changes: Any) -> UsageEvent:
        at = self.start + timedelta(seconds=seconds)
        made = make.event(self.who.tenant.id, self.schedule, USAGE, event_id=make.uuid7_at(0))
        admitted_us = int(at.timestamp() * S)
        facts = {
            "id": make.uuid7_at(int(at.timestamp()), new_uuid().int % 2**60),
            "project_id": self.who.project.id,
            "key_id": self.who.key.id,
            "model_id": self.model_id,
            "admitted_at_us": admitted_us,
            "ended_at_us": admitted_us + S,
        }
        return msgspec.structs.replace(made, **(facts | changes))

    async def post(self, *events: UsageEvent) -> None:
        posted = await self.posting.post(events)
        assert sum(one.new for one in posted) == len(events)

    async def refuse(self, seconds: int, requests: int, code: str = "RATE_LIMITED", **changes: Any) -> None:
        facts: dict[str, Any] = {
            "id": new_uuid(),
            "at_s": int(self.start.timestamp()) + seconds,
            "span_s": 1,
            "tenant_id": self.who.tenant.id,
            "project_id": self.who.project.id,
            "key_id": self.who.key.id,
            "model_id": self.model_id,
            "model": "demo",
            "code": code,
            "level": "key",
            "metric": "requests_per_minute",
            "limit_model": "",
            "mode": "hard",
            "requests": requests,
            "input_tokens": 900 * requests,
            "output_tokens": 256 * requests,
            "sample_request_id": UUID(int=1),
        }
        async with db.transaction(self.sessions) as session:
            await refusals.write(session, [Refusal(**(facts | changes))])

    async def ask(self, *limits: dict[str, Any], path: str = "", hours: int = 2) -> dict[str, Any]:
        body = {
            "limits": list(limits),
            "since": self.start.isoformat(),
            "until": (self.start + timedelta(hours=hours)).isoformat(),
        }
        answer = await self.admin.post(f"{path or self.tenant}/limits/what-if", body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


async def open_account(sessions: db.Sessions, who: Customer) -> None:
    async with db.transaction(sessions) as session:
        await ledger.open_tenant(session, who.tenant.id, Currency.USD)


@pytest.fixture
async def world(admin: Client, sessions: db.Sessions) -> World:
    who = await customer(sessions)
    await open_account(sessions, who)
    async with db.transaction(sessions) as session:
        model_id = await models.create_model(session, name="demo", now=datetime.now(UTC))
        version = NewVersion(source="x", context_max=4096)
        await models.add_version(session, model_id, version, now=datetime.now(UTC))
    prices = await make.publish_prices(sessions, make.items(make.PRICES, model_id))
    schedule = prices.schedule(model_id, Tier.STANDARD, who.tenant.id)
    assert schedule is not None
    start = (datetime.now(UTC) - timedelta(hours=5)).replace(minute=0, second=0, microsecond=0)
    return World(admin, sessions, who, model_id, schedule, start)


KEY_RPM = {"level": "key", "metric": "requests_per_minute"}


async def test_the_worked_example(world: World) -> None:
    """30 requests in 30 s, 5 refused in the tenth second; under 10 a minute 10 pass, 20 newly and 5 again do not."""
    await world.post(*(world.event(second) for second in range(30)))
    await world.refuse(10, 5)
    found = await world.ask(KEY_RPM | {"amount": 10})
    assert found["total"] == {
        "requests": 35,
        "refused_in_fact": 5,
        "refused": 25,
        "newly_refused": 20,
        "newly_served": 0,
    }
    tenant_id = f"ten_{world.who.tenant.id.hex}"
    [hour] = found["hours"]
    at = world.start.isoformat().replace("+00:00", "Z")
    assert hour == found["total"] | {"tenant_id": tenant_id, "model": "demo", "hour": at}
    [limit] = found["limits"]
    assert limit == {
        **KEY_RPM,
        "tenant_id": tenant_id,
        "amount": 10,
        "mode": "hard",
        "model": "",
        "requests": 25,
    }
    assert found["in_fact"] == [{**KEY_RPM, "code": "RATE_LIMITED", "model": "", "mode": "hard", "requests": 5}]
    assert (found["refused_with_present_limits"], found["refused_otherwise"], found["known_by_minute"]) == (0, 0, 0)


async def test_nothing_is_saved_and_the_question_is_audited(world: World) -> None:
    await world.ask(KEY_RPM | {"amount": 10})
    assert (await world.admin.get(f"{world.tenant}/limits")).json()["items"] == []
    [record] = (await world.admin.get(f"{ADMIN}/audit", params={"action": "limit."})).json()["items"]
    assert (record["action"], record["details"]["limits"]) == ("limit.preview", [KEY_RPM | {"amount": 10}])


async def test_what_is_set_holds_beside_what_is_tried(world: World) -> None:
    """6 a minute are in force; a higher one tried in its place lets more pass, one beside it for the model does not."""
    body = KEY_RPM | {"amount": 6, "reason": "x"}
    assert (await world.admin.call("PUT", f"{world.tenant}/limits", json=body)).status_code == 200
    await world.post(*(world.event(second) for second in range(6)))
    await world.refuse(6, 4)
    raised = await world.ask(KEY_RPM | {"amount": 8})
    assert (raised["total"]["newly_served"], raised["total"]["refused"]) == (2, 2)
    assert raised["refused_with_present_limits"] == 4
    beside = await world.ask(KEY_RPM | {"amount": 100, "model": "demo"})
    assert beside["total"]["refused"] == 4
    without = await world.ask(KEY_RPM | {"amount": None})
    assert without["total"]["refused"] == 0


async def test_a_dark_limit_is_counted_beside_the_hard_ones(world: World) -> None:
    await world.post(*(world.event(second) for second in range(10)))
    found = await world.ask(KEY_RPM | {"amount": 3, "mode": "dark"})
    assert found["total"]["refused"] == 0
    assert [(row["mode"], row["requests"]) for row in found["limits"]] == [("dark", 7)]


async def test_a_budget_knows_what_was_spent_before(world: World) -> None:
    """Each costs 0.0005. 8 on the day before the time asked for; of 0.005 in total two more fit."""
    early = world.start - timedelta(minutes=30)
    begin = (early - world.start).total_seconds()
    await world.post(*(world.event(begin + n) for n in range(8)), *(world.event(n) for n in range(5)))
    total = {"level": "tenant", "metric": "spend_total", "amount": "0.005"}
    found = await world.ask(total)
    assert (found["total"]["requests"], found["total"]["refused"]) == (5, 3)
    assert found["limits"][0]["amount"] == "0.005000000000"
    assert any("Spend counts as charged" in note for note in found["notes"])
    per_key = await world.ask(total | {"level": "key", "model": "demo"})
    assert per_key["total"]["refused"] == 3


async def test_requests_at_once_are_told_from_their_ends(world: World) -> None:
    await world.post(world.event(0), world.event(0.5), world.event(1))
    found = await world.ask({"level": "project", "metric": "concurrency", "amount": 1})
    assert (found["total"]["refused"], found["limits"][0]["level"]) == (1, "project")


async def test_the_time_in_the_queue_is_before_the_admission(world: World) -> None:
    """A request admitted at 70 s that waited 20 s stood at the door at 50 s, in the window of the first."""
    await world.post(world.event(0), world.event(70, queue_us=20 * S))
    assert (await world.ask(KEY_RPM | {"amount": 1}))["total"]["refused"] == 1


async def test_refusals_for_money_or_capacity_are_told_and_not_replayed(world: World) -> None:
    await world.post(world.event(0))
    await world.refuse(1, 7, "INSUFFICIENT_CREDIT", level="tenant", metric="credit")
    await world.refuse(2, 2, "RATE_LIMITED", mode="soft")
    found = await world.ask(KEY_RPM | {"amount": 100})
    assert (found["total"]["requests"], found["refused_otherwise"]) == (1, 7)
    assert [(fact["mode"], fact["requests"]) for fact in found["in_fact"]] == [("soft", 2)]


async def test_days_without_events_are_replayed_by_the_minute(world: World, database_settings: Database) -> None:
    """30 in one minute, spread over it: 1 at 0, 2, 4 … 58 s. Under 10 a minute 20 do not pass."""
    await world.post(*(world.event(second) for second in range(30)))
    assert database_settings.owner_url is not None
    with psycopg.connect(database_settings.owner_url.get_secret_value(), autocommit=True) as owner:
        owner.execute("SET session_replication_role = replica")
        owner.execute("DELETE FROM usage_event")
    found = await world.ask(KEY_RPM | {"amount": 10})
    assert (found["total"]["requests"], found["total"]["newly_refused"], found["known_by_minute"]) == (30, 20, 30)
    assert any("spread evenly" in note for note in found["notes"])


async def test_usage_that_an_operator_billed_days_later_is_replayed_by_its_event(sessions: db.Sessions) -> None:
    """Two calls of one noon, one of them billed out of quarantine today: both are single requests, at their seconds."""
    prices = await make.publish_prices(sessions)
    tenant_id = await make.tenant(sessions, "1")
    noon = datetime(2025, 11, 5, 12, tzinfo=UTC)
    first, second = (
        make.event(tenant_id, make.schedule(prices, tenant_id), event_id=make.uuid7_at(int(noon.timestamp()) + n, n))
        for n in range(2)
    )
    us = int(noon.timestamp()) * S
    first = msgspec.structs.replace(first, admitted_at_us=us, ended_at_us=us + S, queue_us=0)
    second = msgspec.structs.replace(
        second, admitted_at_us=us + S, ended_at_us=us + 2 * S, queue_us=0, quarantine="looked odd"
    )
    await Posting(sessions, ManualClock(noon), poster_metrics(CollectorRegistry())).post([first, second])
    async with db.transaction(sessions) as session:
        await quarantine.bill(
            session, tenant_id, second.id, USAGE, reason="it is right", by=new_uuid(), now=datetime.now(UTC)
        )
        found = await traffic.recorded(session, tenant_id, noon, noon + timedelta(minutes=1), rows_max=10)
    assert [(one.came_at, one.by_minute) for one in found.served] == [
        (noon, False),
        (noon + timedelta(seconds=1), False),
    ]


async def test_a_plan_is_tried_on_all_its_tenants(world: World) -> None:
    """A tenant with a limit of its own keeps it; the plan's holds for the other."""
    other = await customer(world.sessions)
    await open_account(world.sessions, other)
    facts = {"tenant_id": other.tenant.id, "project_id": other.project.id, "key_id": other.key.id}
    await world.post(*(world.event(second) for second in range(6)))
    await world.post(*(world.event(second, **facts) for second in range(6)))
    own = f"{ADMIN}/tenants/ten_{other.tenant.id.hex}/limits"
    assert (await world.admin.call("PUT", own, json=KEY_RPM | {"amount": 5, "reason": "x"})).status_code == 200
    found = await world.ask(KEY_RPM | {"amount": 2}, path=DEFAULT_PLAN)
    assert (found["tenants"], found["tenants_left_out"]) == (2, 0)
    assert {row["tenant_id"][4:]: row["newly_refused"] for row in found["hours"]} == {
        world.who.tenant.id.hex: 4,
        other.tenant.id.hex: 1,
    }


async def test_members_try_limits_of_their_own(world: World, anonymous: Client) -> None:
    """The operators' hold beside them: a wider one of their own changes nothing."""
    body = KEY_RPM | {"amount": 4, "reason": "x"}
    assert (await world.admin.call("PUT", f"{world.tenant}/limits", json=body)).status_code == 200
    await world.post(*(world.event(second) for second in range(6)))
    tenant = f"/api/v1/tenants/ten_{world.who.tenant.id.hex}"
    world.admin = anonymous.visited_by(await member(world.sessions, world.who.tenant.id, Role.ADMIN))
    for amount, refused in ((100, 2), (1, 5)):
        assert (await world.ask(KEY_RPM | {"amount": amount}, path=tenant))["total"]["refused"] == refused


async def test_questions_that_make_no_sense_are_refused(world: World) -> None:
    theirs = await customer(world.sessions)
    day = timedelta(days=1)
    bad: tuple[tuple[dict[str, Any], int], ...] = (
        ({"limits": []}, 422),
        ({"limits": [KEY_RPM]}, 422),
        ({"limits": [KEY_RPM | {"amount": -1}]}, 422),
        ({"limits": [KEY_RPM | {"amount": "1"}]}, 400),
        ({"limits": [KEY_RPM | {"amount": 1, "model": "none"}]}, 404),
        ({"limits": [KEY_RPM | {"amount": 1, "project_id": f"prj_{world.who.project.id.hex}"}]}, 400),
        ({"limits": [KEY_RPM | {"amount": 1, "key_id": f"key_{theirs.key.id.hex}"}]}, 404),
        ({"limits": [KEY_RPM | {"amount": 1}], "since": (world.start - 40 * day).isoformat()}, 400),
        ({"limits": [KEY_RPM | {"amount": 1}], "since": (world.start + day).isoformat()}, 400),
    )
    for body, status in bad:
        answer = await world.admin.post(f"{world.tenant}/limits/what-if", body)
        assert answer.status_code == status, (body, answer.text)
    of_key = KEY_RPM | {"amount": 1, "key_id": f"key_{world.who.key.id.hex}"}
    assert (await world.admin.post(f"{DEFAULT_PLAN}/limits/what-if", {"limits": [of_key]})).status_code == 400


async def test_what_was_refused_is_read_by_hour(world: World, anonymous: Client) -> None:
    await world.refuse(10, 5)
    await world.refuse(20, 2)
    await world.refuse(3700, 1, "TOKENS_LIMITED", metric="input_tokens_per_minute", mode="dark")
    found = (await world.admin.get(f"{world.tenant}/refusals")).json()
    assert [(row["code"], row["mode"], row["requests"], row["input_tokens"]) for row in found["items"]] == [
        ("TOKENS_LIMITED", "dark", 1, 900),
        ("RATE_LIMITED", "hard", 7, 6300),
    ]
    viewer = anonymous.visited_by(await member(world.sessions, world.who.tenant.id, Role.VIEWER))
    mine = await viewer.get(f"/api/v1/tenants/ten_{world.who.tenant.id.hex}/refusals")
    assert mine.json()["items"] == found["items"]
    late = {"since": (world.start + timedelta(hours=1)).isoformat()}
    assert len((await world.admin.get(f"{world.tenant}/refusals", params=late)).json()["items"]) == 1
    wide = {"since": (world.start - timedelta(days=40)).isoformat()}
    assert (await world.admin.get(f"{world.tenant}/refusals", params=wide)).status_code == 400


async def _recorded(world: World, rows_max: int, minutes: int = 10) -> traffic.Recorded:
    async with db.transaction(world.sessions) as session:
        until = world.start + timedelta(minutes=minutes)
        return await traffic.recorded(session, world.who.tenant.id, world.start, until, rows_max=rows_max)


async def test_traffic_is_bounded_and_says_from_when_it_is_known(world: World) -> None:
    """Three minutes with 3, 2 and 1 requests: all of them, then by the minute, then the newest minutes only."""
    await world.post(*(world.event(second) for second in (0, 1, 2, 60, 61, 120)), world.event(-1), world.event(601))
    whole = await _recorded(world, 6)
    assert (whole.since, [one.requests for one in whole.served]) == (world.start, [1] * 6)
    assert {one.nano for one in whole.served} == {500_000}
    assert [one.came_at for one in whole.served] == sorted(one.came_at for one in whole.served)
    minutes = await _recorded(world, 5)
    assert sorted((one.came_at, one.requests, one.input_tokens, one.output_tokens) for one in minutes.served) == [
        (world.start, 3, 300, 150),
        (world.start + timedelta(minutes=1), 2, 200, 100),
        (world.start + timedelta(minutes=2), 1, 100, 50),
    ]
    assert (minutes.since, all(one.by_minute for one in minutes.served)) == (world.start, True)
    newest = await _recorded(world, 2)
    assert newest.since == world.start + timedelta(minutes=1)
    assert sorted(one.requests for one in newest.served) == [1, 2]
