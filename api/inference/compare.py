"""How like two answers to one request are. Pure; the texts are not kept."""

from typing import Any

import msgspec

from knative.arm_figures import Sample

TEXT_MAX = 400  # characters of each that the edit distance looks at: a millisecond or two of this process
UNLIKE = 0.5  # edit distance above which answers that are not equal are called unlike

_decode = msgspec.json.Decoder().decode


def compare(live: str, shadow: str, live_tokens: int, shadow_tokens: int) -> Sample:
    """Return the figures of two answers."""
    exact = live == shadow
    edit = 0.0 if exact else edit_part(live[:TEXT_MAX], shadow[:TEXT_MAX])
    return Sample(exact, json_equal(live, shadow), round(edit, 4), len(live), len(shadow), live_tokens, shadow_tokens)


def is_unlike(sample: Sample) -> bool:
    """Neither equal, nor equal as JSON, nor nearly the same."""
    return not sample.exact and not sample.json_equal and sample.edit > UNLIKE


def json_equal(live: str, shadow: str) -> bool | None:
    """Return whether both are the same JSON object or list, whatever their spaces and order; None: live is none."""
    wanted = _document(live)
    return None if wanted is None else _document(shadow) == wanted


def _document(text: str) -> Any:
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def edit_part(one: str, other: str) -> float:
    """Return the least number of characters to insert, delete or replace, over the length of the longer one."""
    longer = max(len(one), len(other))
    return distance(one, other) / longer if longer else 0.0


def distance(one: str, other: str) -> int:
    """Return the Levenshtein distance, by one whole number with a bit per character (Myers 1999, Hyyrö 2003)."""
    if not one or not other:
        return len(one) + len(other)
    mask, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    places: dict[str, int] = {}
    for place, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | 1 << place
    plus, minus, found = mask, 0, len(one)
    for letter in other:
        same = places.get(letter, 0)
        diagonal = (((same & plus) + plus) ^ plus) | same | minus
        up, down = minus | ~(diagonal | plus) & mask, plus & diagonal
        found += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & mask, down << 1 & mask
        plus, minus = down | ~(diagonal | up) & mask, up & diagonal
    return found


def text_of_answer(body: bytes) -> str:
    """Return what a buffered answer says, with the arguments of its tools; empty when it says nothing."""
    try:
        (choice, *_) = _decode(body)["choices"]
        return _words(choice.get("message") or choice)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError, ValueError, AttributeError):
        return ""


def text_of_stream(events: bytes) -> str:
    """Return what a stream of whole events says, put together."""
    parts: list[str] = []
    for event in events.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        try:
            parts += [_words(choice.get("delta") or choice) for choice in _decode(event[6:]).get("choices", ())]
        except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError, AttributeError):
            continue
    return "".join(parts)


def _words(message: dict[str, Any]) -> str:
    words = [message.get("content") or message.get("text") or ""]
    for tool in message.get("tool_calls") or ():
        function = tool.get("function") or {}
        words.append(f"{function.get('name') or ''}{function.get('arguments') or ''}")
    return "".join(word for word in words if type(word) is str)


def output_tokens(body: bytes) -> int:
    """Return how many tokens a buffered answer says that it has; 0 when it does not say."""
    try:
        found = _decode(body)["usage"]["completion_tokens"]
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError):
        return 0
    return found if type(found) is int else 0
