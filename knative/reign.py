"""One term of the controller's leader: see, decide, act, publish."""

import asyncio
import signal
import socket
from datetime import UTC, datetime, timedelta
from uuid import UUID

from catalog import deployments, observed
from catalog.types import Deployment, DeploymentKind, EngineKind, ObservedReplica
from core import db
from core.clock import Clock
from core.logging import get_logger
from core.resp import RespClient, RespError, RespUnavailable
from engine import health
from knative import lifecycle, publisher
from knative.bulletin import Bulletin
from knative.external import ExternalWatch, Outside
from knative.leader import ANSWER_S, EPOCHS_PER_TERM, UNREACHABLE
from knative.lifecycle import SERVING, Action, Facts, Life, Policy
from knative.local import LocalBackend, Record, fingerprint
from knative.metrics import ControllerMetrics
from knative.publisher import Activity
from knative.records import Records
from knative.types import DeploymentState, Endpoint, ReplicaState

PROBE_LOADING_S = 0.1
PROBE_SERVING_S = 2.0
PROBE_TIMEOUT_S = 5.0
LAST_SETTLE_S = 0.3  # when the controller itself ends: until every gateway has seen it,
LAST_DRAIN_S = 5.0  # and for requests in flight
END_TIMEOUT_S = 5.0
VALKEY_AWAY = (RespError, RespUnavailable)
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
log = get_logger(__name__)


