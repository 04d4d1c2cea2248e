"""Rating, pure: token counts times unit prices, in whole pico. Nothing is rounded here, because nothing has to be."""

from billing.types import Outcome, PriceSchedule
from core.money import MAX_EVENT_PICO
from core.usage import TokenUsage

BILLED_OUTCOMES = frozenset({Outcome.COMPLETED, Outcome.CLIENT_ABORT})
"""The endings a tenant pays for. Ours that went wrong (error, timeout, preemption) cost the tenant nothing."""


def rate(usage: TokenUsage, s: PriceSchedule) -> int:
    """Return the price of `usage` in pico. The parts are disjoint, so every token is counted once.

    Raises:
        ValueError: a part is negative, or the amount is beyond what one event may be (9,000,000 units).
    """
    fresh, cached, written = usage.input_uncached, usage.input_cached, usage.input_cache_write
    output, reasoning = usage.output, usage.reasoning
    if min(fresh, cached, written, output, reasoning) < 0:
        raise ValueError("a token count is negative")
    if not (fresh or cached or written or output or reasoning):
        return 0
    pico = (
        fresh * s.input
        + cached * s.cached_input
        + written * s.cache_write
        + output * s.output
        + reasoning * s.reasoning
        + s.request
    )
    if pico > MAX_EVENT_PICO:
        raise ValueError("the amount is beyond what one event may be")
    return pico


def charge(usage: TokenUsage, s: PriceSchedule, outcome: Outcome) -> int:
    """Return what the tenant pays, in pico: `rate` where the ending is billed, else 0.

    A call that its client left before anything was generated produced nothing and costs nothing.

    Raises:
        ValueError: as `rate`; also for endings that are not billed, since a negative part is wrong anywhere.
    """
    pico = rate(usage, s)
    if outcome not in BILLED_OUTCOMES:
        return 0
    if outcome is Outcome.CLIENT_ABORT and usage.output_total == 0:
        return 0
    return pico


def worst_case(s: PriceSchedule, prompt_tokens: int, output_tokens: int) -> int:
    """Return the most that such a call can cost, in pico: no cache hit, every token of the dearest kind."""
    dearest_input = max(s.input, s.cached_input, s.cache_write)
    dearest_output = max(s.reasoning, s.output)
    return prompt_tokens * dearest_input + output_tokens * dearest_output + s.request
