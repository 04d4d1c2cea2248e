"""What a gateway tells the controller about rollouts: which configuration it serves, what it counted of versions."""

import asyncio

from api.inference.directory import Directory
from api.inference.tally import Tally
from core.resp import RespClient, RespError, RespUnavailable
from knative import rollout_board

AGAIN_S = 1.0


class RolloutPost:
    """Tells of a revision as soon as requests are resolved by it, and all of it again every second.

    Args:
        client: of Valkey; while it is away nobody is told, and rollouts stay where they are.
        replica: this gateway's name, as its heartbeat has it.
        directory: what it serves by.
        tally: what it counted of versions in rollouts.
    """

    def __init__(self, client: RespClient, replica: str, directory: Directory, tally: Tally) -> None:
        self._client = client
        self._replica = replica
        self._directory = directory
        self._tally = tally

    async def run(self) -> None:
        """Tell for ever."""
        served = self._directory.served
        while True:
            try:
                async with asyncio.timeout(AGAIN_S):
                    await served.wait()
            except TimeoutError:
                pass
            served.clear()
            try:
                await self.tell()
            except (RespError, RespUnavailable):
                continue

    async def tell(self) -> None:
        if self._directory.loaded:
            await rollout_board.acknowledge(self._client, self._replica, self._directory.revision)
        self._tally.keep_only(self._directory.rollouts)
        for arms in {arms.rollout_id: arms for arms in self._directory.rollouts.values()}.values():
            figures = self._tally.of(arms)
            await rollout_board.publish_figures(self._client, arms.rollout_id, self._replica, figures)
