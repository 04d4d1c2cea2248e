"""Copies of some requests for a version to come: sent when the live answer has left, compared with it, and forgotten.

Nobody is billed for a copy, and no caller sees it. It runs at the lowest tier through admission, without waiting, so
that it takes no place that a request wants; it is dropped when many copies wait here, when somebody waits for a place,
and whenever anything about it fails. What is kept are figures (`knative.arm_figures.ShadowFigures`).
"""

import asyncio

from api.inference import compare, estimate
from api.inference.directory import Offer, engine_fields
from api.inference.gateway import Gateway
from api.inference.job import Client, Job
from api.inference.pass_through import PassThrough
from api.inference.relay import Relay, StreamRelay, read_answer
from api.inference.shadow_copies import BODY_MAX
from api.inference.stream import PATHS
from billing import pricing
from billing.types import Outcome
from catalog.rollout_types import PARTS, Arms
from catalog.types import DeploymentKind, EngineKind
from core.errors import PlatformError
from core.tiers import Tier
from core.usage import TokenUsage
from engine.client import Target
from engine.usage import UsageRejected, normalise
from knative.arm_figures import Sample, ShadowFigures
from knative.types import ReplicaState

ENDPOINTS = frozenset({"chat", "completions"})
TEXT_BYTES_MAX = 256 * 1024  # of the live answer; a longer one is not compared
OWNER = "shadow"
SERVING = frozenset({ReplicaState.READY, ReplicaState.IDLE})


def watch(gateway: Gateway, job: Job, client: Client) -> Client:
    """Return to whom the answer goes: its caller, and where it is to be copied, a `Mirror` before it."""
    arms = gateway.directory.rollouts.get(job.offer.model.name)
    if arms is None or not arms.shadow_parts or job.id.int % PARTS >= arms.shadow_parts:
        return client
    call = job.call
    if call.endpoint not in ENDPOINTS or call.choices != 1 or call.size > BODY_MAX:
        return client
    return Mirror(gateway, arms, job, client)


class Mirror(PassThrough):
    """The caller's connection, as the stages see it; an answer that went out whole is handed on to be compared."""

    __slots__ = ("_arms", "_gateway", "_job", "_parts", "_size")

    def __init__(self, gateway: Gateway, arms: Arms, job: Job, client: Client) -> None:
        super().__init__(client)
        self._gateway = gateway
        self._arms = arms
        self._job = job
        self._parts: list[bytes] = []
        self._size = 0

    def stream(self, data: bytes) -> None:
        self._client.stream(data)
        self._size += len(data)
        if self._size <= TEXT_BYTES_MAX:
            self._parts.append(data)

    def end_stream(self, data: bytes) -> None:
        self._client.end_stream(data)
        relay = self._job.relay
        if isinstance(relay, StreamRelay) and relay.error is None and self._size <= TEXT_BYTES_MAX:
            report = (relay.events.report or {}).get("usage") or {}
            tokens = report.get("completion_tokens")
            tokens = tokens if type(tokens) is int else relay.events.deltas
            self._hand_on(compare.text_of_stream(b"".join(self._parts)), tokens)

    def respond(self, status: int, body: bytes, extra: bytes) -> None:
        self._client.respond(status, body, extra)
        if status == 200 and len(body) <= TEXT_BYTES_MAX:
            self._hand_on(compare.text_of_answer(body), compare.output_tokens(body))

    def _hand_on(self, text: str, tokens: int) -> None:
        """Let a copy be sent, if there is room for it now."""
        if self._job.instead_of:  # another model's answer
            return
        gateway, figures = self._gateway, self._gateway.tally.of(self._arms).shadow
        figures.copies += 1
        busy = gateway.draining or gateway.admission.waiting or not gateway.admission.ready
        if busy or not gateway.shadows.take((self._arms, self._job, text, tokens)):
            figures.dropped += 1
            return
        _send_waiting(gateway)


def _send_waiting(gateway: Gateway) -> None:
    """Begin with what waits, as far as it may run at once."""
    while (copy := gateway.shadows.next()) is not None:
        task = gateway.loop.create_task(_run(gateway, *copy))
        gateway.shadows.tasks.add(task)
        task.add_done_callback(lambda done: _ended(gateway, done))


