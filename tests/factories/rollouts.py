"""Rollouts for tests: two versions of a model, and a stage on which the test plays gateways and engines."""

from pathlib import Path
from uuid import UUID

from catalog import deployments, models, rollouts
from catalog.rollout_types import NewRollout, Plan, Rollout, RolloutNote
from catalog.types import Deployment, NewVersion, ServedModel
from core import db, keyspace
from core.clock import ManualClock
from core.resp import RespClient
from knative import publisher, rollout_board
from knative.arm_figures import Figures
from knative.rollouts import RolloutDriver
from knative.types import DeploymentState, Endpoint, ReplicaState
from tests.factories.catalog import NOW, SEALING_KEY, deploy
from tests.factories.scheduler import load_text

FAR_MS = 10**14


async def second_version(sessions: db.Sessions, deployment_id: UUID) -> tuple[UUID, UUID]:
    """Add a version to the model of a deployment that nothing leads to yet; returns the model's id and its own."""
    async with db.transaction(sessions) as session:
        model_id = (await deployments.get(session, deployment_id)).model_id
        version = NewVersion(context_max=2048)
        return model_id, await models.add_version(session, model_id, version, now=NOW, make_current=False)


class RolloutStage:
    """A model with two versions; what gateways and engines would say is said by the test."""

    def __init__(self, sessions: db.Sessions, client: RespClient) -> None:
        self.sessions, self.client, self.clock = sessions, client, ManualClock(NOW)
        self.epoch = 0
        self.old = self.model_id = self.version_id = UUID(int=0)
        self.engines_max = 0

    @classmethod
    async def open(cls, sessions: db.Sessions, valkey: Path) -> "RolloutStage":
        made = cls(sessions, await RespClient.connect(f"unix://{valkey}"))
        made.old = await deploy(sessions, "m", min_scale=1)
        made.model_id, made.version_id = await second_version(sessions, made.old)
        await made.engine(made.old, ReplicaState.READY)
        return made

    async def start(self, plan: Plan) -> Rollout:
        async with db.transaction(self.sessions) as session:
            wanted = NewRollout(self.model_id, self.version_id, plan)
            return await rollouts.start(session, wanted, sealing_key=SEALING_KEY, now=self.clock.now())

    async def engine(self, deployment_id: UUID, state: ReplicaState, reason: str = "") -> None:
        self.epoch += 1
        there = (Endpoint("r", "unix:/nowhere"),) if state is ReplicaState.READY else ()
        published = DeploymentState(deployment_id.hex, state, there, epoch=self.epoch, reason=reason)
        await publisher.publish(self.client, published)

    async def load(self, deployment_id: UUID, inflight: int) -> None:
        await self.client.call("SET", keyspace.deployment(deployment_id), load_text(inflight=inflight))

    async def gateway(self, name: str, revision: int) -> None:
        """A living gateway that serves this revision."""
        await self.client.call("ZADD", keyspace.BEAT, FAR_MS, name)
        await rollout_board.acknowledge(self.client, name, revision)

    async def count(self, rollout: Rollout, figures: Figures, gateway: str = "g1") -> None:
        await rollout_board.publish_figures(self.client, rollout.id, gateway, figures)

    async def look(self, rollout: Rollout, after_s: float = 0) -> Rollout:
        """Let a driver that knows nothing of earlier looks look once, as after a crash."""
        self.clock.advance(after_s)
        await RolloutDriver(self.sessions, self.client, self.clock, engines_max=self.engines_max).look()
        return await self.now(rollout)

    async def now(self, rollout: Rollout) -> Rollout:
        async with db.transaction(self.sessions) as session:
            return await rollouts.get(session, rollout.id)

    async def notes(self, rollout: Rollout) -> list[RolloutNote]:
        async with db.transaction(self.sessions) as session:
            return await rollouts.notes(session, rollout.id)

    async def deployment(self, deployment_id: UUID) -> Deployment:
        async with db.transaction(self.sessions) as session:
            return await deployments.get(session, deployment_id)

    async def scale(self, deployment_id: UUID) -> tuple[int, int]:
        found = await self.deployment(deployment_id)
        return found.min_scale, found.max_scale

    async def served(self) -> ServedModel:
        async with db.transaction(self.sessions) as session:
            return (await models.load_served(session))["m"]
