"""Stage seven: on every ending give back what was taken, charge what was used, and let the last byte go."""

import asyncio
from typing import Any

import msgspec
import structlog

from api.inference import claim, errors, estimate, stream
from api.inference.count import count_prompt
from api.inference.gateway import Gateway
from api.inference.job import Client, Job, Request
from api.inference.relay import Relay, StreamRelay, read_answer, read_count
from api.inference.sse import DONE, usage_chunk
from billing import pricing
from billing.types import CountSource, Outcome, UsageEvent
from core.errors import ErrorKind, PlatformError
from core.money import format_pico, nano_up
from core.settings import LatePolicy
from core.usage import NO_USAGE, TokenUsage
from engine.usage import UsageRejected, normalise, plain_usage

RAW_USAGE_MAX = 2000
LATE_REFUSED_S = 1.0  # then some work is let in to see whether the disk is quick again
CLIENT_LEFT = PlatformError("CLIENT_LEFT", ErrorKind.INVALID, "The client closed the connection.")
CLIENT_LEFT_STATUS = 499  # only ever in logs and events: nobody is there to read it
COMPLETED, UPSTREAM_ERROR, ENGINE = Outcome.COMPLETED, Outcome.UPSTREAM_ERROR, CountSource.ENGINE  # looked up once
NEVER = (0, 0, 0)
NOT_BILLED = {"UPSTREAM_TIMEOUT": Outcome.TIMEOUT, "PREEMPTED": Outcome.PREEMPTED}

_log = structlog.get_logger("gateway")


class Bill(msgspec.Struct, frozen=True, gc=False):
    """How a request that reached an engine ended, and what it costs."""

    outcome: Outcome
    usage: TokenUsage = NO_USAGE
    source: CountSource = ENGINE
    pico: int = 0
    quarantine: str = ""
    raw_usage: str = ""
    upstream_id: str = ""


async def settle(gateway: Gateway, job: Job, request: Request, client: Client, error: PlatformError | None) -> None:
    """Release, record, wait for the disk, answer."""
    relay = job.relay
    if error is None and relay is not None:
        error = relay.error
    bill = None
    if relay is not None and job.call.endpoint != "tokenize":  # which costs nothing and is no generation
        bill = plain_bill(job, relay) if error is None and not job.call.stream else None
        bill = bill or make_bill(job, relay, error) or await counted_bill(gateway, job, relay, error)
        if error is None and bill.outcome is UPSTREAM_ERROR:
            error = errors.upstream_error()  # it said 200, and what came is no answer
    status = 200 if error is None else CLIENT_LEFT_STATUS if error is CLIENT_LEFT else errors.status_of(error)
    durable = record(gateway, job, bill, status) if bill is not None else None
    if job.claim is not None:  # before the release, so that no repeat takes it for lost
        claim.finish(
            gateway, job.claim, ended=error is None, billed=bill is not None and bool(bill.pico or bill.quarantine)
        )
    grant, job.grant = job.grant, None
    if grant is not None:
        charge_nano = nano_up(bill.pico) if bill is not None else None
        gateway.admission.release(grant, charge_nano, *tokens_used(job, relay, bill))
    if durable is not None and not client.gone:
        gateway.durable.add(durable)
        if not await durable:
            note_not_durable(gateway, durable)
    if not client.gone:
        answer(gateway, job, client, relay, bill, error)
    note(gateway, job, request, bill, status, error)
    if gateway.directory.rollouts:
        gateway.tally.note(gateway.directory.rollouts, job, bill, error, grant)


def tokens_used(job: Job, relay: Relay | None, bill: Bill | None) -> tuple[int, int, int]:
    """Return the input and output tokens that count against limits, and of the input those that were cached.

    -1 where nobody knows: the estimate stays.
    """
    if bill is not None:
        usage = bill.usage
        return (-1, -1, 0) if bill.quarantine else (usage.input_total, usage.output_total, usage.input_cached)
    if relay is None or relay.error is not None or job.call.endpoint != "tokenize":
        return 0, 0, 0
    return read_count(b"".join(relay.body)), 0, 0


# ---- the bill


def plain_bill(job: Job, relay: Relay) -> Bill | None:
    """The bill of a whole answer that reports no more than tokens in and out; None for any other answer."""
    found = plain_usage(b"".join(relay.body))
    if found is None or estimate.impossible(found[1], job.call, job.offer.model):
        return None
    try:
        pico = pricing.charge(found[1], job.offer.schedule, COMPLETED)
    except ValueError:
        return None
    return Bill(COMPLETED, found[1], ENGINE, pico, upstream_id=found[0])


