"""The product in one function: every stage of an inference request, in order, and undone in reverse.

No stage calls another; each lives in a module of its own and gets what the stages before it found.
"""

import asyncio

from api.inference import errors, settle, shadow
from api.inference.access import authenticate, resolve
from api.inference.admit import admit, admit_again
from api.inference.claim import claim
from api.inference.directory import Offer
from api.inference.fallback import fallback_of, hand_over, refusal_of, take_back
from api.inference.gateway import Gateway
from api.inference.hold import hold, note_first_token
from api.inference.job import Client, Job, Request
from api.inference.request import parse
from api.inference.route import may_retry, route
from api.inference.stream import stream
from api.inference.switched import follow, is_switched
from api.inference.wire import IDEMPOTENCY_KEY
from core.errors import PlatformError
from engine.client import Target


async def serve(gateway: Gateway, request: Request, client: Client) -> None:
    """Answer one inference request, whatever happens to client, engine or us.

    Every ending passes `settle`: what was admitted is given back and what was used is charged, exactly once.
    """
    clock = gateway.clock
    job = Job(gateway.new_id(), clock.monotonic())
    error: PlatformError | None = None
    try:
        # 1. authenticate: key → principal, from memory.
        now_us = clock.now_us()
        principal = authenticate(gateway.directory, request.digest, now_us, request.client_ip)
        job.principal = principal
        # 2. resolve: model → deployment, tier, and the price frozen for this request.
        job.call = call = parse(request.endpoint, request.body)
        job.offer = resolve(gateway.directory, gateway.admission, principal, call, now_us)
        # 3. inspect: the project's policy on the prompt; most projects have none.
        if gateway.inspectors and (inspect := gateway.inspectors.get(principal.project_id)) is not None:
            await inspect(principal, call)
        # claim: of requests with one idempotency key, one runs, and is billed.
        if (key := request.head.noted.get(IDEMPOTENCY_KEY)) is not None:
            client = await claim(gateway, job, request, client, key)
        # shadow: during a rollout some requests are copied to the version to come, once their answers have left.
        if gateway.directory.rollouts:
            client = shadow.watch(gateway, job, client)
        # 4. to 6.: by the model, or by its fallback where it has no capacity and the caller agreed to that.
        if (other := fallback_of(gateway, job, request)) is None:
            await _run(gateway, job, request, client)
        else:
            await _run_either(gateway, job, request, client, other)
    except PlatformError as refusal:
        error = refusal
    except asyncio.CancelledError:
        error = settle.CLIENT_LEFT
    except Exception as bug:  # noqa: BLE001 - a bug in one request must not leak its slot and its money
        settle.report_bug(gateway, job, bug)
        error = errors.internal()
    # 7. settle: give back, charge, write the usage event; the last byte leaves when it is on disk.
    client.settling = True
    try:
        await settle.settle(gateway, job, request, client, error)
    except Exception as bug:  # noqa: BLE001 - whoever waits for the rest of an answer must hear that none comes
        settle.report_bug(gateway, job, bug)
        client.abandon()
    finally:
        if job.grant is not None:
            gateway.admission.release(job.grant, None)


async def _run(gateway: Gateway, job: Job, request: Request, client: Client) -> None:
    # 4. admit: every limit and the money hold, all or nothing; may wait in the queue.
    job.grant = await admit(gateway, job, request)
    if job.grant.queue_us and is_switched(gateway, job):  # its version was replaced while it waited
        follow(gateway, job)
        job.grant = await admit(gateway, job, request)
    # 5. and 6.: again when a higher tier needed its place before a byte of the answer had come.
    await _answer(gateway, job, request, client)
    while job.yields:
        await admit_again(gateway, job)
        await _answer(gateway, job, request, client)


async def _run_either(gateway: Gateway, job: Job, request: Request, client: Client, other: Offer) -> None:
    """Have the other model serve, at its own price, what the model has no capacity for; one hop."""
    own, error, job.may_hand_over = job.offer, None, True
    try:
        await _run(gateway, job, request, client)
    except PlatformError as refused:
        error = refused
    refusal = refusal_of(job, client, error)
    if refusal is None:
        if error is not None:
            raise error
        return
    hand_over(gateway, job, other, refusal)
    job.may_hand_over = False
    try:
        await _run(gateway, job, request, client)
    except PlatformError:
        if job.relay is not None:  # it ran there
            raise
        take_back(gateway, job, own)
        raise refusal from None


async def _answer(gateway: Gateway, job: Job, request: Request, client: Client) -> None:
    # 5. route: a replica that answers. Where all sleep, or have just been woken for those who wait, it is held.
    opening = gateway.states.opening
    held = opening and job.offer.model.deployment_id in opening
    target = (None if held else route(gateway, job)) or await hold(gateway, job, client)
    if gateway.directory.principals.get(request.digest) is not job.principal:  # its rights changed while it waited
        authenticate(gateway.directory, request.digest, gateway.clock.now_us(), request.client_ip)
    gateway.retries.accept(job.offer.model.deployment_id, gateway.now)
    # 6. stream: from the engine to the client by direct calls; on another replica when no byte came.
    await stream(gateway, job, target, client)
    if job.woke is not None:
        note_first_token(gateway, job)
    if job.relay is not None and job.relay.retryable and not job.retried:
        await _once_more(gateway, job, target, client)


async def _once_more(gateway: Gateway, job: Job, failed: Target, client: Client) -> None:
    """Ask another replica, once, when there is one and the rules of retries allow it."""
    other = route(gateway, job, besides=failed) or await hold(gateway, job, client)
    moved = job.relay is not None and job.relay.hung  # which has been allowed already
    if other is not failed and (moved or await may_retry(gateway, job.offer.model.deployment_id)):
        job.retried = True
        await stream(gateway, job, other, client)
