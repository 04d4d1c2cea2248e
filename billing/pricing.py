"""Rating, pure: token counts times unit prices, in whole pico. Nothing is rounded here, because nothing has to be.

A long-context step prices a whole request by its total input tokens; a minimum lifts what is charged for one.
"""

from billing.types import Outcome, PriceSchedule, PriceStep
from core.money import MAX_EVENT_PICO
from core.usage import TokenUsage

# The endings a tenant pays for. Ours that went wrong (error, timeout, preemption) cost the tenant nothing.
COMPLETED, CLIENT_ABORT = Outcome.COMPLETED, Outcome.CLIENT_ABORT


def rate(usage: TokenUsage, s: PriceSchedule) -> int:
    """Return the price of `usage` in pico, without a minimum. The parts are disjoint, so every token is counted once.

    Raises:
        ValueError: a part is negative, or the amount is beyond what one event may be (9,000,000 units).
    """
    fresh, cached, written = usage.input_uncached, usage.input_cached, usage.input_cache_write
    output, reasoning = usage.output, usage.reasoning
    bits = fresh | cached | written | output | reasoning  # below 0 when any part is, 0 when all are
    if bits <= 0:
        if bits:
            raise ValueError("a token count is negative")
        return 0
    unit = step_of(s, fresh + cached + written) if s.steps else s
    pico = (
        fresh * unit.input
        + cached * unit.cached_input
        + written * unit.cache_write
        + output * unit.output
        + reasoning * unit.reasoning
        + s.request
    )
    if pico > MAX_EVENT_PICO:
        raise ValueError("the amount is beyond what one event may be")
    return pico


def step_of(s: PriceSchedule, input_tokens: int) -> PriceSchedule | PriceStep:
    """Return the unit prices of a request with so many input tokens: the last step it exceeds, or those without one."""
    unit: PriceSchedule | PriceStep = s
    for step in s.steps:
        if input_tokens <= step.above:
            break
        unit = step
    return unit


def charge(usage: TokenUsage, s: PriceSchedule, outcome: Outcome) -> int:
    """Return what the tenant pays, in pico: `rate`, at least the minimum, where the ending is billed; else 0.

    A call that its client left before anything was generated produced nothing and costs nothing, and neither does one
    that used nothing.

    Raises:
        ValueError: as `rate`; also for endings that are not billed, since a negative part is wrong anywhere.
    """
    pico = rate(usage, s)
    if outcome is not COMPLETED and (outcome is not CLIENT_ABORT or usage.output_total == 0):
        return 0
    if pico < s.minimum and (pico or usage.input_total or usage.output_total):
        return s.minimum
    return pico


def min_charge(charged: int, usage: TokenUsage, s: PriceSchedule) -> int:
    """Return the part of a `charge` that lifts it to the minimum; the rest is the usage's own price. Pico."""
    return charged - rate(usage, s) if charged and charged == s.minimum else 0


def worst_case(s: PriceSchedule, input_tokens: int, output_tokens: int) -> int:
    """Return the most that such a call can cost, in pico.

    That is without a cache hit, every token of the dearest kind, at the dearest step it may reach with at most so many
    tokens, and at least the minimum.
    """
    dearest_input, dearest_output = s.dearest_input, s.dearest_output
    for step in s.steps:
        if input_tokens <= step.above:
            break
        dearest_input = max(dearest_input, step.input, step.cached_input, step.cache_write)
        dearest_output = max(dearest_output, step.output, step.reasoning)
    pico = input_tokens * dearest_input + output_tokens * dearest_output + s.request
    if pico < s.minimum:
        return s.minimum
    return pico
