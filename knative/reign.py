"""One term of the controller's leader: see, decide, act, publish."""

import asyncio
import signal
import socket
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid5

import msgspec

from catalog import deployments, observed
from catalog.types import Deployment, DeploymentKind, ObservedReplica, WakeOutcome
from core import db, keyspace
from core.clock import Clock
from core.ids import new_uuid
from core.logging import get_logger
from core.resp import RespClient, RespError, RespUnavailable
from engine import health
from knative import lifecycle, publisher, wakes
from knative.bulletin import Bulletin
from knative.external import ExternalWatch, Outside
from knative.leader import ANSWER_S, EPOCHS_PER_TERM, UNREACHABLE
from knative.lifecycle import SERVING, Action, Facts, Life, Policy
from knative.local import LocalBackend, Record, fingerprint
from knative.metrics import ControllerMetrics
from knative.publisher import Activity
from knative.records import Records
from knative.scale import Bounds, Load, Scale, rescale
from knative.summary import Seen, summarize
from knative.types import DeploymentState, Endpoint, ReplicaState, Seat
from knative.wakes import Timing, Wakes
from knative.watches import Watches

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
        self._lives: dict[UUID, dict[int, Life]] = {}
        self._scales: dict[UUID, Scale] = {}
        self._fingerprints: dict[Seat, str] = {}  # what each engine was last started with
        self._wakes = Wakes(new_uuid)
        self._watches = Watches(nudge, clock.now_us)
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
        for seat in self._backend.adopt():
            await self._adopt(seat)
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
            self._look_at(deployment_id, activity)
        await self._bulletin.publish()
        await self._read_first_tokens()

    def _look_at(self, deployment_id: UUID, activity: dict[UUID, Activity] | None) -> None:
        """One look at the engines of one local deployment."""
        deployment = self._deployments.get(deployment_id)
        seen = None if activity is None else activity.get(deployment_id, Activity())
        lives = self._lives.setdefault(deployment_id, {})
        scale = self._rescale(deployment_id, deployment, seen)
        for index in sorted(lives.keys() | set(range(scale.count))):
            self._step(Seat(deployment_id, index), deployment, seen, scale.count)
        self._publish(deployment_id)
        for index in [index for index, life in lives.items() if life.state is ReplicaState.ABSENT]:
            if index >= scale.count:
                del lives[index]
        if deployment is None and not lives:
            del self._lives[deployment_id]
            self._scales.pop(deployment_id, None)

    def _rescale(self, deployment_id: UUID, deployment: Deployment | None, seen: Activity | None) -> Scale:
        bounds = Bounds(deployment.min_scale, deployment.max_scale) if deployment else Bounds(0, 0)
        serving = sum(life.state in SERVING for life in self._lives[deployment_id].values())
        load = Load(serving, None) if seen is None else Load(serving, seen.inflight, seen.waiting)
        before = self._scales.get(deployment_id, Scale())
        after = rescale(before, load, bounds, self._policy_of(deployment), self._clock.now_us())
        self._scales[deployment_id] = after
        if after.count != before.count:
            log.info("deployment.scaled", deployment=deployment_id.hex, before=before.count, after=after.count)
        return after

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
        self._all_become(SERVING, ReplicaState.DRAINING)
        await self._bulletin.publish()
        await self._last_drain()
        await self._external.close()
        await self._watches.close()
        await self._backend.end_all(END_TIMEOUT_S)
        self._all_become(frozenset(ReplicaState), ReplicaState.ABSENT)
        await self._bulletin.publish()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._records.write(self._clock.now())
        except UNREACHABLE:
            return

    def _all_become(self, those: frozenset[ReplicaState], state: ReplicaState) -> None:
        """The last word on engines that end with this controller."""
        now_us = self._clock.now_us()
        for deployment_id, lives in self._lives.items():
            ending = [index for index, life in lives.items() if life.state in those]
            lives.update({index: Life(state, since_us=now_us) for index in ending})
            if ending:
                self._publish(deployment_id)

    async def _last_drain(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        serving = any(life.state is ReplicaState.DRAINING for lives in self._lives.values() for life in lives.values())
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

    async def _adopt(self, seat: Seat) -> None:
        """Offer an engine that answers at once; give one that does not the time of a load."""
        now_us = self._clock.now_us()
        deployment, record = self._deployments.get(seat.deployment_id), self._backend.record(seat)
        life = Life(ReplicaState.LOADING, since_us=now_us)
        if record is not None:
            self._fingerprints[seat] = record.fingerprint
        if deployment is not None and record is not None and record.url:
            if (await health.probe(record.url, deployment.engine, timeout_s=2.0)).ok:
                life = lifecycle.adopted(now_us)
            self._watches.begin(seat, record.url, deployment.engine)
        self._lives.setdefault(seat.deployment_id, {})[seat.index] = life
        known = self._scales.get(seat.deployment_id, Scale())
        self._scales[seat.deployment_id] = Scale(max(known.count, seat.index + 1))
        log.info("engine.adopted", engine=seat.name, state=life.state.value)

    async def _read_activity(self) -> dict[UUID, Activity] | None:
        """Return what admission counts; None while Valkey is away."""
        try:
            return await publisher.read_activity(self._client, sorted(self._deployments.keys() | self._lives.keys()))
        except VALKEY_AWAY:
            return None

    def _step(self, seat: Seat, deployment: Deployment | None, seen: Activity | None, count: int) -> None:
        """One look at one local engine."""
        now_us = self._clock.now_us()
        lives = self._lives[seat.deployment_id]
        before = lives.get(seat.index, Life(since_us=now_us))
        facts = self._facts(seat, before, deployment, seen, count)
        after, action = lifecycle.decide(before, facts, self._policy_of(deployment), now_us)
        lives[seat.index] = after
        self._watches.drain(seat, draining=after.state is ReplicaState.DRAINING)
        timing = self._act(seat, deployment, action)
        if deployment is not None and timing is not None:
            wished_us = seen.wished_us if seen is not None and facts.woken else 0
            cause = wakes.cause_of(seat, before.state, deployment.min_scale)
            self._wakes.begin(seat, cause, timing, now_us=now_us, wished_us=wished_us)
        self._metrics.failures.inc(after.attempts > before.attempts)
        if after.state is not before.state:
            log.info(
                "engine.state_changed",
                engine=seat.name,
                before=before.state.value,
                after=after.state.value,
                reason=after.reason,
            )
        if before.state is ReplicaState.LOADING and after.state is not ReplicaState.LOADING:
            self._end_wake(seat, before, after, seen.held if seen is not None else 0, now_us)

    def _end_wake(self, seat: Seat, before: Life, after: Life, held: int, now_us: int) -> None:
        """A start is over. `now_us` is that of the look: gateways know the wake by it."""
        outcome = wakes.OUTCOMES.get(after.state, WakeOutcome.ENDED)
        fetched_us = self._backend.fetched_us(seat)
        wake = self._wakes.end(seat, outcome, now_us=now_us, fetched_us=fetched_us, held=held, reason=after.reason)
        if wake is None:  # it was adopted while it loaded: nobody knows since when
            return
        self._records.note_wake(wake)
        for phase in ("decide", "fetch", "schedule", "load"):
            if (took_ms := getattr(wake, f"{phase}_ms")) is not None:
                self._metrics.wake_seconds.labels(phase).observe(took_ms / 1000)
        if wake.ready_ms is not None:
            load_us = now_us - before.since_us
            self._records.note_load(seat.deployment_id, wake.ready_ms if wake.attempts == 1 else load_us // 1000)
            self._metrics.load_seconds.observe(load_us / lifecycle.SECOND_US)

    async def _read_first_tokens(self) -> None:
        """Add to wakes what gateways say of the first answers."""
        for deployment_id in self._wakes.tokenless(self._clock.now_us()):
            try:
                said = await self._client.call("GET", keyspace.first(deployment_id))
            except VALKEY_AWAY:
                return
            wake = self._wakes.first_token(deployment_id, said) if said is not None else None
            if wake is not None and wake.first_token_ms is not None:
                self._records.note_wake(wake)
                self._metrics.wake_seconds.labels("first_token").observe(wake.first_token_ms / 1000)

    def _policy_of(self, deployment: Deployment | None) -> Policy:
        if deployment is None:
            return self._policy
        return lifecycle.policy_for(self._policy, deployment.keep_alive_s, deployment.load_timeout_s)

    def _facts(
        self, seat: Seat, before: Life, deployment: Deployment | None, seen: Activity | None, count: int
    ) -> Facts:
        alive, note = self._backend.look(seat)
        if not alive:
            self._watches.end(seat)
        activity = seen or Activity()
        inflight = None if seen is None else seen.inflight
        if before.state is ReplicaState.DRAINING and inflight != 0:  # others may serve what is in flight
            inflight = self._watches.working(seat, before.since_us + self._policy.settle_us)
        started_with = self._fingerprints.get(seat)
        return Facts(
            wanted=deployment is not None and deployment.max_scale > seat.index,
            alive=alive,
            hot=deployment is not None and seat.index < (count if seat.index else deployment.min_scale),
            surplus=0 < count <= seat.index,
            stale=deployment is not None and started_with not in {None, fingerprint(deployment)},
            woken=activity.woken and seat.index == 0,
            healthy=self._watches.take_health(seat) if alive else None,
            inflight=inflight,
            last_us=activity.last_us,
            note=note,
        )

    def _act(self, seat: Seat, deployment: Deployment | None, action: Action) -> Timing | None:
        """Do it; of a start return what took how long."""
        if action is Action.START and deployment is not None:
            self._fingerprints[seat] = fingerprint(deployment)
            timing = self._backend.start(seat, deployment)
            self._metrics.starts.inc()
            if (record := self._backend.record(seat)) is not None:
                self._watches.begin(seat, record.url, deployment.engine)
            return timing
        if action is Action.STOP:
            self._backend.send(seat, signal.SIGTERM)
        elif action is Action.KILL:
            self._backend.send(seat, signal.SIGKILL)
        return None

    def _publish(self, deployment_id: UUID) -> None:
        """Put down what gateways and operators are to see."""
        lives = self._lives[deployment_id]
        records = {index: self._backend.record(Seat(deployment_id, index)) for index in lives}
        deployment, epoch = self._deployments.get(deployment_id), 0
        if deployment is not None:  # else it is retired: gateways have forgotten it already
            seen = {index: Seen(life, _endpoint(records[index], self._backend.zone)) for index, life in lives.items()}
            loads_ms, now_us = self._records.loads(deployment_id), self._clock.now_us()
            state = summarize(deployment_id, seen, loads_ms, now_us)
            memory = {"gpu_memory_mb": deployment.gpu_memory_mb, "kv_request_mb": deployment.kv_request_mb}
            epoch = self._bulletin.note(msgspec.structs.replace(state, **memory)).epoch
        for index, life in lives.items():
            self._records.note(_replica(Seat(deployment_id, index), life, records[index], self._term, epoch))


def _endpoint(record: Record | None, zone: str) -> Endpoint | None:
    return Endpoint(record.replica_id.hex, record.url, zone) if record else None


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


def _replica(seat: Seat, life: Life, record: Record | None, term: int, epoch: int) -> ObservedReplica:
    """Return the row that operators see; its id is the engine's, or the seat's while there is no engine."""
    return ObservedReplica(
        id=record.replica_id if record else uuid5(seat.deployment_id, str(seat.index)),
        deployment_id=seat.deployment_id,
        index=seat.index,
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
