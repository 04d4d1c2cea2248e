"""A version that takes another one's place: what was asked for, how far it has come, and what gateways know of it."""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from catalog.types import ServedModel

PARTS = 10_000
"""Weights are so many of ten thousand: 100 is 1 %."""


class RolloutState(StrEnum):
    """How far it has come. The last four are ends."""

    REQUESTED = "requested"
    WARMING = "warming"  # the new version's engine starts
    SHADOWING = "shadowing"  # copies of some requests go to it, and its answers are compared
    CANARY = "canary"  # some conversations are served by it
    SWITCHING = "switching"  # the names lead to it; not every gateway has said that it knows
    DRAINING = "draining"  # what runs on the old version ends there
    STOPPING = "stopping"  # the old version's engine ends
    ROLLING_BACK = "rolling_back"  # the names lead to the old version again; not every gateway has said that it knows
    RETURNING = "returning"  # what runs on the new version ends there
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDS = frozenset({RolloutState.DONE, RolloutState.ROLLED_BACK, RolloutState.CANCELLED, RolloutState.FAILED})
BACKWARD = frozenset({RolloutState.ROLLING_BACK, RolloutState.RETURNING})


class Room(StrEnum):
    """Whether both versions' engines run at once."""

    AUTO = "auto"  # beside each other where the controller's host has room
    BESIDE = "beside"
    INSTEAD = "instead"  # the old one stops before the new one starts; callers wait as for any cold start


class Step(msgspec.Struct, frozen=True):
    """A part of the conversations is served by the new version for so long, and until it has had so many requests."""

    parts: int
    seconds: int = 600
    requests: int = 100


class Rules(msgspec.Struct, frozen=True):
    """When the new version is taken back without being asked. A ratio of 0 switches its rule off.

    Ratios are new over old, in the same window; each needs `samples` of both. See `knative.rollout_rules`.
    """

    samples: int = 100
    errors: float = 2.0
    ttft: float = 1.5  # 95th percentile
    tpot: float = 1.5  # 95th percentile
    cost: float = 1.5  # mean of an answer
    tokens: float = 1.5  # mean output of an answer, in either direction


class Shadow(msgspec.Struct, frozen=True):
    """So many requests of ten thousand are copied, for so long and until so many answers were compared.

    `unlike_max`: taken back when more than this part of the compared answers are unlike; 1.0 never.
    """

    parts: int = 100
    seconds: int = 600
    comparisons: int = 20
    unlike_max: float = 1.0


class Plan(msgspec.Struct, frozen=True):
    """What was asked for. Without steps the names switch as soon as the new version is warm."""

    steps: tuple[Step, ...] = ()
    rules: Rules = Rules()
    shadow: Shadow | None = None
    room: Room = Room.AUTO
    warm_s: int = 1800  # the new version must be ready within
    drain_s: int = 600  # what runs on a version that is left may take so long
    keep_s: int = 0  # the old version stays ready at least so long after the switch


class NewRollout(msgspec.Struct, frozen=True):
    """`deployment_id`: of the version; None: its oldest, or a copy of the one that serves now."""

    model_id: UUID
    version_id: UUID
    plan: Plan = Plan()
    deployment_id: UUID | None = None


class Scale(msgspec.Struct, frozen=True):
    """What is desired of a deployment."""

    min_scale: int
    max_scale: int


STOPPED = Scale(0, 0)


class Rollout(msgspec.Struct, frozen=True):
    """One row. `epoch` counts its moves: who moves it says from which. Reasons are for operators."""

    id: UUID
    model_id: UUID
    names: tuple[str, ...]  # the public names that are switched
    from_version_id: UUID
    to_version_id: UUID
    from_deployment_id: UUID
    to_deployment_id: UUID
    plan: Plan
    room: Room  # AUTO until it was looked at
    state: RolloutState
    step: int  # of `plan.steps`, while it is a canary
    ending: RolloutState | None  # what it ends as once it has gone back
    wish: RolloutState | None  # what somebody asked it to end as
    reason: str
    fence: int  # the configuration revision that every gateway must serve before it moves on
    from_scale: Scale  # of the old deployment before it began
    to_scale: Scale  # of the new one when it is done
    back_scale: Scale  # of the new one before it began
    epoch: int
    state_since: datetime
    created_at: datetime
    ended_at: datetime | None
    moves_engines: bool = True  # False: both are external, nothing is started or stopped


class Move(msgspec.Struct, frozen=True):
    """What a rollout becomes next, why, and the figures that say so."""

    state: RolloutState
    reason: str = ""
    step: int = 0
    ending: RolloutState | None = None
    room: Room | None = None
    engines: int = 1  # that the new version begins with, within what it may have
    figures: dict[str, Any] = {}


class RolloutNote(msgspec.Struct, frozen=True):
    """One move as it was written down."""

    id: int
    at: datetime
    state: RolloutState
    step: int
    reason: str
    figures: dict[str, Any]


class Arms(msgspec.Struct, frozen=True, gc=False):
    """What a gateway must know of one public name in a rollout. `window` names the stretch its figures are of."""

    rollout_id: UUID
    window: int
    seed: bytes
    parts: int  # of ten thousand conversations: to the new version
    shadow_parts: int  # of ten thousand requests: copied to the new version
    stable_version_id: UUID
    canary: ServedModel  # under this public name
