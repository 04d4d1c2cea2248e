"""A replica that hangs: who waits on it for a first byte is moved to another one, once, and pays once."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web

from api.inference.hung import Watch
from api.inference.relay import Relay
from billing.types import Outcome
from catalog.types import ServedModel
from engine.simulation import Plan
from scheduler.router.fleet import SILENT_S
from tests.factories.stack import Stack, chat, until

COST = 20 * 2_000_000 + 7 * 6_000_000  # pico
PROMPT = "[[sim n=7 p=20]]"


class Hanging:
    """A server that takes requests and says nothing; `well` is what it says when it is asked for its health."""

    def __init__(self) -> None:
        self.taken = self.left = self.probes = 0
        self.well = False
        self.begins = False  # to answer: a head, and then nothing

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.taken += 1
        try:
            if self.begins:
                await web.StreamResponse(headers={"Content-Type": "text/event-stream"}).prepare(request)
            await asyncio.sleep(3600)
        finally:
            self.left += 1
        return web.Response()

    async def health(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.well else 500)


class Site:
    """The gateway with one model of two replicas, one of which hangs."""

    def __init__(self, stack: Stack, hanging: Hanging, url: str) -> None:
        self.stack, self.hanging, self.watch = stack, hanging, Watch(stack.rig.gateway)
        self.model: ServedModel = stack.rig.sleeping("two")
        self.urls = (url, stack.rig.models["sim"].base_url)
        stack.rig.wake(self.model, *self.urls)

    def ask(self, **members: object) -> "asyncio.Task[httpx.Response]":
        body = chat(PROMPT, model="two") | members
        return asyncio.create_task(self.stack.client.post("/v1/chat/completions", json=body))

    async def stuck(self, count: int = 1, **members: object) -> "list[asyncio.Task[httpx.Response]]":
        """Ask, and return those that wait on the replica which hangs."""
        self.stack.rig.wake(self.model, self.urls[0])
        tasks = [self.ask(**members) for _ in range(count)]
        await until(lambda: self.hanging.taken == count)
        self.stack.rig.wake(self.model, *self.urls)
        return tasks

    async def wait_long(self) -> None:
        """Let the time pass after which it is looked at, and let that look end."""
        gateway = self.stack.rig.gateway
        gateway.pool.listen(gateway.now)
        gateway.pool.listen(gateway.now)
        gateway.now += SILENT_S
        self.watch.look(gateway.now)
        await asyncio.gather(*self.watch._asked.values())

    @property
    def retries(self) -> dict[str, int]:
        return self.stack.rig.gateway.metrics.retries


@pytest.fixture
async def site(stack: Stack) -> AsyncIterator[Site]:
    hanging, app = Hanging(), web.Application()
    app.router.add_post("/v1/chat/completions", hanging.take)
    app.router.add_get("/health", hanging.health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found = Site(stack, hanging, "http://{}:{}".format(*runner.addresses[0][:2]))
    yield found
    await found.watch.close()
    await runner.cleanup()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_answered_elsewhere_ended_there_and_billed_once(site: Site, *, stream: bool, begins: bool) -> None:
    """Also where the engine has sent a head: what counts is what the caller has had."""
    site.hanging.begins = begins and stream
    (task,) = await site.stuck(stream=stream)
    await site.wait_long()
    assert (await task).status_code == 200
    await until(lambda: site.hanging.left == 1)  # it has heard that nobody waits any more
    await site.stack.rig.settled()
    event = site.stack.rig.event
    assert (event.outcome, event.amount_pico, event.usage.output) == (Outcome.COMPLETED, COST, 7)
    assert list(site.stack.rig.admission.charges.values()) == [COST // 1000]
    assert not site.stack.rig.admission.held
    assert (site.retries, site.hanging.probes) == ({"moved": 1}, 1)
    assert site.stack.rig.gateway.pool.target(site.urls[0]).inflight == 0


async def test_a_silent_one_that_is_well_is_left_at_its_work(site: Site) -> None:
    """A long prompt: it says nothing for long, but to who asks how it is."""
    site.hanging.well = True
    (task,) = await site.stuck()
    for _ in range(3):
        await site.wait_long()
    assert (site.hanging.probes, site.retries, task.done()) == (1, {}, False)
    site.stack.rig.gateway.now += 5
    await site.wait_long()
    assert (site.hanging.probes, task.done()) == (2, False)  # it is looked at again, not all the time
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nobody_is_moved_twice(site: Site) -> None:
    """The other one hangs as well by then."""
    (task,) = await site.stuck()
    site.stack.engine.plan = Plan(t=60_000_000)
    await site.wait_long()
    await until(lambda: site.stack.engine.running == 1)
    (relay,) = site.stack.rig.gateway.relays
    assert isinstance(relay, Relay)
    assert not relay.movable
    for _ in range(3):
        await site.wait_long()
    assert (site.retries, task.done()) == ({"moved": 1}, False)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_those_beyond_the_budget_stay_and_are_looked_at_again(site: Site) -> None:
    """Three of five in ten seconds, as nobody else has called."""
    tasks = await site.stuck(5)
    await site.wait_long()
    await until(lambda: sum(task.done() for task in tasks) == 3)
    assert site.retries == {"moved": 3, "over_budget": 1}
    site.stack.rig.gateway.now += 10
    await site.wait_long()
    assert [(await task).status_code for task in tasks] == [200] * 5
    assert len({event.id for event in site.stack.rig.spool.events}) == len(site.stack.rig.spool.events) == 5


async def test_with_no_other_that_speaks_it_stays(site: Site) -> None:
    (task,) = await site.stuck()
    site.stack.rig.wake(site.model, site.urls[0])
    await site.wait_long()
    assert (site.retries, task.done(), site.hanging.probes) == ({}, False, 0)
    site.stack.rig.wake(site.model, *site.urls)
    await site.wait_long()
    assert (await task).status_code == 200
