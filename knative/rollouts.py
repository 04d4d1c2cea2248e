"""Moves rollouts on, a look every quarter of a second while there are any: see, decide by `rollout_life`, write.

Nothing is remembered between two looks, and a move is one transaction that only succeeds from the epoch that was seen.
So it may run beside any controller, leading or not, and a crash at any place delays a rollout by one look.
"""

import asyncio
from uuid import UUID

from catalog import deployments, rollouts
from catalog.rollout_types import ENDS, Move, Rollout, RolloutState
from catalog.types import Deployment, DeploymentKind
from core import db
from core.clock import Clock
from core.logging import get_logger
from core.resp import RespClient, RespError, RespUnavailable
from knative import rollout_board, rollout_life
from knative.arm_figures import Figures, total
from knative.leader import UNREACHABLE
from knative.rollout_life import Seen
from knative.types import DeploymentState, ReplicaState
from tenants import audit
from tenants.types import SYSTEM

LOOK_S = 0.25
QUIET_LOOK_S = 1.0
RUNNING = frozenset({ReplicaState.LOADING, ReplicaState.READY, ReplicaState.IDLE, ReplicaState.DRAINING})
log = get_logger(__name__)


class RolloutDriver:
    """One process's hand on all rollouts.

    Args:
        sessions: of the truth.
        client: of Valkey, where states, loads, acknowledgements and figures are.
        clock: whose wall time ends steps.
        engines_max: engines that the host of the local ones has room for; 0: no bound.
    """

    def __init__(self, sessions: db.Sessions, client: RespClient, clock: Clock, *, engines_max: int = 0) -> None:
        self._sessions = sessions
        self._client = client
        self._clock = clock
        self._engines_max = engines_max

    async def run(self) -> None:
        """Look for ever."""
        while True:
            busy = False
            try:
                busy = await self.look()
            except UNREACHABLE as problem:
                log.warning("rollouts.postgres_away", error=type(problem).__name__)
            except Exception:
                log.exception("rollouts.look_failed")
            await asyncio.sleep(LOOK_S if busy else QUIET_LOOK_S)

    async def look(self) -> bool:
        """Move on each rollout that can move, by one state; return whether there are any."""
        async with db.transaction(self._sessions) as session:
            live = await rollouts.live(session)
            known = {found.id: found for found in await deployments.list_all(session)} if live else {}
        for rollout in live:
            seen = await see(self._client, rollout, known, self._engines_max)
            move = rollout_life.decide(rollout, seen, self._clock.now())
            if move is not None:
                await self._move(rollout, move)
        return bool(live)

    async def _move(self, rollout: Rollout, move: Move) -> None:
        async with db.transaction(self._sessions) as session:
            moved = await rollouts.move(session, rollout, move, now=self._clock.now())
            if moved is None:
                return
            audit.record(
                session,
                SYSTEM,
                _action(move),
                target_id=rollout.id,
                details={
                    "from": rollout.state.value,
                    "to": move.state.value,
                    "step": move.step,
                    "reason": moved.reason,
                    "figures": move.figures,
                },
            )
        log.info(
            "rollout.moved",
            rollout=rollout.id.hex,
            before=rollout.state.value,
            after=move.state.value,
            reason=moved.reason,
        )
        if move.state in ENDS:
            await self._forget(rollout.id)

    async def _forget(self, rollout_id: UUID) -> None:
        try:
            await rollout_board.forget(self._client, rollout_id)
        except (RespError, RespUnavailable):
            return  # it expires


async def see(client: RespClient, rollout: Rollout, known: dict[UUID, Deployment], engines_max: int) -> Seen:
    """Return what is to be seen of a rollout now; next to nothing while Valkey is away."""
    old, new = rollout.from_deployment_id, rollout.to_deployment_id
    old_found = known.get(old)
    try:
        states = await rollout_board.states(client)
        loads = await rollout_board.loads(client, (old, new))
        behind = await rollout_board.behind(client, rollout.fence)
        figures = total(rollout.epoch, await rollout_board.read_figures(client, rollout.id))
    except (RespError, RespUnavailable):
        return Seen(None, None, None, None, None, Figures(rollout.epoch))
    old_state, new_state, new_found = states.get(old), states.get(new), known.get(new)
    return Seen(
        old_state=_state(old_state),
        new_state=_state(new_state),
        old_load=loads[old],
        new_load=loads[new],
        behind=behind,
        figures=figures,
        room=_has_room(rollout, states, known, engines_max),
        old_wanted=old_found is not None and old_found.max_scale > 0,
        reason=new_state.reason if new_state is not None else "",
        old_engines=len(old_state.endpoints) if old_state is not None else 0,
        new_engines=len(new_state.endpoints) if new_state is not None else 0,
        new_wanted=max(1, new_found.min_scale) if new_found is not None and rollout.moves_engines else 1,
    )


def _state(found: DeploymentState | None) -> ReplicaState | None:
    return found.state if found is not None else None


def _has_room(
    rollout: Rollout, states: dict[UUID, DeploymentState], known: dict[UUID, Deployment], engines_max: int
) -> bool:
    """Say whether the new engines, as many as the old version has, may run beside all that run now."""
    if not engines_max or not rollout.moves_engines:
        return True
    old = states.get(rollout.from_deployment_id)
    wanted = max(1, len(old.endpoints) if old is not None else 0)
    others = [
        max(1, len(state.endpoints))
        for key, state in states.items()
        if state.state in RUNNING and _is_local(known.get(key)) and key != rollout.to_deployment_id
    ]
    return sum(others) + wanted <= engines_max


def _is_local(deployment: Deployment | None) -> bool:
    return deployment is not None and deployment.kind is DeploymentKind.LOCAL


def _action(move: Move) -> str:
    """The name of a move in the audit trail."""
    if move.state is RolloutState.ROLLING_BACK:
        return "rollout.roll_back"
    return "rollout.end" if move.state in ENDS else "rollout.advance"
