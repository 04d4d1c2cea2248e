"""The body of an inference request: parsed once, every member known by name, ours taken out.

The rest is kept as JSON text, and what we add for the engine is put before it (`for_engine`). No member can stand there
twice: duplicates are refused at every depth, and what we add was taken out before.

Nearly every body is a chat of plain texts (`PlainChat`), which the decoder checks by itself. Any other, and any that is
wrong, goes the long way, member by member, which also finds the words for its sender.
"""

from types import MappingProxyType
from typing import Annotated, Any, TypedDict

import msgspec
import orjson
from msgspec import UNSET, Meta, UnsetType

from api.inference import errors, places
from core.tiers import Tier
from engine.client import Parts

SAMPLING = frozenset(
    {"temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"}
)
# Taken out of what the engine sees: we answer for them ourselves.
OURS_FOR_CALLERS = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("service_tier", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "max_wait"),
    }
)
ALLOWED = MappingProxyType(
    {
        "chat": OURS_FOR_CALLERS
        | SAMPLING
        | {
            *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "top_logprobs"),
            *("reasoning_effort", "functions", "function_call"),
        },
        "completions": (OURS_FOR_CALLERS - {"max_completion_tokens"})
        | SAMPLING
        | {"prompt", "suffix", "echo", "best_of"},
        "embeddings": frozenset({"model", "input", "encoding_format", "dimensions", "user", "max_wait"}),
        "tokenize": frozenset({"model", "messages", "prompt", "tools", "add_special_tokens"}),
    }
)
_OURS_OF = MappingProxyType(
    {endpoint: {name: name in OURS_FOR_CALLERS for name in allowed} for endpoint, allowed in ALLOWED.items()}
)
# Known to engines, set by the platform alone.
PLATFORM_ONLY = frozenset(
    {"priority", "cache_salt", "vllm_xargs", "kv_transfer_params", "id_slot", "cache_prompt", "request_id", "lora"}
)
MUST_HAVE = MappingProxyType({"chat": "messages", "completions": "prompt", "embeddings": "input", "tokenize": ""})
# OpenAI's words, and those of our prices and receipts
TIERS = MappingProxyType(
    {
        "priority": Tier.PRIORITY,
        "default": Tier.STANDARD,
        "flex": Tier.BATCH,
        "standard": Tier.STANDARD,
        "batch": Tier.BATCH,
    }
)
BRACKETS_MAX = 100_000  # decoding millions of empty lists would hold the loop for more than a second
MAX_CHOICES = 128
MAX_WAIT_S = 1e6
NAME_MAX = 512  # characters of a conversation's name that tell it from others
LONG = 2048  # bytes; from here on it matters how quotes are counted
TEXT_PARTS = ("text", "refusal")  # of a message's content; any other is an image, a sound or a file

Count = Annotated[int, Meta(ge=1, le=2**31)] | UnsetType


class _Text(TypedDict):
    """A message that is nothing but text; the decoder drops its other members, and their quotes are missed."""

    role: str
    content: str


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool | UnsetType = UNSET
    include_obfuscation: bool | UnsetType = UNSET


class PlainChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A chat as most are. Members of ours come first, so that in its JSON what the engine gets stands in one piece."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | UnsetType = UNSET
    stream_options: _StreamOptions | UnsetType = UNSET
    max_tokens: Count = UNSET
    max_completion_tokens: Count = UNSET
    messages: Annotated[list[_Text], Meta(min_length=1)]
    temperature: Any = UNSET
    top_p: Any = UNSET
    stop: Any = UNSET
    seed: Any = UNSET
    presence_penalty: Any = UNSET
    frequency_penalty: Any = UNSET
    response_format: Any = UNSET


_NO_MESSAGES = b'"messages":[]'
_decode = msgspec.json.Decoder().decode
_decode_plain = msgspec.json.Decoder(PlainChat).decode
_encode = msgspec.json.Encoder().encode


class Call(msgspec.Struct, frozen=True, gc=False):
    """What the gateway must know of a request. From `begin` on, `body` is the engine's JSON but for our own members."""

    endpoint: str
    model: str
    body: bytes
    size: int  # bytes of the caller's body
    stream: bool = False
    include_usage: bool = False
    max_tokens: int = 0  # 0: not named
    max_tokens_name: str = "max_tokens"
    choices: int = 1  # answers generated: n, or best_of, times the number of prompts
    single_text: bool = True  # one prompt, written as text: its tokens are at most its bytes over the measured ratio
    tier: Tier | None = None  # None: the key's tier
    text_only: bool = True  # False: with an image, a sound or a file, whose tokens its bytes here do not bound
    begin: int = 1
    max_wait: float | None = None  # seconds the caller waits at most for a place or a wake; None: not named
    conversation: str = ""  # which one it belongs to, as the caller names it

    def for_engine(self, ours: bytes) -> Parts:
        """The JSON the engine gets, in parts: a body may be large. `ours` is ``"name":value,…`` without braces."""
        if self.body == b"{}":
            return b"{", ours, b"}"
        return b"{", ours, b",", memoryview(self.body)[self.begin :]


