"""The errors of admission, in words. Pure."""

from collections.abc import Sequence
from uuid import UUID

from core.demand import Demand, DemandKind, Unit
from core.errors import ErrorKind, PlatformError
from core.money import NANO_PER_UNIT, PICO_PER_NANO, format_pico
from core.resp import RespUnavailable
from core.waits import Wait
from scheduler.commands import Busy, Code
from scheduler.types import Grant
from tenants.types import LimitMetric

RETRY_MAX_S = 3600
PREEMPTED_RETRY_S = (5, 30)  # at least and at most
BUSY_RETRY_S = (1, 60)
SPREAD = (0.8, 1.2)
INSUFFICIENT_CREDIT = "INSUFFICIENT_CREDIT"
_METRIC_OF_UNIT = {
    Unit.REQUEST: LimitMetric.REQUESTS_PER_MINUTE,
    Unit.INPUT_TOKEN: LimitMetric.INPUT_TOKENS_PER_MINUTE,
    Unit.OUTPUT_TOKEN: LimitMetric.OUTPUT_TOKENS_PER_MINUTE,
}
_METRIC_OF_PERIOD = {"d": LimitMetric.SPEND_PER_DAY, "m": LimitMetric.SPEND_PER_MONTH, "t": LimitMetric.SPEND_TOTAL}
_WORDS = {
    LimitMetric.REQUESTS_PER_MINUTE: "requests per minute",
    LimitMetric.INPUT_TOKENS_PER_MINUTE: "input tokens per minute",
    LimitMetric.OUTPUT_TOKENS_PER_MINUTE: "output tokens per minute",
    LimitMetric.CONCURRENCY: "requests at once",
    LimitMetric.SPEND_PER_DAY: "spend per day",
    LimitMetric.SPEND_PER_MONTH: "spend per month",
    LimitMetric.SPEND_TOTAL: "spend",
}


def metric_of(demand: Demand) -> LimitMetric:
    """What the demand's limit counts."""
    if demand.kind is DemandKind.RATE:
        return _METRIC_OF_UNIT[demand.unit]
    if demand.kind is DemandKind.SPEND:
        return _METRIC_OF_PERIOD[demand.counter.partition(":spend:")[2][:1] or "t"]
    return LimitMetric.CONCURRENCY


def over_limit(demand: Demand, retry_after_s: int, *, model: str, wanted: int, hold: int) -> PlatformError:
    """Return the refusal of a demand that did not fit: 402 for a budget, 429 for all else; it names the limit.

    Args:
        demand: the limit.
        retry_after_s: when the same request may pass.
        model: the public name of the model that was asked for.
        wanted: how much of the limit the request takes.
        hold: the most it may cost, in nano.
    """
    metric, level = metric_of(demand), demand.counter.partition(":")[0]
    label = demand.label or f"{_WORDS[metric]} of this {level}"
    fields: dict[str, object] = {
        "level": level,
        "metric": metric.value,
        "limit": demand.limit,
        "model": model if ":m:" in demand.counter.partition(":spend:")[0] else "",
    }
    if demand.kind is DemandKind.SPEND:
        fields["limit"] = format_pico(demand.limit * PICO_PER_NANO)
        text = f"The limit of {_units(demand.limit)} {label} does not leave the {_units(hold)} this request may cost."
        text = f"{text} Have the limit raised, or lower max_tokens."
        return PlatformError(demand.refusal, ErrorKind.PAYMENT, text, fields=fields)
    wait = min(RETRY_MAX_S, max(1, retry_after_s))
    if demand.kind is DemandKind.RATE and demand.unit and wanted > demand.limit:
        lower = "max_tokens" if demand.unit is Unit.OUTPUT_TOKEN else "the length of the prompt"
        text = f"This request alone takes {wanted:,}, more than the limit of {demand.limit:,} {label}. Lower {lower}."
    else:
        text = f"The limit of {demand.limit:,} {label} is reached. Try again in {wait} s."
    return PlatformError(demand.refusal, ErrorKind.RATE_LIMITED, text, retry_after_s=wait, fields=fields)


