"""What an engine's own refusal tells a caller, in words that help a caller. Pure."""

from collections.abc import Mapping
from typing import Any


def explain(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return message and parameter of an engine's error object, either may be empty.

    llama.cpp advises to enlarge the context, which is not the caller's to do.
    """
    tokens, context = error.get("n_prompt_tokens"), error.get("n_ctx")
    if error.get("type") == "exceed_context_size_error" and type(tokens) is int and type(context) is int:
        return f"The prompt has {tokens} tokens; this model takes {context}, prompt and answer together.", None
    message, param = error.get("message"), error.get("param")
    return (message if type(message) is str else ""), (param if type(param) is str else None)
