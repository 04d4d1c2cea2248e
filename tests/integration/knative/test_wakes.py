"""The cold-start contract of the controller: slow loads are waited for, estimated, and written down by phase.

The engine is the simulator in this process, under the clock that the test moves: it is ready when so much of that time
has passed. Nothing waits for real time.
"""

import asyncio
import signal
from pathlib import Path
from uuid import UUID

import pytest
from aiohttp import web

from catalog import observed
from catalog.types import Deployment, DeploymentChange, Wake
from core import db, keyspace
from core.clock import ManualClock
from core.ids import new_uuid
from engine import simulator
from engine.simulator import Options
from knative import publisher
from knative.local import LocalBackend, Record, fingerprint
from knative.types import WAKE_MS, ReplicaState, Seat
from knative.wakes import Timing
from tests.factories.catalog import deploy
from tests.factories.controller import Stage
from tests.waiting import until

MINUTE_S = 60


class FakeLoader(LocalBackend):
    """Engines of this process that take their deployment's `load_ms` of the test's clock to be ready."""

    def __init__(self, clock: ManualClock, host: str) -> None:
        super().__init__(Path(host), Path(host))
        self.clock = clock
        self.host = host
        self.starts = self.looks = 0
        self.signals: list[signal.Signals] = []
        self.runners: list[web.AppRunner] = []
        self.seats: dict[Seat, Record] = {}
        self.starting: set[asyncio.Task[None]] = set()

    def adopt(self) -> list[Seat]:
        return []

    def record(self, seat: Seat) -> Record | None:
        return self.seats.get(seat)

    def look(self, seat: Seat) -> tuple[bool, str]:
        self.looks += 1
        return seat in self.seats, ""

    def start(self, seat: Seat, deployment: Deployment) -> Timing:
        self.starts += 1
        url = f"unix:{self.host}/{seat.name[-8:]}.sock"
        self.seats[seat] = Record(new_uuid(), url, 1, 1, fingerprint(deployment))
        options = Options(load_ms=int(deployment.engine_args["load_ms"]))
        task = asyncio.create_task(self._serve(options, url.removeprefix("unix:")))
        self.starting.add(task)
        return Timing(fetch_us=2_000, schedule_us=1_000)

    async def _serve(self, options: Options, uds: str) -> None:
        self.runners.append(await simulator.serve(options, self.clock, uds=uds))

    def send(self, seat: Seat, number: signal.Signals) -> None:
        self.signals.append(number)
        self.seats.pop(seat, None)

    def trim_logs(self) -> None: ...

    async def end_all(self, timeout_s: float) -> None:
        self.seats.clear()
        await asyncio.gather(*self.starting)
        for runner in self.runners:
            await runner.cleanup()


@pytest.fixture
def loading(stage: Stage) -> FakeLoader:
    loader = FakeLoader(stage.clock, str(stage.folder))
    stage.backend = loader  # type: ignore[assignment]
    return loader


async def estimate(stage: Stage, loading: FakeLoader, deployment_id: UUID, *, after_s: float) -> int:
    """Return the estimate that a gateway has so much later."""
    stage.clock.advance(after_s)
    seen = loading.looks
    await until(lambda: loading.looks >= seen + 2)  # one look may have begun before

    async def followed() -> bool:
        there = (await publisher.read_epochs(stage.client))[deployment_id.hex]
        found = stage.feed.current(deployment_id)
        return found is not None and found.epoch == there

    await until(followed)
    found = stage.feed.current(deployment_id)
    assert found is not None
    return found.eta_s


async def wish(stage: Stage, deployment_id: UUID) -> None:
    await stage.client.call("SET", keyspace.wake(deployment_id), 1, "PX", WAKE_MS)


async def wakes(stage: Stage, deployment_id: UUID, count: int) -> list[Wake]:
    async def written() -> bool:
        async with db.transaction(stage.sessions) as session:
            return len(await observed.list_wakes(session, deployment_id)) >= count

    await until(written)
    async with db.transaction(stage.sessions) as session:
        return await observed.list_wakes(session, deployment_id)


