"""Stage six: send the request to the engine and wait for the end of its answer. Chunks do not pass through here."""

import asyncio

from api.inference import estimate
from api.inference.count import TOKENIZE, tokenize_llama
from api.inference.gateway import Gateway
from api.inference.job import Client, Job
from api.inference.relay import Relay, StreamRelay
from api.inference.sse import EventFilter
from catalog.types import EngineKind
from core.tiers import Tier
from engine.client import Target
from scheduler.router.fleet import Choice

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "tokenize": TOKENIZE,
}
OPENAI = EngineKind.OPENAI
USAGE_ASKED = b',"stream":true,"stream_options":{"include_usage":true}'


async def stream(gateway: Gateway, job: Job, target: Target, client: Client) -> None:
    """Relay one attempt; `job.relay` says afterwards what came of it.

    Raises:
        CancelledError: the client left; the engine's connection is closed by then.
    """
    call, offer, grant = job.call, job.offer, job.grant
    job.yields = grant.asked_for is not None  # while it was being routed
    if job.yields:
        return
    if call.endpoint == "tokenize" and offer.model.engine is EngineKind.LLAMA_CPP:
        job.relay = await tokenize_llama(gateway, job, target)
        return
    done = gateway.loop.create_future()
    relay = _streaming(gateway, job, client, done) if call.stream else Relay(done, gateway.clock.monotonic)
    job.relay = relay
    relay.offer, relay.target = offer, target
    relay.unmoved = not job.retried
    sent_at = gateway.clock.monotonic()
    relay.deadline = gateway.now + gateway.settings.request_timeout_s
    gateway.relays.add(relay)
    credentials = gateway.directory.credentials
    client_of_engine = gateway.upstream if target.https else gateway.pool
    relay.call = client_of_engine.send(
        target,
        PATHS[call.endpoint],
        call.for_engine(fields(job)),
        relay,
        request_id=job.public_id,
        credential=credentials.get(offer.model.deployment_id, "") if credentials else "",
    )
    if offer.tier is not Tier.STANDARD or not call.stream:
        grant.on_asked = relay.give_place
    if call.stream:  # a buffered answer is kept here, however slowly the client reads
        client.attach(relay.call)
    if (choice := job.choice) is not None:
        choice.sent()
    try:
        await done
    except BaseException:
        relay.abort()
        raise
    finally:
        grant.on_asked = None
        gateway.relays.discard(relay)
        if call.stream:
            client.attach(None)
        if choice is not None:
            _tell(choice, relay, sent_at)
    if relay.preempted:
        job.yields = True
        job.wasted_calls += 1
        job.wasted_us += int((gateway.clock.monotonic() - sent_at) * 1_000_000)


def _streaming(gateway: Gateway, job: Job, client: Client, done: asyncio.Future[None]) -> Relay:
    """Begin the caller's stream, and return what fills it."""
    call, model = job.call, job.offer.model
    events = EventFilter(
        model.upstream_model, model.name, include_usage=call.include_usage, chat=call.endpoint == "chat"
    )
    if not client.streaming:  # a caller that was held may have heard that it is
        client.begin_stream(stream_headers(job))
    return StreamRelay(done, gateway.clock.monotonic, client, events, gateway.metrics.gap.observe)


def _tell(choice: Choice, relay: Relay, sent_at: float) -> None:
    """Tell the router how the attempt went."""
    choice.ended(relay.says, relay.first_at and relay.first_at - sent_at, relay.monotonic())


def fields(job: Job) -> bytes:
    """Our members of the engine's JSON: name, isolation and priority from the offer, limits of this request."""
    call, offer = job.call, job.offer
    if not call.choices:
        return offer.fields
    name = call.max_tokens_name if offer.model.engine is OPENAI else "max_tokens"
    return b'%b,"%b":%d%b' % (
        offer.fields,
        name.encode(),
        estimate.max_tokens(call, offer.model),
        USAGE_ASKED if call.stream else b"",
    )


def stream_headers(job: Job) -> bytes:
    """Header lines that every answer of an admitted request carries."""
    lines = b"X-Request-Id: %b\r\n%b" % (job.public_id.encode(), job.limits)
    return lines + b"X-Tidegate-Served-Model: %b\r\n" % job.offer.model.name.encode() if job.instead_of else lines
