"""What a caller may send, and what the engine then gets."""

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.inference import estimate
from api.inference.request import PLATFORM_ONLY, parse
from core.errors import ErrorKind, PlatformError
from core.tiers import Tier
from tests.factories.gateway import served_model

MESSAGES = [{"role": "user", "content": "hi"}]


def body(**members: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": MESSAGES, **members})


def refused(raw: bytes, endpoint: str = "chat") -> PlatformError:
    with pytest.raises(PlatformError) as caught:
        parse(endpoint, raw)
    assert caught.value.kind is ErrorKind.INVALID
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x","content":"y"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"logit_bias":{"1":1,"1":2}}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a","text":"a"}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1,"\\u006e":2}',
        b'{"model":"m","messages":[{"role":"user","content":"\\\\"}],"seed":1,"seed":1}',
        b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}],"stream":false}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":{"a":{"b":"c","b":"d"}}}',
    ],
)
def test_a_member_that_stands_twice_is_refused_at_every_depth(raw: bytes) -> None:
    assert "twice" in refused(raw).message


def test_the_member_that_stands_twice_is_named() -> None:
    message = refused(b'{"model":"m","messages":[{"role":"user","content":"x","content":"y"}]}').message
    assert "'content' stands twice" in message


json_texts = st.text(max_size=12) | st.sampled_from(['"', "\\", '\\"', '"model":"x"', "\n", "é🌊", "\\u0022", "{}"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | json_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_texts, inner, max_size=3),
    max_leaves=12,
)


@given(
    content=json_values,
    extra=st.dictionaries(st.sampled_from(["logit_bias", "stop", "seed"]), json_values),
    spaces=st.booleans(),
)
def test_any_json_is_passed_on_unchanged_but_for_ours(content: Any, extra: dict[str, Any], spaces: bool) -> None:
    document = {"model": "m", "messages": [{"role": "user", "content": content}], **extra}
    raw = orjson.dumps(document, option=orjson.OPT_INDENT_2 if spaces else None)
    call = parse("chat", raw)
    sent = msgspec.json.decode(b"".join(call.for_engine(b'"model":"inner","max_tokens":5')))
    assert sent == {**document, "model": "inner", "max_tokens": 5}


chat_texts = st.lists(st.builds("".join, st.tuples(json_texts, st.sampled_from(["", "fox " * 600]))), min_size=1)


@given(
    texts=chat_texts,
    ours=st.dictionaries(st.sampled_from(["stream", "max_tokens", "max_completion_tokens"]), st.just(1)),
    extra=st.dictionaries(st.sampled_from(["stop", "seed", "temperature", "response_format", "n"]), json_values),
    spaces=st.booleans(),
)
def test_any_chat_of_texts_is_passed_on_unchanged_but_for_ours(
    texts: list[str], ours: dict[str, Any], extra: dict[str, Any], spaces: bool
) -> None:
    """Short and long, with members that make it unusual and without."""
    extra = {**extra, "n": 2} if "n" in extra else extra
    ours = {**ours, "stream": True} if "stream" in ours else ours
    messages = [{"role": "user", "content": text} for text in texts]
    document = {"model": "m", "messages": messages, **ours, **extra}
    raw = orjson.dumps(document, option=orjson.OPT_INDENT_2 if spaces else None)
    call = parse("chat", raw)
    sent = msgspec.json.decode(b"".join(call.for_engine(b'"model":"inner","max_tokens":5')))
    assert sent == {"messages": messages, **extra, "model": "inner", "max_tokens": 5}
    assert (call.stream, call.choices, call.text_only, call.size) == (
        "stream" in ours,
        extra.get("n", 1),
        True,
        len(raw),
    )
    assert call.max_tokens_name == ("max_completion_tokens" if "max_completion_tokens" in ours else "max_tokens")


@given(texts=chat_texts, twice=st.sampled_from(["role", "content", "name", "top", "ours"]), place=st.integers(0, 50))
def test_a_chat_of_texts_with_a_member_twice_is_refused(texts: list[str], twice: str, place: int) -> None:
    messages = [orjson.dumps({"role": "user", "content": text}) for text in texts]
    if twice in {"role", "content", "name"}:
        at = place % len(messages)
        again = b'{"%b":"x",' % twice.encode() * (2 if twice == "name" else 1)
        messages[at] = again.replace(b",{", b",") + messages[at][1:]
    more = {"top": b',"seed":1,"seed":1', "ours": b',"stream":true,"stream":true'}.get(twice, b"")
    raw = b'{"model":"m","messages":[%b]%b}' % (b",".join(messages), more)
    assert "twice" in refused(raw).message


