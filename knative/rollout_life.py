"""A rollout's next move, as a pure function of what it is and what is seen now. Level-triggered, as `lifecycle`.

beside:  requested → warming → (shadowing) → (canary, step by step) → switching → draining → stopping → done
instead: requested → switching → draining → stopping → warming → done
back:    from any of them: rolling_back → returning → rolled_back, cancelled or failed
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

import msgspec

from catalog.rollout_types import BACKWARD, Move, Rollout, RolloutState, Room, Shadow
from knative import rollout_rules
from knative.arm_figures import Figures
from knative.types import ReplicaState

SERVING = frozenset({ReplicaState.READY, ReplicaState.IDLE})
S = RolloutState


class Seen(msgspec.Struct, frozen=True):
    """What is seen now. None stands for what nobody knows, as while Valkey is away: then it stays where it is."""

    old_state: ReplicaState | None
    new_state: ReplicaState | None
    old_load: int | None  # requests that run or wait on the old version, over all gateways
    new_load: int | None
    behind: tuple[str, ...] | None  # live gateways that do not serve the configuration of `Rollout.fence` yet
    figures: Figures
    room: bool = True  # both engines may run at once
    old_wanted: bool = False  # the old engine is to run all the same, as for a name that leads to it since
    reason: str = ""  # why the new engine failed
    old_engines: int = 0  # that answer
    new_engines: int = 0
    new_wanted: int = 1  # engines of the new version that are to answer before it serves


def decide(rollout: Rollout, seen: Seen, now: datetime) -> Move | None:
    """Return the next move, or None to stay."""
    since_s = (now - rollout.state_since).total_seconds()
    back = None if rollout.state in BACKWARD else _asked_back(rollout, seen)
    return back or _NEXT[rollout.state](rollout, seen, since_s)


def waits_for(rollout: Rollout, seen: Seen, now: datetime) -> str:
    """Return in words what keeps a rollout where it is."""
    since_s, plan = (now - rollout.state_since).total_seconds(), rollout.plan
    words = ""
    if rollout.state is S.WARMING:
        words = (
            f"the new engine, which is {seen.new_state or 'unknown'}: {seen.new_engines} of {seen.new_wanted} answer"
        )
    elif rollout.state in {S.SWITCHING, S.ROLLING_BACK}:
        late = seen.behind
        words = "Valkey" if late is None else f"gateways that have not switched: {', '.join(late[:10])}"
    elif rollout.state is S.CANARY:
        step = plan.steps[rollout.step]
        left_s, left = step.seconds - since_s, step.requests - seen.figures.canary.requests
        words = f"{max(0, left_s):.0f} s and {max(0, left)} requests more at {step.parts / 100:g} %"
    elif rollout.state is S.SHADOWING and plan.shadow is not None:
        left_s, left = plan.shadow.seconds - since_s, plan.shadow.comparisons - seen.figures.shadow.compared
        words = f"{max(0, left_s):.0f} s and {max(0, left)} comparisons more"
    elif rollout.state in {S.DRAINING, S.RETURNING}:
        which, load = ("old", seen.old_load) if rollout.state is S.DRAINING else ("new", seen.new_load)
        words = f"{'an unknown number of' if load is None else load} requests on the {which} version"
    elif rollout.state is S.STOPPING:
        words = f"the old engine, which is {seen.old_state or 'unknown'}"
    return words


def _asked_back(rollout: Rollout, seen: Seen) -> Move | None:
    """Somebody wants it back, or the new engine failed while it is needed."""
    beside = rollout.room is not Room.INSTEAD
    if rollout.state is S.STOPPING and beside:
        return None
    if rollout.wish is not None:
        figures = rollout_rules.shown(seen.figures)
        if rollout.state is S.REQUESTED:
            return Move(rollout.wish, "asked by an operator")
        return Move(S.ROLLING_BACK, "asked by an operator", ending=rollout.wish, figures=figures)
    needed = rollout.state is S.WARMING or (beside and rollout.state not in {S.REQUESTED, S.STOPPING})
    if needed and seen.new_state is ReplicaState.FAILED:
        ending = S.FAILED if rollout.state is S.WARMING else S.ROLLED_BACK
        reason = f"the new version's engine failed: {seen.reason or 'no reason given'}"
        return Move(S.ROLLING_BACK, reason, ending=ending, figures=rollout_rules.shown(seen.figures))
    return None


def _first(rollout: Rollout, seen: Seen, _: float) -> Move:
    wanted = rollout.plan.room
    if wanted is Room.BESIDE or (wanted is Room.AUTO and seen.room):
        return Move(S.WARMING, room=Room.BESIDE, engines=max(1, seen.old_engines))
    if rollout.plan.steps or rollout.plan.shadow is not None:
        reason = "there is no room for both versions at once, which canary and shadow need (controller.engines_max)"
        return Move(S.FAILED, reason)
    return Move(
        S.SWITCHING, "there is no room for both versions at once" if wanted is Room.AUTO else "", room=Room.INSTEAD
    )


def _warming(rollout: Rollout, seen: Seen, since_s: float) -> Move | None:
    if seen.new_state in SERVING and seen.new_engines >= seen.new_wanted:
        return Move(S.DONE) if rollout.room is Room.INSTEAD else _after(rollout, S.WARMING)
    if since_s > rollout.plan.warm_s:
        reason = f"the new version was not ready within {rollout.plan.warm_s} s"
        return Move(S.ROLLING_BACK, reason, ending=S.FAILED)
    return None


def _after(rollout: Rollout, state: RolloutState) -> Move:
    """What follows, beside, leaving out what was not asked for."""
    if state is S.WARMING and rollout.plan.shadow is not None:
        return Move(S.SHADOWING)
    if state in {S.WARMING, S.SHADOWING} and rollout.plan.steps:
        return Move(S.CANARY)
    return Move(S.SWITCHING)


def _shadowing(rollout: Rollout, seen: Seen, since_s: float) -> Move | None:
    plan, shadow = rollout.plan.shadow or Shadow(), seen.figures.shadow
    if shadow.compared < plan.comparisons or since_s < plan.seconds:
        return None
    figures = rollout_rules.shown(seen.figures)
    if shadow.unlike > plan.unlike_max * shadow.compared:
        words = f"{shadow.unlike} of {shadow.compared} answers are unlike the old version's"
        return _broken(rollout_rules.Verdict("unlike", words), figures)
    return msgspec.structs.replace(_after(rollout, S.SHADOWING), figures=figures)


def _canary(rollout: Rollout, seen: Seen, since_s: float) -> Move | None:
    figures = rollout_rules.shown(seen.figures)
    verdict = rollout_rules.judge(rollout.plan.rules, seen.figures)
    if verdict is not None:
        return _broken(verdict, figures)
    step = rollout.plan.steps[rollout.step]
    if since_s < step.seconds or seen.figures.canary.requests < step.requests:
        return None
    if rollout.step + 1 < len(rollout.plan.steps):
        return Move(S.CANARY, step=rollout.step + 1, figures=figures)
    return Move(S.SWITCHING, figures=figures)


def _broken(verdict: rollout_rules.Verdict, figures: dict[str, Any]) -> Move:
    reason = f"rule {verdict.rule}: {verdict.words}"
    return Move(S.ROLLING_BACK, reason, ending=S.ROLLED_BACK, figures={"rule": verdict.rule, **figures})


def _draining(rollout: Rollout, seen: Seen, since_s: float) -> Move | None:
    kept = rollout.room is Room.INSTEAD or since_s >= rollout.plan.keep_s
    if kept and seen.old_load == 0:
        return Move(S.STOPPING)
    if kept and since_s >= rollout.plan.drain_s:
        load = "unknown" if seen.old_load is None else seen.old_load
        return Move(S.STOPPING, f"requests that still ran on the old version after {rollout.plan.drain_s} s: {load}")
    return None


def _switching(_: Rollout, seen: Seen, __: float) -> Move | None:
    return Move(S.DRAINING) if seen.behind == () else None


def _stopping(rollout: Rollout, seen: Seen, _: float) -> Move | None:
    """Wait until the old engine is gone, unless it is wanted for something else."""
    ended = seen.old_state in {ReplicaState.ABSENT, ReplicaState.FAILED}
    if rollout.moves_engines and not seen.old_wanted and not ended:
        return None
    return Move(S.WARMING if rollout.room is Room.INSTEAD else S.DONE)


def _rolling_back(_: Rollout, seen: Seen, __: float) -> Move | None:
    return Move(S.RETURNING) if seen.behind == () else None


def _returning(rollout: Rollout, seen: Seen, since_s: float) -> Move | None:
    if rollout.room is Room.INSTEAD:
        gone = seen.new_state in {ReplicaState.ABSENT, ReplicaState.FAILED} or not rollout.moves_engines
    else:
        gone = seen.new_load == 0 or since_s >= rollout.plan.drain_s
    return Move(rollout.ending or S.ROLLED_BACK) if gone else None


_NEXT: Mapping[RolloutState, Callable[[Rollout, Seen, float], Move | None]] = MappingProxyType(
    {
        S.REQUESTED: _first,
        S.WARMING: _warming,
        S.SHADOWING: _shadowing,
        S.CANARY: _canary,
        S.SWITCHING: _switching,
        S.DRAINING: _draining,
        S.STOPPING: _stopping,
        S.ROLLING_BACK: _rolling_back,
        S.RETURNING: _returning,
    }
)
