"""The life of a local engine, as a pure function: what was, what is seen, what time it is → what is, what to do.

absent → loading → ready → idle → draining → absent, with failed beside it. Level-triggered: `decide` is called again
and again with everything that is seen now, so a lost message delays a step by one look and never loses it.
"""

from enum import StrEnum

import msgspec

from knative.types import ReplicaState

SECOND_US = 1_000_000


class Policy(msgspec.Struct, frozen=True):
    """Times of a deployment, in microseconds, and how often a start is tried."""

    idle_window_us: int = 300 * SECOND_US  # a cold one without work for so long goes to sleep
    idle_after_us: int = 10 * SECOND_US  # ready without work for so long is called idle
    settle_us: int = SECOND_US  # draining at least so long: by then every gateway has seen it
    drain_timeout_us: int = 30 * SECOND_US
    start_timeout_us: int = 1800 * SECOND_US
    stop_timeout_us: int = 10 * SECOND_US  # from SIGTERM to SIGKILL
    backoff_min_us: int = SECOND_US // 10
    backoff_max_us: int = 10 * SECOND_US
    attempts_max: int = 5
    retry_failed_us: int = 10 * SECOND_US  # a failed one is tried once more on a wake, at most this often
    stable_us: int = 60 * SECOND_US  # ready for so long forgives earlier failures
    scale_up_us: int = 2 * SECOND_US  # somebody waits for so long although all engines serve: one more
    bad_probes_max: int = 5  # unanswered probes in a row after which a ready engine counts as hung


