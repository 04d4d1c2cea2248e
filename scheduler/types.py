"""What admission hands out: prepared demands and grants."""

from collections.abc import Callable
from uuid import UUID

import msgspec

from catalog.types import ServedModel
from core.demand import Demand, DemandKind
from core.resp import Part
from core.tiers import Tier
from core.waits import Wait
from scheduler.block import Block
from scheduler.fail_static import Share


class Packed(msgspec.Struct, gc=False):
    """The commands of one caller on one model under one epoch, encoded but for what a request brings."""

    epoch: bytes
    names: list[Part]
    form: str  # the hash of `text`
    text: bytes  # what the server reads; sent along until it is known there
    acquire: bytes
    acquire_first: bytes  # the same for a call with the text
    release: bytes
    share: Share  # of this caller on this deployment
    known: bool = False  # the server has the form
    asked: int = 0  # grants of the script since the last look at whether a block is worth while
    asked_since: float = 0.0  # when that was, monotonic
    blocks_after: float = 0.0  # until then there is none


NOBODY = "-"


NO_CAPABILITY = 1_000_000_000
"""Of an entitlement without one: more than is ever in flight."""


class Entitlement(msgspec.Struct, frozen=True, gc=False):
    """What a tenant is entitled to on one deployment, in requests in flight: guarantee ≤ deserved ≤ capability.

    `owner` is the tenant in hex. The guarantee is kept free for it; what it deserves is lent while it does not want it;
    above its capability it waits.
    """

    owner: str
    guarantee: int = 0
    deserved: int = 0
    capability: int = NO_CAPABILITY


def entitled_demand(entitlement: Entitlement, model: ServedModel) -> Demand:
    """Return the count of what an entitled tenant has in flight, which is also the cap that its capability is."""
    counter = f"entitled:{model.deployment_id.hex}:{entitlement.owner}"
    return Demand(DemandKind.CAP, counter, 1, entitlement.capability, "MODEL_BUSY")


class Prepared:
    """The static demands of one caller on one model, in the order the script checks them.

    `named` are those that an answer names by their place. `tenant` (hex) pays; it is empty where nothing costs money.
    `owner` is whose turn it is when a request waits, and `weight` how much that one gets beside others. `entitlements`
    are those of all tenants on this deployment; the owner's own is the first of its caps.
    """

    __slots__ = (
        *(
            "block",
            "caps",
            "concurrencies",
            "demands",
            "entitlements",
            "model",
            "named",
            "owner",
            "packed",
            "rates",
            "reply_size",
            "spends",
        ),
        *("tenant", "tokens", "weight"),
    )

    def __init__(
        self,
        demands: tuple[Demand, ...],
        model: ServedModel,
        tenant: str,
        *,
        owner: str = NOBODY,
        weight: float = 1.0,
        entitlements: tuple[Entitlement, ...] = (),
    ) -> None:
        self.demands = demands
        self.model = model
        self.tenant = tenant
        self.owner = owner
        self.weight = weight
        self.entitlements = entitlements
        own = tuple(entitled_demand(one, model) for one in entitlements if one.owner == owner)
        self.caps = own + tuple(d for d in demands if d.kind is DemandKind.CAP)
        self.concurrencies = tuple(d for d in demands if d.kind is DemandKind.CONCURRENCY)
        self.rates = tuple(d for d in demands if d.kind is DemandKind.RATE)
        self.spends = tuple(d for d in demands if d.kind is DemandKind.SPEND)
        self.named = self.concurrencies + self.rates + self.spends
        units = {d.unit for d in self.rates if d.enforced}
        self.reply_size = 5 + 2 * any(d.enforced for d in self.concurrencies) + 3 * len(units)
        self.tokens = any(d.unit for d in self.rates)
        self.packed: Packed | None = None
        self.block: Block | None = None  # its requests may be admitted from that


class Grant(msgspec.Struct, gc=False):
    """A request that may run. Give it back with `Admission.release`, whatever happens.

    `reply` is the script's answer: code, µs waited, credit left (-1: no money), when admitted (server µs), what is left
    in the nearest budget (-1: none); then what is left of the nearest concurrency and its place in `prepared.named`;
    then for each unit that has rates what is left of the nearest, in how many s some comes back, its place; then the
    places of limits that were passed and did not refuse. Of those that never refuse nothing else is shown. With 5
    elements or none nothing is known of limits: Valkey was away, or its answer was lost.
    """

    request_id: UUID
    reply: list[int]
    key: bytes  # the request id in hex
    packed: Packed
    prepared: Prepared
    tier: Tier
    hold: int  # nano
    input_tokens: int
    output_tokens: int
    queue_us: int = 0  # how long it waited for its slot
    wait: Wait | None = None  # why it did; None also of one that was granted at once and gave its place later
    over: tuple[Demand, ...] = ()  # the limits it passed that refuse nothing: soft and dark ones; empty almost always
    local: bool = False  # granted by the replica itself while Valkey was away
    preempted: int = 0  # how often its place went to a higher tier
    asked_for: Tier | None = None  # a request of this tier needs its place; `on_asked` was told
    block: Block | None = None  # admitted from it, so that Valkey does not know the request
    on_asked: Callable[[], bool] | None = None  # True: the place will be given (`Admission.wait_again`)