def make_bill(job: Job, relay: Relay, error: PlatformError | None) -> Bill | None:
    """Judge the ending, and rate what was used at the price frozen in stage two; None when it has to be counted."""
    events = relay.events if isinstance(relay, StreamRelay) else None
    outcome = COMPLETED
    if error is CLIENT_LEFT or relay.revoked_by is not None:
        outcome = Outcome.CLIENT_ABORT
    elif error is not None:
        # one that was preempted and then refused was not sent again: no fault of the engine
        code = "PREEMPTED" if relay.preempted else error.code
        return Bill(NOT_BILLED.get(code, UPSTREAM_ERROR))
    if events is not None:
        upstream_id, report = events.upstream_id, events.report
    else:
        facts = read_answer(b"".join(relay.body)) if relay.status == 200 else None
        if facts is None and outcome is COMPLETED:
            return Bill(UPSTREAM_ERROR)
        upstream_id = facts.id[:200] if facts is not None and type(facts.id) is str else ""
        report = {"usage": facts.usage, "timings": facts.timings} if facts is not None and facts.usage else None
    if report is not None:
        return _engine_bill(job, outcome, report, upstream_id)
    deltas = events.deltas if events is not None else 0
    if outcome is COMPLETED and not deltas:
        return Bill(outcome, quarantine="the engine reported no usage", upstream_id=upstream_id)
    if not deltas:
        return Bill(outcome, upstream_id=upstream_id)  # left before anything was generated: nothing is charged
    return None


def _engine_bill(job: Job, outcome: Outcome, report: dict[str, Any], upstream_id: str) -> Bill:
    try:
        usage = believable(report, job)
        pico = pricing.charge(usage, job.offer.schedule, outcome)
    except (UsageRejected, ValueError) as rejection:
        raw = msgspec.json.encode(report.get("usage")).decode("utf-8", "replace")[:RAW_USAGE_MAX]
        return Bill(outcome, quarantine=str(rejection)[:200], raw_usage=raw, upstream_id=upstream_id)
    return Bill(outcome, usage, ENGINE, pico, upstream_id=upstream_id)


def believable(report: dict[str, Any], job: Job) -> TokenUsage:
    """Return what the engine reported.

    Raises:
        UsageRejected: it contradicts itself, or is more than this call could use.
    """
    usage = normalise(report)
    if reason := estimate.impossible(usage, job.call, job.offer.model):
        raise UsageRejected(reason)
    return usage


async def counted_bill(gateway: Gateway, job: Job, relay: Relay, error: PlatformError | None) -> Bill:
    """No report came: one delta is one token; the prompt is counted by the engine's tokenizer.

    When even that fails the prompt is not charged: an estimate is an upper bound, and a bill must never be above
    what was used.
    """
    outcome = COMPLETED if error is None else Outcome.CLIENT_ABORT
    deltas, upstream_id = (relay.events.deltas, relay.events.upstream_id) if isinstance(relay, StreamRelay) else (0, "")
    gateway.metrics.add("usage_counted_by_gateway_total")
    prompt = await count_prompt(gateway, job)
    if prompt is None:
        gateway.metrics.add("prompt_uncounted_total")
        prompt = 0
    usage = TokenUsage(input_uncached=prompt, output=deltas)
    pico = pricing.charge(usage, job.offer.schedule, outcome)
    return Bill(outcome, usage, CountSource.GATEWAY, pico, upstream_id=upstream_id)


def record(gateway: Gateway, job: Job, bill: Bill, status: int) -> Any:
    """Hand the usage event to the spool; returns a future: True on disk, False refused by it, None after too long."""
    relay, grant = job.relay, job.grant
    first_at = relay.first_at if relay is not None else 0.0
    ending: tuple[Any, ...] = (  # the members of an event that are this request's own, in their order
        bill.outcome,
        status,
        bill.pico,
        job.admitted_at_us,
        gateway.clock.now_us(),
        bill.usage,
        bill.source,
        job.call.stream,
        grant.queue_us if grant is not None else 0,
        int((first_at - job.started) * 1_000_000) if first_at else 0,
        bill.upstream_id,
        bill.quarantine,
        bill.raw_usage,
        job.claim.bill if job.claim is not None else b"",
        *(preempted(gateway, job, bill, grant.preempted) if grant is not None and grant.preempted else NEVER),
        grant.wait if grant is not None else None,
    )
    event = UsageEvent(job.id, *job.offer.facts, *ending)
    durable = gateway.loop.create_future()
    gateway.spool.append(event, durable.set_result)
    return durable


def preempted(gateway: Gateway, job: Job, bill: Bill, times: int) -> tuple[int, int, int]:
    """How often it gave its place, and the waste: prompt tokens its ended calls were sent, and how long those ran (µs).

    The prompt is counted as its answer's was, else as estimated: nobody is charged for it.
    """
    prompt = bill.usage.input_total or estimate.prompt_tokens(job.call, job.offer.model)
    tokens = job.wasted_calls * prompt
    gateway.metrics.add("preempt_waste_tokens_total", tokens)
    return times, tokens, job.wasted_us


