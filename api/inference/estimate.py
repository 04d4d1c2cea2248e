"""How much a request can use at most, before anybody has counted. Pure."""

from api.inference.request import Call
from catalog.types import ServedModel
from core.usage import TokenUsage


def prompt_tokens(call: Call, model: ServedModel) -> int:
    """An upper bound: a token is at least so many bytes of the body, and one prompt at most fills the context.

    What is not text may be far more tokens than bytes (an image named by its URL): the whole context.
    """
    if not call.text_only:
        return model.context_max
    ratio = model.bytes_per_token_milli if call.single_text else 1000
    bound, most = -(-call.size * 1000 // (ratio or 1)) + model.template_tokens, model.context_max
    return most if bound > most and call.single_text and call.endpoint != "embeddings" else bound


def output_tokens(call: Call, model: ServedModel) -> int:
    """What the engine is allowed to generate, over all choices."""
    return max_tokens(call, model) * call.choices


def impossible(usage: TokenUsage, call: Call, model: ServedModel) -> str:
    """Return why an engine's report cannot be true of this call; an empty string when it can."""
    most, tokens = model.context_max, usage.input_total
    if tokens > most and tokens > call.size + model.template_tokens:
        return "more input tokens than the context and the body allow"
    tokens = usage.output_total
    if tokens > most and tokens > most * call.choices:
        return "more output tokens than the context allows"
    return ""


def max_tokens(call: Call, model: ServedModel) -> int:
    """What the engine is told, for one choice."""
    return call.max_tokens or min(model.default_max_tokens, model.context_max)
