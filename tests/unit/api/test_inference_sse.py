"""Whole events out, however they came in; usage and [DONE] kept back; nothing of the answer's text is mistaken."""

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from api.inference.sse import TAIL_MAX, EventFilter, usage_chunk

TRICKY = [
    '"usage":{"prompt_tokens":1}',
    '"model":"inner"',
    "data: [DONE]\n\n",
    '"content":"x"',
    "[DONE]",
    "\r\n\r\n",
    "🌊é",
    '"error"',
]


def event(**members: Any) -> bytes:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "inner"}
    return b"data: " + msgspec.json.encode({**head, **members}) + b"\n\n"


def delta(text: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more)


def play(stream: bytes, cuts: list[int], *, include_usage: bool = False) -> tuple[bytes, EventFilter]:
    found = EventFilter("inner", "public", include_usage=include_usage, chat=True)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    shown = b""
    for start, end in pairwise(places):
        block = found.feed(stream[start:end])
        assert block == b"" or block.endswith(b"\n\n")
        shown += block
    return shown + found.finish(), found


def texts(shown: bytes) -> str:
    documents = [msgspec.json.decode(part[6:]) for part in shown.split(b"\n\n") if part]
    return "".join(choice["delta"].get("content", "") for document in documents for choice in document["choices"])


@given(
    words=st.lists(st.text(max_size=8) | st.sampled_from(TRICKY), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    place=st.integers(0, 8),
    crlf=st.booleans(),
    nulls=st.booleans(),
    done=st.booleans(),
    wanted=st.booleans(),
)
def test_however_it_is_cut(  # noqa: PLR0917 - hypothesis gives them by name
    words: list[str], cuts: list[int], place: int, crlf: bool, nulls: bool, done: bool, wanted: bool
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
    events = [delta(word, **({"usage": None} if nulls else {})) for word in words]
    if place < len(words):
        events[place] = delta(words[place], usage=usage)
    else:
        events.append(event(choices=[], usage=usage))
    stream = b"".join([*events, b"data: [DONE]\n\n" if done else b""])
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    whole, first = play(stream, [], include_usage=wanted)
    cut, second = play(stream, cuts, include_usage=wanted)
    assert whole == cut
    assert texts(cut) == "".join(words)
    assert first.report == second.report == {"usage": usage, "timings": None}
    assert second.deltas == sum(1 for word in words if word)
    assert second.done is done
    assert not second.failed
    assert second.upstream_id == "c1"
    assert b'"model":"inner"' not in cut
    assert cut.count(b'"model":"public"') == len(words)
    assert (b'"usage":null' in cut) == (wanted and nulls and any(i != place for i in range(len(words))))


def test_role_chunks_and_empty_deltas_are_no_tokens_and_reasoning_is() -> None:
    stream = (
        event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        + event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
        + event(choices=[{"index": 0, "delta": {"content": "a"}}])
        + event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}])
        + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    )
    assert play(stream, [])[1].deltas == 3
    spaced = stream.replace(b'":', b'": ').replace(b",", b", ")
    assert play(spaced, list(range(0, len(spaced), 5)))[1].deltas == 3


def test_an_error_event_ends_it_and_is_not_shown() -> None:
    shown, found = play(delta("a") + b'data: {"error":{"message":"CUDA out of memory"}}\n\n', [])
    assert found.failed
    assert b"CUDA" not in shown
    assert play(delta("a") + b"error: something\n\n", [])[1].failed is False  # no JSON, no known form: passed on


def test_an_event_without_end_is_given_up() -> None:
    found = EventFilter("m", "m", include_usage=False, chat=True)
    for _ in range(TAIL_MAX // 65536 + 2):
        assert found.feed(b"x" * 65536) == b""
    assert found.overflow
    assert len(found.tail) <= TAIL_MAX


def test_text_completions_count_their_own_member() -> None:
    found = EventFilter("m", "m", include_usage=False, chat=False)
    found.feed(b'data: {"id":"a","choices":[{"index":0,"text":"x"},{"index":1,"text":""}]}\n\n')
    assert found.deltas == 1


def test_the_usage_chunk_of_ours() -> None:
    chunk = usage_chunk({"id": "c", "object": "o", "created": 1}, "public", {"prompt_tokens": 1, "cost": "0.1"})
    assert msgspec.json.decode(chunk[6:]) == {
        "id": "c",
        "object": "o",
        "created": 1,
        "model": "public",
        "choices": [],
        "usage": {"prompt_tokens": 1, "cost": "0.1"},
    }


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_usage_is_found_among_other_lines_of_an_event() -> None:
    """Servers write ``event:``, ``id:`` and comments beside the data; usage is kept back all the same."""
    closing = event(choices=[], usage=USAGE)
    for around in (b"id: 7\n" + closing, b"event: message\nid: 7\n" + closing, b": ping\n" + closing):
        stream = b"event: message\n" + delta("hi") + around + b"data: [DONE]\n\n"
        for cut in range(len(stream)):
            shown, found = play(stream, [cut])
            assert found.report is not None
            assert found.report["usage"] == USAGE
            assert shown == b"event: message\n" + delta("hi").replace(b'"inner"', b'"public"')
            assert found.upstream_id == "c1"


def test_usage_in_one_event_over_two_data_lines_is_found_without_its_end() -> None:
    shown, found = play(b'id: 1\ndata: {"choices":[],\ndata: "usage":' + msgspec.json.encode(USAGE) + b"}", [])
    assert found.report is not None
    assert found.report["usage"] == USAGE
    assert shown.strip() == b""


def test_a_null_inside_a_choice_does_not_hide_the_usage_beside_it() -> None:
    chunk = event(choices=[{"index": 0, "delta": {"content": "a"}, "usage": None}], usage=USAGE)
    shown, found = play(chunk, [])
    assert found.report is not None
    assert found.report["usage"] == USAGE
    assert texts(shown) == "a"
