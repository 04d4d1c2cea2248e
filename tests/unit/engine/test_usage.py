"""Usage reports: public bug reports as cases, and properties over every shape."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.usage import TokenUsage
from engine.usage import UsageRejected, normalise, plain_usage


def openai(prompt: int, cached: int, completion: int, reasoning: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning, "accepted_prediction_tokens": 0},
    }


def vllm(prompt: int, cached: int, completion: int, reasoning: int) -> dict[str, Any]:
    details = {"cached_tokens": cached} if cached else None
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }


def llama_cpp(prompt: int, cached: int, completion: int, reasoning: int) -> dict[str, Any]:
    return {
        "usage": {
            "completion_tokens": completion,
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        },
        "timings": {"cache_n": cached, "prompt_n": prompt - cached, "prompt_ms": 17.5, "predicted_n": completion},
    }


SHAPES = pytest.mark.parametrize("shape", [openai, vllm, llama_cpp])


@SHAPES
def test_the_worked_example_of_the_ledger(shape: Any) -> None:
    usage = normalise(shape(12_345, 10_240, 1_000, 640))
    assert usage == TokenUsage(
        input_uncached=2_105, input_cached=10_240, input_cache_write=0, output=360, reasoning=640
    )


@SHAPES
@given(data=st.data())
def test_parts_are_never_negative_and_add_up_to_the_vendors_totals(shape: Any, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(0, 2_000_000))
    completion = data.draw(st.integers(0, 200_000))
    cached = data.draw(st.integers(0, prompt))
    reasoning = data.draw(st.integers(0, completion))
    usage = normalise(shape(prompt, cached, completion, reasoning))
    parts = (usage.input_uncached, usage.input_cached, usage.input_cache_write, usage.output, usage.reasoning)
    assert min(parts) >= 0
    assert (usage.input_total, usage.output_total) == (prompt, completion)
    assert (usage.input_cached, usage.reasoning) == (cached, reasoning)


COUNT = st.one_of(st.integers(-(10**12), 10**12), st.integers(0, 50), st.sampled_from([None, True, 1.5, "7"]))
DETAILS = st.one_of(
    st.none(),
    st.integers(),
    st.dictionaries(
        st.sampled_from(["cached_tokens", "cache_write_tokens", "cache_creation_tokens", "reasoning_tokens"]), COUNT
    ),
)
ANYTHING = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": DETAILS,
        "completion_tokens_details": DETAILS,
        "prompt_cache_hit_tokens": COUNT,
        "timings": st.one_of(
            st.none(), st.dictionaries(st.sampled_from(["cache_n", "prompt_n", "predicted_n"]), COUNT)
        ),
    },
)


@given(ANYTHING)
def test_whatever_an_engine_sends_is_either_disjoint_parts_or_rejected(raw: dict[str, Any]) -> None:
    try:
        usage = normalise(raw)
    except UsageRejected:
        return
    parts = (usage.input_uncached, usage.input_cached, usage.input_cache_write, usage.output, usage.reasoning)
    assert min(parts) >= 0
    if isinstance(raw.get("prompt_tokens"), int):
        assert (usage.input_total, usage.output_total) == (raw["prompt_tokens"], raw.get("completion_tokens") or 0)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        # an Anthropic-shaped report labelled as OpenAI's: more from the cache than the prompt has
        (openai(56_322, 72_960, 87, 0), "cached_tokens 72960 + cache writes 0 exceed prompt_tokens 56322"),
        # a negative count would refill the caller's credit
        (openai(-5, 0, 10, 0), "prompt_tokens -5 is not a possible count"),
        ({"prompt_tokens": 5, "completion_tokens": -1}, "completion_tokens -1 is not a possible count"),
        (openai(10, 0, 5, 6), "reasoning_tokens 6 exceed completion_tokens 5"),
        # thoughts counted outside the completion
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 112}, "total_tokens 112 is not"),
        ({"prompt_tokens": 1.5, "completion_tokens": 1}, "prompt_tokens is not a whole number"),
        ({"prompt_tokens": True, "completion_tokens": 1}, "prompt_tokens is not a whole number"),
        ({"prompt_tokens": 10**15}, "is not a possible count"),
        ({"completion_tokens": 3}, "prompt_tokens is missing"),
        ({}, "prompt_tokens is missing"),
        ({"usage": []}, "usage is not an object"),
    ],
)
def test_an_inconsistent_report_is_rejected_with_its_reason(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageRejected) as caught:
        normalise(raw)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # real reports: OpenAI-shaped, cached part inside the prompt
        (openai(262_960, 257_955, 1_744, 0), TokenUsage(5_005, 257_955, 0, 1_744, 0)),
        (openai(2_459, 2_455, 23, 0), TokenUsage(4, 2_455, 0, 23, 0)),
        (openai(16_111, 15_872, 2, 0), TokenUsage(239, 15_872, 0, 2, 0)),
        # cache writes are inside the prompt too
        (
            {
                "prompt_tokens": 200_000,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": 10_000, "cache_write_tokens": 184_457},
            },
            TokenUsage(5_543, 10_000, 184_457, 1, 0),
        ),
        ({"prompt_tokens": 100, "completion_tokens": 5, "prompt_cache_hit_tokens": 64}, TokenUsage(36, 64, 0, 5, 0)),
        ({"prompt_tokens": 7, "total_tokens": 7}, TokenUsage(7, 0, 0, 0, 0)),  # embeddings
        ({"timings": {"cache_n": 31, "prompt_n": 1, "predicted_n": 4}}, TokenUsage(1, 31, 0, 4, 0)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, TokenUsage()),
    ],
)
def test_real_reports_become_disjoint_parts(raw: dict[str, Any], expected: TokenUsage) -> None:
    assert normalise(raw) == expected


counts = st.integers(-2, 3) | st.sampled_from([10**9, 10**9 + 1, True, 1.0, None, "1"])


@given(
    st.fixed_dictionaries(
        {"prompt_tokens": counts, "completion_tokens": counts},
        optional={
            "total_tokens": counts,
            "prompt_tokens_details": st.none() | st.just({"cached_tokens": 1}),
            "completion_tokens_details": st.none(),
            "reasoning_tokens": counts,
        },
    ),
    st.booleans(),
)
def test_a_plain_report_is_read_as_any_other_and_what_is_odd_is_left_to_it(usage: dict[str, Any], sums: bool) -> None:
    if sums and type(usage["prompt_tokens"]) is type(usage["completion_tokens"]) is int:
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    found = plain_usage(msgspec.json.encode({"id": "gen-1", "choices": [{}], "usage": usage}))
    if found is not None:
        assert found == ("gen-1", normalise({"usage": usage}))


def test_most_reports_are_plain() -> None:
    vllm = (
        b'{"id":"c","usage":{"prompt_tokens":21,"total_tokens":37,"completion_tokens":16,"prompt_tokens_details":null}}'
    )
    assert plain_usage(vllm) == ("c", TokenUsage(input_uncached=21, output=16))
    assert plain_usage(vllm.replace(b"37", b"38")) is None
    assert plain_usage(b'{"id":"c","usage":null}') is None
