"""Whoever moves a rollout is killed at each of its states, and the next one goes on from there."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from catalog import rollouts
from catalog.rollout_types import ENDS, Plan, Rollout, RolloutState, Step
from core import db
from core.settings import Database
from knative.arm_figures import Arm, Figures
from knative.types import ReplicaState
from tests.factories.gateway_process import ROOT
from tests.factories.rollouts import RolloutStage
from tests.waiting import until

S, R = RolloutState, ReplicaState
Start = Callable[[], Awaitable[int]]


@asynccontextmanager
async def drivers(database: Database, valkey: Path) -> AsyncIterator[Start]:
    """What starts a process that moves rollouts on, and returns its pid."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.factories.rollout_driver", database.url.get_secret_value(), str(valkey)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    pids: list[int] = []
    stdin, stdout = program.stdin, program.stdout

    async def start() -> int:
        stdin.write(b"start\n")
        pids.append(int(await stdout.readline()))
        return pids[-1]

    try:
        yield start
    finally:
        for pid in pids:
            kill(pid)
        stdin.close()
        await program.wait()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
async def stage(sessions: db.Sessions, valkey: Path) -> AsyncIterator[RolloutStage]:
    made = await RolloutStage.open(sessions, valkey)
    yield made
    await made.client.close()


async def play(stage: RolloutStage, rollout: Rollout) -> None:
    """Be the engines and the gateway: what is wanted is so, and what is served is said."""
    now = await stage.now(rollout)
    for deployment_id in (rollout.from_deployment_id, rollout.to_deployment_id):
        _, most = await stage.scale(deployment_id)
        await stage.engine(deployment_id, R.READY if most else R.ABSENT)
    await stage.gateway("g1", now.fence)
    await stage.count(now, Figures(now.epoch, Arm(100), Arm(20)))


async def killed_at_each_state(stage: RolloutStage, rollout: Rollout, start: Start) -> list[RolloutState]:
    """Kill the driver whenever the rollout has moved; return the states that were seen."""
    seen = [rollout.state]
    while seen[-1] not in ENDS:
        pid = await start()
        await play(stage, rollout)

        async def moved() -> bool:
            return (await stage.now(rollout)).state is not seen[-1]

        await until(moved)
        kill(pid)
        seen.append((await stage.now(rollout)).state)
    return seen


async def test_it_is_done_whenever_its_driver_dies(
    stage: RolloutStage, database_settings: Database, valkey: Path
) -> None:
    rollout = await stage.start(Plan((Step(100, 0, 10),)))
    async with drivers(database_settings, valkey) as start:
        seen = await killed_at_each_state(stage, rollout, start)
    assert seen[-1] is S.DONE
    notes = [note.state for note in await stage.notes(rollout)]
    assert notes == [S.REQUESTED, S.WARMING, S.CANARY, S.SWITCHING, S.DRAINING, S.STOPPING, S.DONE]
    assert (await stage.served()).version_id == rollout.to_version_id
    assert (await stage.scale(stage.old), await stage.scale(rollout.to_deployment_id)) == ((0, 0), (1, 1))


async def test_it_goes_back_whenever_its_driver_dies(
    stage: RolloutStage, database_settings: Database, valkey: Path
) -> None:
    rollout = await stage.start(Plan((Step(100, 3600, 10),)))
    async with drivers(database_settings, valkey) as start:
        pid = await start()
        await play(stage, rollout)

        async def tried() -> bool:
            await play(stage, rollout)
            return (await stage.now(rollout)).state is S.CANARY

        await until(tried)
        kill(pid)
        async with db.transaction(stage.sessions) as session:
            await rollouts.wish(session, rollout.id, S.ROLLED_BACK)
        seen = await killed_at_each_state(stage, await stage.now(rollout), start)
    assert seen[-1] is S.ROLLED_BACK
    assert (await stage.served()).version_id == rollout.from_version_id
    assert (await stage.scale(stage.old), await stage.scale(rollout.to_deployment_id)) == ((1, 1), (0, 0))
