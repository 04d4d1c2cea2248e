"""Another model serves when the one that was asked for has no capacity, if operator and caller want it so."""

from typing import Any
from uuid import UUID

import httpx
import pytest

from billing.types import Outcome, PriceSchedule
from catalog.types import DeploymentKind, ServedModel
from core.tiers import Tier
from core.waits import Wait
from scheduler import refusals
from scheduler.commands import UNSERVED
from tests.factories.gateway import FixedPrices, served_model, usd_per_million
from tests.factories.stack import Stack, chat, events_of, text_of

ALLOW = {"X-Tidegate-Fallback": "allow"}
PROMPT = "[[sim n=10 p=100]]"
OWN_PRICE, FALLBACK_PRICE = 160_000_000, 320_000_000  # pico; of 100 tokens in and 10 out


class PricesByModel(FixedPrices):
    """`dear` costs twice as much as all else; `unpriced` has no price."""

    def __init__(self, dear: UUID, unpriced: UUID | None = None) -> None:
        one, nothing, six = (usd_per_million(text) for text in ("1.00", "0.00", "6.00"))
        super().__init__((Tier.STANDARD,), input_=one, cached=nothing, output=six)
        self._twice = FixedPrices((Tier.STANDARD,), input_=2 * one, cached=nothing, output=2 * six)
        self._dear, self._unpriced = dear, unpriced

    def schedule(self, model_id: UUID, *facts: Any, **more: Any) -> PriceSchedule | None:
        if model_id == self._unpriced:
            return None
        return (
            self._twice.schedule(model_id, *facts, **more)
            if model_id == self._dear
            else super().schedule(model_id, *facts, **more)
        )


def add_own(stack: Stack, url: str = "", **changes: Any) -> ServedModel:
    """A model `own` whose fallback is `sim`, which costs twice as much."""
    sim = stack.rig.models["sim"]
    model = served_model("own", url or sim.base_url, **({"fallback_model": "sim"} | changes))
    stack.rig.models["own"] = model
    stack.rig.gateway.directory.prices = PricesByModel(sim.model_id)
    return model


def make_busy(stack: Stack, *names: str) -> None:
    for name in names:
        stack.rig.admission.refused[name] = refusals.busy(name, 7, "queue", Wait(4, 64, 0, 7))


