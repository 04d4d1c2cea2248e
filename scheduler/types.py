"""What admission hands out: prepared demands, grants, and the limits that callers are shown."""

from uuid import UUID

import msgspec

from catalog.types import ServedModel
from core.demand import Demand, DemandKind
from core.tiers import Tier
from scheduler.fail_static import Credit, Share


class LimitState(msgspec.Struct, frozen=True, gc=False):
    """A limit of the caller after this request. `reset_s`: when some of a rate comes back; 0 for a concurrency."""

    name: str  # the demand's counter
    limit: int
    remaining: int
    reset_s: int
    kind: DemandKind = DemandKind.RATE


class Packed(msgspec.Struct, gc=False):
    """The commands of (prepared, model, tenant) under one epoch, encoded but for what a request brings."""

    model: ServedModel
    tenant: str  # hex; empty without money
    epoch: bytes
    acquire: bytes
    release: tuple[bytes, bytes]
    lease: str  # a granted lease's text after state and tier
    share: Share  # of this caller on this deployment
    deployment: Share
    credit: Credit | None


class Prepared:
    """The static demands of one caller on one model, in the order the script checks them."""

    __slots__ = ("caps", "concurrencies", "demands", "named", "packed", "rates")

    def __init__(self, demands: tuple[Demand, ...]) -> None:
        self.demands = demands
        self.caps = tuple(d for d in demands if d.kind is DemandKind.CAP)
        self.concurrencies = tuple(d for d in demands if d.kind is DemandKind.CONCURRENCY)
        self.rates = tuple(d for d in demands if d.kind is DemandKind.RATE)
        self.named = self.concurrencies + self.rates
        self.packed: Packed | None = None


class Grant(msgspec.Struct, gc=False):
    """A request that may run. Give it back with `Admission.release`, whatever happens."""

    request_id: UUID
    queue_us: int  # how long it waited for its slot
    limits: tuple[LimitState, ...]
    key: str  # the request id in hex
    packed: Packed
    tier: Tier
    hold: str  # nano in decimal; empty without money
    local: bool = False  # granted by the replica itself while Valkey was away
