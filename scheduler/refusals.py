"""The errors of admission, in words. Pure."""

from core.demand import Demand, DemandKind
from core.errors import ErrorKind, PlatformError

RETRY_MAX_S = 3600


def over_limit(demand: Demand, retry_after_s: int) -> PlatformError:
    """Return the 429 of a rate or concurrency demand that did not fit."""
    whose = demand.counter.partition(":")[0]
    if demand.kind is DemandKind.RATE:
        text = f"This {whose} may make {demand.limit} requests per {demand.window_s} s and has made them."
    else:
        text = f"This {whose} may have {demand.limit} requests in flight and has them."
    wait = min(RETRY_MAX_S, max(1, retry_after_s))
    return PlatformError(
        demand.refusal,
        ErrorKind.RATE_LIMITED,
        f"{text} Try again in {wait} s.",
        retry_after_s=wait,
        fields={"limit": demand.limit},
    )


def no_credit(demand: Demand) -> PlatformError:
    return PlatformError(
        demand.refusal,
        ErrorKind.PAYMENT,
        "The credit left does not cover the most this request may cost. Top up, or lower max_tokens.",
    )


def busy(model: str, retry_after_s: int, reason: str) -> PlatformError:
    """Return the 503 of a full model. `reason`: ``queue`` (no place in it) or ``deadline`` (waited long enough)."""
    return PlatformError(
        "MODEL_BUSY",
        ErrorKind.UNAVAILABLE,
        f"All capacity for {model} is in use. Try again in {max(1, retry_after_s)} s.",
        retry_after_s=max(1, retry_after_s),
        fields={"reason": reason},
    )


def unavailable() -> PlatformError:
    return PlatformError(
        "SERVICE_UNAVAILABLE",
        ErrorKind.UNAVAILABLE,
        "Admission is not available for this request at the moment. Try again shortly.",
        retry_after_s=1,
    )
