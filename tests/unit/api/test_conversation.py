"""Which requests belong together: by name, else by how the chat begins."""

import json
from typing import Any

from api.inference.conversation import conversation_of
from api.inference.request import parse

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is a tide?"}
ANSWER = {"role": "assistant", "content": "The sea, rising and falling."}
MORE = {"role": "user", "content": "And a gate?"}


def chat(*messages: dict[str, Any], **members: Any) -> bytes:
    return conversation_of(parse("chat", json.dumps({"model": "m", "messages": messages, **members}).encode()))


def test_every_turn_of_a_chat_is_the_same_conversation() -> None:
    first, second = chat(SYSTEM, ASK), chat(SYSTEM, ASK, ANSWER, MORE)
    assert first == second
    assert chat(ASK) == chat(ASK, ANSWER, MORE)
    assert len({first, chat(ASK), chat(MORE), chat(SYSTEM, MORE)}) == 4


def test_settings_of_a_request_do_not_matter() -> None:
    assert chat(ASK, temperature=0.2, max_tokens=5) == chat(ASK, stream=True) == chat(ASK, n=2)


def test_the_callers_own_name_goes_before() -> None:
    named = chat(ASK, user="u-1")
    assert named == chat(MORE, user="u-1") != chat(ASK)
    assert chat(ASK, user="u-1", safety_identifier="s-1") == chat(MORE, safety_identifier="s-1")
    assert chat(ASK, prompt_cache_key="k", user="u-1") == chat(ASK, prompt_cache_key="k") != named


def test_embeddings_of_a_tenant_are_all_one() -> None:
    bodies = [{"model": "m", "input": text} for text in ("a", "b")]
    assert {conversation_of(parse("embeddings", json.dumps(body).encode())) for body in bodies} == {b""}


def test_completions_go_by_their_beginning() -> None:
    prompts = ["x" * 300 + end for end in ("a", "b")] + ["y"]
    found = [
        conversation_of(parse("completions", json.dumps({"model": "m", "prompt": prompt}).encode()))
        for prompt in prompts
    ]
    assert found[0] == found[1] != found[2]