class Reign:
    """What one leader knows. `begin`, `look`, `housekeep` and `end` change it, one after the other."""

    def __init__(
        self,
        sessions: db.Sessions,
        client: RespClient,
        backend: LocalBackend,
        *,
        term: int,
        policy: Policy,
        clock: Clock,
        sealing: bytes,
        nudge: asyncio.Event,
        metrics: ControllerMetrics,
    ) -> None:
        self._sessions = sessions
        self._client = client
        self._backend = backend
        self._term = term
        self._policy = policy
        self._clock = clock
        self._sealing = sealing
        self._nudge = nudge
        self._metrics = metrics
        self._revision = -1
        self._deployments: dict[UUID, Deployment] = {}
        self._credentials: dict[UUID, str] = {}
        self._lives: dict[UUID, Life] = {}
        self._fingerprints: dict[UUID, str] = {}  # what each deployment's engine was last started with
        self._watches: dict[UUID, asyncio.Task[None]] = {}
        self._health: dict[UUID, bool] = {}
        self._external = ExternalWatch(clock, nudge)
        self._bulletin = Bulletin(client, term * EPOCHS_PER_TERM)
        self._records = Records(sessions, term)

    async def begin(self) -> None:
        """Read the catalog, take over the engines that run, and publish everything once.

        Raises:
            UNREACHABLE: Postgres went away meanwhile; nothing has been taken over.
        """
        await self._read_catalog()
        await self._records.load()
        for deployment_id in self._backend.adopt():
            await self._adopt(deployment_id)
        await self.look()
        await self.housekeep()

    async def look(self) -> None:
        """See, decide and act for every deployment; publish what changed."""
        activity = await self._read_activity()
        woken = {deployment_id for deployment_id, seen in (activity or {}).items() if seen.woken}
        outside = {key: value for key, value in self._deployments.items() if value.kind is DeploymentKind.EXTERNAL}
        self._external.look(outside, self._credentials, woken)
        for deployment in outside.values():
            self._bulletin.note(_outside_state(deployment, self._external.known[deployment.id]))
        local = {key for key, value in self._deployments.items() if value.kind is DeploymentKind.LOCAL}
        for deployment_id in sorted(local | set(self._lives)):
            self._step(deployment_id, activity)
        await self._bulletin.publish()

    async def housekeep(self) -> None:
        """Once a second: the catalog if it changed, Valkey if it lost something, Postgres what was observed."""
        self._backend.trim_logs()
        try:
            async with asyncio.timeout(ANSWER_S):
                async with db.transaction(self._sessions) as session:
                    newest, changed = await observed.changes_since(session, self._revision)
                if changed:
                    await self._read_catalog()
                self._revision = newest
                await self._records.write(self._clock.now())
        except UNREACHABLE as problem:
            self._metrics.postgres_away.inc()
            log.warning("controller.postgres_away", error=type(problem).__name__)
        await self._bulletin.heal()
        for state, count in self._bulletin.count().items():
            self._metrics.deployments.labels(state.value).set(count)

    async def end(self) -> None:
        """End every engine, after the requests in flight had a moment to finish."""
        for deployment_id, life in self._lives.items():
            if life.state in SERVING:
                self._note(deployment_id, Life(ReplicaState.DRAINING, since_us=self._clock.now_us()))
        await self._bulletin.publish()
        await self._last_drain()
        await self._external.close()
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await self._backend.end_all(END_TIMEOUT_S)
        for deployment_id in self._lives:
            self._note(deployment_id, Life(since_us=self._clock.now_us()))
        await self._bulletin.publish()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._records.write(self._clock.now())
        except UNREACHABLE:
            return

    async def _last_drain(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        serving = any(life.state in SERVING for life in self._lives.values())
        while serving and loop.time() - begun < LAST_DRAIN_S:
            await asyncio.sleep(LAST_SETTLE_S)
            activity = await self._read_activity() or {}
            serving = any(seen.inflight for key, seen in activity.items() if key in self._lives)

    async def _read_catalog(self) -> None:
        async with db.transaction(self._sessions) as session:
            found = await deployments.list_all(session)
            self._credentials = await deployments.load_credentials(session, self._sealing)
        self._deployments = {deployment.id: deployment for deployment in found}
        self._bulletin.keep_only({deployment_id.hex for deployment_id in self._deployments})

    async def _adopt(self, deployment_id: UUID) -> None:
        """Offer an engine that answers at once; give one that does not the time of a load."""
        now_us = self._clock.now_us()
        deployment, record = self._deployments.get(deployment_id), self._backend.record(deployment_id)
        life = Life(ReplicaState.LOADING, since_us=now_us)
        if record is not None:
            self._fingerprints[deployment_id] = record.fingerprint
        if deployment is not None and record is not None and record.url:
            if (await health.probe(record.url, deployment.engine, timeout_s=2.0)).ok:
                life = lifecycle.adopted(now_us)
            self._watch(deployment_id, record, deployment.engine)
        self._lives[deployment_id] = life
        log.info("engine.adopted", deployment=deployment_id.hex, state=life.state.value)

    async def _read_activity(self) -> dict[UUID, Activity] | None:
        """Return what admission counts; None while Valkey is away."""
        try:
            return await publisher.read_activity(self._client, sorted(self._deployments.keys() | self._lives.keys()))
        except VALKEY_AWAY:
            return None

    def _step(self, deployment_id: UUID, activity: dict[UUID, Activity] | None) -> None:
        """One look at one local engine."""
        now_us = self._clock.now_us()
        deployment = self._deployments.get(deployment_id)
        before = self._lives.get(deployment_id, Life(since_us=now_us))
        after, action = lifecycle.decide(before, self._facts(deployment_id, activity), self._policy, now_us)
        self._lives[deployment_id] = after
        self._act(deployment_id, action)
        self._metrics.failures.inc(after.attempts > before.attempts)
        if after.state is not before.state:
            log.info(
                "engine.state_changed",
                deployment=deployment_id.hex,
                before=before.state.value,
                after=after.state.value,
                reason=after.reason,
            )
        if before.state is ReplicaState.LOADING and after.state is ReplicaState.READY:
            self._records.note_load(deployment_id, (now_us - before.since_us) // 1000)
            self._metrics.load_seconds.observe((now_us - before.since_us) / lifecycle.SECOND_US)
        self._note(deployment_id, after)
        if deployment is None and after.state is ReplicaState.ABSENT:
            del self._lives[deployment_id]

    def _facts(self, deployment_id: UUID, activity: dict[UUID, Activity] | None) -> Facts:
        deployment = self._deployments.get(deployment_id)
        alive, note = self._backend.look(deployment_id)
        if not alive and (watch := self._watches.pop(deployment_id, None)) is not None:
            watch.cancel()
        seen = Activity() if activity is None else activity.get(deployment_id, Activity())
        started_with = self._fingerprints.get(deployment_id)
        return Facts(
            wanted=deployment is not None and deployment.max_scale > 0,
            alive=alive,
            hot=deployment is not None and deployment.min_scale > 0,
            stale=deployment is not None and started_with not in {None, fingerprint(deployment)},
            woken=seen.woken,
            healthy=self._health.pop(deployment_id, None) if alive else None,
            inflight=None if activity is None else seen.inflight,
            last_us=seen.last_us,
            note=note,
        )

    def _act(self, deployment_id: UUID, action: Action) -> None:
        deployment = self._deployments.get(deployment_id)
        if action is Action.START and deployment is not None:
            self._fingerprints[deployment_id] = fingerprint(deployment)
            self._health.pop(deployment_id, None)
            self._backend.start(deployment)
            self._metrics.starts.inc()
            if (record := self._backend.record(deployment_id)) is not None:
                self._watch(deployment_id, record, deployment.engine)
        elif action is Action.STOP:
            self._backend.send(deployment_id, signal.SIGTERM)
        elif action is Action.KILL:
            self._backend.send(deployment_id, signal.SIGKILL)

    def _watch(self, deployment_id: UUID, record: Record, engine: EngineKind) -> None:
        if (old := self._watches.pop(deployment_id, None)) is not None:
            old.cancel()
        self._watches[deployment_id] = asyncio.create_task(self._keep_probing(deployment_id, record.url, engine))

    async def _keep_probing(self, deployment_id: UUID, url: str, engine: EngineKind) -> None:
        """Ask an engine for its health as long as it lives: often until it is ready, then now and then."""
        was_well = False
        while True:
            seen = await health.probe(url, engine, timeout_s=PROBE_TIMEOUT_S)
            self._health[deployment_id] = seen.ok
            if seen.ok and not was_well:
                self._nudge.set()
            was_well = was_well or seen.ok
            await asyncio.sleep(PROBE_SERVING_S if was_well else PROBE_LOADING_S)

    def _note(self, deployment_id: UUID, life: Life) -> None:
        """Put down what gateways and operators are to see."""
        record = self._backend.record(deployment_id)
        deployment = self._deployments.get(deployment_id)
        if deployment is None:  # retired: gateways have forgotten it already
            if life.state is ReplicaState.ABSENT:
                self._records.note(_replica(deployment_id, life, record, self._term, 0))
            return
        offered = record if life.state in SERVING else None
        state = DeploymentState(
            deployment=deployment_id.hex,
            state=life.state,
            endpoints=(Endpoint(offered.replica_id.hex, offered.url),) if offered else (),
            eta_s=lifecycle.eta_s(life, self._records.loads(deployment_id), self._clock.now_us()),
            since_us=life.since_us,
            reason=life.reason,
            gpu_memory_mb=deployment.gpu_memory_mb,
            kv_request_mb=deployment.kv_request_mb,
        )
        published = self._bulletin.note(state)
        self._records.note(_replica(deployment_id, life, record, self._term, published.epoch))


def _outside_state(deployment: Deployment, outside: Outside) -> DeploymentState:
    serving = outside.state is ReplicaState.READY
    endpoints = (Endpoint(deployment.id.hex, deployment.base_url),) if serving else ()
    return DeploymentState(
        deployment=deployment.id.hex,
        state=outside.state,
        endpoints=endpoints,
        eta_s=0 if serving else 5,
        since_us=outside.since_us,
        reason=outside.reason,
        gpu_memory_mb=deployment.gpu_memory_mb,
        kv_request_mb=deployment.kv_request_mb,
    )


def _replica(deployment_id: UUID, life: Life, record: Record | None, term: int, epoch: int) -> ObservedReplica:
    """Return the row that operators see; its id is the engine's, or the deployment's while there is no engine."""
    return ObservedReplica(
        id=record.replica_id if record else deployment_id,
        deployment_id=deployment_id,
        index=0,
        state=life.state.value,
        host=socket.gethostname(),
        pid=record.pid if record else None,
        pid_started_ms=record.started_ms if record else None,
        url=record.url if record else "",
        reason=life.reason,
        term=term,
        epoch=epoch,
        state_since=UNIX_EPOCH + timedelta(microseconds=life.since_us),
    )
