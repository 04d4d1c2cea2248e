"""The one place that reads an engine's usage report: vendor totals in, disjoint parts out. Pure.

In every shape read here ``prompt_tokens`` includes what came from the cache and ``completion_tokens`` includes
reasoning. A part that is negative, not a whole number or larger than its total makes the whole report unusable: it goes
to quarantine and is never billed automatically.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from catalog.types import EngineKind
from core.usage import TokenUsage

# Engines whose `usage` counts only the first of several choices (or prompts) of one request, so that it cannot be
# billed exactly: the gateway refuses ``n`` above 1 and several prompts for them. The engine contract shows it.
CHOICES_UNCOUNTED = frozenset({EngineKind.LLAMA_CPP})
TOKENS_MAX = 10**9  # of one generation; no engine has such a context

# Where engines write a part, best source first: (object inside the report or "" for itself, member).
CACHED = (
    ("prompt_tokens_details", "cached_tokens"),  # OpenAI, vLLM, SGLang, llama.cpp
    ("", "prompt_cache_hit_tokens"),
    ("timings", "cache_n"),  # llama.cpp
)
CACHE_WRITE = (("prompt_tokens_details", "cache_write_tokens"), ("prompt_tokens_details", "cache_creation_tokens"))
REASONING = (("completion_tokens_details", "reasoning_tokens"), ("", "reasoning_tokens"))
_PARTED = frozenset(container or member for container, member in (*CACHED, *CACHE_WRITE, *REASONING))


_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _PlainUsage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: int
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class _PlainAnswer(msgspec.Struct, gc=False):
    id: Annotated[str, msgspec.Meta(max_length=200)]
    usage: _PlainUsage
    timings: None = None


_plain = msgspec.json.Decoder(_PlainAnswer).decode


class UsageRejected(ValueError):  # noqa: N818 - it says what happened to the report
    """The report cannot be billed. `reason` is safe to store: it names members and counts, never text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def plain_usage(answer: bytes) -> tuple[str, TokenUsage] | None:
    """Return id and usage of an answer that reports tokens in and out and nothing else, as `normalise` would.

    None for any other, also for one that is wrong: most answers are such, and need not be taken apart.
    """
    try:
        found = _plain(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    usage = found.usage
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return (found.id, TokenUsage(prompt, 0, 0, completion)) if usage.total_tokens == prompt + completion else None


def normalise(raw: Mapping[str, Any]) -> TokenUsage:
    """Return the disjoint parts of a usage report.

    Args:
        raw: a ``usage`` object, or the body or event that holds ``usage`` (and perhaps ``timings``).

    Raises:
        UsageRejected: a part is missing, negative, not a whole number, or does not fit into its total.
    """
    usage = raw.get("usage")
    report = usage if type(usage) is dict and raw.get("timings") is None else _report(raw)
    prompt, completion = _totals(report)
    if _PARTED.isdisjoint(report):
        return TokenUsage(prompt, 0, 0, completion, 0)
    cached = _part(report, CACHED)
    written = _part(report, CACHE_WRITE)
    reasoning = _part(report, REASONING)
    if cached + written > prompt:
        raise UsageRejected(f"cached_tokens {cached} + cache writes {written} exceed prompt_tokens {prompt}")
    if reasoning > completion:
        raise UsageRejected(f"reasoning_tokens {reasoning} exceed completion_tokens {completion}")
    return TokenUsage(
        input_uncached=prompt - cached - written,
        input_cached=cached,
        input_cache_write=written,
        output=completion - reasoning,
        reasoning=reasoning,
    )


def _report(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage object with llama.cpp's timings beside its members."""
    usage, timings = raw.get("usage"), raw.get("timings")
    if usage is None:
        return raw
    if type(usage) is not dict and not isinstance(usage, Mapping):
        raise UsageRejected("usage is not an object")
    return {**usage, "timings": timings} if timings is not None and isinstance(timings, Mapping) else usage


def _totals(report: Mapping[str, Any]) -> tuple[int, int]:
    """Return prompt and completion tokens, as the engine totals them."""
    totals: tuple[Any, Any, Any] = (
        report.get("prompt_tokens"),
        report.get("completion_tokens"),
        report.get("total_tokens"),
    )
    prompt, completion, total = totals
    whole = type(prompt) is type(completion) is type(total) is int and total == prompt + completion
    if whole and 0 <= prompt <= TOKENS_MAX and 0 <= completion <= TOKENS_MAX:
        return prompt, completion  # nearly every report; what is odd is looked at one by one
    prompt = _count(report, "prompt_tokens")
    if prompt is None:
        return _timed_totals(report)
    completion = _count(report, "completion_tokens") or 0
    total = _count(report, "total_tokens")
    if total is not None and total != prompt + completion:
        raise UsageRejected(f"total_tokens {total} is not prompt_tokens {prompt} + completion_tokens {completion}")
    return prompt, completion


def _timed_totals(report: Mapping[str, Any]) -> tuple[int, int]:
    """Totals of llama.cpp's native answers, which report only timings."""
    timings = report.get("timings")
    fresh = _count(timings, "prompt_n") if isinstance(timings, Mapping) else None
    if fresh is None or not isinstance(timings, Mapping):
        raise UsageRejected("prompt_tokens is missing")
    return fresh + (_count(timings, "cache_n") or 0), _count(timings, "predicted_n") or 0


def _part(report: Mapping[str, Any], places: tuple[tuple[str, str], ...]) -> int:
    """Return the count at the first place that has one; 0 when none has."""
    for container, member in places:
        holder = report.get(container) if container else report
        if holder is None:
            continue
        if (type(holder) is dict or isinstance(holder, Mapping)) and (count := _count(holder, member)) is not None:
            return count
    return 0


def _count(holder: Mapping[str, Any], member: str) -> int | None:
    """Return a count of tokens, None when absent or null."""
    value = holder.get(member)
    if value is None:
        return None
    if type(value) is not int:
        raise UsageRejected(f"{member} is not a whole number")
    if not 0 <= value <= TOKENS_MAX:
        raise UsageRejected(f"{member} {value} is not a possible count")
    return value
