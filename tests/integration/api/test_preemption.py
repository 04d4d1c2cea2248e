"""Gateway, admission's scripts and an engine: batch gives its place to priority and is answered all the same."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from core.tiers import Tier
from engine.simulation import Plan
from tests.factories.gateway import FixedPrices, Rig, usd_per_million
from tests.factories.scheduler import Fleet
from tests.factories.stack import Stack, chat, events_of, text_of, until

NEVER = Plan(t=60_000_000)  # µs to the first token
ONE = 20 * 2_000_000 + 7 * 6_000_000  # pico, of 20 and 7 tokens
PROMPT = "[[sim n=7 p=20]]"
CREDIT = 10**12


@pytest.fixture
async def fleet(stack: Stack, valkey: Path) -> AsyncIterator[Fleet]:
    """The scripts admit to the stack's engine, which has one place."""
    fleet, rig = await Fleet.open(valkey), stack.rig
    await fleet.client.call("FLUSHALL")
    await fleet.set_credit(rig.principal.tenant_id, CREDIT)
    rig.gateway.admission = await fleet.replica()
    prices = [usd_per_million(text) for text in ("2.00", "0.20", "6.00")]
    rig.gateway.directory.prices = FixedPrices(tuple(Tier), input_=prices[0], cached=prices[1], output=prices[2])
    model = rig.models["sim"]
    rig.models["sim"] = type(model)(
        **{name: getattr(model, name) for name in model.__struct_fields__} | {"inflight_max": 1}
    )
    rig.gateway.directory.changed()
    yield fleet
    await rig.settled()
    await fleet.close()


def batch(
    stack: Stack, prompt: str = PROMPT, *, wait_s: float = 20, stream: bool = False
) -> "asyncio.Task[httpx.Response]":
    """Begin a batch request; the engine takes for ever over it, unless it was told something else before."""
    body = chat(PROMPT, service_tier="flex", stream=stream)
    headers = {"x-tidegate-max-wait": str(wait_s)}
    return asyncio.create_task(stack.client.post("/v1/chat/completions", json=body, headers=headers))


def priority(stack: Stack, prompt: str = PROMPT) -> "asyncio.Task[httpx.Response]":
    body, headers = chat(prompt, service_tier="priority"), {"x-tidegate-max-wait": "20"}
    return asyncio.create_task(stack.client.post("/v1/chat/completions", json=body, headers=headers))


async def waited_long(fleet: Fleet) -> None:
    """Return once somebody waits, and by Valkey's clock has waited more than half of its time."""
    await until(lambda: fleet.replicas[0].waiting == 1)
    await fleet.advance(11)
    await fleet.replicas[0].heartbeat()
    await fleet.replicas[0].tick()


async def running(stack: Stack) -> None:
    """Return once the engine works on a request; the next one is answered at once."""
    await until(lambda: stack.engine.running == 1)
    stack.engine.plan = Plan()


def preemptions(rig: Rig) -> dict[tuple[str, str], int]:
    return rig.gateway.metrics.preemptions


