"""What was refused, on the wire."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import Query
from sqlalchemy.ext.asyncio import AsyncSession

from api.schemas import Count, Instant, Output
from api.services import Services
from core.errors import ErrorKind, PlatformError
from core.ids import IdKind, format_id
from tenants import refusals

SPAN_DEFAULT = timedelta(days=1)
SPAN_MAX = timedelta(days=35)
ROWS_MAX = 5000

Since = Annotated[Instant | None, Query(description="From this instant on; by default a day before `until`.")]
Until = Annotated[Instant | None, Query(description="Before this instant; by default now.")]


class RefusalOut(Output):
    """Requests for one model that met one limit in one hour. `mode` hard: they were refused; else they were served."""

    hour: datetime
    model: str
    code: str
    level: str
    metric: str
    limit_model: str
    mode: str
    requests: Count
    input_tokens: Count
    output_tokens: Count
    sample_request_id: str


class RefusalList(Output):
    """Newest hour first, at most 5,000 rows. Tokens are estimates at the door."""

    since: datetime
    until: datetime
    items: list[RefusalOut]


async def refusal_list(
    session: AsyncSession, services: Services, tenant_id: UUID, since: datetime | None, until: datetime | None
) -> RefusalList:
    """Return a tenant's refusals by hour.

    Raises:
        PlatformError: INVALID_RANGE.
    """
    end = until or services.clock.now()
    begin = since or end - SPAN_DEFAULT
    if not timedelta() < end - begin <= SPAN_MAX:
        message = f"The range goes forward, over {SPAN_MAX.days} days at most."
        raise PlatformError("INVALID_RANGE", ErrorKind.INVALID, message, param="since")
    found = await refusals.by_hour(session, tenant_id, begin, end, limit=ROWS_MAX)
    items = [
        RefusalOut(
            hour=one.hour,
            model=one.model,
            code=one.code,
            level=one.level,
            metric=one.metric,
            limit_model=one.limit_model,
            mode=one.mode,
            requests=one.requests,
            input_tokens=one.input_tokens,
            output_tokens=one.output_tokens,
            sample_request_id=format_id(IdKind.GENERATION, one.sample_request_id),
        )
        for one in found
    ]
    return RefusalList(since=begin, until=end, items=items)
