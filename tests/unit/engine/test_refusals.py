"""Engines' error objects as they were seen, and what callers read of them."""

from typing import Any

import pytest

from engine.refusals import blames_caller, explain

LLAMA_CPP = {
    "code": 400,
    "message": "request (8031 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 8031,
    "n_ctx": 4096,
}


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (LLAMA_CPP, "The prompt has 8031 tokens; this model takes 4096, prompt and answer together.", None),
        (LLAMA_CPP | {"n_ctx": "4096"}, LLAMA_CPP["message"], None),
        ({"message": "top_p must be in (0, 1]", "param": "top_p"}, "top_p must be in (0, 1]", "top_p"),
        ({"message": 7, "param": ["x"]}, "", None),
        (
            {"message": "Field 'seed': [json.exception.type_error.302] type must be number, but is string"},
            "Field 'seed': type must be number, but is string",
            None,
        ),
        (
            {"message": "Failed to parse tools: Missing tool type: {}; tools = [\n  {},\n  {}\n]"},
            "Failed to parse tools: Missing tool type: {}",
            None,
        ),
        (
            {
                "message": "Unable to generate parser for this template. Automatic parser generation failed: "
                "JSON schema error at #: unrecognized type zork"
            },
            "JSON schema error at #: unrecognized type zork",
            None,
        ),
        ({}, "", None),
    ],
)
def test_a_caller_is_told_what_a_caller_can_change(error: dict[str, Any], message: str, param: str | None) -> None:
    assert explain(error) == (message, param)


@pytest.mark.parametrize(
    ("status", "message", "callers"),
    [
        (400, "Invalid tool_choice: zzz", True),
        (422, "", True),
        (500, "Failed to parse tools: Missing tool type: {}; tools = [\n  {}\n]", True),
        (500, "CUDA error: out of memory", False),
        (503, "Failed to parse tools", False),
        (500, None, False),
    ],
)
def test_whose_fault_a_refusal_is(status: int, message: str | None, callers: bool) -> None:
    assert blames_caller(status, {"message": message}) is callers
