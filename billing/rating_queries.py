"""Rating in SQL, for millions of events at once: the same amounts as `pricing.charge`, which a test checks."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from billing.types import PriceSchedule, PriceStep

BIGINT_MAX = 2**63 - 1

# A relation of unit prices, for a statement with the parameters that `schedule_values` gives. A schedule is a row per
# step: it holds for more than `above` input tokens, up to `up_to`.
SCHEDULES = """
    unnest(CAST(:tenant AS uuid[]), CAST(:model AS uuid[]), CAST(:tier AS smallint[]), CAST(:version AS uuid[]),
        CAST(:above AS bigint[]), CAST(:up_to AS bigint[]), CAST(:input AS numeric[]), CAST(:cached AS numeric[]),
        CAST(:cache_write AS numeric[]), CAST(:output AS numeric[]), CAST(:reasoning AS numeric[]),
        CAST(:request AS numeric[]), CAST(:minimum AS numeric[]), CAST(:proportional AS boolean[]))
        AS s (tenant, model, tier, version, above, up_to, input, cached, cache_write, output, reasoning, request,
              minimum, proportional)
"""


def is_rated_at(e: str) -> str:
    """Return the condition that a row of usage, named `e`, is rated at the row of `SCHEDULES` named `s`."""
    return f"""s.tenant = {e}.tenant_id AND s.model = {e}.model_id AND s.tier = {e}.tier
        AND s.version = {e}.price_version_id
        AND {e}.input_uncached + {e}.input_cached + {e}.input_cache_write > s.above
        AND {e}.input_uncached + {e}.input_cached + {e}.input_cache_write <= s.up_to"""


def amount_of(e: str) -> str:
    """Return the expression of what a row of usage, named `e`, comes to at the unit prices of a row named `s`."""
    return f"""(CASE
        WHEN {e}.outcome NOT IN ('completed', 'client_abort') THEN 0
        WHEN {e}.outcome = 'client_abort' AND {e}.output + {e}.reasoning = 0 THEN 0
        WHEN {e}.input_uncached + {e}.input_cached + {e}.input_cache_write + {e}.output + {e}.reasoning = 0 THEN 0
        ELSE greatest({e}.input_uncached * s.input + {e}.input_cached * s.cached + {e}.input_cache_write * s.cache_write
                      + {e}.output * s.output + {e}.reasoning * s.reasoning + s.request, s.minimum) END)"""


def schedule_values(rated: Sequence[tuple[UUID, UUID, UUID, PriceSchedule]]) -> dict[str, list[Any]]:
    """Return the parameters of `SCHEDULES`: what usage of a tenant, model and price version is rated at."""
    bands = [(tenant, model, version, s, *band) for tenant, model, version, s in rated for band in _bands(s)]
    units = [band[6] for band in bands]
    schedules = [band[3] for band in bands]
    return {
        "tenant": [band[0] for band in bands],
        "model": [band[1] for band in bands],
        "version": [band[2] for band in bands],
        "tier": [int(s.tier) for s in schedules],
        "above": [band[4] for band in bands],
        "up_to": [band[5] for band in bands],
        "input": [unit.input for unit in units],
        "cached": [unit.cached_input for unit in units],
        "cache_write": [unit.cache_write for unit in units],
        "output": [unit.output for unit in units],
        "reasoning": [unit.reasoning for unit in units],
        "request": [s.request for s in schedules],
        "minimum": [s.minimum for s in schedules],
        "proportional": [is_proportional(s) for s in schedules],
    }


def _bands(s: PriceSchedule) -> list[tuple[int, int, PriceSchedule | PriceStep]]:
    starts = [-1, *(step.above for step in s.steps)]
    return list(zip(starts, [*starts[1:], BIGINT_MAX], (s, *s.steps), strict=True))


def is_proportional(s: PriceSchedule) -> bool:
    """Whether an amount is only so much a token, so that sums of usage can be rated like usage."""
    return not (s.request or s.minimum or s.steps)