async def ask(stack: Stack, headers: dict[str, str] = ALLOW, **members: Any) -> httpx.Response:
    body = chat(PROMPT, model="own") | members
    return await stack.client.post("/v1/chat/completions", json=body, headers=headers)


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("why", "reason"), [("no place", "MODEL_BUSY"), ("asleep", "MODEL_LOADING"), ("not there", "UPSTREAM_ERROR")]
)
async def test_the_fallback_serves_and_is_what_is_billed(stack: Stack, why: str, reason: str, stream: bool) -> None:
    own = add_own(
        stack,
        "unix:/nonexistent/socket" if why == "not there" else "",
        kind=DeploymentKind.LOCAL if why == "asleep" else DeploymentKind.EXTERNAL,
    )
    if why == "no place":
        make_busy(stack, "own")
    answer = await ask(stack, ALLOW | {"X-Tidegate-Max-Wait": "0.05"}, stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-tidegate-served-model"] == "sim"
    if stream:
        events = events_of(answer.text)
        assert {event["model"] for event in events[:-1]} == {"sim"}
        assert text_of(events)
    else:
        assert answer.json()["model"] == "sim"
    event, sim = stack.rig.event, stack.rig.models["sim"]
    assert (event.model_id, event.deployment_id, event.model) == (sim.model_id, sim.deployment_id, "sim")
    assert (event.outcome, event.amount_pico) == (Outcome.COMPLETED, FALLBACK_PRICE)
    assert answer.headers["x-request-id"] == f"gen_{event.id.hex}"
    admission = stack.rig.admission
    assert not admission.held
    assert admission.charges.pop(event.id) == FALLBACK_PRICE // 1000
    assert set(admission.charges.values()) <= {UNSERVED}  # what the own model held is free, and no rate counts it
    assert [asked.model.name for asked, *_ in admission.calls] == [own.name, "sim"]
    assert stack.rig.gateway.metrics.fallbacks == {reason: 1}


async def test_a_model_that_has_capacity_serves_itself(stack: Stack) -> None:
    add_own(stack)
    answer = await ask(stack)
    assert (answer.status_code, answer.json()["model"]) == (200, "own")
    assert "x-tidegate-served-model" not in answer.headers
    assert stack.rig.event.amount_pico == OWN_PRICE


@pytest.mark.parametrize("headers", [{}, {"X-Tidegate-Fallback": "none"}])
async def test_nobody_gets_another_model_without_asking(stack: Stack, headers: dict[str, str]) -> None:
    add_own(stack)
    make_busy(stack, "own")
    assert refused(await ask(stack, headers)) == (503, "MODEL_BUSY")


async def test_the_header_is_allow_or_none(stack: Stack) -> None:
    add_own(stack)
    answer = await ask(stack, {"X-Tidegate-Fallback": "sim"})
    assert refused(answer) == (400, "INVALID_REQUEST")
    assert "X-Tidegate-Fallback" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "lacking", ["right", "price", "context", "image", "endpoint", "name", "nothing", "itself", "none named"]
)
async def test_a_fallback_that_cannot_serve_this_request_is_none(stack: Stack, lacking: str) -> None:
    names = {"name": "gone", "itself": "own", "none named": ""}
    own = add_own(stack, fallback_model=names.get(lacking, "sim"))
    sim = stack.rig.models["sim"]
    changes: dict[str, Any] = {
        "context": {"context_max": 40},
        "image": {"kind": DeploymentKind.LOCAL},
        "endpoint": {"endpoints": frozenset({"completions"})},
    }
    stack.rig.models["sim"] = served_model("sim", sim.base_url, model_id=sim.model_id, **changes.get(lacking, {}))
    if lacking == "price":
        stack.rig.gateway.directory.prices = PricesByModel(own.model_id, unpriced=sim.model_id)
    if lacking == "right":
        key, _ = stack.rig.add_key(model_patterns=("own",))
        stack.client.headers["Authorization"] = f"Bearer {key}"
    members: dict[str, Any] = {"max_tokens": 10}
    if lacking == "image":
        part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
        members["messages"] = [{"role": "user", "content": [part]}]
    make_busy(stack, "own")
    answer = await ask(stack, **members)
    if lacking == "nothing":
        assert answer.status_code == 200
        return
    assert refused(answer) == (503, "MODEL_BUSY")
    assert [asked.model.name for asked, *_ in stack.rig.admission.calls] == ["own"]


async def test_vectors_of_another_model_are_no_answer(stack: Stack) -> None:
    add_own(stack)
    make_busy(stack, "own")
    answer = await stack.client.post("/v1/embeddings", json={"model": "own", "input": "x"}, headers=ALLOW)
    assert refused(answer) == (503, "MODEL_BUSY")


@pytest.mark.parametrize("sim", ["no place", "asleep"])
async def test_one_hop_and_the_refusal_of_the_model_that_was_asked_for(stack: Stack, sim: str) -> None:
    url = stack.rig.models["sim"].base_url
    add_own(stack)
    kind = DeploymentKind.LOCAL if sim == "asleep" else DeploymentKind.EXTERNAL
    stack.rig.models["sim"] = served_model("sim", url, kind=kind, fallback_model="third")
    stack.rig.models["third"] = served_model("third", url)
    make_busy(stack, "own", *(["sim"] if sim == "no place" else []))
    answer = await ask(stack, ALLOW | {"X-Tidegate-Max-Wait": "0.05"})
    assert refused(answer) == (503, "MODEL_BUSY")
    assert "own" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "7"
    assert "x-tidegate-served-model" not in answer.headers
    assert not stack.rig.admission.held
    assert not stack.rig.spool.events
    assert [asked.model.name for asked, *_ in stack.rig.admission.calls] == ["own", "sim"]
    assert stack.rig.gateway.metrics.counters["fallbacks_failed_total"] == 1


async def test_what_the_caller_did_wrong_is_no_want_of_capacity(stack: Stack) -> None:
    add_own(stack)
    answer = await ask(stack, messages=[{"role": "user", "content": "[[sim nonsense=1]]"}])
    assert refused(answer) == (400, "INVALID_REQUEST")
    assert len(stack.rig.admission.calls) == 1


async def test_both_models_share_the_time_that_the_caller_waits(stack: Stack) -> None:
    add_own(stack, kind=DeploymentKind.LOCAL)
    answer = await ask(stack, ALLOW | {"X-Tidegate-Max-Wait": "0.05"})
    assert answer.status_code == 200
    (_, own_s, _), (_, fallback_s, _) = stack.rig.admission.calls
    assert own_s == 0.05
    assert fallback_s <= 0.0  # only a place that is free
