"""Demands: what a request wants from shared counters, as pure data.

`tenants.quotas` returns them, `api.inference.pipeline.serve` hands them to `scheduler.admission`, whose one atomic
script takes all of them or none, and with them the money hold of `billing.holds`.
"""

from enum import IntEnum, StrEnum

import msgspec


class DemandKind(StrEnum):
    """How a counter counts."""

    RATE = "rate"  # at most `limit` per sliding `window_s`
    CONCURRENCY = "concurrency"  # at most `limit` held at once; a full one refuses
    CAP = "cap"  # at most `limit` held at once; a full one makes the request wait in the queue
    SPEND = "spend"  # at most `limit` nano until `until_us`; the request takes its money hold of it


class Unit(IntEnum):
    """What a rate counts. Tokens are estimated at the door and corrected at the end."""

    REQUEST = 0
    INPUT_TOKEN = 1
    OUTPUT_TOKEN = 2


class Demand(msgspec.Struct, frozen=True, gc=False):
    """One counter, how much of it, and what to say when there is not enough.

    `counter` names the counter below the key prefix, e.g. ``key:<hex>:rpm``. `refusal` is the error code, `label`
    the limit in words (``input tokens per minute of this project``). `amount` is 0 where the request decides: tokens
    and spend. One that is not `enforced` counts like the others and refuses nothing.
    """

    kind: DemandKind
    counter: str
    amount: int
    limit: int
    refusal: str
    window_s: int = 0
    unit: Unit = Unit.REQUEST
    enforced: bool = True
    until_us: int = 0  # of a spend: when its period ends, Unix µs; 0: never
    label: str = ""
