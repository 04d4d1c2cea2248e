"""Figures of engines become caps: over real HTTP, into a real Valkey."""

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from core import keyspace
from core.load import LAYOUT
from engine.figures import read
from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.scraper import Reading, Scraper
from tests.factories.scheduler import Fleet, load_text

SEATS = 40


class Engine:
    """A page that says what a test sets."""

    def __init__(self) -> None:
        self.page, self.status, self.asked, self.url = "", 200, 0, ""

    def say(self, *, waiting: int = 0, kv: float = 0.5, preemptions: int = 0, itl: tuple[float, int] = (0, 0)) -> None:
        self.page = (
            f"vllm:num_requests_waiting {waiting}\nvllm:kv_cache_usage_perc {kv}\n"
            f"vllm:num_preemptions_total {preemptions}\n"
            f"vllm:inter_token_latency_seconds_sum {itl[0]}\nvllm:inter_token_latency_seconds_count {itl[1]}\n"
        )

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.page, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine, app = Engine(), web.Application()
    app.router.add_get("/metrics", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def fleet(valkey: Path) -> AsyncIterator[Fleet]:
    fleet = await Fleet.open(valkey)
    await fleet.client.call("FLUSHALL")
    yield fleet
    await fleet.close()


def scraper(fleet: Fleet, holder: str = "c1", registry: CollectorRegistry | None = None) -> Scraper:
    registry = registry or CollectorRegistry()
    return Scraper(
        fleet.client,
        holder=holder,
        clock=fleet.clock,
        seats=SEATS,
        registry=registry,
        ask=lambda url: read(url, timeout_s=5),
    )


async def deploy(fleet: Fleet, *urls: str, deployment: str = "", gpu_mb: int = 0, kv_mb: int = 0) -> str:
    deployment = deployment or uuid4().hex
    endpoints = tuple(Endpoint(f"r{n}", url) for n, url in enumerate(urls))
    state = DeploymentState(deployment, ReplicaState.READY, endpoints, gpu_memory_mb=gpu_mb, kv_request_mb=kv_mb)
    await fleet.client.call("HSET", keyspace.STATE, deployment, msgspec.json.encode(state))
    return deployment


async def caps(fleet: Fleet, deployment: str) -> tuple[float, float, float]:
    raw = await fleet.client.call("GET", keyspace.PREFIX + "m:" + deployment)
    requests, tokens, saturation = LAYOUT.unpack(raw)[5:8] if raw else (0.0, 0.0, 0.0)
    return requests, tokens, saturation


async def test_a_full_engine_lowers_its_cap_and_its_figures_are_there_for_all(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    deployment = await deploy(fleet, engine.url)
    await fleet.client.call("SET", keyspace.PREFIX + "m:" + deployment, load_text(inflight=30))
    engine.say(waiting=5, kv=0.5)
    await scraper(fleet).turn()
    assert await caps(fleet, deployment) == (26.0, 0.0, 1.0)  # what it works on, and one more
    raw = await fleet.client.call("HGET", keyspace.FIGURES, deployment)
    assert msgspec.json.decode(raw, type=Reading).replicas["r0"].waiting == 5


async def test_an_engine_of_which_nothing_is_known_gets_few_seats(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    one = scraper(fleet)
    deployment = await deploy(fleet, engine.url)
    engine.say(kv=0.1)
    await one.turn()
    assert await caps(fleet, deployment) == (32.0, 0.0, 0.1 / 0.9)


async def test_a_stated_memory_is_where_the_cap_begins_and_what_it_never_passes(fleet: Fleet, engine: Engine) -> None:
    """80 GB and 1.2 GB a request: 26 for each engine, however empty it says it is."""
    await fleet.replica()
    one = scraper(fleet)
    deployment = await deploy(fleet, engine.url, engine.url, gpu_mb=80_000, kv_mb=1_200)
    await fleet.client.call("SET", keyspace.PREFIX + "m:" + deployment, load_text(inflight=52))
    engine.say(kv=0.1, itl=(2.0, 100))
    for _ in range(3):
        await one.turn()
        assert (await caps(fleet, deployment))[0] == 52.0
        fleet.clock.advance(1)
    await deploy(fleet, engine.url, deployment=deployment, gpu_mb=80_000, kv_mb=1_600)
    await one.turn()
    assert (await caps(fleet, deployment))[0] == 20.0  # one engine, and stated anew
    await deploy(fleet, engine.url, deployment=deployment, gpu_mb=80_000, kv_mb=1_200)
    await one.turn()
    assert (await caps(fleet, deployment))[0] == 26.0
    await deploy(fleet, engine.url, deployment=deployment)
    await one.turn()
    assert 26.0 < (await caps(fleet, deployment))[0] < 40.0  # unknown again: it goes by the figures


async def test_who_takes_over_begins_at_what_the_engine_works_on(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    deployment = await deploy(fleet, engine.url)
    await fleet.client.call("SET", keyspace.PREFIX + "m:" + deployment, load_text(inflight=39))
    engine.say(waiting=2, kv=0.95)
    await scraper(fleet).turn()
    assert (await caps(fleet, deployment))[0] == 33.0  # 37 run, and it is full: a tenth less


async def test_an_engine_that_says_nothing_of_itself_has_no_adaptive_cap(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    engine.status = 404
    deployment = await deploy(fleet, engine.url)
    await scraper(fleet).turn()
    assert await caps(fleet, deployment) == (0.0, 0.0, 0.0)
    assert engine.asked == 1


async def test_silence_after_speech_leaves_the_cap_and_then_lets_it_fall(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    one, deployment = scraper(fleet), await deploy(fleet, engine.url)
    engine.say(kv=0.1)
    await one.turn()
    engine.status = 500
    fleet.clock.advance(5)
    await one.turn()
    assert (await caps(fleet, deployment))[0] == 32.0
    fleet.clock.advance(6)
    await one.turn()
    assert (await caps(fleet, deployment))[0] == 30.0  # 5 % less each second


async def test_one_reads_and_the_other_takes_over_when_the_lease_ends(fleet: Fleet) -> None:
    first, second = scraper(fleet, "c1"), scraper(fleet, "c2")
    assert [await one._leads() for one in (first, second, first)] == [True, False, True]
    await fleet.client.call("DEL", keyspace.SCRAPER)
    assert [await one._leads() for one in (second, first)] == [True, False]
    assert 0 < await fleet.client.call("PTTL", keyspace.SCRAPER) <= 3000


async def test_an_engine_started_anew_counts_from_nought(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    one, deployment = scraper(fleet), await deploy(fleet, engine.url)
    await fleet.client.call("SET", keyspace.PREFIX + "m:" + deployment, load_text(inflight=30))
    engine.say(preemptions=7, itl=(9.0, 300))
    await one.turn()
    before = (await caps(fleet, deployment))[0]
    engine.say(preemptions=0, itl=(0.1, 5))
    fleet.clock.advance(1)
    await one.turn()
    assert (await caps(fleet, deployment))[0] >= before  # no preemption has happened
    engine.say(preemptions=1, itl=(0.2, 10))
    fleet.clock.advance(3)
    await one.turn()
    assert (await caps(fleet, deployment))[0] == 27.0


async def test_two_engines_of_one_deployment_are_one_sample(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    engine.say(waiting=4, kv=0.1)
    deployment = await deploy(fleet, engine.url, engine.url)
    await scraper(fleet).turn()
    assert await caps(fleet, deployment) == (64.0, 0.0, 0.8)  # 8 wait where 10 are too many


async def test_what_moved_the_cap_and_how_evenly_tenants_are_served_is_shown(fleet: Fleet, engine: Engine) -> None:
    await fleet.replica()
    registry = CollectorRegistry()
    one, deployment = scraper(fleet, registry=registry), await deploy(fleet, engine.url)
    queue = f"{keyspace.PREFIX}q:{deployment}:1"

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tidegate_admission_{name}", {"deployment": deployment, **labels})

    load = LAYOUT.pack(0, 2, *[0] * 7, 2)  # two of standard wait
    await fleet.client.call("SET", keyspace.PREFIX + "m:" + deployment, load)
    engine.say(waiting=5)
    for turn in range(7):
        await fleet.client.call("ZADD", queue, 100 + 30 * turn, "a", 900 + 10 * turn, "b")
        await one.turn()
        fleet.clock.advance(10)
    assert shown("cap_moves_total", cause="engine_queue") == 1  # down to its one pod, and then it stays
    assert shown("fairness_error", tier="standard") == 0.5
    assert shown("fairness_error", tier="batch") is None
    assert [shown("queued", tier=tier) for tier in ("priority", "standard", "batch")] == [0, 2, 0]
    await fleet.client.call("DEL", keyspace.STATE)
    await one.turn()
    assert shown("cap_moves_total", cause="engine_queue") is None
    assert shown("fairness_error", tier="standard") is None
