"""A rollout's moves, state by state: what must be seen before each, and what takes it back."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from catalog.rollout_types import Move, Plan, Rollout, RolloutState, Room, Rules, Scale, Shadow, Step
from core.ids import new_uuid
from knative.arm_figures import Arm, Figures, ShadowFigures
from knative.rollout_life import Seen, decide, waits_for
from knative.types import ReplicaState

S, R = RolloutState, ReplicaState
START = datetime(2026, 12, 1, tzinfo=UTC)
STEPS = (Step(100, 60, 50), Step(5000, 60, 100))
NOTHING = Seen(R.READY, R.ABSENT, 3, 0, (), Figures(1), old_engines=1, new_engines=1)


def rollout(state: RolloutState, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "id": new_uuid(),
        "model_id": new_uuid(),
        "names": ("m",),
        "from_version_id": new_uuid(),
        "to_version_id": new_uuid(),
        "from_deployment_id": new_uuid(),
        "to_deployment_id": new_uuid(),
        "plan": Plan(),
        "room": Room.BESIDE,
        "state": state,
        "step": 0,
        "ending": None,
        "wish": None,
        "reason": "",
        "fence": 9,
        "from_scale": Scale(1, 1),
        "to_scale": Scale(1, 1),
        "back_scale": Scale(0, 0),
        "epoch": 1,
        "state_since": START,
        "created_at": START,
        "ended_at": None,
    }
    return Rollout(**(values | changes))


def seen(**changes: Any) -> Seen:
    return msgspec.structs.replace(NOTHING, **changes)


def move(known: Rollout, what: Seen, after_s: float = 0) -> Move | None:
    return decide(known, what, START + timedelta(seconds=after_s))


def state(known: Rollout, what: Seen, after_s: float = 0) -> RolloutState | None:
    found = move(known, what, after_s)
    return found.state if found is not None else None


def test_beside_each_step_waits_for_what_it_needs() -> None:
    assert state(rollout(S.REQUESTED, room=Room.AUTO), seen()) is S.WARMING
    assert state(rollout(S.WARMING), seen(new_state=R.LOADING)) is None
    assert state(rollout(S.WARMING), seen(new_state=R.READY)) is S.SWITCHING
    assert state(rollout(S.SWITCHING), seen(new_state=R.READY, behind=("g1",))) is None
    assert state(rollout(S.SWITCHING), seen(new_state=R.READY, behind=None)) is None  # Valkey is away
    assert state(rollout(S.SWITCHING), seen(new_state=R.READY)) is S.DRAINING
    assert state(rollout(S.DRAINING), seen(new_state=R.READY, old_load=1)) is None
    assert state(rollout(S.DRAINING), seen(new_state=R.READY, old_load=0)) is S.STOPPING
    assert state(rollout(S.STOPPING), seen(old_state=R.DRAINING)) is None
    assert state(rollout(S.STOPPING), seen(old_state=R.DRAINING, old_wanted=True)) is S.DONE
    assert state(rollout(S.STOPPING), seen(old_state=R.ABSENT)) is S.DONE


def test_as_many_engines_as_the_old_version_has_are_warmed_first() -> None:
    first = move(rollout(S.REQUESTED), seen(old_engines=3))
    assert first is not None
    assert first.engines == 3
    known = rollout(S.WARMING)
    assert state(known, seen(new_state=R.READY, new_engines=2, new_wanted=3)) is None
    assert state(known, seen(new_state=R.READY, new_engines=3, new_wanted=3)) is S.SWITCHING


def test_instead_the_old_one_is_gone_before_the_new_one_starts() -> None:
    first = move(rollout(S.REQUESTED, room=Room.AUTO), seen(room=False))
    assert first is not None
    assert (first.state, first.room) == (S.SWITCHING, Room.INSTEAD)
    known = rollout(S.SWITCHING, room=Room.INSTEAD)
    assert state(known, seen(new_state=R.FAILED)) is S.DRAINING  # it has not been started yet
    assert state(rollout(S.STOPPING, room=Room.INSTEAD), seen(old_state=R.DRAINING)) is None
    assert state(rollout(S.STOPPING, room=Room.INSTEAD), seen(old_state=R.ABSENT)) is S.WARMING
    assert state(rollout(S.WARMING, room=Room.INSTEAD), seen(new_state=R.READY)) is S.DONE
    failed = move(rollout(S.WARMING, room=Room.INSTEAD), seen(new_state=R.FAILED, reason="no such file"))
    assert failed is not None
    assert (failed.state, failed.ending) == (S.ROLLING_BACK, S.FAILED)
    assert "no such file" in failed.reason


def test_without_room_there_is_neither_canary_nor_shadow() -> None:
    for plan in (Plan(STEPS), Plan(shadow=Shadow())):
        found = move(rollout(S.REQUESTED, room=Room.AUTO, plan=plan), seen(room=False))
        assert found is not None
        assert found.state is S.FAILED
        assert "engines_max" in found.reason


def test_a_loader_of_fifteen_minutes_is_waited_for() -> None:
    known = rollout(S.WARMING)
    assert state(known, seen(new_state=R.LOADING), 900) is None
    assert state(known, seen(new_state=R.LOADING), 1801) is S.ROLLING_BACK


def test_steps_end_after_their_time_and_their_requests() -> None:
    known = rollout(S.CANARY, plan=Plan(STEPS))
    enough = seen(new_state=R.READY, figures=Figures(1, canary=Arm(requests=50)))
    assert state(known, enough, 59) is None
    assert state(known, seen(new_state=R.READY, figures=Figures(1, canary=Arm(requests=49))), 3600) is None
    found = move(known, enough, 60)
    assert found is not None
    assert (found.state, found.step) == (S.CANARY, 1)
    assert found.figures["canary"]["requests"] == 50
    last = rollout(S.CANARY, plan=Plan(STEPS), step=1)
    assert state(last, seen(new_state=R.READY, figures=Figures(1, canary=Arm(requests=100))), 60) is S.SWITCHING
    assert waits_for(known, enough, START) == "60 s and 0 requests more at 1 %"


def test_a_shadow_is_left_when_its_answers_are_unlike() -> None:
    plan = Plan(shadow=Shadow(seconds=60, comparisons=20, unlike_max=0.5))
    known = rollout(S.SHADOWING, plan=plan)
    for unlike, expected in ((10, S.SWITCHING), (11, S.ROLLING_BACK)):
        figures = Figures(1, shadow=ShadowFigures(compared=20, unlike=unlike))
        assert state(known, seen(new_state=R.READY, figures=figures), 59) is None
        assert state(known, seen(new_state=R.READY, figures=figures), 60) is expected
    few = Figures(1, shadow=ShadowFigures(compared=19))
    assert state(known, seen(new_state=R.READY, figures=few), 3600) is None


@pytest.mark.parametrize("where", [S.WARMING, S.SHADOWING, S.CANARY, S.SWITCHING, S.DRAINING])
def test_a_wish_and_a_failed_engine_take_it_back_from_anywhere(where: RolloutState) -> None:
    plan = Plan(STEPS, shadow=Shadow())
    asked = move(rollout(where, plan=plan, wish=S.CANCELLED), seen(new_state=R.READY))
    assert asked is not None
    assert (asked.state, asked.ending) == (S.ROLLING_BACK, S.CANCELLED)
    failed = move(rollout(where, plan=plan), seen(new_state=R.FAILED))
    assert failed is not None
    assert (failed.state, failed.ending) == (S.ROLLING_BACK, S.FAILED if where is S.WARMING else S.ROLLED_BACK)


def test_going_back_waits_for_gateways_and_for_what_runs() -> None:
    back = rollout(S.ROLLING_BACK, ending=S.CANCELLED)
    assert state(back, seen(behind=("g1",))) is None
    assert state(back, seen()) is S.RETURNING
    returning = rollout(S.RETURNING, ending=S.CANCELLED)
    assert state(returning, seen(new_load=2)) is None
    assert state(returning, seen(new_load=0)) is S.CANCELLED
    assert state(returning, seen(new_load=2), 600) is S.CANCELLED


def test_a_bad_version_goes_back_by_rule_and_says_so() -> None:
    bad = Figures(1, stable=Arm(requests=1000), canary=Arm(requests=100, errors=10))
    found = move(rollout(S.CANARY, plan=Plan(STEPS, rules=Rules())), seen(new_state=R.READY, figures=bad))
    assert found is not None
    assert (found.state, found.ending) == (S.ROLLING_BACK, S.ROLLED_BACK)
    assert found.reason == "rule errors: 10.0% of the requests end in errors, of the old version's 0.0%"
    assert found.figures["rule"] == "errors"


def test_the_old_version_is_kept_as_long_as_asked() -> None:
    known = rollout(S.DRAINING, plan=Plan(keep_s=300))
    assert state(known, seen(new_state=R.READY, old_load=0), 299) is None
    assert state(known, seen(new_state=R.READY, old_load=0), 300) is S.STOPPING
