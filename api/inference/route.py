"""Stage five: which replica answers (`scheduler.router`, where there are several), and a wake when all sleep."""

from uuid import UUID

from api.inference import errors
from api.inference.gateway import Gateway
from api.inference.job import Job
from api.inference.retries import FULL_PART
from catalog.types import DeploymentKind
from engine.client import Target
from knative.types import DeploymentState, ReplicaState

GENERATE = frozenset({"chat", "completions"})  # of whose prompts engines keep what they have read
EXTERNAL = DeploymentKind.EXTERNAL
ANSWERING = frozenset({ReplicaState.READY, ReplicaState.IDLE})


def route(gateway: Gateway, job: Job, *, besides: Target | None = None) -> Target | None:
    """Return the replica to ask, another one than `besides` when there is another; None when all sleep."""
    model, job.choice = job.offer.model, None
    if model.kind is EXTERNAL:
        return gateway.pool.target(model.base_url)
    state = gateway.states.current(model.deployment_id)
    if state is None or state.state not in ANSWERING or not state.endpoints:
        return None
    return _of(gateway, job, state, besides.url if besides is not None else "")


def _of(gateway: Gateway, job: Job, state: DeploymentState, besides: str = "") -> Target:
    """Return one of the replicas of a state; `job.choice` says which, where there are several."""
    endpoints = state.endpoints
    if len(endpoints) == 1:
        return gateway.pool.target(endpoints[0].url)
    call = job.call
    salt = job.offer.principal.cache_salt if call.endpoint in GENERATE else None
    job.choice = choice = gateway.router.pick(state, call.body, call.begin, salt, gateway.now, besides=besides)
    return gateway.pool.target(choice.replica.url)


async def wake(gateway: Gateway, job: Job) -> Target:
    """Return a replica once one is awake.

    Raises:
        PlatformError: MODEL_LOADING when it was not ready within the caller's patience; MODEL_BUSY when too many wait.
    """
    model, held = job.offer.model, gateway.held
    waiting = held.get(model.deployment_id, 0)
    if waiting >= model.waiting_max:
        raise errors.model_busy()
    held[model.deployment_id] = waiting + 1
    patience_s = max(0.0, job.patience_until - gateway.clock.monotonic())
    try:
        state = await gateway.states.wait_ready(model.deployment_id, patience_s)
    except TimeoutError:
        state = gateway.states.current(model.deployment_id) or DeploymentState("", ReplicaState.ABSENT)
    finally:
        held[model.deployment_id] -= 1
        if not held[model.deployment_id]:
            del held[model.deployment_id]
    if state.state not in ANSWERING or not state.endpoints:
        raise errors.model_loading(state.eta_s, round(patience_s))
    return _of(gateway, job, state)


async def may_retry(gateway: Gateway, deployment_id: UUID) -> bool:
    """Whether a request that an engine never answered may go to another one now. See `retries`."""
    if await gateway.part_full(deployment_id) > FULL_PART:
        result = "replicas_full"
    elif not gateway.retries.spend(deployment_id, gateway.now):
        result = "over_budget"
    else:
        result = "sent"
    gateway.metrics.retries[result] = gateway.metrics.retries.get(result, 0) + 1
    return result == "sent"
