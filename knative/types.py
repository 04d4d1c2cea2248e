"""Observed state of deployments, as the controller publishes it in Valkey (`{tg}:state`) and gateways read it."""

from enum import StrEnum
from uuid import UUID

import msgspec

WAKE_MS = 2000  # a wish for a wake that nobody saw is forgotten after so long, and renewed by those who still wait


class ReplicaState(StrEnum):
    """The life of a deployment's engine."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    IDLE = "idle"  # ready, and without work for a while
    DRAINING = "draining"
    FAILED = "failed"


class Seat(msgspec.Struct, frozen=True, order=True):
    """One replica of a deployment, whichever engine runs there: its replicas are counted from 0."""

    deployment_id: UUID
    index: int = 0

    @property
    def name(self) -> str:
        """What its files are called: the deployment in hex, and the index of all but the first."""
        return f"{self.deployment_id.hex}-{self.index}" if self.index else self.deployment_id.hex


def parse_seat(name: str) -> Seat:
    """Return the seat of this name.

    Raises:
        ValueError: it is none.
    """
    deployment, dash, index = name.partition("-")
    seat = Seat(UUID(hex=deployment), int(index) if dash else 0)
    if seat.name != name or seat.index < 0:
        raise ValueError(f"{name!r} names no seat")
    return seat


class Endpoint(msgspec.Struct, frozen=True):
    """One engine that answers: ``http://127.0.0.1:4711`` or ``unix:/path`` (no /v1). `zone` is where it stands."""

    replica: str
    url: str
    zone: str = ""


class DeploymentState(msgspec.Struct, frozen=True):
    """`epoch` rises with every change; `eta_s` is the time to ready that load history promises.

    Memory is that of one engine and of one request on it, as the operator stated it; 0: unknown.
    """

    deployment: str  # hex
    state: ReplicaState
    endpoints: tuple[Endpoint, ...] = ()
    eta_s: int = 0
    since_us: int = 0
    ready_us: int = 0
    epoch: int = 0
    reason: str = ""
    gpu_memory_mb: int = 0
    kv_request_mb: int = 0