def parse(endpoint: str, raw: bytes) -> Call:
    """Read the request body.

    Raises:
        PlatformError: kind invalid, naming the place or the parameter.
    """
    if endpoint == "chat" and len(raw) <= BRACKETS_MAX and (call := _plain(raw)) is not None:
        return call
    members = _members(raw)
    ours, own = _OURS_OF[endpoint], {}
    for name in tuple(members):
        mine = ours.get(name)
        if mine:
            own[name] = members.pop(name)
        elif mine is None:
            raise _unknown(endpoint, members)
    body = _encode(members)
    text = _encode(own)
    if b"\\" in raw:
        same = _quotes(raw) == _quotes(body) + _quotes(text)
    elif len(raw) > LONG:  # nothing in it is escaped: every quote delimits a string
        same = _count_quotes(raw) == _count_quotes(body) + _count_quotes(text)
    else:
        same = raw.count(b'"') == body.count(b'"') + text.count(b'"')
    if not same:
        raise errors.invalid(places.twice(raw))
    return _call(endpoint, members, own, body, len(raw))


def _plain(raw: bytes) -> Call | None:
    """Return the call of a chat of plain texts; None for any other body, also for one that will be refused."""
    try:
        chat = _decode_plain(raw)
        body = _encode(chat) if len(raw) <= LONG else _encode_long(chat)
    except (msgspec.MsgspecError, orjson.JSONEncodeError, UnicodeError, RecursionError):
        return None
    if b"\\" in raw:
        same = _quotes(raw) == _quotes(body)
    elif len(raw) > LONG:
        same = _count_quotes(raw) == _count_quotes(body)
    else:
        same = raw.count(b'"') == body.count(b'"')
    if not same:
        return None
    stream, options, name, most = chat.stream is True, chat.stream_options, "max_tokens", chat.max_tokens
    if options is not UNSET and not stream:
        return None
    if chat.max_completion_tokens is not UNSET:
        name, most = "max_completion_tokens", chat.max_completion_tokens
    return Call(
        "chat",
        chat.model,
        body,
        len(raw),
        stream,
        options is not UNSET and options.include_usage is True,
        most if most is not UNSET else 0,
        name,
        begin=body.find(b'"messages":'),
    )


def _encode_long(chat: PlainChat) -> bytes:
    """As `_encode`; orjson writes long texts ten times as fast, and knows no structs."""
    messages, chat.messages = chat.messages, []
    return _encode(chat).replace(_NO_MESSAGES, b'"messages":' + orjson.dumps(messages), 1)


