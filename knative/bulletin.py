"""What the leader says of each deployment: numbered, published when it changes, and again when Valkey lost it."""

from collections import Counter

import msgspec

from core.resp import RespClient, RespError, RespUnavailable
from knative import publisher
from knative.types import DeploymentState, ReplicaState


class Bulletin:
    """The states of one term; epochs count up from `first_epoch`."""

    def __init__(self, client: RespClient, first_epoch: int) -> None:
        self._client = client
        self._epoch = first_epoch
        self._states: dict[str, DeploymentState] = {}
        self._unpublished: set[str] = set()

    def note(self, state: DeploymentState) -> DeploymentState:
        """Put down a state; one that says something new gets the next epoch. Returns the numbered state."""
        known = self._states.get(state.deployment)
        if known is not None and msgspec.structs.replace(state, epoch=known.epoch) == known:
            return known
        self._epoch += 1
        numbered = msgspec.structs.replace(state, epoch=self._epoch)
        self._states[state.deployment] = numbered
        self._unpublished.add(state.deployment)
        return numbered

    def count(self) -> dict[ReplicaState, int]:
        """Return how many deployments are in each state."""
        counts = Counter(state.state for state in self._states.values())
        return {state: counts[state] for state in ReplicaState}

    def keep_only(self, deployments: set[str]) -> None:
        """Forget deployments that are no more; `heal` then takes them out of Valkey."""
        for gone in set(self._states) - deployments:
            del self._states[gone]
            self._unpublished.discard(gone)

    async def publish(self) -> None:
        """Write what is new. While Valkey is away it is kept for later."""
        for deployment in sorted(self._unpublished):
            try:
                await publisher.publish(self._client, self._states[deployment])
            except (RespError, RespUnavailable):
                return
            self._unpublished.discard(deployment)

    async def heal(self) -> None:
        """Compare with Valkey: what it lost is published anew, what it should not have is withdrawn."""
        try:
            there = await publisher.read_epochs(self._client)
            for stranger in set(there) - set(self._states):
                await publisher.withdraw(self._client, stranger, self._epoch)
        except (RespError, RespUnavailable):
            return
        self._unpublished |= {name for name, state in self._states.items() if there.get(name, -1) < state.epoch}
        await self.publish()
