"""What a caller hears of capacity, from a gateway process: why it waited, was refused, gave its place or fell back.

Receipts come from the control plane, once the poster has posted.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.embedded import valkey as vk
from core import db, keyspace
from core.clock import SystemClock
from core.ids import IdKind, parse_id
from core.load import Load, parse_load
from core.resp import RespClient
from core.settings import Database
from engine import simulator
from engine.simulation import Plan
from engine.simulator import SIMULATOR, Options, Simulator
from tests.conftest import PostgresService, fresh_database, settings_of
from tests.factories import fleet as fleets
from tests.factories.fleet import Customer, Fleet, Member
from tests.factories.gateway_process import free_port
from tests.factories.tenants import operator
from tests.waiting import until

CHAT = "/v1/chat/completions"
ALLOW = {"X-Tidegate-Fallback": "allow"}
PRICES = {
    "narrow": {"input": "2.00", "output": "6.00"},
    "gone": {"input": "2.00", "output": "6.00"},
    "wide": {"input": "1.00", "output": "3.00"},
}
NARROW_COST, WIDE_COST = "0.000100000000", "0.000050000000"  # of 20 tokens in and 10 out
PROMPT = "[[sim n=10 p=20]]"
NEVER_US = 60_000_000


class Desk:
    """The platform, its engine, and a gateway's door."""

    def __init__(self, fleet: Fleet, engine: Simulator, valkey: RespClient, narrow: str) -> None:
        self.fleet, self.engine, self.valkey, self.narrow = fleet, engine, valkey, narrow
        self.http = httpx.AsyncClient(base_url=fleet.urls[0], timeout=30)

    async def load(self) -> Load:
        return parse_load(await self.valkey.call("GET", self.narrow))

    async def ask(self, whose: Customer, wait_s: float = 20, model: str = "narrow", **more: Any) -> httpx.Response:
        headers = {"x-tidegate-max-wait": str(wait_s), **whose.headers, **more.pop("headers", {})}
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 10, **more}
        return await self.http.post(CHAT, json=body, headers=headers)

    def soon(self, whose: Customer, *args: Any, **more: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.ask(whose, *args, **more))

    async def waiting(self, count: int) -> None:
        async def so() -> bool:
            return (await self.load()).waiting == count

        await until(so)

    @asynccontextmanager
    async def one_runs(self, whose: Customer) -> AsyncIterator[None]:
        """Its only place is taken by a stream that has begun, until its caller leaves."""
        prompt = {"role": "user", "content": "[[sim n=9 p=20 fault=stall at=1]]"}
        body = {"model": "narrow", "messages": [prompt], "stream": True}
        async with self.http.stream("POST", CHAT, json=body, headers=whose.headers) as answer:
            assert answer.status_code == 200
            blocks = answer.aiter_raw()  # closed, it would end the request
            await anext(blocks)
            yield

        async def free() -> bool:
            return (await self.load()).inflight == 0

        await until(free)

    async def receipt(self, whose: Customer, answer: httpx.Response) -> dict[str, Any]:
        return await self.fleet.receipt(whose, answer.headers["x-request-id"])


@pytest.fixture(scope="module")
def module_database(postgres: PostgresService) -> Iterator[Database]:
    with fresh_database(postgres) as name:
        yield settings_of(postgres, name)


@pytest.fixture(scope="module")
async def desk(
    module_database: Database, tmp_path_factory: pytest.TempPathFactory, service_folder: Path
) -> AsyncIterator[Desk]:
    """One gateway, the control plane and a poster as processes; `narrow` has one place, and two may wait for it."""
    folder, address = service_folder / "capacity", service_folder / "capacity.valkey"
    folder.mkdir(mode=0o700)
    data = tmp_path_factory.mktemp("valkey")
    process = vk.start(data, address)
    vk.wait_ready(data, address, lambda: process.poll() is None)
    engine = await simulator.serve(Options(), SystemClock())
    pool = db.create_engine(module_database)
    _, token = await operator(db.create_sessions(pool))
    await pool.dispose()
    member, url = fleets.gateway(0)
    members = [member, Member("api", "api.app"), Member("poster", "billing.poster")]
    with_all = fleets.running(folder, fleets.environment(folder, module_database, address), members)
    await asyncio.to_thread(with_all.__enter__)
    try:
        fleet = Fleet(folder, [url], token, folder / "engine.jsonl")
        narrow = await furnish(fleet, "http://{}:{}".format(*engine.addresses[0][:2]))
        client = await RespClient.connect(f"unix://{address}")
        found = Desk(fleet, engine.app[SIMULATOR], client, narrow)
        yield found
        for closing in (found.http.aclose(), fleet.operator.aclose(), client.close()):
            await closing
    finally:
        await asyncio.to_thread(with_all.__exit__, None, None, None)
        await engine.cleanup()
        vk.stop(process)


async def furnish(fleet: Fleet, engine: str) -> str:
    """Make the models; returns where Valkey has the load of `narrow`."""
    there, version = {"kind": "external", "base_url": engine}, {"context_max": 32768}
    await fleet.add_model("wide", version, **there)
    await fleet.add_model("narrow", version, inflight_max=1, waiting_max=2, fallback_model="wide", **there)
    await fleet.add_model(
        "gone", version, kind="external", base_url=f"http://127.0.0.1:{free_port()}", fallback_model="wide"
    )
    await fleet.publish(PRICES, tiers=("batch", "standard", "priority"))
    listed = (await fleet.operator.get(f"{fleets.ADMIN}/deployments")).json()["items"]
    (narrow,) = [one["id"] for one in listed if one["name"] == "narrow"]
    return keyspace.deployment(parse_id(IdKind.DEPLOYMENT, narrow))


