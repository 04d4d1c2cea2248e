"""Two versions of a model behind one gateway: who is served by which, what is counted, and copies nobody sees."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api.inference.shadow_copies import WAITING_MAX
from billing.types import Outcome
from catalog.rollout_types import Arms
from catalog.types import ServedModel
from core.clock import SystemClock
from core.errors import ErrorKind, PlatformError
from engine import simulator
from engine.simulator import SIMULATOR, Options, Simulator
from knative.arm_figures import Figures
from tests.factories.gateway import served_model
from tests.factories.stack import Stack, chat, events_of, text_of, until

PROMPT = "[[sim n=10 p=100]]"


@dataclass(frozen=True)
class Both:
    """The stack, whose model `sim` has a second version on an engine of its own."""

    stack: Stack
    canary: ServedModel
    engine: Simulator

    def begin(self, **percents: int) -> Arms:
        return self.stack.rig.roll_out("sim", self.canary, **percents)

    def figures(self, arms: Arms) -> Figures:
        return self.stack.rig.gateway.tally.of(arms)

    async def ask(self, prompt: str = PROMPT, **members: Any) -> httpx.Response:
        return await self.stack.client.post("/v1/chat/completions", json=chat(prompt) | members)

    async def copied(self) -> None:
        await until(lambda: not self.stack.rig.gateway.shadows.tasks and not self.stack.rig.gateway.shadows.waiting)


@pytest.fixture
async def both(stack: Stack, service_folder: Path) -> AsyncIterator[Both]:
    uds = service_folder / "gw-sim-2.sock"
    runner = await simulator.serve(Options(), SystemClock(), uds=str(uds))
    stable = stack.rig.models["sim"]
    canary = served_model("sim", f"unix:{uds}", model_id=stable.model_id)
    try:
        yield Both(stack, canary, runner.app[SIMULATOR])
    finally:
        await runner.cleanup()
        uds.unlink(missing_ok=True)


async def test_conversations_stay_with_their_version_and_events_name_it(both: Both) -> None:
    both.begin(percent=50)
    for number in range(40):
        for _ in range(2):
            assert (await both.ask(user=f"u-{number}")).status_code == 200
    versions = [event.version_id for event in both.stack.rig.spool.events]
    assert versions[::2] == versions[1::2]
    assert set(versions) == {both.stack.rig.models["sim"].version_id, both.canary.version_id}
    assert 8 <= sum(version == both.canary.version_id for version in versions[::2]) <= 32
    assert {event.model for event in both.stack.rig.spool.events} == {"sim"}
    assert both.engine.sequence == sum(version == both.canary.version_id for version in versions)


async def test_when_it_is_over_all_are_served_by_the_one_version_again(both: Both) -> None:
    both.begin(percent=99)
    await both.ask()
    both.stack.rig.gateway.directory.rollouts = {}
    both.stack.rig.gateway.directory.changed()
    for number in range(5):
        await both.ask(user=f"u-{number}")
    versions = {event.version_id for event in both.stack.rig.spool.events[1:]}
    assert versions == {both.stack.rig.models["sim"].version_id}


async def test_what_each_version_did_is_counted(both: Both) -> None:
    arms = both.begin(percent=99)
    for number in range(10):
        assert (await both.ask(user=f"u-{number}", stream=True)).status_code == 200
    found = both.figures(arms)
    canary = found.canary
    assert (canary.requests + found.stable.requests, canary.errors) == (10, 0)
    assert canary.requests >= 8
    assert canary.output_tokens == 10 * canary.answers
    assert canary.cost_pico == 260_000_000 * canary.answers  # 100 at 2.00 and 10 at 6.00 a million
    assert sum(canary.ttft.values()) == sum(canary.tpot.values()) == canary.answers


async def test_errors_of_the_engine_count_and_those_of_callers_and_limits_do_not(both: Both) -> None:
    arms = both.begin(percent=99)
    assert (await both.ask("[[sim n=5 fault=refuse]]")).status_code == 502
    both.stack.rig.admission.refusal = PlatformError("RATE_LIMITED", ErrorKind.RATE_LIMITED, "Too many.")
    assert (await both.ask()).status_code == 429
    both.stack.rig.admission.refusal = None
    assert (await both.ask(max_tokens=0)).status_code == 400
    found = both.figures(arms)
    assert (found.canary.requests + found.stable.requests, found.canary.errors + found.stable.errors) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_copy_is_compared_never_billed_and_never_seen(both: Both, stream: bool) -> None:
    arms = both.begin(shadow_percent=100)
    answer = await both.ask(stream=stream)
    assert answer.status_code == 200
    await both.copied()
    shadow = both.figures(arms).shadow
    assert (shadow.copies, shadow.compared, shadow.dropped, shadow.failed) == (1, 1, 0, 0)
    assert (shadow.live_tokens, shadow.shadow_tokens) == (10, 10)
    said = text_of(events_of(answer.text)) if stream else answer.json()["choices"][0]["message"]["content"]
    assert shadow.live_chars == len(said)
    assert shadow.cost_pico == 260_000_000
    (event,) = both.stack.rig.spool.events  # of the live request alone
    assert (event.version_id, event.outcome) == (both.stack.rig.models["sim"].version_id, Outcome.COMPLETED)
    admission = both.stack.rig.admission
    assert not admission.held
    prepared, wait_s, tier = admission.calls[-1]
    assert (prepared.tenant, prepared.demands, wait_s, tier.label) == ("", (), 0, "batch")
    assert set(admission.charges.values()) == {None, event.amount_pico // 1000}
    assert both.stack.rig.gateway.metrics.outcomes == {"completed": 1}
    stored = msgspec.json.encode(both.figures(arms))
    assert said[:12].encode() not in stored


async def test_a_copy_is_sent_when_the_answer_has_left_and_holds_nobody_up(both: Both) -> None:
    both.begin(shadow_percent=100)
    both.engine.seats = asyncio.Semaphore(0)  # the version to come hangs
    for number in range(WAITING_MAX + 6):
        assert (await both.ask(user=f"u-{number}")).status_code == 200
    gateway = both.stack.rig.gateway
    assert len(gateway.shadows.tasks) == 2
    assert len(gateway.shadows.waiting) == WAITING_MAX
    (arms,) = gateway.directory.rollouts.values()
    assert both.figures(arms).shadow.dropped == 4
    for relay in list(gateway.relays):
        relay.deadline = 0.0
    gateway.shadows.waiting.clear()
    for relay in list(gateway.relays):
        relay.time_out()
    await both.copied()
    assert both.figures(arms).shadow.failed == 2
    assert not both.stack.rig.admission.held


async def test_nobody_is_copied_while_somebody_waits_for_a_place(both: Both) -> None:
    arms = both.begin(shadow_percent=100)
    both.stack.rig.admission.waiting = 1
    await both.ask()
    assert both.figures(arms).shadow.dropped == 1
    assert both.engine.sequence == 0


async def test_only_a_part_is_copied(both: Both) -> None:
    arms = both.begin(shadow_percent=10)
    for number in range(60):
        await both.ask(user=f"u-{number}")
        await both.copied()
    assert 0 < both.figures(arms).shadow.copies < 20


async def test_a_request_that_waited_while_its_name_moved_is_served_by_the_new_version(both: Both) -> None:
    rig = both.stack.rig
    rig.admission.queue_us, rig.admission.gate = 5000, asyncio.Event()
    waiting = asyncio.create_task(both.ask())
    await until(lambda: rig.admission.calls)
    rig.models["sim"] = both.canary
    rig.gateway.directory.changed()
    rig.admission.gate.set()
    assert (await waiting).status_code == 200
    assert rig.event.version_id == both.canary.version_id
    assert not rig.admission.held
    assert rig.gateway.metrics.counters["switched_while_waiting_total"] == 1
    assert both.engine.sequence == 1
