"""Rating in SQL, for looking at millions of events at once: the same amounts as `pricing.charge`, which a test checks."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from billing.types import PriceSchedule

# A relation of unit prices, for a statement with the parameters that `schedule_values` gives.
SCHEDULES = """
    unnest(CAST(:tenant AS uuid[]), CAST(:model AS uuid[]), CAST(:tier AS smallint[]), CAST(:version AS uuid[]),
        CAST(:currency AS text[]), CAST(:input AS numeric[]), CAST(:cached AS numeric[]),
        CAST(:cache_write AS numeric[]), CAST(:output AS numeric[]), CAST(:reasoning AS numeric[]),
        CAST(:request AS numeric[]), CAST(:proportional AS boolean[]))
        AS s (tenant, model, tier, version, currency, input, cached, cache_write, output, reasoning, request,
              proportional)
"""


def amount_of(e: str) -> str:
    """Return the expression of what a row of usage, named `e`, comes to at the unit prices of a row named `s`."""
    return f"""(CASE
        WHEN {e}.outcome NOT IN ('completed', 'client_abort') THEN 0
        WHEN {e}.outcome = 'client_abort' AND {e}.output + {e}.reasoning = 0 THEN 0
        WHEN {e}.input_uncached + {e}.input_cached + {e}.input_cache_write + {e}.output + {e}.reasoning = 0 THEN 0
        ELSE {e}.input_uncached * s.input + {e}.input_cached * s.cached + {e}.input_cache_write * s.cache_write
             + {e}.output * s.output + {e}.reasoning * s.reasoning + s.request END)"""


def schedule_values(rated: Sequence[tuple[UUID, UUID, UUID, PriceSchedule]]) -> Mapping[str, list[Any]]:
    """Return the parameters of `SCHEDULES`: what usage of a tenant, model and price version is rated at."""
    found = [s for *_, s in rated]
    return {
        "tenant": [tenant for tenant, *_ in rated],
        "model": [model for _, model, *_ in rated],
        "version": [version for *_, version, _ in rated],
        "tier": [int(s.tier) for s in found],
        "currency": [s.currency.value for s in found],
        "input": [s.input for s in found],
        "cached": [s.cached_input for s in found],
        "cache_write": [s.cache_write for s in found],
        "output": [s.output for s in found],
        "reasoning": [s.reasoning for s in found],
        "request": [s.request for s in found],
        "proportional": [is_proportional(s) for s in found],
    }


def is_proportional(s: PriceSchedule) -> bool:
    """Whether an amount is only so much a token, so that sums of usage can be rated like usage."""
    return not s.request
