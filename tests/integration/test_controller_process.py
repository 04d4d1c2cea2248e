"""The controller as processes that are killed."""

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from core import db
from core.resp import RespClient
from core.settings import Database, Settings
from engine import processes
from knative import controller
from knative.local import Record
from knative.types import Endpoint, ReplicaState, Seat
from knative.wake import StateFeed
from tests.factories.catalog import SEALING_KEY, deploy
from tests.waiting import until

START_S = 30.0
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["knative.controller"])  # importing it is nearly all of a start


def be_controller(environment: dict[str, str], ready: Path, log: Path) -> None:
    """Run as the process does, and touch `ready` when it says so."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(environment)
    controller.run(Settings.load(), ready.touch)


class Home:
    """A home folder, and the controllers that were started in it."""

    def __init__(self, folder: Path, database: Database, valkey: Path) -> None:
        self.folder = folder
        self.environment = {
            "TIDEGATE_HOME": str(folder),
            "TIDEGATE_SECRETS__PEPPER": "00" * 32,
            "TIDEGATE_SECRETS__SIGNING": "00" * 32,
            "TIDEGATE_SECRETS__SEALING": SEALING_KEY.hex(),
            "TIDEGATE_DATABASE__URL": database.url.get_secret_value(),
            "TIDEGATE_VALKEY__URL": f"unix://{valkey}",
            "TIDEGATE_VALKEY__BROKER_URL": f"unix://{valkey}?db=1",
        }
        self.controllers: list[ForkServerProcess] = []

    async def start(self) -> ForkServerProcess:
        """Start a controller and return it once it says that it is ready."""
        ready, log = self.folder / f"ready-{len(self.controllers)}", self.folder / "controller.log"
        process = FORKS.Process(target=be_controller, args=(self.environment, ready, log))
        process.start()
        self.controllers.append(process)

        def said_so() -> bool:
            assert process.is_alive(), log.read_text()
            return ready.exists()

        await until(said_so, START_S)
        return process

    def engine(self, deployment_id: UUID, index: int = 0) -> Record | None:
        path = self.folder / "run" / "engines" / f"{Seat(deployment_id, index).name}.json"
        return msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else None

    def close(self) -> None:
        for process in self.controllers:
            if process.is_alive():
                process.terminate()
                process.join(20)


@pytest.fixture
def home(service_folder: Path, database_settings: Database, valkey: Path) -> Iterator[Home]:
    folder = service_folder / secrets.token_hex(3)
    folder.mkdir(mode=0o700)
    home = Home(folder, database_settings, valkey)
    yield home
    home.close()
    shutil.rmtree(folder)


@pytest.fixture
async def feed(valkey: Path) -> AsyncIterator[StateFeed]:
    client = await RespClient.connect(f"unix://{valkey}")
    feed = StateFeed(client, poll_s=0.03)
    await feed.start()
    yield feed
    await feed.close()
    await client.close()


async def test_after_kill_9_the_next_leader_adopts_the_engines_and_sigterm_ends_them(
    home: Home, feed: StateFeed, sessions: db.Sessions
) -> None:
    deployment_id, pair_id = await deploy(sessions), await deploy(sessions, min_scale=2, max_scale=2)
    first = await home.start()
    stand_by = await home.start()
    before = await feed.wait_ready(deployment_id, 20)
    await until(lambda: (found := feed.current(pair_id)) is not None and len(found.endpoints) == 2)
    pair = [home.engine(pair_id, index) for index in range(2)]
    engine = home.engine(deployment_id)
    assert engine is not None
    first.kill()
    first.join()

    def led_on() -> bool:
        found = feed.current(deployment_id)
        return found is not None and found.epoch > before.epoch + 1000  # an epoch of the next term

    await until(led_on, timeout_s=10)  # the promise to users: the next leader within ten seconds
    after = await feed.wait_ready(deployment_id, 0)
    assert after.endpoints == before.endpoints
    assert home.engine(deployment_id) == engine
    assert [home.engine(pair_id, index) for index in range(2)] == pair
    assert (await feed.wait_ready(pair_id, 0)).endpoints == tuple(
        Endpoint(one.replica_id.hex, one.url) for one in pair if one is not None
    )
    assert processes.is_alive(engine.pid, engine.started_ms)
    stand_by.terminate()
    await asyncio.to_thread(stand_by.join, 20)
    assert stand_by.exitcode == 0
    assert not processes.is_alive(engine.pid, engine.started_ms)
    assert home.engine(deployment_id) is home.engine(pair_id, 1) is None
    await until(lambda: (found := feed.current(deployment_id)) is not None and found.state is ReplicaState.ABSENT)


async def test_after_kill_9_of_controller_and_engine_a_new_one_is_started(
    home: Home, feed: StateFeed, sessions: db.Sessions
) -> None:
    deployment_id = await deploy(sessions, min_scale=1)
    killed = await home.start()
    await feed.wait_ready(deployment_id, 20)
    engine = home.engine(deployment_id)
    assert engine is not None
    killed.kill()
    killed.join()
    assert processes.send(engine.pid, engine.started_ms, signal.SIGKILL)
    await home.start()

    def another() -> bool:
        found = home.engine(deployment_id)
        return found is not None and found.pid != engine.pid

    await until(another)
    await until(lambda: (found := feed.current(deployment_id)) is not None and found.state is ReplicaState.READY)
