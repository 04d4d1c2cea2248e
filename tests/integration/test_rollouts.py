"""Rollouts in Postgres and Valkey; gateways and engines are played by the test, and every look is a new driver's."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from catalog import deployments, models, rollouts
from catalog.rollout_types import Move, NewRollout, Plan, Rollout, RolloutState, Room, Step
from core import db, keyspace
from core.errors import PlatformError
from core.ids import new_uuid
from knative.arm_figures import Arm, Figures
from knative.types import ReplicaState
from tenants import audit
from tenants.types import AuditFilter
from tests.factories.catalog import NOW, SEALING_KEY
from tests.factories.rollouts import RolloutStage

S, R = RolloutState, ReplicaState


@pytest.fixture
async def stage(sessions: db.Sessions, valkey: Path) -> AsyncIterator[RolloutStage]:
    made = await RolloutStage.open(sessions, valkey)
    yield made
    await made.client.close()


async def actions(stage: RolloutStage) -> list[str]:
    async with db.transaction(stage.sessions) as session:
        found = await audit.search(session, AuditFilter(action="rollout."), after=None, limit=100)
    return [record.action for record in reversed(found)]


async def to_switching(stage: RolloutStage) -> Rollout:
    rollout = await stage.start(Plan())
    assert (await stage.look(rollout)).state is S.WARMING
    await stage.engine(rollout.to_deployment_id, R.READY)
    return await stage.look(rollout)


async def test_the_new_version_is_warmed_beside_switched_behind_a_fence_and_the_old_one_drained(
    stage: RolloutStage,
) -> None:
    await stage.gateway("g1", 0)
    await stage.gateway("g2", 0)
    rollout = await stage.start(Plan())
    new, old_version = rollout.to_deployment_id, (await stage.served()).version_id
    assert await stage.scale(new) == (0, 0)  # made like the old one, asleep
    assert (await stage.deployment(new)).name == "m-v2"
    assert (await stage.look(rollout)).state is S.WARMING
    assert await stage.scale(new) == (1, 1)
    await stage.engine(new, R.LOADING)
    assert (await stage.look(rollout)).state is S.WARMING
    assert (await stage.served()).version_id == old_version
    await stage.engine(new, R.READY)
    switching = await stage.look(rollout)
    assert switching.state is S.SWITCHING
    assert (await stage.served()).version_id == stage.version_id
    await stage.gateway("g1", switching.fence)
    assert (await stage.look(rollout)).state is S.SWITCHING  # g2 has not said so
    await stage.load(stage.old, 3)
    await stage.gateway("g2", switching.fence)
    assert (await stage.look(rollout)).state is S.DRAINING
    assert (await stage.look(rollout)).state is S.DRAINING  # three streams run there
    assert await stage.scale(stage.old) == (1, 1)
    await stage.load(stage.old, 0)
    assert (await stage.look(rollout)).state is S.STOPPING
    assert await stage.scale(stage.old) == (0, 0)
    assert (await stage.look(rollout)).state is S.STOPPING
    await stage.engine(stage.old, R.ABSENT)
    assert (await stage.look(rollout)).state is S.DONE
    assert await stage.scale(new) == (1, 1)
    assert [note.state for note in await stage.notes(rollout)] == [
        *(S.REQUESTED, S.WARMING, S.SWITCHING, S.DRAINING, S.STOPPING, S.DONE),
    ]
    assert await actions(stage) == ["rollout.advance"] * 4 + ["rollout.end"]


async def test_a_gateway_that_died_holds_nothing_up(stage: RolloutStage) -> None:
    rollout = await to_switching(stage)
    await stage.gateway("dead", 0)
    assert (await stage.look(rollout)).state is S.SWITCHING
    await stage.client.call("ZADD", keyspace.BEAT, 1, "dead")  # its heartbeat has lapsed
    assert (await stage.look(rollout)).state is S.DRAINING


async def die_in_a_move(session: AsyncSession, rollout: Rollout) -> None:
    assert await rollouts.move(session, rollout, Move(S.ROLLING_BACK, ending=S.ROLLED_BACK), now=NOW)
    raise RuntimeError  # the controller dies before the commit


async def test_a_crash_in_a_move_leaves_all_of_it_undone(stage: RolloutStage) -> None:
    rollout = await to_switching(stage)
    with pytest.raises(RuntimeError):
        async with db.transaction(stage.sessions) as session:
            await die_in_a_move(session, rollout)
    assert (await stage.now(rollout)).state is S.SWITCHING
    assert (await stage.served()).version_id == stage.version_id
    async with db.transaction(stage.sessions) as session:  # one that decided by what it saw before
        assert await rollouts.move(session, rollout, Move(S.DRAINING), now=NOW) is not None
        assert await rollouts.move(session, rollout, Move(S.DRAINING), now=NOW) is None


@pytest.mark.parametrize("ending", [S.CANCELLED, S.ROLLED_BACK])
async def test_by_hand_it_goes_back_from_a_canary(stage: RolloutStage, ending: RolloutState) -> None:
    rollout = await stage.start(Plan((Step(1000, 60, 10),)))
    await stage.look(rollout)
    await stage.engine(rollout.to_deployment_id, R.READY)
    assert (await stage.look(rollout)).state is S.CANARY
    async with db.transaction(stage.sessions) as session:
        arms = (await rollouts.load_arms(session))["m"]
        assert (arms.parts, arms.canary.version_id) == (1000, stage.version_id)
        await rollouts.wish(session, rollout.id, ending)
    assert (await stage.look(rollout)).state is S.ROLLING_BACK
    async with db.transaction(stage.sessions) as session:
        assert await rollouts.load_arms(session) == {}
    await stage.load(rollout.to_deployment_id, 1)
    assert (await stage.look(rollout)).state is S.RETURNING
    assert (await stage.look(rollout)).state is S.RETURNING
    await stage.load(rollout.to_deployment_id, 0)
    ended = await stage.look(rollout)
    assert (ended.state, ended.reason) == (ending, "asked by an operator")
    assert await stage.scale(rollout.to_deployment_id) == (0, 0)
    assert await stage.scale(stage.old) == (1, 1)


async def test_a_canary_of_two_steps_goes_on_by_what_gateways_counted(stage: RolloutStage) -> None:
    rollout = await stage.start(Plan((Step(100, 60, 10), Step(5000, 60, 10))))
    await stage.look(rollout)
    await stage.engine(rollout.to_deployment_id, R.READY)
    first = await stage.look(rollout)
    for name, requests in (("g1", 6), ("g2", 4)):
        await stage.count(first, Figures(first.epoch, Arm(500), Arm(requests)), name)
    assert (await stage.look(rollout, 59)).step == 0
    second = await stage.look(rollout, 1)
    assert (second.state, second.step) == (S.CANARY, 1)
    assert (await stage.look(rollout, 60)).state is S.CANARY  # what was counted before is of another window
    await stage.count(second, Figures(second.epoch, Arm(500), Arm(10)))
    assert (await stage.look(rollout)).state is S.SWITCHING
    figures = (await stage.notes(rollout))[-1].figures
    assert (figures["canary"]["requests"], figures["stable"]["requests"]) == (10, 500)


async def test_a_bad_canary_goes_back_by_rule_and_the_figures_are_kept(stage: RolloutStage) -> None:
    rollout = await stage.start(Plan((Step(5000, 60, 10),)))
    await stage.look(rollout)
    await stage.engine(rollout.to_deployment_id, R.READY)
    canary = await stage.look(rollout)
    twice = Figures(canary.epoch, Arm(200, answers=200, output_tokens=2000), Arm(200, answers=200, output_tokens=4000))
    await stage.count(canary, twice)
    back = await stage.look(rollout)
    assert (back.state, back.ending) == (S.ROLLING_BACK, S.ROLLED_BACK)
    assert back.reason == "rule tokens: an answer has 20.0 tokens, with the old version 10.0"
    async with db.transaction(stage.sessions) as session:
        (record,) = await audit.search(session, AuditFilter(action="rollout.roll_back"), after=None, limit=9)
    assert record.target_id == rollout.id
    assert record.details["figures"]["canary"]["mean_output_tokens"] == 20.0
    await stage.look(rollout)
    assert (await stage.look(rollout)).state is S.ROLLED_BACK
    assert await stage.client.call("EXISTS", keyspace.arms(rollout.id)) == 0


async def test_without_room_the_old_one_gives_its_place(stage: RolloutStage) -> None:
    stage.engines_max = 1
    rollout = await stage.start(Plan())
    switching = await stage.look(rollout)
    assert (switching.state, switching.room) == (S.SWITCHING, Room.INSTEAD)
    await stage.look(rollout)
    assert (await stage.look(rollout)).state is S.STOPPING
    assert await stage.scale(stage.old) == (0, 0)
    assert await stage.scale(rollout.to_deployment_id) == (0, 0)  # never both
    await stage.engine(stage.old, R.ABSENT)
    assert (await stage.look(rollout)).state is S.WARMING
    assert await stage.scale(rollout.to_deployment_id) == (1, 1)
    await stage.engine(rollout.to_deployment_id, R.FAILED, "it does not fit")
    assert (await stage.look(rollout)).state is S.ROLLING_BACK
    assert (await stage.served()).version_id == rollout.from_version_id
    await stage.look(rollout)
    failed = await stage.look(rollout)
    assert (failed.state, await stage.scale(stage.old)) == (S.FAILED, (1, 1))
    assert "it does not fit" in failed.reason


async def test_nothing_is_changed_under_a_rollout(stage: RolloutStage) -> None:
    rollout = await stage.start(Plan())
    for attempt in (
        lambda session: models.set_alias(session, "m", rollout.from_version_id, now=NOW),
        lambda session: deployments.retire(session, stage.old, now=NOW),
        lambda session: rollouts.start(
            session, NewRollout(stage.model_id, stage.version_id), sealing_key=SEALING_KEY, now=NOW
        ),
    ):
        with pytest.raises(PlatformError) as refusal:
            async with db.transaction(stage.sessions) as session:
                await attempt(session)
        assert refusal.value.code == "ROLLOUT_RUNNING"


async def test_what_cannot_be_rolled_out_is_refused(stage: RolloutStage) -> None:
    current = (await stage.served()).version_id
    for wanted, code in (
        (NewRollout(stage.model_id, current), "ALREADY_SERVED"),
        (NewRollout(stage.model_id, new_uuid()), "NOT_FOUND"),
        (NewRollout(stage.model_id, stage.version_id, deployment_id=stage.old), "NOT_FOUND"),
        (NewRollout(stage.model_id, stage.version_id, Plan((Step(200), Step(100)))), "INVALID_ROLLOUT"),
        (NewRollout(stage.model_id, stage.version_id, Plan((Step(100),), room=Room.INSTEAD)), "INVALID_ROLLOUT"),
    ):
        with pytest.raises(PlatformError) as refusal:
            async with db.transaction(stage.sessions) as session:
                await rollouts.start(session, wanted, sealing_key=SEALING_KEY, now=NOW)
        assert refusal.value.code == code


async def test_with_valkey_empty_it_stays_where_it_is(stage: RolloutStage) -> None:
    rollout = await to_switching(stage)
    await stage.gateway("g1", 0)
    await stage.client.close()
    assert (await stage.look(rollout)).state is S.SWITCHING
