"""A request that waited while its model's name was led to another version goes there instead of to the old one."""

from api.inference.access import resolve
from api.inference.gateway import Gateway
from api.inference.job import Job


def is_switched(gateway: Gateway, job: Job) -> bool:
    """Whether the request was resolved to a version that its public name leads to no more."""
    directory, model = gateway.directory, job.offer.model
    current = directory.models.get(model.name)
    both = model.name in directory.rollouts  # then it may be either
    return current is not None and current.version_id != model.version_id and not both


def follow(gateway: Gateway, job: Job) -> None:
    """Give back its place on the old version, and resolve it again. It used nothing, so nothing is billed of it.

    Raises:
        PlatformError: the new version does not serve what it asks for.
    """
    gateway.admission.release(job.grant, None, 0, 0, 0)
    job.grant = None
    own = job.offer
    job.offer = resolve(
        gateway.directory,
        gateway.admission,
        own.principal,
        job.call,
        gateway.clock.now_us(),
        name=own.model.name,
    )
    job.rename(gateway.new_id())
    if job.claim is not None and gateway.claims is not None:
        gateway.claims.rename(job.claim, job.id.hex)
    gateway.metrics.add("switched_while_waiting_total")