async def test_who_waited_sees_what_was_full_who_was_before_and_who_went_before(desk: Desk) -> None:
    """And who finds no place to wait, or none in time, is told the same in the refusal, which has no receipt."""
    customer = await desk.fleet.customer("1")
    async with desk.one_runs(customer):
        first = desk.soon(customer)
        await desk.waiting(1)
        second = desk.soon(customer)
        await desk.waiting(2)
        refused = await desk.ask(customer)
    seen = [await desk.receipt(customer, await answer) for answer in (first, second)]
    for receipt, ahead in zip(seen, (0, 1), strict=True):
        wait = receipt["wait"]
        assert (wait["waits_for"], wait["limit"], wait["ahead"]) == ("model_places", 1, ahead)
        assert wait["passed"] == {"priority": 0, "standard": ahead, "batch": 0}
        assert (receipt["outcome"], receipt["amount"], receipt["preemptions"]) == ("completed", NARROW_COST, 0)
        assert receipt["queue_us"] > 0
        assert wait["text"].startswith("Waited ")
        assert "the model's 1 places for its tier were taken" in wait["text"]
        assert ("requests that went before: 1 of standard" in wait["text"]) is bool(ahead)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "MODEL_BUSY")
    assert error["details"] == {"reason": "queue", "waits_for": "model_places", "limit": 1, "ahead": 2}
    assert int(refused.headers["retry-after"]) >= 1
    generation = f"/v1/generations/{refused.headers['x-request-id']}"
    assert (await desk.http.get(generation, headers=customer.headers)).status_code == 404


async def test_who_waited_in_vain_is_told_what_for(desk: Desk) -> None:
    customer = await desk.fleet.customer("1")
    async with desk.one_runs(customer):
        refused = await desk.ask(customer, 0.05)
    details = refused.json()["error"]["details"]
    assert refused.status_code == 503
    assert details["reason"] in {"deadline", "too_late"}
    assert (details["waits_for"], details["limit"], details["ahead"]) == ("model_places", 1, 0)


async def test_who_was_not_made_to_wait_has_nothing_to_be_told(desk: Desk) -> None:
    customer = await desk.fleet.customer("1")
    receipt = await desk.receipt(customer, await desk.ask(customer))
    assert (receipt["wait"], receipt["queue_us"], receipt["preemptions"]) == (None, 0, 0)


async def test_batch_that_gave_its_place_says_so_and_priority_why_it_waited(desk: Desk) -> None:
    """Once it finds another place and is billed once, once none in its time: then it costs nothing."""
    customer = await desk.fleet.customer("1", tier_max="priority")
    for finds_another in (True, False):
        desk.engine.plan = Plan(t=NEVER_US)
        victim = desk.soon(customer, 20 if finds_another else 0.5, service_tier="flex")
        await until(lambda: desk.engine.running == 1)
        desk.engine.plan = Plan()
        winner = desk.soon(customer, 2, service_tier="priority")
        one, other = await victim, await winner
        gave, took = [await desk.receipt(customer, answer) for answer in (one, other)]
        assert (other.status_code, took["tier"], took["amount"]) == (200, "priority", NARROW_COST)
        assert (took["wait"]["waits_for"], took["wait"]["ahead"], took["preemptions"]) == ("model_places", 0, 0)
        assert (gave["tier"], gave["preemptions"]) == ("batch", 1)
        if finds_another:
            assert (one.status_code, gave["outcome"], gave["amount"]) == (200, "completed", NARROW_COST)
            assert gave["queue_us"] > 0
        else:
            assert (one.status_code, one.json()["error"]["code"]) == (503, "PREEMPTED")
            assert 5 <= int(one.headers["retry-after"]) <= 30
            assert (gave["outcome"], gave["amount"]) == ("preempted", "0.000000000000")
    desk.engine.plan = Plan()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_model_falls_back_and_what_served_is_what_is_told_and_billed(desk: Desk, *, stream: bool) -> None:
    customer = await desk.fleet.customer("1")
    async with desk.one_runs(customer):
        mine = desk.ask(customer, 0.05, headers=ALLOW, stream=stream)
        answer, without = await asyncio.gather(mine, desk.ask(customer, 0.05))
    assert (answer.status_code, answer.headers["x-tidegate-served-model"]) == (200, "wide")
    assert b'"model":"wide"' in answer.content
    assert (without.status_code, without.json()["error"]["code"]) == (503, "MODEL_BUSY")
    receipt = await desk.receipt(customer, answer)
    assert (receipt["model"], receipt["amount"], receipt["outcome"]) == ("wide", WIDE_COST, "completed")
    assert [line["unit_price"] for line in receipt["lines"]] == ["1.000000", "3.000000"]


async def test_a_request_that_fell_back_counts_once_and_one_that_failed_on_both_counts_never(desk: Desk) -> None:
    """`gone` was admitted to its own model, whose engine cannot be reached, and then to the other one."""
    customer = await desk.fleet.customer("1", limits={"requests_per_minute": 10, "output_tokens_per_minute": 1000})
    left = []
    for _ in range(2):
        answer = await desk.ask(customer, model="gone", headers=ALLOW)
        assert (answer.status_code, answer.headers["x-tidegate-served-model"]) == (200, "wide")
        names = ("x-ratelimit-remaining-requests", "x-ratelimit-remaining-output-tokens")
        left.append(tuple(int(answer.headers[name]) for name in names))
    assert left == [(9, 990), (8, 980)]
    receipt = await desk.receipt(customer, answer)
    assert (receipt["model"], receipt["amount"]) == ("wide", WIDE_COST)