@pytest.mark.parametrize("stream", [False, True])
async def test_batch_gives_its_place_is_answered_later_and_billed_once(
    stack: Stack, fleet: Fleet, *, stream: bool
) -> None:
    stack.engine.plan = NEVER
    first = batch(stack, stream=stream)
    await running(stack)
    second = priority(stack)
    await waited_long(fleet)
    answer = await first
    assert ((await second).status_code, answer.status_code) == (200, 200)
    if stream:
        assert text_of(events_of(answer.text)) == "tide gate é潮 over 🌊sand, "
    ended = [(line["request_id"], line["ended"], line["generated"]) for line in stack.generated()]
    (victim, *_), (winner, *_), _ = ended
    assert ended == [(victim, "aborted", 0), (winner, "completed", 7), (victim, "completed", 7)]
    await stack.rig.settled()
    by_tier = {event.tier: event for event in stack.rig.spool.events}
    assert len(stack.rig.spool.events) == 2
    assert (by_tier[Tier.BATCH].amount_pico, by_tier[Tier.PRIORITY].amount_pico) == (ONE, ONE)
    assert by_tier[Tier.BATCH].outcome == "completed"
    assert [(e.preemptions, e.waste_tokens) for e in (by_tier[Tier.BATCH], by_tier[Tier.PRIORITY])] == [(1, 20), (0, 0)]
    assert 0 < by_tier[Tier.BATCH].waste_us < by_tier[Tier.BATCH].ended_at_us - by_tier[Tier.BATCH].admitted_at_us
    assert set((await fleet.outstanding(stack.rig.principal.tenant_id)).values()) == {ONE // 1000}
    assert await fleet.load(stack.rig.models["sim"]) == (0, 0)
    assert preemptions(stack.rig) == {("batch", "priority"): 1}


async def test_a_stream_that_has_begun_is_never_ended(stack: Stack, fleet: Fleet) -> None:
    prompt = "[[sim n=15 p=20 d=20000]]"
    seen = b""
    async with stack.client.stream(
        "POST", "/v1/chat/completions", json=chat(prompt, service_tier="flex", stream=True)
    ) as answer:
        async for block in answer.aiter_raw():
            if not seen:
                second = priority(stack)
                await waited_long(fleet)
            seen += block
    assert seen.endswith(b"data: [DONE]\n\n")
    assert (await second).status_code == 200
    assert [line["ended"] for line in stack.generated()] == ["completed", "completed"]
    assert preemptions(stack.rig) == {}


async def test_without_another_place_in_its_time_it_is_told_so_and_pays_nothing(stack: Stack, fleet: Fleet) -> None:
    """A stream that has not begun gets a plain 503."""
    stack.engine.plan = NEVER
    first = batch(stack, wait_s=0.4, stream=True)
    await running(stack)
    second = priority(stack, "[[sim n=7 p=20 t=60000000]]")
    await waited_long(fleet)
    answer = await first
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "PREEMPTED"
    assert [n for (_, _, why), n in stack.rig.gateway.admission_metrics.refusals.items() if why == "preempted"] == [1]
    assert 5 <= int(answer.headers["retry-after"]) <= 30
    event = stack.rig.event
    assert (event.outcome, event.amount_pico, event.http_status) == ("preempted", 0, 503)
    assert event.preemptions == 1
    assert event.waste_tokens >= 20  # an estimate, which is no less than it was
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await stack.rig.settled()
    assert preemptions(stack.rig) == {("batch", "priority"): 1, ("batch", "ended"): 1}
    assert sum((await fleet.outstanding(stack.rig.principal.tenant_id)).values()) == 0
    assert await fleet.load(stack.rig.models["sim"]) == (0, 0)


async def test_a_caller_that_leaves_while_its_request_waits_again_leaves_nothing_behind(
    stack: Stack, fleet: Fleet
) -> None:
    stack.engine.plan = NEVER
    first = batch(stack)
    await running(stack)
    second = priority(stack, "[[sim n=7 p=20 t=60000000]]")
    await waited_long(fleet)
    await until(lambda: fleet.replicas[0].waiting == 1 and stack.engine.aborted_total == 1)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await stack.rig.settled()
    assert sum((await fleet.outstanding(stack.rig.principal.tenant_id)).values()) == 0
    assert await fleet.load(stack.rig.models["sim"]) == (0, 0)


async def test_refused_before_it_is_sent_again_it_does_not_blame_the_engine(stack: Stack, fleet: Fleet) -> None:
    """Its key was revoked while it waited for another place."""
    stack.engine.plan = NEVER
    first = batch(stack)
    await running(stack)
    second = priority(stack, "[[sim n=7 p=20 t=60000000]]")
    await waited_long(fleet)
    await until(lambda: fleet.replicas[0].waiting == 1 and stack.engine.aborted_total == 1)
    stack.rig.gateway.directory.principals.clear()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (await first).status_code == 401
    await stack.rig.settled()
    by_tier = {event.tier: event for event in stack.rig.spool.events}
    assert (by_tier[Tier.BATCH].outcome, by_tier[Tier.BATCH].amount_pico) == ("preempted", 0)