@given(content=json_values, place=st.integers(0, 1))
def test_any_json_with_a_member_twice_is_refused(content: Any, place: int) -> None:
    inner = orjson.dumps({"k": content})
    twice = inner[:-1] + b"," + inner[1:]
    raw = (
        b'{"model":"m","messages":[%b]}' % twice
        if place
        else b'{"model":"m","messages":[[%b]],"stop":[{"a":%b}]}' % (inner, twice)
    )
    assert "twice" in refused(raw).message


@pytest.mark.parametrize("name", sorted(PLATFORM_ONLY))
def test_what_is_ours_is_refused_by_name(name: str) -> None:
    error = refused(body(**{name: 1}))
    assert error.param == name
    assert "set by the platform" in error.message


@pytest.mark.parametrize("endpoint", ["chat", "completions", "embeddings", "tokenize"])
def test_what_is_not_known_is_refused_by_name(endpoint: str) -> None:
    raw = orjson.dumps({"model": "m", "messages": MESSAGES, "prompt": "x", "input": "x", "use_beam_search": True})
    members = {"chat": {"prompt", "input"}, "completions": {"messages", "input"}, "embeddings": {"messages", "prompt"}}
    error = refused(raw, endpoint)
    assert error.param in {"use_beam_search", *members.get(endpoint, {"input"})}
    assert f"{error.param!r}" in error.message


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model":"m",}', "byte 13"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"model":"m","messages":NaN}', "byte 24"),
        (b'{"model":"\xff","messages":[1]}', "UTF-8 at line 1, column 11"),
        (b'{"model":"m",\n"messages":[1]}\n x', "line 3, column 2"),
        (b'{"model":"m",\n"messages":[1', "line 2, column 14"),
        (b'{"model":"m","messages":' + b"[" * 99_000, "deeply"),
        (b'{"messages":[1]}', "'model'"),
        (b'{"model":"","messages":[1]}', "'model'"),
        (b'{"model":7,"messages":[1]}', "'model'"),
        (b'{"model":"m"}', "'messages'"),
        (b'{"model":"m","messages":[]}', "'messages'"),
    ],
)
def test_what_cannot_be_read_names_the_place(raw: bytes, word: str) -> None:
    assert word in refused(raw).message


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("stream", "yes"),
        ("stream", 1),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "12"),
        ("max_completion_tokens", 0),
        ("stream_options", []),
        ("stream_options", {"include_usage": True}),  # without stream
        ("service_tier", "gold"),
        ("service_tier", 1),
        ("store", True),
    ],
)
def test_members_that_we_read_must_make_sense(member: str, value: Any) -> None:
    assert refused(body(**{member: value})).param == member


def test_stream_options_takes_what_it_takes() -> None:
    assert refused(body(stream=True, stream_options={"continuous_usage_stats": True})).param == "stream_options"
    assert parse("chat", body(stream=True, stream_options={"include_usage": True})).include_usage
    assert not parse("chat", body(stream=True, stream_options={"include_usage": False})).include_usage
    assert not parse("chat", body(stream=None, stream_options=None, max_tokens=None, n=None)).stream


@pytest.mark.parametrize(
    ("tier", "found"),
    [
        *(("auto", None), ("default", Tier.STANDARD), ("standard", Tier.STANDARD)),
        *(("priority", Tier.PRIORITY), ("flex", Tier.BATCH), ("batch", Tier.BATCH)),
    ],
)
def test_service_tiers(tier: str, found: Tier | None) -> None:
    assert parse("chat", body(service_tier=tier)).tier is found


def test_what_we_answer_for_ourselves_does_not_reach_the_engine() -> None:
    call = parse("chat", body(user="u", metadata={"a": "b"}, store=False, service_tier="auto", temperature=0))
    assert msgspec.json.decode(b"".join(call.for_engine(b'"model":"x"'))) == {
        "messages": MESSAGES,
        "temperature": 0,
        "model": "x",
    }


