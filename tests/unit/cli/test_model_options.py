"""`tidegate model …`: what is typed becomes the plan that is asked for, and the end is an exit code."""

import pytest

from catalog.rollout_types import Move, Plan, RolloutState, Room, Shadow, Step
from cli import main, rollouts


def plan(*words: str) -> Plan:
    options = main._parser().parse_args(["model", "update", "smol", "--to", "2", *words])
    return rollouts.plan_of(options)


def test_words_become_a_plan() -> None:
    assert plan() == Plan()
    assert plan("--steps", "1,12.5", "--step-seconds", "30", "--step-requests", "5", "--room", "beside") == Plan(
        (Step(100, 30, 5), Step(1250, 30, 5)), room=Room.BESIDE
    )
    assert plan("--shadow", "1", "--keep-seconds", "60") == Plan(shadow=Shadow(100, 600), keep_s=60)


def test_what_is_no_percentage_is_refused() -> None:
    with pytest.raises(SystemExit):
        plan("--steps", "1;10")


def test_ends_are_told_apart() -> None:
    assert {Move(state).state for state in rollouts.WISHES.values()} == {
        RolloutState.CANCELLED,
        RolloutState.ROLLED_BACK,
    }
