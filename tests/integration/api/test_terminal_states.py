"""Every end that admission gives a request, as its caller sees it: status, code, reason, Retry-After."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import httpx
import msgspec
import pytest

from core import keyspace
from core.demand import Demand
from core.tiers import Tier
from engine.simulation import Plan
from tenants.types import Limit, LimitLevel, LimitMetric
from tests.factories.gateway import FixedPrices, usd_per_million
from tests.factories.scheduler import Fleet
from tests.factories.stack import Stack, chat, until

NEVER = Plan(t=60_000_000)  # µs to the first token
PROMPT = "[[sim n=7 p=20]]"
CREDIT = 10**12


class Door:
    """A gateway whose engine has one place, which is taken; one more request may wait."""

    def __init__(self, stack: Stack, fleet: Fleet) -> None:
        self.stack, self.fleet = stack, fleet
        self.begun: list[asyncio.Task[httpx.Response]] = []

    async def caller(self, *limits: tuple[LimitMetric, int], credit: int = CREDIT) -> dict[str, str]:
        """The header of a new key with these limits."""
        rules = tuple(Limit(LimitLevel.KEY, metric, amount) for metric, amount in limits)
        key, who = self.stack.rig.add_key(limits=rules)
        await self.fleet.set_credit(who.tenant_id, credit)
        return {"Authorization": f"Bearer {key}"}

    def begin(
        self, who: dict[str, str], *, tier: str = "default", wait_s: float = 20
    ) -> "asyncio.Task[httpx.Response]":
        headers = who | {"x-tidegate-max-wait": str(wait_s)}
        body = chat(PROMPT, service_tier=tier)
        task = asyncio.create_task(self.stack.client.post("/v1/chat/completions", json=body, headers=headers))
        self.begun.append(task)
        return task

    async def run(self, who: dict[str, str]) -> "asyncio.Task[httpx.Response]":
        """Begin a request for which the engine takes for ever; it has the place."""
        before = self.stack.engine.running
        task = self.begin(who)
        await until(lambda: self.stack.engine.running == before + 1)
        return task

    async def wait(self, who: dict[str, str], *, tier: str = "default") -> "asyncio.Task[httpx.Response]":
        """Begin a request that waits."""
        before = self.fleet.replicas[0].waiting
        task = self.begin(who, tier=tier)
        await until(lambda: self.fleet.replicas[0].waiting == before + 1)
        return task


@pytest.fixture
async def door(stack: Stack, valkey: Path) -> AsyncIterator[Door]:
    fleet, rig = await Fleet.open(valkey), stack.rig

    async def nothing_spent(tenant: UUID, spends: tuple[Demand, ...]) -> None:
        for demand in spends:
            await fleet.client.call("SET", keyspace.counter(demand.counter), 0, "NX")

    rig.gateway.admission = await fleet.replica(budget_loader=nothing_spent)
    prices = [usd_per_million(text) for text in ("2.00", "0.20", "6.00")]
    rig.gateway.directory.prices = FixedPrices(tuple(Tier), input_=prices[0], cached=prices[1], output=prices[2])
    rig.models["sim"] = msgspec.structs.replace(rig.models["sim"], inflight_max=1, waiting_max=1)
    rig.gateway.directory.changed()
    stack.engine.plan = NEVER
    door = Door(stack, fleet)
    yield door
    for task in door.begun:
        task.cancel()
    await asyncio.gather(*door.begun, return_exceptions=True)
    await rig.settled()
    await fleet.close()


async def over_requests(door: Door) -> httpx.Response:
    who = await door.caller((LimitMetric.REQUESTS_PER_MINUTE, 1))
    await door.run(who)
    return await door.begin(who)


async def over_tokens(door: Door) -> httpx.Response:
    who = await door.caller((LimitMetric.INPUT_TOKENS_PER_MINUTE, 150))
    await door.run(who)
    return await door.begin(who)


async def over_concurrency(door: Door) -> httpx.Response:
    who = await door.caller((LimitMetric.CONCURRENCY, 1))
    await door.run(who)
    return await door.begin(who)


async def without_credit(door: Door) -> httpx.Response:
    return await door.begin(await door.caller(credit=0))


async def over_budget(door: Door) -> httpx.Response:
    return await door.begin(await door.caller((LimitMetric.SPEND_PER_DAY, 1_000_000)))


async def that_does_not_wait(door: Door) -> httpx.Response:
    who = await door.caller()
    await door.run(who)
    return await door.begin(who, wait_s=0)


async def that_would_come_too_late(door: Door) -> httpx.Response:
    """A place came free after five seconds of waiting; whoever comes behind one that waits is served in five."""
    who = await door.caller()
    first = await door.run(who)
    await door.wait(who)
    await door.fleet.advance(5)
    first.cancel()
    await until(lambda: door.fleet.replicas[0].waiting == 0)
    await door.wait(who)
    return await door.begin(who, wait_s=1)


async def whose_time_ends(door: Door) -> httpx.Response:
    who = await door.caller()
    await door.run(who)
    return await door.begin(who, wait_s=0.1)


async def for_whom_there_is_no_place_to_wait(door: Door) -> httpx.Response:
    who = await door.caller()
    await door.run(who)
    await door.wait(who)
    return await door.begin(who)


async def whose_place_in_the_queue_goes_to_a_higher_tier(door: Door) -> httpx.Response:
    who = await door.caller()
    await door.run(who)
    waiter = await door.wait(who, tier="flex")
    door.begin(who, tier="priority")
    return await waiter


async def whose_place_goes_to_a_higher_tier(door: Door) -> httpx.Response:
    who = await door.caller()
    runs = door.begin(who, tier="flex", wait_s=0.1)
    await until(lambda: door.stack.engine.running == 1)
    await door.wait(who, tier="priority")
    await door.fleet.advance(11)
    await door.fleet.replicas[0].heartbeat()
    await door.fleet.replicas[0].tick()
    return await runs


async def of_somebody_unknown_while_valkey_is_away(door: Door) -> httpx.Response:
    who = await door.caller()
    await door.fleet.clients[0].close()
    return await door.begin(who)


class End(NamedTuple):
    status: int
    code: str
    reason: str | None
    retry_after: range | None  # s; None: no header, as another try makes no sense


SECONDS, WINDOW = range(1, 61), range(60, 62)
ENDS: dict[Callable[[Door], Awaitable[httpx.Response]], End] = {
    over_requests: End(429, "RATE_LIMITED", None, WINDOW),
    over_tokens: End(429, "TOKENS_LIMITED", None, WINDOW),
    over_concurrency: End(429, "CONCURRENCY_LIMITED", None, range(1, 2)),
    without_credit: End(402, "INSUFFICIENT_CREDIT", None, None),
    over_budget: End(402, "BUDGET_EXCEEDED", None, None),
    that_does_not_wait: End(503, "MODEL_BUSY", "queue", SECONDS),
    for_whom_there_is_no_place_to_wait: End(503, "MODEL_BUSY", "queue", SECONDS),
    that_would_come_too_late: End(503, "MODEL_BUSY", "too_late", range(4, 9)),
    whose_time_ends: End(503, "MODEL_BUSY", "deadline", SECONDS),
    whose_place_in_the_queue_goes_to_a_higher_tier: End(503, "MODEL_BUSY", "evicted", SECONDS),
    whose_place_goes_to_a_higher_tier: End(503, "PREEMPTED", None, range(5, 31)),
    of_somebody_unknown_while_valkey_is_away: End(503, "SERVICE_UNAVAILABLE", None, range(1, 2)),
}


@pytest.mark.parametrize("of_one", ENDS, ids=lambda of_one: of_one.__name__)
async def test_what_the_caller_sees_of_a_request(
    door: Door, of_one: Callable[[Door], Awaitable[httpx.Response]]
) -> None:
    answer, end = await of_one(door), ENDS[of_one]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (end.status, end.code)
    assert error.get("details", {}).get("reason") == end.reason
    if end.retry_after is None:
        assert "retry-after" not in answer.headers
    else:
        assert int(answer.headers["retry-after"]) in end.retry_after
