"""One request while it is served: what each stage found, for the stages after it and for the bill."""

from typing import Any, Protocol
from uuid import UUID

from api.inference.claims import Claim
from api.inference.directory import Offer
from api.inference.relay import Relay
from api.inference.request import Call
from api.inference.wire import Head
from core.ids import IdKind
from scheduler.router.fleet import Choice
from tenants.types import Principal

_PREFIX = IdKind.GENERATION.value + "_"


class Request:
    """A whole inference request as it came over the wire."""

    __slots__ = ("body", "client_ip", "digest", "endpoint", "head")

    def __init__(self, head: Head, endpoint: str, digest: bytes, client_ip: str, body: bytes = b"") -> None:
        self.head = head
        self.endpoint = endpoint
        self.digest = digest
        self.client_ip = client_ip
        self.body = body


class Client(Protocol):
    """The caller's connection, as the stages see it."""

    @property
    def gone(self) -> bool: ...

    settling: bool  # set once the caller's leaving must no longer cancel the work

    def begin_stream(self, extra: bytes) -> None: ...

    def stream(self, data: bytes) -> None: ...

    def end_stream(self, data: bytes) -> None: ...

    @property
    def streaming(self) -> bool: ...

    def attach(self, flow: Any) -> None: ...

    def respond(self, status: int, body: bytes, extra: bytes) -> None: ...

    def abandon(self) -> None: ...


class Job:
    """Filled in stage by stage."""

    __slots__ = (
        "admitted_at_us",
        "call",
        "choice",
        "claim",
        "grant",
        "id",
        "instead_of",
        "limits",
        "may_hand_over",
        "offer",
        "patience_until",
        "place_until",
        "principal",
        "public_id",
        "relay",
        "retried",
        "started",
        "wasted_calls",
        "wasted_us",
        "woke",
        "yields",
    )

    call: Call
    offer: Offer

    def __init__(self, request_id: UUID, started: float) -> None:
        self.id = request_id
        self.principal: Principal | None = None
        self.public_id = _PREFIX + request_id.hex
        self.instead_of = ""  # the model that was asked for, when its fallback serves
        self.started = started
        self.patience_until = started
        self.place_until = started  # how long it waits for a place, monotonic
        self.yields = False  # a higher tier needs its place, and nothing of it runs any more
        self.wasted_calls = 0  # to engines, ended for a higher tier
        self.wasted_us = 0  # how long those ran
        self.admitted_at_us = 0
        self.claim: Claim | None = None  # on its idempotency key, when it has one
        self.grant: Any = None  # what admission gave, until it is given back
        self.may_hand_over = False  # to its model's fallback: nothing may be said before
        self.woke: tuple[int, float] | None = None  # held for a wake: since when it is ready, and when it was let go
        self.limits: bytes = b""  # header lines of the caller's limits
        self.relay: Relay | None = None
        self.choice: Choice | None = None  # of a replica for the next attempt, where there are several
        self.retried = False  # sent to a second replica, whichever model serves

    def rename(self, request_id: UUID) -> None:
        """Give it another id: what is told to give back the first one must not reach what is taken by this one."""
        self.id, self.public_id = request_id, _PREFIX + request_id.hex