def _ended(gateway: Gateway, task: "asyncio.Task[None]") -> None:
    gateway.shadows.tasks.discard(task)
    _send_waiting(gateway)


async def _run(gateway: Gateway, arms: Arms, job: Job, live: str, live_tokens: int) -> None:
    """Send a copy and count how like its answer is."""
    figures = gateway.tally.of(arms).shadow
    target = _target(gateway, arms)
    if target is None:
        figures.dropped += 1
        return
    try:
        body = await _ask(gateway, arms, job, target)
    except PlatformError:  # no place at once
        figures.dropped += 1
        return
    usage = _usage_of(body)
    if usage is None:
        figures.failed += 1
        return
    sample = compare.compare(live, compare.text_of_answer(body), live_tokens, usage.output_total)
    figures.add(_counted(job.offer, usage, sample))


def _target(gateway: Gateway, arms: Arms) -> Target | None:
    model = arms.canary
    if model.kind is DeploymentKind.EXTERNAL:
        return gateway.pool.target(model.base_url)
    state = gateway.states.current(model.deployment_id)
    if state is None or state.state not in SERVING or not state.endpoints:
        return None
    return gateway.pool.target(state.endpoints[0].url)


async def _ask(gateway: Gateway, arms: Arms, job: Job, target: Target) -> bytes:
    """Return the whole answer; empty when there is none.

    Raises:
        PlatformError: admission has no place for it now.
    """
    call, model, admission, request_id = job.call, arms.canary, gateway.admission, gateway.new_id()
    grant = await admission.acquire(
        request_id,
        admission.prepare((), model, "", owner=OWNER),
        hold=0,
        input_tokens=estimate.prompt_tokens(call, model),
        output_tokens=estimate.output_tokens(call, model),
        tier=Tier.BATCH,
        wait_s=0,
    )
    relay = Relay(gateway.loop.create_future(), gateway.clock.monotonic)
    relay.offer = job.offer  # who loses every right loses this too
    relay.deadline = gateway.now + gateway.settings.request_timeout_s
    gateway.relays.add(relay)
    grant.on_asked = relay.give_place
    try:
        sender = gateway.upstream if target.https else gateway.pool
        relay.call = sender.send(
            target,
            PATHS[call.endpoint],
            call.for_engine(_fields(job, arms)),
            relay,
            request_id=f"shd_{request_id.hex}",
            credential=gateway.directory.credentials.get(model.deployment_id, ""),
        )
        await relay.done
    finally:
        relay.abort()
        grant.on_asked = None
        gateway.relays.discard(relay)
        admission.release(grant, None, 0, 0, 0)
    return b"".join(relay.body) if relay.error is None and not relay.preempted else b""


def _fields(job: Job, arms: Arms) -> bytes:
    """Our members of the copy's JSON: the same request, whole, at the lowest priority."""
    call, model = job.call, arms.canary
    name = call.max_tokens_name if model.engine is EngineKind.OPENAI else "max_tokens"
    ours = engine_fields(job.offer.principal, model, Tier.BATCH, call.endpoint)
    return b'%b,"%b":%d' % (ours, name.encode(), estimate.max_tokens(call, model))


def _counted(offer: Offer, usage: TokenUsage, sample: Sample) -> ShadowFigures:
    try:
        cost = pricing.charge(usage, offer.schedule, Outcome.COMPLETED)
    except ValueError:
        cost = 0
    return ShadowFigures(
        compared=1,
        exact=sample.exact,
        json=sample.json_equal is not None,
        json_equal=sample.json_equal is True,
        unlike=compare.is_unlike(sample),
        edit_sum=sample.edit,
        live_chars=sample.live_chars,
        shadow_chars=sample.shadow_chars,
        live_tokens=sample.live_tokens,
        shadow_tokens=sample.shadow_tokens,
        cost_pico=cost,
        samples=[sample],
    )


def _usage_of(body: bytes) -> TokenUsage | None:
    """Return what an answer says that it used; None for what is no answer."""
    facts = read_answer(body)
    if facts is None or not facts.usage:
        return None
    try:
        return normalise({"usage": facts.usage, "timings": facts.timings})
    except UsageRejected:
        return None


async def close(gateway: Gateway) -> None:
    """End what runs: nobody waits for it."""
    gateway.shadows.waiting.clear()
    tasks = list(gateway.shadows.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
