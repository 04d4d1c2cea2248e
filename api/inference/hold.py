"""Stage five, where all replicas sleep: the caller is held until one is awake and it is its turn.

A caller of a stream hears a comment every few seconds meanwhile (`settings.heartbeat_s`), so that nothing between it
and us takes the connection for dead. The first comes when it has waited so long; until then an error is a plain answer.
"""

import asyncio

from api.inference import cold_start, errors
from api.inference.gateway import Gateway
from api.inference.job import Client, Job
from api.inference.route import route
from api.inference.stream import stream_headers
from core.errors import PlatformError
from engine.client import Target
from scheduler.held import Waiter

LOOK_AGAIN_S = 0.05


async def hold(gateway: Gateway, job: Job, client: Client) -> Target:
    """Return a replica once one is awake and it is this caller's turn. Whoever leaves gives its place back.

    Raises:
        PlatformError: MODEL_LOADING when it was not ready within the caller's patience or too many wait already;
            MODEL_BUSY when it was ready, and others came first; UPSTREAM_ERROR when its engine does not start.
    """
    model, clock = job.offer.model, gateway.clock
    patience_s = max(0.0, job.patience_until - clock.monotonic())
    waiter = Waiter(model.deployment_id, job.id, job.offer.tier, int(patience_s * 1000))
    heart = Heart(gateway, job, client) if job.call.stream and not job.may_hand_over else None
    stands = False
    try:
        while True:
            stands = True
            state = gateway.states.current(model.deployment_id)
            awake = state is not None and cold_start.is_awake(state)
            place = await gateway.held.enter(
                waiter,
                most=model.waiting_max,
                opened=(state.ready_us or 1) if state is not None and awake else 0,
                engines=len(state.endpoints) if state is not None else 0,
            )
            stands = not (place.go or place.refused)
            if place.go and state is not None:
                if (target := route(gateway, job)) is not None:
                    job.woke = (state.ready_us, clock.monotonic())
                    return target
                if cold_start.is_awake(gateway.states.current(model.deployment_id)):
                    raise errors.model_busy()  # it answers, and none of its replicas may be asked now
            left_s = job.patience_until - clock.monotonic()
            if place.refused:
                gateway.states.request_wake(model.deployment_id)  # also where nobody may wait for it
                raise _refusal(gateway, job, 0.0)
            if place.again_s:
                if place.again_s >= left_s:
                    raise _refusal(gateway, job, patience_s)
                await asyncio.sleep(place.again_s)
            else:
                await _awake(gateway, job, left_s, patience_s)
    finally:
        if stands:
            gateway.held.leave(waiter)
        if heart is not None:
            heart.stop()


async def _awake(gateway: Gateway, job: Job, left_s: float, patience_s: float) -> None:
    """Wake the model, and wait until an engine is ready."""
    try:
        state = await gateway.states.wait_ready(job.offer.model.deployment_id, max(0.0, left_s))
    except TimeoutError:
        raise _refusal(gateway, job, patience_s) from None
    if not cold_start.is_awake(state):
        await asyncio.sleep(LOOK_AGAIN_S)


def note_first_token(gateway: Gateway, job: Job) -> None:
    """Tell the controller how long the first token of a caller that was held took since it was let go: of a stream."""
    woke, relay, job.woke = job.woke, job.relay, None
    if woke is not None and relay is not None and relay.first_at and job.call.stream:
        ready_us, at = woke
        took_ms = int((relay.first_at - at) * 1000)
        gateway.states.note_first_token(job.offer.model.deployment_id, ready_us, max(0, took_ms))


def _refusal(gateway: Gateway, job: Job, waited_s: float) -> PlatformError:
    model = job.offer.model
    if cold_start.is_asleep(gateway, model):
        return cold_start.loading(gateway, model, waited_s)
    return errors.model_busy()


class Heart:
    """Comments to the caller of a stream, by a timer, until it is stopped."""

    __slots__ = ("_client", "_gateway", "_job", "_timer")

    def __init__(self, gateway: Gateway, job: Job, client: Client) -> None:
        self._gateway = gateway
        self._job = job
        self._client = client
        self._timer = gateway.loop.call_later(gateway.settings.heartbeat_s, self._beat)

    def _beat(self) -> None:
        gateway, client = self._gateway, self._client
        if client.gone:
            return
        if not client.streaming:
            client.begin_stream(stream_headers(self._job))
        client.stream(cold_start.news(gateway.states.current(self._job.offer.model.deployment_id)))
        self._timer = gateway.loop.call_later(gateway.settings.heartbeat_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()
