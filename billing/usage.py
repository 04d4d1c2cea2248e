"""Usage of a tenant, summed from the rollup, in days of the tenant's own time zone."""

from datetime import date, datetime, time, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from billing import queries
from core.errors import ErrorKind, PlatformError
from core.money import Currency

DAYS_MAX = 400


class DayUsage(msgspec.Struct, frozen=True):
    """One model on one day. Tokens are disjoint parts; `amount_pico` is exact."""

    day: date
    model: str
    currency: Currency
    requests: int
    completed: int
    input_uncached: int
    input_cached: int
    input_cache_write: int
    output: int
    reasoning: int
    amount_pico: int
    min_charge_pico: int = 0  # part of the amount: what minimum charges add
    rerated_pico: int = 0  # by how much re-ratings changed the amount since


async def by_day_and_model(
    session: AsyncSession,
    tenant_id: UUID,
    start: date,
    end: date,
    *,
    time_zone: str = "UTC",
    project_id: UUID | None = None,
) -> list[DayUsage]:
    """Return usage from the day `start` to the day `end`, both included, as far as it is posted (≤ 1 s behind).

    Raises:
        PlatformError: INVALID_RANGE: the end is before the start, more than 400 days, or no such time zone.
    """
    if not 0 <= (end - start).days < DAYS_MAX:
        raise PlatformError(
            "INVALID_RANGE",
            ErrorKind.INVALID,
            f"The range goes from a day to the same or a later one, over {DAYS_MAX} days at most.",
        )
    try:
        zone = ZoneInfo(time_zone)
    except (KeyError, ValueError, OSError) as error:
        raise PlatformError(
            "INVALID_RANGE", ErrorKind.INVALID, f"There is no time zone {time_zone[:64]!r}.", param="time_zone"
        ) from error
    rows = await queries.usage_by_day_and_model(
        session,
        tenant_id,
        zone=time_zone,
        start=datetime.combine(start, time.min, zone),
        end=datetime.combine(end + timedelta(days=1), time.min, zone),
        project_id=project_id,
    )
    return [
        DayUsage(
            row.day,
            row.model,
            Currency(row.currency),
            int(row.requests),
            int(row.completed or 0),
            int(row.input_uncached),
            int(row.input_cached),
            int(row.input_cache_write),
            int(row.output),
            int(row.reasoning),
            int(row.amount_pico),
            int(row.min_charge_pico),
            int(row.rerated_pico),
        )
        for row in rows
    ]