def policy_for(policy: Policy, keep_alive_s: int, load_timeout_s: int) -> Policy:
    """Return the times of one deployment: its own where it has some (not 0), else the controller's."""
    if keep_alive_s:
        window_us = keep_alive_s * SECOND_US
        idle_after_us = min(policy.idle_after_us, window_us // 3)
        policy = msgspec.structs.replace(policy, idle_window_us=window_us, idle_after_us=idle_after_us)
    if load_timeout_s:
        policy = msgspec.structs.replace(policy, start_timeout_us=load_timeout_s * SECOND_US)
    return policy


class Facts(msgspec.Struct, frozen=True):
    """What is seen now. `healthy` is None when no probe came back since the last look, `inflight` when nobody knows."""

    wanted: bool  # the deployment exists and may have an engine
    alive: bool  # a process of it runs
    hot: bool = False
    surplus: bool = False  # others serve what there is to do
    stale: bool = False  # the process runs with other arguments than are desired now
    woken: bool = False
    healthy: bool | None = None
    inflight: int | None = 0
    last_us: int = 0  # when admission last granted or released
    note: str = ""  # how the process ended, or why it could not be started


class Life(msgspec.Struct, frozen=True):
    """What must be remembered between two looks."""

    state: ReplicaState = ReplicaState.ABSENT
    since_us: int = 0
    attempts: int = 0  # starts that failed in a row
    retry_at_us: int = 0  # loading: not before; 0 when the process has been started
    ready_us: int = 0
    active_us: int = 0  # when there was work last
    stop_sent_us: int = 0
    bad_probes: int = 0
    reason: str = ""


class Action(StrEnum):
    """What the backend is to do with the process."""

    NONE = "none"
    START = "start"
    STOP = "stop"  # SIGTERM
    KILL = "kill"


SERVING = frozenset({ReplicaState.READY, ReplicaState.IDLE})
Step = tuple[Life, Action]


def decide(life: Life, facts: Facts, policy: Policy, now_us: int) -> Step:
    """Return the life after this look and the one action that goes with it."""
    if life.state is ReplicaState.ABSENT:
        return _absent(life, facts, now_us)
    if life.state is ReplicaState.LOADING:
        return _loading(life, facts, policy, now_us)
    if life.state is ReplicaState.DRAINING:
        return _draining(life, facts, policy, now_us)
    if life.state is ReplicaState.FAILED:
        return _failed(life, facts, policy, now_us)
    return _serving(life, facts, policy, now_us)


def adopted(now_us: int) -> Life:
    """Return the life of an engine that an earlier leader started and that answers."""
    return Life(ReplicaState.READY, since_us=now_us, ready_us=now_us, active_us=now_us)


def _start(now_us: int, attempts: int) -> Step:
    return Life(ReplicaState.LOADING, since_us=now_us, attempts=attempts), Action.START


def _absent(life: Life, facts: Facts, now_us: int) -> Step:
    if facts.alive:
        return life, Action.KILL  # nobody's: an engine that is not ours to run
    if facts.wanted and (facts.hot or facts.woken):
        return _start(now_us, 0)
    return life, Action.NONE


def _loading(life: Life, facts: Facts, policy: Policy, now_us: int) -> Step:
    if life.retry_at_us:
        return _waiting_to_retry(life, facts, now_us)
    if not facts.alive:
        return _failure(life, facts.note or "the engine ended while loading", policy, now_us)
    if not facts.wanted or facts.stale:
        stopping = Life(ReplicaState.DRAINING, since_us=now_us, stop_sent_us=now_us)
        return stopping, Action.STOP  # nobody was sent to it
    if facts.healthy:
        ready = Life(ReplicaState.READY, now_us, attempts=life.attempts, ready_us=now_us, active_us=now_us)
        return ready, Action.NONE
    if now_us - life.since_us >= policy.start_timeout_us:
        seconds = policy.start_timeout_us // SECOND_US
        return _failure(life, f"the engine was not ready within {seconds} s", policy, now_us)[0], Action.KILL
    return life, Action.NONE


def _waiting_to_retry(life: Life, facts: Facts, now_us: int) -> Step:
    if facts.alive:
        return life, Action.KILL  # the one that failed has not ended yet
    if not facts.wanted or facts.surplus:
        return Life(since_us=now_us), Action.NONE
    if now_us >= life.retry_at_us:
        return _start(now_us, life.attempts)
    return life, Action.NONE


def _failure(life: Life, reason: str, policy: Policy, now_us: int) -> Step:
    """Wait and try again, each time longer; give up after `attempts_max` in a row."""
    attempts = life.attempts + 1
    if attempts >= policy.attempts_max:
        retry_at_us = now_us + policy.retry_failed_us
        failed = Life(ReplicaState.FAILED, now_us, attempts=attempts, retry_at_us=retry_at_us, reason=reason)
        return failed, Action.NONE
    wait_us = min(policy.backoff_min_us << (attempts - 1), policy.backoff_max_us)
    again = Life(ReplicaState.LOADING, now_us, attempts=attempts, retry_at_us=now_us + wait_us, reason=reason)
    return again, Action.NONE


def _failed(life: Life, facts: Facts, policy: Policy, now_us: int) -> Step:
    if facts.alive:
        return life, Action.KILL
    if not facts.wanted or facts.stale or facts.surplus:
        return Life(since_us=now_us), Action.NONE
    if (facts.hot or facts.woken) and now_us >= life.retry_at_us:
        return _start(now_us, policy.attempts_max - 1)
    return life, Action.NONE


def _serving(life: Life, facts: Facts, policy: Policy, now_us: int) -> Step:
    """Ready or idle."""
    if now_us - life.ready_us >= policy.stable_us:
        life = msgspec.structs.replace(life, attempts=0)
    if not facts.alive:
        return _failure(life, facts.note or "the engine ended", policy, now_us)
    if facts.healthy is not None:
        life = msgspec.structs.replace(life, bad_probes=0 if facts.healthy else life.bad_probes + 1)
    if life.bad_probes >= policy.bad_probes_max:
        return _failure(life, "the engine stopped answering", policy, now_us)[0], Action.KILL
    if not facts.wanted or facts.stale or facts.surplus:
        return Life(ReplicaState.DRAINING, since_us=now_us), Action.NONE
    active_us = _active_us(life, facts, now_us)
    quiet_us = now_us - active_us
    if quiet_us >= policy.idle_window_us and not facts.hot:
        return Life(ReplicaState.DRAINING, since_us=now_us), Action.NONE
    state = ReplicaState.IDLE if quiet_us >= policy.idle_after_us else ReplicaState.READY
    since_us = life.since_us if state is life.state else now_us
    return msgspec.structs.replace(life, state=state, since_us=since_us, active_us=active_us), Action.NONE


def _active_us(life: Life, facts: Facts, now_us: int) -> int:
    """Return when there was work last; what nobody knows counts as work."""
    if facts.woken or facts.inflight is None or facts.inflight > 0:
        return now_us
    return max(life.active_us, min(facts.last_us, now_us))


def _draining(life: Life, facts: Facts, policy: Policy, now_us: int) -> Step:
    if not facts.alive:
        return Life(since_us=now_us), Action.NONE
    if life.stop_sent_us:
        late = now_us - life.stop_sent_us >= policy.stop_timeout_us
        return life, Action.KILL if late else Action.NONE
    if facts.wanted and not facts.stale and (facts.hot or facts.woken):
        back = Life(ReplicaState.READY, since_us=now_us, ready_us=now_us, active_us=now_us)
        return back, Action.NONE
    drained_us = now_us - life.since_us
    if drained_us >= policy.drain_timeout_us or (drained_us >= policy.settle_us and facts.inflight == 0):
        return msgspec.structs.replace(life, stop_sent_us=now_us), Action.STOP
    return life, Action.NONE


def eta_s(life: Life, loads_ms: tuple[int, ...], now_us: int, default_s: int = 10) -> int:
    """Return whole seconds until the engine should be ready, by past loads; 0 when it is, else at least 1."""
    if life.state in SERVING:
        return 0
    begun_us = now_us
    if life.state is ReplicaState.LOADING:
        begun_us = max(life.retry_at_us, life.since_us)
    elif life.state is ReplicaState.FAILED:
        begun_us = max(life.retry_at_us, now_us)
    whole_us = _whole_us(now_us - begun_us, loads_ms, default_s)
    return max(1, -(-(begun_us + whole_us - now_us) // SECOND_US))


def _whole_us(spent_us: int, loads_ms: tuple[int, ...], default_s: int) -> int:
    """Return how long a load takes in all that has taken `spent_us`: the median of those that took longer.

    One that has taken longer than any is half done: of loads of which nothing is known, half take that long again.
    """
    longer = sorted(load_ms * 1000 for load_ms in loads_ms if load_ms * 1000 > spent_us)
    if longer:
        return longer[len(longer) // 2]
    return 2 * spent_us if loads_ms else max(default_s * SECOND_US, 2 * spent_us)
