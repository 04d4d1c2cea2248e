"""What gateways are told of a deployment, from the lives of its engines. Pure."""

from collections.abc import Mapping
from uuid import UUID

import msgspec

from knative import lifecycle
from knative.lifecycle import SERVING, Life
from knative.types import DeploymentState, Endpoint, ReplicaState

_RANK = {
    state: rank
    for rank, state in enumerate(
        (
            ReplicaState.READY,
            ReplicaState.IDLE,
            ReplicaState.LOADING,
            ReplicaState.FAILED,
            ReplicaState.DRAINING,
            ReplicaState.ABSENT,
        )
    )
}


class Seen(msgspec.Struct, frozen=True):
    """One engine: its life, and where it answers, if it runs."""

    life: Life
    endpoint: Endpoint | None = None


def summarize(deployment_id: UUID, seen: Mapping[int, Seen], loads_ms: tuple[int, ...], now_us: int) -> DeploymentState:
    """Return the state of the deployment: the best of its engines'.

    Args:
        deployment_id: whose.
        seen: by index; nothing means that no engine was ever wanted.
        loads_ms: the last load times.
        now_us: for the estimate.
    """
    lives = [one.life for _, one in sorted(seen.items())] or [Life()]
    state = min((life.state for life in lives), key=_RANK.__getitem__)
    there = [life for life in lives if life.state is state]
    offered = [one.endpoint for _, one in sorted(seen.items()) if one.life.state in SERVING and one.endpoint]
    return DeploymentState(
        deployment=deployment_id.hex,
        state=state,
        endpoints=tuple(offered),
        eta_s=min(lifecycle.eta_s(life, loads_ms, now_us) for life in there),
        since_us=min(life.since_us for life in there),
        ready_us=min((life.ready_us for life in lives if life.state in SERVING), default=0),
        reason=next((life.reason for life in [*there, *lives] if life.reason), ""),
    )
