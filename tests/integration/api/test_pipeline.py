"""One request through all stages, with a real engine behind it and the bill in front."""

import asyncio
from typing import Any
from uuid import UUID

import httpx
import orjson
import pytest

from api.inference.gateway import Waiters
from billing.types import CountSource, Outcome
from catalog.types import DeploymentKind, EngineKind
from core.clock import SystemClock
from core.errors import ErrorKind, PlatformError
from core.settings import Gateway as GatewaySettings
from core.settings import LatePolicy
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories.gateway import FixedPrices, rig, rpm, served_model, usd_per_million
from tests.factories.stack import Stack, chat, events_of, text_of, until


async def test_a_buffered_answer_is_billed_and_says_so(stack: Stack) -> None:
    """2.00 in / 0.20 cached / 6.00 out: 12,345 prompt of which 10,240 cached, 1,000 out of which 640 reasoning."""
    answer = await stack.chat("[[sim n=1000 p=12345 cached=10240 reasoning=640]]", max_tokens=2000)
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "sim"
    assert body["usage"]["prompt_tokens"] == 12345
    assert answer.headers["x-tidegate-cost"] == "0.012258000000 USD"
    event = stack.rig.event
    assert answer.headers["x-request-id"] == f"gen_{event.id.hex}"
    assert answer.headers["x-ratelimit-remaining-requests"] == "599"
    assert event.usage == TokenUsage(2105, 10240, 0, 360, 640)
    assert event.amount_pico == 12_258_000_000
    assert (event.outcome, event.count_source, event.http_status) == (Outcome.COMPLETED, CountSource.ENGINE, 200)
    assert stack.rig.admission.charges == {event.id: 12_258_000}
    assert not stack.rig.admission.held


async def test_limits_are_shown_as_last_seen_while_valkey_is_away(stack: Stack) -> None:
    key, _ = stack.rig.add_key(limits=rpm(600))
    stack.client.headers["Authorization"] = f"Bearer {key}"
    stack.rig.admission.alone = True
    answer = await stack.chat("x")
    assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "600")


