"""Gateways follow states and wake deployments over a real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from core import keyspace
from core.errors import ErrorKind, PlatformError
from core.resp import RespClient
from knative import publisher
from knative.types import DeploymentState, Endpoint, ReplicaState
from knative.wake import StateFeed
from tests.factories.scheduler import load_text
from tests.waiting import until

TIDE = UUID(int=0x71DE)


def state(kind: ReplicaState, epoch: int, deployment: UUID = TIDE, eta_s: int = 0) -> DeploymentState:
    endpoints = (Endpoint("r0", "unix:/e.sock"),) if kind in {ReplicaState.READY, ReplicaState.IDLE} else ()
    return DeploymentState(deployment.hex, kind, endpoints, eta_s=eta_s, epoch=epoch)


@pytest.fixture
async def client(valkey: Path) -> AsyncIterator[RespClient]:
    client = await RespClient.connect(f"unix://{valkey}")
    yield client
    await client.close()


@pytest.fixture
async def feed(client: RespClient) -> AsyncIterator[StateFeed]:
    feed = StateFeed(client, poll_s=0.05)
    await feed.start()
    yield feed
    await feed.close()


async def eventually(feed: StateFeed, kind: ReplicaState | None, deployment: UUID = TIDE) -> None:
    await until(lambda: (found := feed.current(deployment)) is not None and found.state is kind)


async def test_a_state_arrives_by_message_and_also_without_one(client: RespClient) -> None:
    patient = StateFeed(client, poll_s=60)
    polling = StateFeed(client, poll_s=0.02)
    await patient.start()
    await polling.start()
    await publisher.publish(client, state(ReplicaState.READY, 1))
    await eventually(patient, ReplicaState.READY)
    other = uuid4()
    raw = f'{{"deployment":"{other.hex}","state":"idle"}}'
    await client.call("HSET", keyspace.STATE, other.hex, raw)  # as if the message were lost
    await eventually(polling, ReplicaState.IDLE, other)
    assert patient.current(other) is None
    await patient.close()
    await polling.close()


async def test_a_ready_deployment_is_returned_at_once_and_not_woken(client: RespClient, feed: StateFeed) -> None:
    await publisher.publish(client, state(ReplicaState.IDLE, 1))
    await eventually(feed, ReplicaState.IDLE)
    assert (await feed.wait_ready(TIDE, 0)).endpoints[0].url == "unix:/e.sock"
    assert await client.call("EXISTS", keyspace.wake(TIDE)) == 0


async def test_a_herd_in_several_gateways_sends_one_wake(client: RespClient) -> None:
    heard: list[bytes] = []
    await client.subscribe([keyspace.WAKE_CHANNEL], lambda _, payload: heard.append(payload))
    feeds = [StateFeed(client, poll_s=0.05) for _ in range(3)]
    for feed in feeds:
        await feed.start()
    callers = [asyncio.create_task(feed.wait_ready(TIDE, 5)) for feed in feeds for _ in range(100)]
    await until(lambda: bool(heard))
    await publisher.publish(client, state(ReplicaState.LOADING, 1))
    await publisher.publish(client, state(ReplicaState.READY, 2))
    answers = await asyncio.gather(*callers)
    assert {answer.state for answer in answers} == {ReplicaState.READY}
    assert heard == [TIDE.hex.encode()]
    for feed in feeds:
        await feed.close()


async def test_beyond_the_callers_patience_it_says_loading_with_an_estimate(
    client: RespClient, feed: StateFeed
) -> None:
    await publisher.publish(client, state(ReplicaState.LOADING, 1, eta_s=7))
    await eventually(feed, ReplicaState.LOADING)
    with pytest.raises(PlatformError) as caught:
        await feed.wait_ready(TIDE, 0.02)
    problem = caught.value
    assert (problem.code, problem.kind, problem.retry_after_s) == ("MODEL_LOADING", ErrorKind.UNAVAILABLE, 7)


async def test_a_failed_engine_is_asked_for_once_more_and_its_next_failure_is_told(
    client: RespClient, feed: StateFeed
) -> None:
    await publisher.publish(client, state(ReplicaState.FAILED, 1))
    await eventually(feed, ReplicaState.FAILED)
    caller = asyncio.create_task(feed.wait_ready(TIDE, 5))

    async def woken() -> bool:
        return bool(await client.call("EXISTS", keyspace.wake(TIDE)))

    await until(woken)
    assert not caller.done()
    await publisher.publish(client, state(ReplicaState.LOADING, 2))
    await eventually(feed, ReplicaState.LOADING)
    assert not caller.done()
    await publisher.publish(client, state(ReplicaState.FAILED, 3))
    with pytest.raises(PlatformError) as caught:
        await caller
    assert (caught.value.code, caught.value.kind) == ("UPSTREAM_ERROR", ErrorKind.UPSTREAM)


async def test_an_old_leader_cannot_publish_over_or_withdraw_a_newer_state(client: RespClient) -> None:
    assert await publisher.publish(client, state(ReplicaState.READY, 2**40 + 5))
    assert not await publisher.publish(client, state(ReplicaState.ABSENT, 2**40 + 4))
    assert not await publisher.withdraw(client, TIDE.hex, 2**40 + 4)
    assert await publisher.read_epochs(client) == {TIDE.hex: 2**40 + 5}
    assert not await publisher.publish(client, state(ReplicaState.READY, 2**40 + 5))  # already there: no message
    assert await publisher.withdraw(client, TIDE.hex, 2**40 + 5)
    assert await publisher.read_epochs(client) == {}


async def test_activity_is_zero_for_a_deployment_that_nobody_called(client: RespClient) -> None:
    other = uuid4()
    await client.call("SET", keyspace.deployment(TIDE), load_text(inflight=3, waiting=1, last_us=17))
    await client.call("SET", keyspace.wake(other), 1)
    found = await publisher.read_activity(client, [TIDE, other])
    assert found == {TIDE: publisher.Activity(3, 1, 17), other: publisher.Activity(woken=True)}


async def test_states_survive_a_flush_of_valkey_until_published_anew(client: RespClient, feed: StateFeed) -> None:
    await publisher.publish(client, state(ReplicaState.READY, 1))
    await eventually(feed, ReplicaState.READY)
    await client.call("FLUSHALL")
    await asyncio.sleep(0.15)  # three polls
    assert feed.current(TIDE) is not None
