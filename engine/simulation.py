"""What the engine simulator answers: a pure function of the request, so that a test can know the bill beforehand.

A request is steered by the model's name (``sim-n64-t20000-d10000``), by a directive anywhere in its prompt
(``[[sim n=64 t=20000 cached=10 fault=die at=5]]``), which wins, and by the process's defaults, which lose. Keys:

==============  ====================================================================================================
``n``           tokens to generate per choice, before ``max_tokens`` cuts it
``t``, ``d``    microseconds to the first token, and between tokens
``p``           prompt tokens (else a quarter of the prompt's bytes, rounded up, and 4 for each message)
``cached``      how many of them came from the cache
``reasoning``   how many of the generated tokens are reasoning; they come first
``fault``       ``refuse`` (500), ``busy`` (503), ``close`` (no answer), ``garbage`` (200, no JSON), and after ``at``
                tokens: ``die`` (connection cut), ``stall`` (nothing more), ``error`` (error event), ``exit`` (the
                process ends)
``usage``       ``final`` (own chunk without choices), ``choice`` (in the last chunk with choices), ``every`` (in all
                chunks), ``null`` (``null`` in all chunks, then final), ``middle`` (before the last delta), ``spaced``
                (``"usage" : {``), ``missing``, ``negative``, ``over`` (more cached than prompt)
``ids``         ``own``, ``null``, ``empty``, ``same``
``split``       bytes per write, to cut UTF-8 and lines apart; 0 writes whole events
``done``        ``0`` leaves out the final ``[DONE]``
``crlf``        ``1`` ends lines with CR LF
==============  ====================================================================================================
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

_NAME = re.compile(r"-([ntdp])(\d{1,9})(?=-|$)")
_DIRECTIVE = re.compile(r"\[\[sim ([^\]]{1,400})\]\]")
_TOKENS = ("tide ", "gate ", "é", "潮 ", "over ", "🌊", "sand, ", "and ", '"quoted" ', "line\n")
FAULTS = frozenset({"", "refuse", "busy", "close", "garbage", "die", "stall", "error", "exit"})
USAGES = frozenset({"final", "choice", "every", "null", "middle", "spaced", "missing", "negative", "over"})
IDS = frozenset({"own", "null", "empty", "same"})


class Plan(msgspec.Struct, frozen=True):
    """How one request is answered; see the module for the meaning of each field."""

    n: int = 16
    t: int = 0
    d: int = 0
    p: int = -1
    cached: int = 0
    reasoning: int = 0
    fault: str = ""
    at: int = 0
    usage: str = "final"
    ids: str = "own"
    split: int = 0
    done: int = 1
    crlf: int = 0


class Generation(msgspec.Struct, frozen=True):
    """A plan applied to a request."""

    plan: Plan
    prompt_tokens: int
    cached_tokens: int
    tokens: int  # per choice
    choices: int
    finish_reason: str

    @property
    def reasoning_tokens(self) -> int:
        return min(self.plan.reasoning, self.tokens)


def parse_plan(defaults: Plan, model: str, prompt: str) -> Plan:
    """Return the plan of a request; unknown keys and values raise ValueError, so that a typo is seen."""
    values: dict[str, Any] = {key: int(value) for key, value in _NAME.findall(model)}
    if found := _DIRECTIVE.search(prompt):
        for word in found[1].split():
            key, _, value = word.partition("=")
            values[key] = value if key in {"fault", "usage", "ids"} else int(value)
    unknown = set(values) - set(Plan.__struct_fields__)
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    plan = msgspec.structs.replace(defaults, **values)
    if plan.fault not in FAULTS or plan.usage not in USAGES or plan.ids not in IDS:
        raise ValueError("unknown fault, usage or ids")
    return plan


def prompt_texts(body: Mapping[str, Any]) -> list[str]:
    """Return the texts of a chat, completion or embedding request, in order."""
    if "messages" in body:
        return [_content_text(message.get("content")) for message in body["messages"]]
    prompt = body.get("prompt", body.get("input", ""))
    return [str(part) for part in prompt] if isinstance(prompt, list) else [str(prompt)]


def _content_text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def count_tokens(text: str) -> int:
    """Return the tokens of a text here: a quarter of its UTF-8 bytes, rounded up."""
    return -(-len(text.encode()) // 4)


def plan_generation(defaults: Plan, body: Mapping[str, Any]) -> Generation:
    """Return what this request will be answered with."""
    texts = prompt_texts(body)
    plan = parse_plan(defaults, str(body.get("model", "")), "\n".join(texts))
    prompt_tokens = plan.p
    if prompt_tokens < 0:
        per_message = 4 if "messages" in body else 0
        prompt_tokens = sum(count_tokens(text) + per_message for text in texts)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or plan.n
    tokens = min(plan.n, int(limit))
    return Generation(
        plan=plan,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(plan.cached, prompt_tokens),
        tokens=tokens,
        choices=int(body.get("n") or 1),
        finish_reason="length" if tokens < plan.n else "stop",
    )


def token_text(index: int) -> str:
    """Return the text of the token at this place of every answer."""
    return _TOKENS[index % len(_TOKENS)]


def answer_text(generation: Generation) -> tuple[str, str]:
    """Return reasoning and visible text of one choice."""
    cut = generation.reasoning_tokens
    return "".join(map(token_text, range(cut))), "".join(map(token_text, range(cut, generation.tokens)))


def usage_object(generation: Generation, dialect: str, generated: int) -> dict[str, Any]:
    """Return the `usage` that the engine reports after `generated` tokens over all choices."""
    prompt, cached = generation.prompt_tokens, generation.cached_tokens
    if generation.plan.usage == "negative":
        generated = -generated - 1
    if generation.plan.usage == "over":
        cached = prompt + 1
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if generation.reasoning_tokens:
        reasoning = min(generation.reasoning_tokens * generation.choices, max(generated, 0))
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    if dialect == "vllm" and not cached:
        usage["prompt_tokens_details"] = None
    return usage


def timings_object(generation: Generation, generated: int) -> dict[str, Any]:
    """Return llama.cpp's `timings` for the same counts."""
    cached = generation.cached_tokens
    return {"cache_n": cached, "prompt_n": generation.prompt_tokens - cached, "predicted_n": generated}


def upstream_id(generation: Generation, prefix: str, sequence: int) -> str | None:
    """Return the engine's own id of the answer, good or bad as the plan says."""
    return {"null": None, "empty": "", "same": f"{prefix}-same"}.get(generation.plan.ids, f"{prefix}-{sequence}")


def encode_event(payload: Mapping[str, Any], plan: Plan) -> bytes:
    """Return one SSE event."""
    data = orjson.dumps(payload)
    if plan.usage == "spaced":
        data = data.replace(b'"usage":', b'"usage" : ')
    end = b"\r\n\r\n" if plan.crlf else b"\n\n"
    return b"data: " + data + end


def pieces(data: bytes, size: int) -> list[bytes]:
    """Cut `data` into writes of `size` bytes; 0 leaves it whole."""
    return [data[start : start + size] for start in range(0, len(data), size)] if size else [data]
