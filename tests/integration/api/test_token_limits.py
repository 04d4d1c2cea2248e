"""What a request takes of token limits at the door, and what it has used at the end."""

import orjson
import pytest

from tests.factories.stack import Stack, chat


def used(stack: Stack) -> tuple[int, int]:
    """Input and output tokens of the only request."""
    (found,) = stack.rig.admission.used.values()
    return found


async def test_at_the_door_the_most_is_taken_and_at_the_end_what_it_was(stack: Stack) -> None:
    """300 bytes are at most 300 tokens and the template; two choices of 50."""
    body = orjson.dumps(chat("[[sim n=7 p=20]]", max_tokens=50, n=2)).ljust(300)
    assert (await stack.client.post("/v1/chat/completions", content=body)).status_code == 200
    ((estimated_input, estimated_output),) = stack.rig.admission.estimates
    assert 300 * 1000 // stack.rig.gateway.directory.models["sim"].bytes_per_token_milli <= estimated_input <= 400
    assert estimated_output == 100
    assert used(stack) == (20, 14)


async def test_what_the_engine_had_cached_is_told_apart_because_it_weighs_less_in_turns(stack: Stack) -> None:
    assert (await stack.chat("[[sim n=7 p=20 cached=16]]")).status_code == 200
    assert used(stack) == (20, 7)
    assert list(stack.rig.admission.cached.values()) == [16]


async def test_a_stream_likewise(stack: Stack) -> None:
    assert (await stack.chat("[[sim n=7 p=20]]", stream=True)).status_code == 200
    assert used(stack) == (20, 7)


@pytest.mark.parametrize("plan", ["fault=refuse", "fault=busy", "fault=close", "nonsense=1"])
async def test_what_failed_has_used_nothing(stack: Stack, plan: str) -> None:
    assert (await stack.chat(f"[[sim {plan}]]")).status_code >= 400
    assert used(stack) == (0, 0)


async def test_usage_that_cannot_be_true_leaves_the_estimate(stack: Stack) -> None:
    assert (await stack.chat("[[sim usage=negative]]")).status_code == 200
    assert used(stack) == (-1, -1)


async def test_a_cut_stream_has_used_its_prompt_and_what_was_relayed(stack: Stack) -> None:
    directive = "[[sim n=2000 fault=stall at=137]]"
    prompt = directive + "x" * ((4000 - 4) * 4 - len(directive))
    seen = b""
    wanted = chat(prompt, stream=True, max_tokens=2000)
    async with stack.client.stream("POST", "/v1/chat/completions", json=wanted) as answer:
        async for block in answer.aiter_raw():
            seen += block
            if seen.count(b'"delta"') == 138:
                break
    await stack.rig.settled()
    assert used(stack) == (4000, 137)


async def test_embeddings_take_no_output(stack: Stack) -> None:
    answer = await stack.client.post("/v1/embeddings", json={"model": "sim", "input": "12345678"})
    assert answer.status_code == 200
    assert stack.rig.admission.estimates[0][1] == 0
    assert used(stack) == (answer.json()["usage"]["prompt_tokens"], 0)


async def test_tokenizing_uses_what_it_counted_and_costs_nothing(stack: Stack) -> None:
    answer = await stack.client.post("/tokenize", json={"model": "sim", "prompt": "12345678"})
    assert stack.rig.admission.estimates[0][1] == 0
    assert used(stack) == (answer.json()["count"], 0)
    assert list(stack.rig.admission.charges.values()) == [None]