@pytest.mark.parametrize("load_s", [45, 15 * MINUTE_S])
async def test_a_slow_load_is_waited_for_and_the_next_one_is_estimated_within_half(
    stage: Stage, loading: FakeLoader, load_s: int
) -> None:
    deployment_id = await deploy(stage.sessions, engine_args={"load_ms": load_s * 1000})
    await stage.begin()
    for round_number in range(2):
        await wish(stage, deployment_id)
        await stage.reach(deployment_id, ReplicaState.LOADING)
        steps = 10
        for step in range(steps - 1):
            said_s = await estimate(stage, loading, deployment_id, after_s=load_s / steps)
            left_s = load_s * (steps - 1 - step) / steps
            assert stage.feed.current(deployment_id).state is ReplicaState.LOADING  # type: ignore[union-attr]
            if round_number:  # the first time there is no history
                assert left_s / 1.5 <= said_s <= left_s * 1.5 + 1, (step, said_s, left_s)
        await stage.client.call("DEL", keyspace.wake(deployment_id))
        await stage.reach(deployment_id, ReplicaState.READY, step_s=load_s / 2000)
        assert not loading.signals  # never killed while it loaded
        if not round_number:
            await stage.reach(deployment_id, ReplicaState.ABSENT, step_s=60)
            loading.signals.clear()
            cold = await stage.reach(deployment_id, ReplicaState.ABSENT)
            assert load_s <= cold.eta_s <= load_s * 1.5
    assert loading.starts == 2
    second, first = await wakes(stage, deployment_id, 2)
    for wake in (first, second):
        assert (wake.cause, wake.outcome, wake.attempts, wake.fetch_ms, wake.schedule_ms) == ("call", "ready", 1, 2, 1)
        assert wake.load_ms is not None
        assert wake.ready_ms is not None
        assert load_s * 1000 <= wake.ready_ms <= load_s * 1500


class TickingClock(ManualClock):
    """Tells no time twice, as a real one."""

    def now_us(self) -> int:
        self.advance(1e-6)
        return super().now_us()


async def test_a_wish_is_timed_from_the_first_gateway_to_the_first_token(stage: Stage, loading: FakeLoader) -> None:
    stage.clock = loading.clock = TickingClock()
    deployment_id = await deploy(stage.sessions, engine_args={"load_ms": 100})
    await stage.client.call("SET", keyspace.wake(deployment_id), 1, "PX", 1500)  # wished for half a second ago
    for number in range(3):
        await stage.client.call("ZADD", keyspace.held(deployment_id), number, f"a {number} 1000")
    await stage.begin()
    await stage.reach(deployment_id, ReplicaState.READY, step_s=0.01)
    (wake,) = await wakes(stage, deployment_id, 1)
    assert 500 <= wake.decide_ms < 2000
    assert (wake.held, wake.first_token_ms) == (3, None)
    ready = stage.feed.current(deployment_id)
    assert ready is not None
    stage.feed.note_first_token(deployment_id, ready.ready_us + 1, 9)  # of another wake
    stage.feed.note_first_token(deployment_id, ready.ready_us, 77)
    await stage.client.call("SET", keyspace.first(deployment_id), f"{ready.ready_us} 42")

    async def noted() -> bool:
        return (await wakes(stage, deployment_id, 1))[0].first_token_ms == 42

    await until(noted)
    assert loading.starts == 1


async def test_causes_and_outcomes_are_told_apart(stage: Stage, loading: FakeLoader) -> None:
    deployment_id = await deploy(stage.sessions, engine_args={"load_ms": 10}, min_scale=1, max_scale=2)
    await stage.begin()
    await stage.offers(deployment_id, 1, step_s=0.01)
    loading.seats.pop(Seat(deployment_id))  # it crashed
    await stage.reach(deployment_id, ReplicaState.LOADING)
    await stage.reach(deployment_id, ReplicaState.READY, step_s=0.02)
    await stage.change(deployment_id, DeploymentChange(engine_args={"load_ms": 999_999}, load_timeout_s=30))
    await stage.reach(deployment_id, ReplicaState.FAILED, step_s=0.5)
    found = await wakes(stage, deployment_id, 3)
    assert [(wake.cause, wake.outcome) for wake in reversed(found)] == [
        ("floor", "ready"),
        ("crash", "ready"),
        ("floor", "failed"),
    ]
    assert (found[0].attempts, found[0].load_ms) == (2, None)
    assert found[0].reason == "the engine was not ready within 30 s"


async def test_a_deployment_is_kept_awake_for_as_long_as_it_says(stage: Stage, loading: FakeLoader) -> None:
    short = await deploy(stage.sessions, engine_args={"load_ms": 1}, keep_alive_s=20)
    usual = await deploy(stage.sessions, engine_args={"load_ms": 1})
    await stage.begin()
    for deployment_id in (short, usual):
        await wish(stage, deployment_id)
        await stage.reach(deployment_id, ReplicaState.READY, step_s=0.01)
        await stage.client.call("DEL", keyspace.wake(deployment_id))
    await stage.reach(short, ReplicaState.ABSENT, step_s=1)
    assert loading.starts == 2
    found = stage.feed.current(usual)
    assert found is not None
    assert found.state in {ReplicaState.READY, ReplicaState.IDLE}
