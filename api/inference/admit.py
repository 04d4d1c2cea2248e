"""Stage four: hand every demand of the request to the one admission script."""

from typing import Any

from api.inference import errors, estimate, wire
from api.inference.cold_start import is_asleep, loading
from api.inference.gateway import Gateway
from api.inference.job import Job, Request
from billing import holds
from catalog.types import ServedModel
from core.errors import PlatformError
from core.tiers import Tier
from scheduler import patience

SPOOL_RETRY_AFTER_S = (30, 10, 5)  # by tier: as the spool empties, the higher ones are let in first
PATIENCE_HEADER = b"x-tidegate-max-wait"  # seconds the caller is willing to wait for a place or a wake


async def admit(gateway: Gateway, job: Job, request: Request) -> Any:  # noqa: C901 - one look after the other, none nested
    """Return the grant.

    Raises:
        PlatformError: whatever limit, credit or the caller's patience says.
    """
    if gateway.draining:
        raise errors.unavailable("This gateway is shutting down. Try again.")
    if job.call.endpoint != "tokenize":  # which costs nothing, so that nothing of it has to be kept
        refuse_unrecorded(gateway, job.offer.tier)
    if not gateway.admission.ready and not trusted(gateway):
        raise errors.unavailable("Keys and limits cannot be checked now. Try again shortly.", 5)
    call, offer = job.call, job.offer
    model = offer.model
    most, wait_s = waits(gateway, job, request)
    job.patience_until, job.place_until = job.started + most, job.started + wait_s
    if job.instead_of or job.admitted_at_us:  # the time is the caller's, whichever model or version serves
        wait_s = job.place_until - gateway.clock.monotonic()
    input_tokens, output_tokens = estimate.prompt_tokens(call, model), estimate.output_tokens(call, model)
    hold = holds.hold_nano(offer.schedule, input_tokens, output_tokens) if call.endpoint != "tokenize" else 0
    grant = None
    if offer.prepared.block is not None and job.claim is None:  # a claim asks whether Valkey knows the request
        grant = gateway.admission.take(job.id, offer.prepared, hold, input_tokens, output_tokens, offer.tier)
    if grant is None:
        try:
            grant = await gateway.admission.acquire(
                job.id,
                offer.prepared,
                hold=hold,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                tier=offer.tier,
                wait_s=wait_s,
            )
        except PlatformError as refusal:
            raise _meant(gateway, model, refusal) from None
    job.admitted_at_us = gateway.clock.now_us()
    gateway.admission_metrics.grants[model.name][offer.tier] += 1
    if grant.queue_us or grant.over:
        _note(gateway, job, grant)
    lines = offer.lines
    if lines.named:
        job.limits = lines.of(grant.reply)
        if job.limits:
            gateway.seen_limits.note(offer.principal.key_id, grant.reply, lines, job.started)
        else:  # decided without Valkey
            job.limits = gateway.seen_limits.headers(offer.principal, job.started)
    return grant


def _meant(gateway: Gateway, model: ServedModel, refusal: PlatformError) -> PlatformError:
    """Return the refusal; of a model that sleeps, and for which as many wait as may, that it is being loaded."""
    busy = refusal.code == "MODEL_BUSY" and is_asleep(gateway, model)
    return loading(gateway, model) if busy else refusal


def _note(gateway: Gateway, job: Job, grant: Any) -> None:
    """Count what few requests have: a wait, and limits passed that refuse nothing."""
    if grant.queue_us:
        gateway.admission_metrics.waited(job.offer.tier, job.offer.model.name, grant.queue_us)
    if grant.over:
        gateway.refusals.note_over(job, grant.over)


def waits(gateway: Gateway, job: Job, request: Request) -> tuple[float, float]:
    """Return the seconds that it waits at most for a wake, and for a place."""
    offer, noted = job.offer, request.head.noted
    most: float = min(offer.model.max_wait_s, gateway.settings.max_wait_s)
    header, member = noted.get(PATIENCE_HEADER), job.call.max_wait
    if header is not None or member is not None:
        if header is not None:
            most = named_patience(header, most)
        if member is not None:
            most = min(member, most)
        return most, most
    if is_asleep(gateway, offer.model):
        return most, most  # behind those who are held for its wake
    wait_s = min(most, gateway.tier_waits[offer.tier])
    for name in wire.RETRIES:
        if name in noted:
            wait_s = patience.of_retry(wait_s, offer.tier, tries(noted[name]))
    return most, wait_s


async def admit_again(gateway: Gateway, job: Job) -> None:
    """Wait for another place, as a higher tier needs this one: with its age, for what is left of its time.

    Raises:
        PlatformError: PREEMPTED when there was none.
    """
    tier = job.offer.tier.label
    gateway.metrics.preempted(tier, job.grant.asked_for)
    try:
        job.grant = await gateway.admission.wait_again(job.grant, job.place_until - gateway.clock.monotonic())
    except PlatformError:
        gateway.metrics.preempted(tier, None)
        raise


def refuse_unrecorded(gateway: Gateway, tier: Tier) -> None:
    """Take no work whose usage could not be kept, lower tiers first (`settings.SpoolPolicy`).

    Raises:
        PlatformError: SERVICE_UNAVAILABLE.
    """
    if gateway.spool.refuses(tier):
        retry_after_s = SPOOL_RETRY_AFTER_S[tier]
    elif gateway.spool_late_until > gateway.now:
        retry_after_s = 1
    else:
        return
    gateway.metrics.spool_refusals[tier] += 1
    whose = "no new work" if gateway.spool.refuses(Tier.PRIORITY) else f"no new work of tier {tier.label}"
    raise errors.unavailable(f"Usage cannot be recorded now, so {whose} is taken. Try again shortly.", retry_after_s)


def trusted(gateway: Gateway) -> bool:
    """With Postgres and Valkey both away, what is known holds for a stated time and no longer, wherever it was kept."""
    return gateway.clock.monotonic() - gateway.directory.fresh_at <= gateway.settings.cache_trust_s


def tries(header: bytes) -> int:
    """Return how many tries came before this one; what is no number is none."""
    return int(header) if header.isdigit() and len(header) <= 3 else 0


def named_patience(header: bytes, most: float) -> float:
    """Return the seconds the caller waits at most.

    Raises:
        PlatformError: the header is not a number of seconds.
    """
    try:
        named = float(header)
    except ValueError:
        named = -1.0
    if not 0 <= named < 1e6:
        raise _bad_patience()
    return min(named, most)


def _bad_patience() -> PlatformError:
    return errors.invalid("The header X-Tidegate-Max-Wait is a number of seconds.")
