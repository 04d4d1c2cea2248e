"""The engine simulator answers as its request says."""

import orjson
import pytest

from engine import simulation
from engine.simulation import Plan


def chat(prompt: str, **members: object) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": prompt}], **members}


def test_the_directive_wins_over_the_name_and_the_name_over_the_defaults() -> None:
    plan = simulation.parse_plan(Plan(n=5, d=7, t=1), "sim-n64-t20000", "please [[sim n=3 fault=die at=2]] now")
    assert (plan.n, plan.t, plan.d, plan.fault, plan.at) == (3, 20000, 7, "die", 2)


@pytest.mark.parametrize("words", ["colour=1", "fault=explode", "usage=sometimes", "n=many"])
def test_a_directive_with_a_typo_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"unknown|invalid literal"):
        simulation.parse_plan(Plan(), "sim", f"[[sim {words}]]")


def test_prompt_tokens_are_a_quarter_of_the_bytes_and_four_a_message() -> None:
    generation = simulation.plan_generation(Plan(), chat("潮水潮水"))  # 12 bytes
    assert generation.prompt_tokens == 3 + 4
    body = {"model": "sim", "input": ["12345", "1"]}
    assert simulation.plan_generation(Plan(), body).prompt_tokens == 2 + 1


def test_max_tokens_cuts_and_says_so() -> None:
    whole = simulation.plan_generation(Plan(n=10), chat("x", max_tokens=10))
    cut = simulation.plan_generation(Plan(n=10), chat("x", max_completion_tokens=4))
    assert (whole.tokens, whole.finish_reason) == (10, "stop")
    assert (cut.tokens, cut.finish_reason) == (4, "length")


def test_usage_counts_parts_inside_the_totals() -> None:
    generation = simulation.plan_generation(Plan(n=1000, p=12345, cached=10240, reasoning=640), chat("x"))
    usage = simulation.usage_object(generation, "openai", 1000)
    assert usage == {
        "prompt_tokens": 12345,
        "completion_tokens": 1000,
        "total_tokens": 13345,
        "prompt_tokens_details": {"cached_tokens": 10240},
        "completion_tokens_details": {"reasoning_tokens": 640},
    }


def test_bad_usage_is_bad_on_demand() -> None:
    negative = simulation.plan_generation(Plan(usage="negative"), chat("x"))
    over = simulation.plan_generation(Plan(usage="over", p=7), chat("x"))
    assert simulation.usage_object(negative, "openai", 16)["completion_tokens"] == -17
    assert simulation.usage_object(over, "openai", 16)["prompt_tokens_details"] == {"cached_tokens": 8}


def test_events_can_be_spaced_and_cut_inside_a_character() -> None:
    spaced = simulation.encode_event({"usage": {"a": 1}}, Plan(usage="spaced"))
    assert spaced == b'data: {"usage" : {"a":1}}\n\n'
    cut = simulation.pieces("潮".encode(), 2)
    assert cut == ["潮".encode()[:2], "潮".encode()[2:]]
    assert orjson.loads(spaced[6:]) == {"usage": {"a": 1}}
