"""Figures of engines reach routers, and what these see reaches operators: through a real Valkey."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from core import keyspace
from core.clock import ManualClock
from core.resp import RespClient
from engine.figures import EngineFigures
from knative.types import DeploymentState, Endpoint, ReplicaState
from scheduler.router.router import Router
from scheduler.routing_feed import RoutingFeed, read_reports
from scheduler.scraper import Reading

STATE = DeploymentState("d", ReplicaState.READY, (Endpoint("a", "unix:/a"), Endpoint("b", "unix:/b")))


@pytest.fixture
async def client(valkey: Path) -> AsyncIterator[RespClient]:
    client = await RespClient.connect(f"unix://{valkey}")
    await client.call("FLUSHALL")
    yield client
    await client.close()


class Gateway:
    """A router with its feed."""

    def __init__(self, client: RespClient, name: str) -> None:
        self.clock = ManualClock()
        self.router = Router(random=lambda: 0.0)
        self.feed = RoutingFeed(client, self.router, gateway=name, clock=self.clock)

    def pick(self) -> str:
        return self.router.pick(STATE, b"", 0, None, self.clock.monotonic()).replica.name

    async def turn(self) -> None:
        self.clock.advance(1.0)
        await self.feed.turn()
        self.router.look(self.clock.monotonic(), lambda _: 0.0)


async def put(client: RespClient, at_us: int, **running: int) -> None:
    replicas = {name: EngineFigures(running=count) for name, count in running.items()}
    await client.call("HSET", keyspace.FIGURES, "d", msgspec.json.encode(Reading(at_us, replicas)))


async def test_figures_that_change_are_gone_by_and_those_that_do_not_are_old(client: RespClient) -> None:
    gateway = Gateway(client, "g")
    assert gateway.pick() == "a"
    await put(client, 1, a=9, b=2)
    await gateway.turn()
    assert gateway.pick() == "a"  # how old they are nobody knows
    await put(client, 2, a=9, b=2)
    await gateway.turn()
    assert gateway.pick() == "b"
    for _ in range(3):
        await gateway.turn()
    assert gateway.pick() == "a"


async def test_what_each_gateway_sees_can_be_read_while_it_lives(client: RespClient) -> None:
    gateways = [Gateway(client, "g1"), Gateway(client, "g2")]
    for gateway in gateways:
        gateway.pick()
    for _ in range(2):
        for gateway in gateways:
            await gateway.turn()
    now_us = gateways[0].clock.now_us()
    reports = await read_reports(client, "d", now_us)
    assert [report.gateway for report in reports] == ["g1", "g2"]
    assert [seen.replica for seen in reports[0].replicas] == ["a", "b"]
    assert reports[0].decisions[0].chosen == "a"
    assert await read_reports(client, "d", now_us + 11_000_000) == []
    assert await read_reports(client, "other", now_us) == []
    assert 0 < await client.call("PTTL", keyspace.routing("d")) <= 60_000


async def test_nothing_is_read_or_said_where_no_deployment_has_several_replicas(client: RespClient) -> None:
    gateway = Gateway(client, "g")
    await put(client, 1, a=1)
    for _ in range(4):
        await gateway.turn()
    assert await client.call("KEYS", "{tg}:routing:*") == []