def _members(raw: bytes) -> dict[str, Any]:
    if len(raw) > BRACKETS_MAX and raw.count(b"[") + raw.count(b"{") > BRACKETS_MAX:
        raise errors.invalid(f"The body has more than {BRACKETS_MAX:,} lists and objects.")
    try:
        members = _decode(raw)
    except RecursionError:
        raise errors.invalid("The body is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.invalid(places.malformed(raw, str(error))) from None
    if type(members) is not dict:
        raise errors.invalid("The body must be a JSON object.")
    return members


def _quotes(text: bytes) -> int:
    """Count the quotes that delimit strings. Decoding drops all but the last of equal names, and with each its two."""
    if b"\\" not in text:
        return _count_quotes(text)
    if b"\\\\" in text:
        text = text.replace(b"\\\\", b"")
    return _count_quotes(text) - text.count(b'\\"')


def _count_quotes(text: bytes) -> int:
    """Count them all. Where they are rare, as in prose, cutting them out is many times quicker than `bytes.count`."""
    rare = len(text) // 64
    cut = len(text) - len(text.replace(b'"', b"", rare))
    return cut if cut < rare else text.count(b'"')


def _unknown(endpoint: str, members: dict[str, Any]) -> Exception:
    name = min(members.keys() - ALLOWED[endpoint])
    shown = name[:64]
    if name in PLATFORM_ONLY:
        return errors.invalid(f"The parameter {shown!r} is set by the platform and cannot be sent.", shown)
    return errors.invalid(f"The parameter {shown!r} is not supported here.", shown)


def _call(endpoint: str, members: dict[str, Any], own: dict[str, Any], body: bytes, size: int) -> Call:
    must = MUST_HAVE[endpoint]
    if must and not members.get(must):
        raise errors.invalid(f"The parameter {must!r} is missing or empty.", must)
    model = own.get("model")
    if type(model) is not str or not model or len(model) > 256:
        raise errors.invalid("The parameter 'model' must name a model.", "model")
    if members.get("tools") is not None:
        _check_tools(members["tools"])
    if endpoint in {"embeddings", "tokenize"}:
        single_text = _is_text(members.get("input", ""))
        return Call(endpoint, model, body, size, choices=0, single_text=single_text, max_wait=_max_wait(own))
    conversation = own.get("prompt_cache_key") or own.get("safety_identifier") or own.get("user")
    name = "max_completion_tokens" if own.get("max_completion_tokens") is not None else "max_tokens"
    stream = "stream" in own and _boolean(own, "stream")
    choices, single_text = (1, True) if endpoint == "chat" else _prompts(members["prompt"])
    if "n" in members or "best_of" in members:
        choices *= max(_whole(members, "n", 1, MAX_CHOICES), _whole(members, "best_of", 1, MAX_CHOICES))
    if own.get("store"):
        raise errors.invalid("Answers are not stored here: 'store' must be false.", "store")
    return Call(
        endpoint,
        model,
        body,
        size,
        stream,
        "stream_options" in own and _include_usage(own, stream=stream),
        _whole(own, name, 0, 2**31),
        name,
        choices,
        single_text,
        _tier(own["service_tier"]) if "service_tier" in own else None,
        endpoint != "chat" or _text_only(members["messages"]),
        max_wait=_max_wait(own),
        conversation=conversation[:NAME_MAX] if type(conversation) is str else "",
    )


def _boolean(members: dict[str, Any], name: str) -> bool:
    value = members.get(name)
    if value is None or value is False:
        return False
    if value is True:
        return True
    raise errors.invalid(f"The parameter {name!r} must be true or false.", name)


def _whole(members: dict[str, Any], name: str, default: int, top: int) -> int:
    value = members.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= top:
        raise errors.invalid(f"The parameter {name!r} must be a whole number from 1 to {top}.", name)
    return value


def _max_wait(own: dict[str, Any]) -> float | None:
    value = own.get("max_wait")
    if value is None:
        return None
    if type(value) not in {int, float} or not 0 <= value < MAX_WAIT_S:
        raise errors.invalid("The parameter 'max_wait' is a number of seconds, at least 0.", "max_wait")
    return float(value)


def _include_usage(own: dict[str, Any], *, stream: bool) -> bool:
    options = own.get("stream_options")
    if options is None:
        return False
    if type(options) is not dict or not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise errors.invalid("The parameter 'stream_options' takes 'include_usage' only.", "stream_options")
    if not stream:
        raise errors.invalid("The parameter 'stream_options' needs 'stream': true.", "stream_options")
    return _boolean(options, "include_usage")


def _prompts(prompt: Any) -> tuple[int, bool]:
    """How many prompts, and whether it is one text: a list of token ids counts a token per two bytes, not per ratio."""
    if type(prompt) is str:
        return 1, True
    if type(prompt) is not list:
        raise errors.invalid("The parameter 'prompt' must be a string or a list.", "prompt")
    return (1, False) if type(prompt[0]) is int else (len(prompt), False)


def _check_tools(tools: Any) -> None:
    """Engines differ in what they make of a tool without its parts; some call it a failure of their own."""
    if type(tools) is not list:
        raise errors.invalid("The parameter 'tools' must be a list.", "tools")
    for place, tool in enumerate(tools):
        kind = tool.get("type") if type(tool) is dict else None
        if type(kind) is not str:
            raise errors.invalid(f"The tool {place} must be an object with a 'type'.", "tools")
        function = tool.get("function")
        if kind == "function" and not (type(function) is dict and type(function.get("name")) is str):
            raise errors.invalid(f"The tool {place} must have a 'function' with a 'name'.", "tools")


def _text_only(messages: Any) -> bool:
    """Whether every token of the prompt stands in the body as text."""
    if type(messages) is not list:
        return True
    for message in messages:
        if type(message) is not dict:
            continue
        content = message.get("content")
        if type(content) is list and any(type(part) is dict and part.get("type") not in TEXT_PARTS for part in content):
            return False
        if message.get("audio"):  # an earlier answer, by its id
            return False
    return True


def _is_text(value: Any) -> bool:
    return type(value) is str


def _tier(name: Any) -> Tier | None:
    if name is None or name == "auto":
        return None
    tier = TIERS.get(name) if type(name) is str else None
    if tier is None:
        raise errors.invalid(
            "The parameter 'service_tier' is auto, priority, default (or standard) or flex (or batch).", "service_tier"
        )
    return tier
