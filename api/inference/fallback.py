"""Another model for a request whose own has no capacity: named by its operator, agreed to by the caller, once."""

from api.inference import errors, estimate
from api.inference.access import resolve
from api.inference.directory import Offer
from api.inference.gateway import Gateway
from api.inference.job import Client, Job, Request
from api.inference.request import Call
from api.inference.wire import FALLBACK
from catalog.types import ServedModel
from core.errors import PlatformError
from scheduler.commands import UNSERVED

NO_CAPACITY = frozenset({"MODEL_BUSY", "MODEL_LOADING"})
ENDPOINTS = frozenset({"chat", "completions"})  # vectors and token counts of another model mean something else


def fallback_of(gateway: Gateway, job: Job, request: Request) -> Offer | None:
    """Return what may serve instead: the deployment's fallback, if the caller allows it and its key may use it.

    None also where it lacks something that this request needs: the endpoint, the tier's price, the length of context.

    Raises:
        PlatformError: the header says neither allow nor none.
    """
    agreed = request.head.noted.get(FALLBACK)
    if agreed is None:
        return None
    if agreed.lower() not in {b"allow", b"none"}:
        raise errors.invalid("The header X-Tidegate-Fallback is allow or none.")
    call, own = job.call, job.offer.model
    if agreed.lower() == b"none" or not own.fallback_model or call.endpoint not in ENDPOINTS:
        return None
    principal, now_us = job.offer.principal, gateway.clock.now_us()
    try:
        other = resolve(gateway.directory, gateway.admission, principal, call, now_us, name=own.fallback_model)
    except PlatformError:
        return None
    if other.model.deployment_id == own.deployment_id or not _holds(other.model, own, call):
        return None
    return other


def refusal_of(job: Job, client: Client, refusal: PlatformError | None) -> PlatformError | None:
    """Return why the model did not serve when that is a want of capacity, and the caller has had nothing yet.

    Want of capacity: no place in time, not loaded in time, the engine says that it is full or cannot be reached.
    """
    if client.streaming:
        return None
    if refusal is not None:
        return refusal if refusal.code in NO_CAPACITY else None
    relay = job.relay
    error = relay.error if relay is not None else None
    if relay is None or error is None:
        return None
    return error if relay.retryable or error.code in NO_CAPACITY else None


def hand_over(gateway: Gateway, job: Job, other: Offer, refusal: PlatformError) -> None:
    """Give back all that the request has, and make it one of the other model. It used nothing, so nothing is billed."""
    if job.grant is not None:
        gateway.admission.release(job.grant, UNSERVED, 0, 0, 0)
    job.grant = job.relay = None
    job.instead_of, job.offer = job.offer.model.name, other
    job.rename(gateway.new_id())
    if job.claim is not None and gateway.claims is not None:
        gateway.claims.rename(job.claim, job.id.hex)
    fallbacks = gateway.metrics.fallbacks
    fallbacks[refusal.code] = fallbacks.get(refusal.code, 0) + 1


def take_back(gateway: Gateway, job: Job, own: Offer) -> None:
    """The other model has no place either: the request ends as one of its own model, with that one's refusal."""
    if job.grant is not None:
        gateway.admission.release(job.grant, UNSERVED, 0, 0, 0)
    job.grant = job.relay = None
    job.instead_of, job.offer = "", own
    gateway.metrics.add("fallbacks_failed_total")


def _holds(model: ServedModel, own: ServedModel, call: Call) -> bool:
    """Whether prompt and answer fit its context for certain, wherever they fit the own one's."""
    if model.context_max >= own.context_max:
        return True
    if not call.text_only:
        return False
    ratio = model.bytes_per_token_milli if call.single_text else 1000
    longest = -(-call.size * 1000 // (ratio or 1000)) + model.template_tokens
    return longest + estimate.max_tokens(call, model) <= model.context_max
