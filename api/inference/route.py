"""Stage five: which replica answers (`scheduler.router`, where there are several)."""

from uuid import UUID

from api.inference.cold_start import EXTERNAL, is_awake
from api.inference.gateway import Gateway
from api.inference.job import Job
from api.inference.retries import FULL_PART
from catalog.types import ServedModel
from engine.client import Target
from knative.types import DeploymentState

GENERATE = frozenset({"chat", "completions"})  # of whose prompts engines keep what they have read


def route(gateway: Gateway, job: Job, *, besides: Target | None = None) -> Target | None:
    """Return the replica to ask, another one than `besides` when there is another; None when all sleep."""
    model, job.choice = job.offer.model, None
    if model.kind is EXTERNAL:
        return gateway.pool.target(model.base_url)
    state = gateway.states.current(model.deployment_id)
    if state is None or not is_awake(state):
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


def replicas(gateway: Gateway, model: ServedModel) -> list[Target]:
    """Return all replicas that are published as answering; of none when they sleep."""
    state = gateway.states.current(model.deployment_id)
    endpoints = state.endpoints if state is not None and is_awake(state) else ()
    return [gateway.pool.target(endpoint.url) for endpoint in endpoints]


async def may_retry(gateway: Gateway, deployment_id: UUID) -> bool:
    """Whether a request that an engine never answered may go to another one now. See `retries`."""
    return counted(gateway, deployment_id, full=await most_are_full(gateway, deployment_id), sent="sent")


async def most_are_full(gateway: Gateway, deployment_id: UUID) -> bool:
    return await gateway.part_full(deployment_id) > FULL_PART


def counted(gateway: Gateway, deployment_id: UUID, *, full: bool, sent: str) -> bool:
    """Whether the rules of retries allow one more now; it counts, under `sent` or why not."""
    if full:
        result = "replicas_full"
    elif not gateway.retries.spend(deployment_id, gateway.now):
        result = "over_budget"
    else:
        result = sent
    gateway.metrics.retries[result] = gateway.metrics.retries.get(result, 0) + 1
    return result == sent