def _units(nano: int) -> str:
    return f"{nano // NANO_PER_UNIT:,}.{nano % NANO_PER_UNIT // 1000:06d}"


def no_credit() -> PlatformError:
    return PlatformError(
        INSUFFICIENT_CREDIT,
        ErrorKind.PAYMENT,
        "The credit left does not cover the most this request may cost. Top up, or lower max_tokens.",
    )


def busy(model: str, retry_after_s: int, reason: str, wait: Wait) -> PlatformError:
    """Return the 503 of a full model.

    `reason`: ``queue`` (no place in it), ``too_late`` (it would not have been served in the time the caller waits),
    ``deadline`` (waited long enough) or ``evicted`` (its place in a full queue went to a higher tier or to another
    tenant). `wait`: what was full, and who waited before it.
    """
    return PlatformError(
        "MODEL_BUSY",
        ErrorKind.UNAVAILABLE,
        f"All capacity for {model} is in use. Try again in {max(1, retry_after_s)} s.",
        retry_after_s=max(1, retry_after_s),
        fields={"reason": reason, "waits_for": wait.label, "limit": wait.limit, "ahead": wait.ahead},
    )


def too_busy(grant: Grant, estimate_s: int, reason: str, wait: Wait) -> PlatformError:
    """Return the same of one request, told to come back in about the time after which it would have been served."""
    return busy(grant.prepared.model.name, retry_after_s(estimate_s, grant.request_id), reason, wait)


def retry_after_s(estimate_s: float, request_id: UUID) -> int:
    """Return when to come back: 0.8 to 1.2 of the estimate, so that not all who were refused at once do so at once.

    By the random end of the id, which makes no request wait for dice; between 1 and 60 s.
    """
    part = SPREAD[0] + (SPREAD[1] - SPREAD[0]) * (request_id.int & 0xFFFF) / 0xFFFF
    return min(BUSY_RETRY_S[1], max(BUSY_RETRY_S[0], round(estimate_s * part)))


def preempted(model: str, retry_after_s: int) -> PlatformError:
    """Return the 503 of a request whose place went to one before it and that found no other in its time."""
    wait = min(PREEMPTED_RETRY_S[1], max(PREEMPTED_RETRY_S[0], retry_after_s))
    return PlatformError(
        "PREEMPTED",
        ErrorKind.UNAVAILABLE,
        f"A request that goes before this one needed its place on {model}. Nothing was charged. Try again in {wait} s.",
        retry_after_s=wait,
    )


def unavailable() -> PlatformError:
    return PlatformError(
        "SERVICE_UNAVAILABLE",
        ErrorKind.UNAVAILABLE,
        "Admission is not available for this request at the moment. Try again shortly.",
        retry_after_s=1,
    )


def of_reply(grant: Grant, reply: Sequence[int]) -> Exception:
    """Return what an answer of the script that is no grant comes to: what the caller is told, or nobody decides."""
    code, model = reply[0], grant.prepared.model.name
    if code == Code.REFUSED:
        if reply[1] == -1:
            return no_credit()
        demand = grant.prepared.named[reply[1]]
        wanted = (demand.amount, grant.input_tokens, grant.output_tokens)[demand.unit]
        return over_limit(demand, reply[2], model=model, wanted=wanted, hold=grant.hold)
    if code == Code.BUSY:
        _, estimate_s, why, full, limit, ahead = reply
        wait = Wait(full, limit, 0, ahead)
        return too_busy(grant, estimate_s, "queue" if why == Busy.FULL else "too_late", wait)
    if code in {Code.UNKNOWN_CREDIT, Code.UNKNOWN_BUDGET}:
        return unavailable()
    return RespUnavailable("admission is fenced until the replicas have registered their requests")
