"""Engines' error objects as they were seen, and what callers read of them."""

from typing import Any

import pytest

from engine.refusals import explain

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
        ({}, "", None),
    ],
)
def test_a_caller_is_told_what_a_caller_can_change(error: dict[str, Any], message: str, param: str | None) -> None:
    assert explain(error) == (message, param)