def note_not_durable(gateway: Gateway, durable: "asyncio.Future[bool | None]") -> None:
    """The wait is bounded by the settings: then the answer goes, and that is counted; new work may be refused."""
    if gateway.settings.spool_late is LatePolicy.REFUSE:
        gateway.spool_late_until = gateway.now + LATE_REFUSED_S
    gateway.metrics.add("spool_late_total" if durable.result() is None else "spool_failed_total")


# ---- the answer


def answer(  # noqa: PLR0917 - a leaf of settle, which has all of it
    gateway: Gateway, job: Job, client: Client, relay: Relay | None, bill: Bill | None, error: PlatformError | None
) -> None:
    """Write the end of a stream, a whole answer, or the error."""
    if error is not None:
        if client.streaming:
            client.end_stream(errors.sse_event_of(error))
        elif isinstance(error, claim.Replay):
            claim.show(client, error)
        else:
            client.respond(errors.status_of(error), errors.body_of(error), error_headers(gateway, job, error))
    elif isinstance(relay, StreamRelay):
        tail = DONE
        if job.call.include_usage and bill is not None:
            tail = usage_chunk(relay.events.closing_facts, job.offer.model.name, shown_usage(relay, job, bill)) + DONE
        client.end_stream(tail)
    elif relay is not None:
        extra = stream.stream_headers(job)
        if bill is not None:
            extra += f"X-Tidegate-Cost: {format_pico(bill.pico)} {job.offer.schedule.currency!s}\r\n".encode()
        client.respond(200, public_body(job, relay), extra)


def shown_usage(relay: StreamRelay, job: Job, bill: Bill) -> dict[str, Any]:
    """The engine's usage object, or ours when it gave none, with the cost as a string."""
    usage = dict(relay.events.report["usage"]) if relay.events.report is not None else _counts(bill.usage)
    usage["cost"] = format_pico(bill.pico)
    usage["currency"] = job.offer.schedule.currency.value
    return usage


def _counts(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_total,
        "completion_tokens": usage.output_total,
        "total_tokens": usage.input_total + usage.output_total,
    }


def public_body(job: Job, relay: Relay) -> bytes:
    """The engine's answer with the model's public name."""
    body = b"".join(relay.body)  # of one block it is that block, no copy
    model = job.offer.model
    if model.upstream_model != model.name:
        now = b'"model":' + msgspec.json.encode(model.name)
        was = msgspec.json.encode(model.upstream_model)
        for old in (b'"model":' + was, b'"model": ' + was):
            if old in body:
                return body.replace(old, now, 1)
    return body


def error_headers(gateway: Gateway, job: Job, error: PlatformError) -> bytes:
    """Request id, the key's limits, Retry-After where another try makes sense."""
    if not job.limits and job.principal is not None:
        job.limits = gateway.seen_limits.headers(job.principal, job.started, error)
    lines = stream.stream_headers(job)
    if error.code in claim.FINAL:  # a client that knows this header, as OpenAI's does, would else try a 409 again
        lines += b"X-Should-Retry: false\r\n"
    retry_after = errors.retry_after_of(error)
    return lines + b"Retry-After: %d\r\n" % retry_after if retry_after else lines


# ---- what is seen from outside


def note(  # noqa: PLR0917 - one line of the log needs all of it
    gateway: Gateway, job: Job, request: Request, bill: Bill | None, status: int, error: PlatformError | None
) -> None:
    """Count it and write the access line. No prompt, no answer, no key."""
    metrics = gateway.metrics
    took_s = gateway.clock.monotonic() - job.started
    metrics.served(request.endpoint, status, took_s)
    code, pico = "", 0
    if error is not None:
        code = error.code
        metrics.refusals[code] = metrics.refusals.get(code, 0) + 1
        gateway.refusals.note(job, error)
        if hasattr(job, "offer") and (job.relay is None or code == "PREEMPTED"):  # which had a place, and lost it
            gateway.admission_metrics.refused(job.offer.tier, job.offer.model.name, error)
    if bill is not None:
        pico = bill.pico
        first_at = job.relay.first_at if job.relay is not None else 0.0
        metrics.billed(bill.outcome, bill.usage, first_at - job.started if first_at else None)
        if bill.quarantine:
            metrics.add("usage_quarantined_total")
    gateway.log.line(
        f'{{"event":"request.served","request_id":"{job.public_id}","endpoint":"{request.endpoint}",'
        f'"status":{status},"code":"{code}","duration_us":{int(took_s * 1e6)},"amount_pico":{pico}}}'
    )


def report_bug(gateway: Gateway, job: Job, bug: BaseException) -> None:
    """Log what went wrong in our own code, without any text of the request."""
    gateway.metrics.add("internal_errors_total")
    _log.error("request.failed", request_id=job.public_id, error=type(bug).__name__, exc_info=bug)
