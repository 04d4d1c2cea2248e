"""What an engine's own refusal tells a caller, in words that help a caller. Pure."""

import re
from collections.abc import Mapping
from typing import Any

# llama.cpp says 500 to these, which are the caller's.
CALLERS_FAULTS = ("Failed to parse tools", "Failed to parse messages")
# Of its own workings, and of what was sent: neither helps a caller.
_INTERNAL = re.compile(
    r"\[json\.exception\.[\w.]+\] ?|; (?:tools|messages) = .*"
    r"|Unable to generate parser for this template\. |Automatic parser generation failed: ",
    re.DOTALL,
)


def blames_caller(status: int, error: Mapping[str, Any]) -> bool:
    """Say whether a refusal is about what the caller sent."""
    if status in {400, 404, 413, 422}:
        return True
    message = error.get("message")
    return status == 500 and type(message) is str and message.startswith(CALLERS_FAULTS)


def explain(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return message and parameter of an engine's error object, either may be empty.

    llama.cpp advises to enlarge the context, which is not the caller's to do, and names its exceptions.
    """
    tokens, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if error.get("type") == "exceed_context_size_error" and type(tokens) is int and type(context) is int:
        return f"The prompt has {tokens} tokens; this model takes {context}, prompt and answer together.", None
    message, param = error.get("message"), error.get("param")
    return (_INTERNAL.sub("", message) if type(message) is str else ""), (param if type(param) is str else None)
