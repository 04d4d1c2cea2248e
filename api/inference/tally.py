"""What each version of a rollout did here, as the controller's rules want it: counts and times, no text, no tenant."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from api.inference.job import Job
from api.inference.relay import StreamRelay
from billing.types import Outcome
from catalog.rollout_types import Arms
from core.errors import ErrorKind, PlatformError
from core.usage import TokenUsage
from knative.arm_figures import Arm, Figures

OURS = frozenset({ErrorKind.UPSTREAM, ErrorKind.TIMEOUT, ErrorKind.INTERNAL})
MICRO = 1_000_000


class Tally:
    """Figures by rollout, of its current window only."""

    def __init__(self) -> None:
        self._figures: dict[UUID, Figures] = {}

    def of(self, arms: Arms) -> Figures:
        """Return the figures of the rollout's window; those of an earlier one are forgotten."""
        found = self._figures.get(arms.rollout_id)
        if found is None or found.window != arms.window:
            found = self._figures[arms.rollout_id] = Figures(arms.window)
        return found

    def keep_only(self, rollouts: Mapping[str, Arms]) -> None:
        """Forget what has ended."""
        running = {arms.rollout_id for arms in rollouts.values()}
        for ended in self._figures.keys() - running:
            del self._figures[ended]

    def note(self, rollouts: Mapping[str, Arms], job: Job, bill: Any, error: PlatformError | None, grant: Any) -> None:
        """Count one request that has ended. Those that a limit or the caller ended say nothing of a version.

        `bill` is `settle.Bill` or None, `grant` what admission gave.
        """
        arms = rollouts.get(job.offer.model.name) if hasattr(job, "offer") else None
        if arms is None:
            return
        figures, version = self.of(arms), job.offer.model.version_id
        arm = figures.canary if version == arms.canary.version_id else figures.stable
        failed = error is not None and error.kind in OURS
        if bill is None:
            if failed:  # its engine does not start
                arm.requests, arm.errors = arm.requests + 1, arm.errors + 1
            return
        arm.requests += 1
        if failed or bill.quarantine:
            arm.errors += 1
        elif error is not None:
            arm.refused += error.kind is ErrorKind.INVALID and bill.outcome is Outcome.UPSTREAM_ERROR
        elif bill.outcome is Outcome.COMPLETED:
            arm.answers += 1
            arm.cost_pico += bill.pico
            _time(arm, job, bill.usage, grant.queue_us if grant is not None else 0)


def _time(arm: Arm, job: Job, usage: TokenUsage, queue_us: int) -> None:
    """Add its tokens and times; the wait in the queue is no version's doing."""
    output, relay = usage.output_total, job.relay
    arm.input_tokens += usage.input_total
    arm.output_tokens += output
    if relay is None or not relay.first_at:
        return
    first_s = max(0.0, relay.first_at - job.started - queue_us / MICRO)
    if isinstance(relay, StreamRelay):
        arm.time(arm.ttft, first_s)
        if output > 1:
            arm.time(arm.tpot, (relay.last_at - relay.first_at) / (output - 1))
    elif output > 1:
        arm.time(arm.tpot, first_s / output)