async def test_the_hold_covers_the_worst_case(stack: Stack) -> None:
    stack.rig.admission.refusal = PlatformError("INSUFFICIENT_CREDIT", ErrorKind.PAYMENT, "No credit.")
    body = orjson.dumps(chat("x" * 1000, max_tokens=100, n=3))
    answer = await stack.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 402
    stack.rig.admission.refusal = None
    await stack.client.post("/v1/chat/completions", content=body)
    assert stack.rig.event.usage.output == 3 * 16


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_keeps_the_shape_that_was_asked_for(stack: Stack, include_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    answer = await stack.chat("[[sim n=7 p=20]]", stream=True, **options)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    usages = [event for event in events[:-1] if event.get("usage")]
    assert len(usages) == include_usage
    if include_usage:
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 7
        assert events[-2]["usage"]["cost"] == "0.000082000000"
        assert events[-2]["usage"]["currency"] == "USD"
        assert events[-2]["model"] == "sim"
    else:
        assert all("usage" not in event for event in events[:-1])
    assert stack.rig.event.amount_pico == 20 * 2_000_000 + 7 * 6_000_000
    assert stack.rig.event.stream


@pytest.mark.parametrize("done", [1, 0])
@pytest.mark.parametrize("split", [0, 1, 7])
@pytest.mark.parametrize("usage", ["final", "choice", "every", "null", "middle", "spaced"])
async def test_usage_in_any_chunk_is_the_bill_of_the_buffered_call(
    stack: Stack, usage: str, split: int, done: int
) -> None:
    prompt = f"[[sim n=12 p=31 cached=5 usage={usage} split={split} done={done} crlf={done}]]"
    buffered = await stack.chat(prompt)
    streamed = await stack.chat(prompt, stream=True, stream_options={"include_usage": True})
    first, second = stack.rig.spool.events
    assert first.usage == second.usage == TokenUsage(26, 5, 0, 12, 0)
    assert first.amount_pico == second.amount_pico
    assert second.count_source is CountSource.ENGINE
    events = events_of(streamed.text)
    assert events[-1] == "[DONE]"
    assert text_of(events) == buffered.json()["choices"][0]["message"]["content"]
    assert [bool(event.get("usage")) for event in events[:-1]] == [False] * (len(events) - 2) + [True]


async def test_a_stream_without_usage_is_counted_here(stack: Stack) -> None:
    prompt = "[[sim n=9 usage=missing]] how are you"
    answer = await stack.chat(prompt, stream=True, stream_options={"include_usage": True})
    event = stack.rig.event
    counted = -(-len(prompt) // 4) + 4  # as the simulator's tokenizer counts
    assert event.usage == TokenUsage(input_uncached=counted, output=9)
    assert event.count_source is CountSource.GATEWAY
    assert events_of(answer.text)[-2]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(("prompt_tokens", "billed"), [(32_768, True), (32_769, False), (1_000_000, False)])
async def test_more_tokens_than_the_context_holds_are_not_billed(
    stack: Stack, prompt_tokens: int, billed: bool
) -> None:
    answer = await stack.chat(f"[[sim n=1 p={prompt_tokens}]]", max_tokens=20)
    assert answer.status_code == 200
    event = stack.rig.event
    assert (event.amount_pico > 0) is billed
    assert bool(event.quarantine) is not billed


@pytest.mark.parametrize("usage", ["negative", "over"])
@pytest.mark.parametrize("stream", [False, True])
async def test_impossible_usage_is_quarantined_and_never_billed(stack: Stack, usage: str, stream: bool) -> None:
    answer = await stack.chat(f"[[sim usage={usage}]]", stream=stream)
    assert answer.status_code == 200
    event = stack.rig.event
    assert event.amount_pico == 0
    assert event.quarantine
    assert "prompt_tokens" in event.raw_usage
    assert event.usage == TokenUsage()


@pytest.mark.parametrize("ids", ["null", "empty", "same", "own"])
async def test_four_calls_are_four_events_whatever_the_engine_calls_them(stack: Stack, ids: str) -> None:
    for stream in (False, False, True, True):
        await stack.chat(f"[[sim ids={ids}]]", stream=stream)
    assert len({event.id for event in stack.rig.spool.events}) == 4


async def test_what_the_engine_is_told(stack: Stack) -> None:
    model = served_model(
        "public/name", stack.rig.models["sim"].base_url, upstream_model="inner", engine=EngineKind.VLLM
    )
    stack.rig.models["public/name"] = model
    answer = await stack.chat("hi", model="public/name", service_tier="priority", seed=7, user="u", metadata={"a": "b"})
    assert answer.json()["model"] == "public/name"
    (record,) = stack.generated()
    assert record["fields"] == {
        "model": "inner",
        "priority": -10,
        "cache_salt": "salt",
        "max_tokens": model.default_max_tokens,
        "seed": 7,
    }
    assert record["request_id"] == answer.headers["x-request-id"]
    stream = await stack.chat("[[sim split=3]]", model="public/name", stream=True)
    assert {event["model"] for event in events_of(stream.text)[:-1]} == {"public/name"}
    assert stack.generated()[1]["fields"]["stream_options"] == {"include_usage": True}
    assert "priority" not in stack.generated()[1]["fields"]  # standard is vLLM's own default


async def test_completions_and_embeddings(stack: Stack) -> None:
    text = await stack.client.post("/v1/completions", json={"model": "sim", "prompt": ["[[sim n=3 p=8]]"], "n": 2})
    assert [choice["index"] for choice in text.json()["choices"]] == [0, 1]
    stream = await stack.client.post("/v1/completions", json={"model": "sim", "prompt": "[[sim n=3]]", "stream": True})
    assert events_of(stream.text)[-1] == "[DONE]"
    vectors = await stack.client.post("/v1/embeddings", json={"model": "sim", "input": ["a", "b"]})
    assert len(vectors.json()["data"]) == 2
    assert [event.endpoint for event in stack.rig.spool.events] == ["completions", "completions", "embeddings"]
    assert stack.rig.spool.events[0].usage == TokenUsage(8, 0, 0, 6, 0)
    assert stack.rig.spool.events[2].usage == TokenUsage(2, 0, 0, 0, 0)


async def test_tokenize_is_admitted_and_not_billed(stack: Stack) -> None:
    answer = await stack.client.post("/tokenize", json={"model": "sim", "prompt": "12345678"})
    assert answer.json()["count"] == 2
    assert not stack.rig.spool.events
    assert list(stack.rig.admission.charges.values()) == [None]
    assert not stack.rig.gateway.metrics.outcomes
    assert "x-tidegate-cost" not in answer.headers


async def test_tokenize_has_one_shape_also_where_the_engine_speaks_another(stack: Stack) -> None:
    url = stack.rig.models["sim"].base_url
    stack.rig.models["llama"] = served_model("llama", url, engine=EngineKind.LLAMA_CPP, context_max=512)
    answer = await stack.client.post("/tokenize", json={"model": "llama", "prompt": "12345678"})
    assert answer.json() == {"count": 2, "max_model_len": 512, "tokens": [0, 1]}
    templated = await stack.client.post("/tokenize", json={"model": "llama", "messages": chat("x")["messages"]})
    assert templated.status_code == 502  # the simulator has no chat template to apply
    assert not stack.rig.spool.events


# ---- refusals


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/v1/models", True, 200),
        ("GET", "/v1/models/none", True, 404),
        ("GET", "/v1/models", False, 401),
        ("POST", "/v1/chat/completions", False, 401),
        ("PUT", "/v1/chat/completions", True, 405),
        ("GET", "/health", False, 200),
        ("GET", "/nothing", False, 404),
    ],
)
async def test_every_answer_has_a_request_id(stack: Stack, method: str, path: str, key: bool, status: int) -> None:
    headers = {} if key else {"Authorization": ""}
    answer = await stack.client.request(method, path, headers=headers, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert answer.headers["x-request-id"].startswith("gen_")
    if status >= 400:
        assert answer.json()["error"].keys() >= {"message", "type", "code", "param"}


async def test_refusals_before_admission(stack: Stack) -> None:
    client, made = stack.client, stack.rig
    missing = await stack.chat("x", model="nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "MODEL_NOT_FOUND"
    assert missing.json()["error"]["details"] == {"models": ["sim"]}
    assert "sim" in missing.json()["error"]["message"]
    flex = await stack.chat("x", service_tier="flex")
    assert (flex.status_code, flex.json()["error"]["code"]) == (403, "TIER_NOT_PRICED")
    key, _ = made.add_key(tier_max=Tier.STANDARD, model_patterns=("other*",))
    other = {"Authorization": f"Bearer {key}"}
    barred = await client.post("/v1/chat/completions", json=chat("x"), headers=other)
    assert (barred.status_code, barred.json()["error"]["code"]) == (403, "MODEL_NOT_ALLOWED")
    for changes, status, code in (
        ({"refusal": "KEY_REVOKED"}, 401, "KEY_REVOKED"),
        ({"refusal": "TENANT_SUSPENDED"}, 403, "TENANT_SUSPENDED"),
        ({"expires_at_us": 1}, 401, "KEY_EXPIRED"),
        ({"scopes": frozenset({"usage.read"})}, 403, "SCOPE_MISSING"),
        ({"allowed_networks": ("10.0.0.0/8",)}, 403, "FORBIDDEN"),
    ):
        key, _ = made.add_key(**changes)
        refused = await client.post("/v1/chat/completions", json=chat("x"), headers={"Authorization": f"Bearer {key}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    too_many = await stack.chat("x", max_tokens=40_000)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "max_tokens")
    assert not made.spool.events
    assert not made.admission.calls


@pytest.mark.parametrize(
    ("refused", "whose"), [(set(Tier), "no new work is"), ({Tier.BATCH, Tier.STANDARD}, "no new work of tier standard")]
)
async def test_a_full_spool_refuses_new_work_that_would_be_billed(stack: Stack, refused: set[Tier], whose: str) -> None:
    stack.rig.spool.refused = refused
    answer = await stack.chat("x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert whose in answer.json()["error"]["message"]
    assert not stack.rig.admission.calls
    free = await stack.client.post("/tokenize", json={"model": "sim", "prompt": "x"})
    assert free.status_code == 200


async def test_the_tier_that_is_not_refused_yet_goes_on(stack: Stack) -> None:
    stack.rig.spool.refused = {Tier.BATCH}
    assert (await stack.chat("x")).status_code == 200


@pytest.mark.parametrize(("policy", "status"), [(LatePolicy.ANSWER, 200), (LatePolicy.REFUSE, 503)])
async def test_a_slow_disk_delays_no_answer_and_may_refuse_new_work_for_a_second(
    stack: Stack, policy: LatePolicy, status: int
) -> None:
    made = stack.rig
    made.gateway.settings = GatewaySettings(spool_late=policy)
    made.gateway.durable = Waiters(made.gateway.loop, 0.02)
    made.spool.manual = True
    assert (await stack.chat("x")).status_code == 200  # after these 20 ms
    made.spool.manual = False
    answer = await stack.chat("x")
    assert answer.status_code == status
    made.gateway.spool_late_until -= 1  # a second later
    assert (await stack.chat("x")).status_code == 200


@pytest.mark.parametrize("from_disk", [False, True])
async def test_with_both_stores_away_what_is_known_is_trusted_for_a_minute(stack: Stack, *, from_disk: bool) -> None:
    """design: 60 s by default, whether it ran on or started from its disk; with one of them there it goes on."""
    made = stack.rig
    made.gateway.directory.from_disk = from_disk
    monotonic = made.gateway.clock.monotonic()
    made.admission.ready = False
    made.gateway.directory.fresh_at = monotonic - 50
    assert (await stack.chat("x")).status_code == 200
    made.gateway.directory.fresh_at = monotonic - 61
    refused = await stack.chat("x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "SERVICE_UNAVAILABLE")
    assert int(refused.headers["retry-after"]) >= 1
    made.admission.ready = True
    assert (await stack.chat("x")).status_code == 200


async def test_the_last_byte_waits_for_the_disk_and_not_for_ever(stack: Stack) -> None:
    stack.rig.spool.manual = True
    async with stack.client.stream("POST", "/v1/chat/completions", json=chat("x", stream=True)) as answer:
        seen = ""
        async for text in answer.aiter_text():
            seen += text
            if '"finish_reason":"stop"' in seen and stack.rig.spool.waiting:
                assert "[DONE]" not in seen
                stack.rig.spool.waiting.pop()(True)
        assert seen.endswith("data: [DONE]\n\n")
    # now the disk never answers: the settings bound the wait
    answer = await stack.chat("x")
    assert answer.status_code == 200
    assert stack.rig.gateway.metrics.counters["spool_late_total"] == 1


# ---- failures of the engine


@pytest.mark.parametrize(
    ("plan", "status", "code"),
    [
        ("fault=refuse", 502, "UPSTREAM_ERROR"),
        ("fault=busy", 503, "MODEL_BUSY"),
        ("fault=close", 502, "UPSTREAM_ERROR"),
        ("fault=die at=3", 502, "UPSTREAM_ERROR"),
        ("fault=garbage", 502, "UPSTREAM_ERROR"),
        ("nonsense=1", 400, "INVALID_REQUEST"),
    ],
)
async def test_engine_failures_before_an_answer_cost_nothing(stack: Stack, plan: str, status: int, code: str) -> None:
    answer = await stack.chat(f"[[sim {plan}]]")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert stack.rig.event.amount_pico == 0
    assert stack.rig.event.outcome is Outcome.UPSTREAM_ERROR
    assert list(stack.rig.admission.charges.values()) == [0]
    if status == 503:
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("fault", ["die", "error"])
async def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error_event(stack: Stack, fault: str) -> None:
    answer = await stack.chat(f"[[sim n=9 d=1000 fault={fault} at=4]]", stream=True)
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert events[-1]["error"]["code"] == "UPSTREAM_ERROR"
    assert "[DONE]" not in events
    assert stack.rig.event.amount_pico == 0
    assert list(stack.rig.admission.charges.values()) == [0]
    again = await stack.chat("x")  # and the connection lives
    assert again.status_code == 200


async def test_an_engine_that_does_not_answer_in_time(stack: Stack) -> None:
    call = asyncio.create_task(stack.chat("[[sim fault=stall at=0]]"))
    await until(lambda: stack.rig.gateway.relays)
    (relay,) = stack.rig.gateway.relays
    relay.time_out()
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "UPSTREAM_TIMEOUT")
    assert (stack.rig.event.outcome, stack.rig.event.amount_pico) == (Outcome.TIMEOUT, 0)


async def test_an_engine_that_is_not_there(stack: Stack) -> None:
    stack.rig.models["gone"] = served_model("gone", "unix:/nonexistent/socket")
    answer = await stack.chat("x", model="gone")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "UPSTREAM_ERROR")
    assert stack.rig.event.amount_pico == 0


async def test_an_engine_of_ours_is_not_asked_about_images(stack: Stack) -> None:
    """llama.cpp answers 500 to an image: the caller's mistake would look like ours."""
    stack.rig.models["own"] = served_model("own", "", kind=DeploymentKind.LOCAL)
    image = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    for name, status in (("own", 400), ("sim", 200)):
        body = {"model": name, "messages": [{"role": "user", "content": image}], "max_tokens": 1}
        answer = await stack.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "messages"


async def test_the_same_replica_is_never_asked_twice(stack: Stack) -> None:
    """It may have done the work the first time: a second call would be work that nobody pays."""
    model = stack.rig.sleeping("local")
    stack.rig.wake(model, stack.rig.models["sim"].base_url)
    answer = await stack.chat("[[sim fault=close]]", model="local")
    assert answer.status_code == 502
    assert stack.engine.sequence == 1


async def test_another_replica_is_asked_when_the_first_is_not_there(stack: Stack) -> None:
    model = stack.rig.sleeping("local")
    stack.rig.wake(model, "unix:/nonexistent/socket", stack.rig.models["sim"].base_url)
    answer = await stack.chat("x", model="local")
    assert answer.status_code == 200
    assert stack.rig.event.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("part", "status", "result"), [(0.5, 200, "sent"), (0.51, 502, "replicas_full")])
async def test_nothing_is_sent_again_while_most_replicas_are_full(
    stack: Stack, part: float, status: int, result: str
) -> None:
    async def part_full(_: UUID) -> float:
        return part

    model = stack.rig.sleeping("local")
    stack.rig.wake(model, "unix:/nonexistent/socket", stack.rig.models["sim"].base_url)
    stack.rig.gateway.part_full = part_full
    assert (await stack.chat("x", model="local")).status_code == status
    assert stack.rig.gateway.metrics.retries == {result: 1}


async def test_a_model_without_engines_spends_its_few_retries_and_no_more(stack: Stack) -> None:
    model = stack.rig.sleeping("local")
    stack.rig.wake(model, *(f"unix:/nonexistent/{number}" for number in range(3)))
    for _ in range(5):
        assert (await stack.chat("x", model="local")).status_code == 502
    assert stack.rig.gateway.metrics.retries == {"sent": 3, "over_budget": 2}


# ---- a client that leaves


async def test_a_cut_stream_bills_the_prompt_and_what_was_relayed(stack: Stack) -> None:
    """137 tokens of 4,000 prompt tokens at 3.00, output at 15.00 → 0.014055; hold 0.042 with max_tokens 2,000."""
    made = stack.rig
    made.gateway.directory.prices = FixedPrices(
        (Tier.STANDARD,),
        input_=usd_per_million("3.00"),
        cached=usd_per_million("0.30"),
        output=usd_per_million("15.00"),
    )
    directive = "[[sim n=2000 fault=stall at=137]]"
    prompt = directive + "x" * ((4000 - 4) * 4 - len(directive))
    seen = b""
    async with stack.client.stream(
        "POST", "/v1/chat/completions", json=chat(prompt, stream=True, max_tokens=2000)
    ) as answer:
        async for block in answer.aiter_raw():
            seen += block
            if seen.count(b'"delta"') == 138:
                break
    await made.settled()
    event = made.event
    assert event.outcome is Outcome.CLIENT_ABORT
    assert event.count_source is CountSource.GATEWAY
    assert event.usage == TokenUsage(input_uncached=4000, output=137)
    assert event.amount_pico == 14_055_000_000
    assert made.admission.charges == {event.id: 14_055_000}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_pays_nothing_and_the_engine_stops(
    stack: Stack, stream: bool
) -> None:
    task = asyncio.create_task(stack.chat("[[sim n=50 t=30000000]]", stream=stream))
    await until(lambda: stack.engine.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not stack.engine.running, 1)  # a promise: the engine hears of it within a second
    await stack.rig.settled()
    assert (stack.rig.event.outcome, stack.rig.event.amount_pico) == (Outcome.CLIENT_ABORT, 0)
    assert stack.rig.event.http_status == 499
    assert not stack.rig.admission.held


async def test_a_client_that_leaves_the_queue_is_forgotten(stack: Stack) -> None:
    stack.rig.admission.gate = asyncio.Event()
    task = asyncio.create_task(stack.chat("x"))
    await until(lambda: stack.rig.admission.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: stack.rig.gateway.metrics.refusals.get("CLIENT_LEFT"))
    assert not stack.rig.spool.events
    assert not stack.generated()


# ---- a model that sleeps


async def test_a_sleeping_model_is_woken_once_for_all_who_wait(stack: Stack) -> None:
    model = stack.rig.sleeping("local")
    calls = [asyncio.create_task(stack.chat("x", model="local")) for _ in range(10)]
    await until(lambda: len(stack.rig.states.wakes) == 10)
    stack.rig.wake(model, stack.rig.models["sim"].base_url)
    answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200] * 10
    assert not stack.rig.gateway.held.here


async def test_patience_with_a_sleeping_model_is_the_callers(stack: Stack) -> None:
    stack.rig.sleeping("local")
    answer = await stack.client.post(
        "/v1/chat/completions", json=chat("x", model="local"), headers={"X-Tidegate-Max-Wait": "0.05"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "MODEL_LOADING")
    assert int(answer.headers["retry-after"]) >= 1
    assert not stack.rig.spool.events
    assert list(stack.rig.admission.charges.values()) == [None]
    for bad in ("soon", "-1", "nan"):
        refused = await stack.client.post("/v1/chat/completions", json=chat("x"), headers={"X-Tidegate-Max-Wait": bad})
        assert refused.status_code == 400


async def test_only_so_many_wait_for_a_wake(stack: Stack) -> None:
    stack.rig.sleeping("local", waiting_max=1)
    first = asyncio.create_task(
        stack.client.post("/v1/chat/completions", json=chat("x", model="local"), headers={"X-Tidegate-Max-Wait": "0.3"})
    )
    await until(lambda: stack.rig.states.wakes)
    second = await stack.chat("x", model="local")
    assert (second.status_code, second.json()["error"]["code"]) == (503, "MODEL_LOADING")
    assert (await first).status_code == 503


# ---- the policy seam


async def test_a_projects_policy_may_refuse_before_admission(stack: Stack) -> None:
    async def inspector(_: Any, __: Any) -> None:
        raise PlatformError("FORBIDDEN", ErrorKind.FORBIDDEN, "The project's policy refuses this prompt.")

    stack.rig.gateway.inspectors = {stack.rig.principal.project_id: inspector}
    assert (await stack.chat("x")).status_code == 403
    assert not stack.rig.admission.calls


async def test_a_bug_leaks_neither_slot_nor_money(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("api.inference.pipeline.route", broken)
    answer = await stack.chat("x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "INTERNAL")
    assert "bug of ours" not in answer.text
    assert not stack.rig.admission.held
    assert not stack.rig.spool.events


async def test_a_bug_in_the_last_stage_leaves_nobody_waiting(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("api.inference.settle.record", broken)
    for stream in (False, True):
        with pytest.raises(httpx.RemoteProtocolError):
            await stack.chat("x", stream=stream)
    assert not stack.rig.admission.held
    assert stack.rig.gateway.metrics.counters["internal_errors_total"] == 2


async def test_cors_only_for_origins_of_the_settings(stack: Stack) -> None:
    origin = {"Origin": "https://app.example"}
    plain = await stack.client.post("/v1/chat/completions", json=chat("x"), headers=origin)
    assert "access-control-allow-origin" not in plain.headers
    stack.rig.gateway.settings = GatewaySettings(cors_origins=("https://app.example",))
    for stream in (False, True):
        allowed = await stack.client.post("/v1/chat/completions", json=chat("x", stream=stream), headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    preflight = await stack.client.request(
        "OPTIONS", "/v1/chat/completions", headers=origin | {"Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    stranger = await stack.client.post(
        "/v1/chat/completions", json=chat("x"), headers={"Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize(
    ("proxies", "forwarded", "status"),
    [
        (("127.0.0.1",), "10.1.2.3", 200),
        (("127.0.0.1",), "6.6.6.6, 10.1.2.3", 200),  # the entry our proxy wrote is the last one
        (("127.0.0.1",), "10.1.2.3, 6.6.6.6", 403),
        (("127.0.0.1",), "", 403),
        ((), "10.1.2.3", 403),  # nobody's word is taken but a trusted proxy's
    ],
)
async def test_a_keys_networks_hold_on_every_path_and_only_trusted_proxies_name_the_caller(
    stack: Stack, proxies: tuple[str, ...], forwarded: str, status: int
) -> None:
    settings = GatewaySettings(spool_wait_ms=2000, trusted_proxies=proxies)
    async with rig(stack.rig.models, clock=SystemClock(), settings=settings) as made:
        key, _ = made.add_key(allowed_networks=("10.0.0.0/8",))
        headers = {"Authorization": f"Bearer {key}"} | ({"X-Forwarded-For": forwarded} if forwarded else {})
        async with httpx.AsyncClient(base_url=made.url, headers=headers, timeout=20) as client:
            assert (await client.post("/v1/chat/completions", json=chat("x"))).status_code == status
            assert (await client.get("/v1/models")).status_code == status