def test_max_completion_tokens_is_the_newer_name() -> None:
    call = parse("chat", body(max_tokens=5, max_completion_tokens=7))
    assert (call.max_tokens, call.max_tokens_name) == (7, "max_completion_tokens")


@pytest.mark.parametrize(
    ("prompt", "members", "choices", "single"),
    [
        ("x", {}, 1, True),
        ("x", {"n": 3}, 3, True),
        ("x", {"n": 2, "best_of": 5}, 5, True),
        (["a", "b"], {"n": 2}, 4, False),
        ([1, 2, 3], {}, 1, False),
        ([[1, 2], [3]], {}, 2, False),
    ],
)
def test_choices_of_completions(prompt: Any, members: dict[str, Any], choices: int, single: bool) -> None:
    call = parse("completions", orjson.dumps({"model": "m", "prompt": prompt, **members}))
    assert (call.choices, call.single_text) == (choices, single)


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("messages", "text_only"),
    [
        ("not a list", True),
        ([7, {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": "x"}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, 7]}], True),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}], False),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], False),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "audio": {"id": "audio_1"}}], False),
    ],
)
def test_what_is_not_text_may_fill_the_context(messages: Any, text_only: bool) -> None:
    """An image of 1,024 x 1,024 pixels named by a URL of 25 bytes is 765 tokens of OpenAI's."""
    call = parse("chat", body(messages=messages))
    assert call.text_only is text_only
    bound = estimate.prompt_tokens(call, served_model("m", "http://x", context_max=100_000))
    assert bound == (call.size if text_only else 100_000)


def test_estimates_are_upper_bounds() -> None:
    model = served_model("m", "http://x", context_max=1000, default_max_tokens=50, template_tokens=7)
    call = parse("chat", body())
    assert estimate.prompt_tokens(call, model) == call.size + 7
    assert estimate.output_tokens(call, model) == 50
    assert estimate.prompt_tokens(parse("chat", body(stop="x" * 5000)), model) == 1000  # one prompt fills the context
    several = parse("completions", orjson.dumps({"model": "m", "prompt": ["x" * 900] * 4, "max_tokens": 3}))
    assert estimate.prompt_tokens(several, model) == several.size + 7  # each of the four may
    assert estimate.output_tokens(several, model) == 12
    measured = served_model("m", "http://x", context_max=100_000, bytes_per_token_milli=2500)
    assert estimate.prompt_tokens(call, measured) == -(-call.size * 10 // 25)
    ids = parse("completions", orjson.dumps({"model": "m", "prompt": list(range(10, 90))}))
    assert estimate.prompt_tokens(ids, measured) == ids.size  # token ids have no ratio
    assert estimate.output_tokens(parse("embeddings", b'{"model":"m","input":"x"}'), model) == 0


def test_a_body_of_a_million_empty_lists_is_refused_before_it_is_decoded() -> None:
    many = b'{"model":"m","messages":[' + b"[]," * 1_000_000 + b"1]}"
    with pytest.raises(PlatformError) as refused:
        parse("chat", many)
    assert "lists and objects" in refused.value.message
    vectors = b'{"model":"m","input":[' + b"[50000,50001]," * 2047 + b"[1]]}"
    assert parse("embeddings", vectors).model == "m"


@pytest.mark.parametrize("endpoint", ["chat", "tokenize"])
@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("x", "must be a list"),
        ([{}] * 3000, "The tool 0 "),
        ([{"type": "function", "function": {"name": "a"}}, 1], "The tool 1 "),
        ([{"type": "function"}], "'function' with a 'name'"),
        ([{"type": "function", "function": {"name": 5}}], "'function' with a 'name'"),
    ],
)
def test_tools_have_their_parts(tools: Any, words: str, endpoint: str) -> None:
    error = refused(body(tools=tools), endpoint)
    assert error.param == "tools"
    assert words in error.message


def test_tools_that_are_whole_are_passed_on() -> None:
    for tools in (None, [], [{"type": "function", "function": {"name": "a"}}], [{"type": "custom", "custom": {}}]):
        assert msgspec.json.decode(parse("chat", body(tools=tools)).body)["tools"] == tools
