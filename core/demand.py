"""Demands: what a request wants from shared counters, as pure data.

`tenants.quotas` and `billing.holds` return them, `api.inference.pipeline.serve` hands them to `scheduler.admission`,
whose one atomic script takes all of them or none.
"""

from enum import StrEnum

import msgspec


class DemandKind(StrEnum):
    """How a counter counts."""

    RATE = "rate"  # at most `limit` per sliding `window_s`
    CONCURRENCY = "concurrency"  # at most `limit` held at once; a full one refuses
    CAP = "cap"  # at most `limit` held at once; a full one makes the request wait in the queue
    MONEY = "money"  # `amount` nano out of a tenant's credit; `counter` is the tenant's id in hex


class Demand(msgspec.Struct, frozen=True, gc=False):
    """One counter, how much of it, and what to say when there is not enough.

    `counter` names the counter below the key prefix, e.g. ``key:<hex>:rpm``. `refusal` is the error code.
    """

    kind: DemandKind
    counter: str
    amount: int
    limit: int
    refusal: str
    window_s: int = 0
