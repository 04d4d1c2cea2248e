"""Every line of every re-rating, rated again at the prices it was made with."""

from typing import Any
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import verify_rerating_queries as queries
from billing.rerating_post import Prices, amount_at, schedule_of
from billing.rerating_rate import Amount
from billing.types import Meter


async def first_misrated(session: AsyncSession, prices: Prices) -> tuple[str, str] | None:
    """Return row and problem of the first line that is not what its prices give. Memory holds a page."""
    tenant_id = event_id = UUID(int=0)
    seq = 0
    steps: list[tuple[UUID, frozenset[Meter]]] = []
    while page := await queries.lines_after(session, tenant_id, event_id, seq):
        for row in page:
            if (row.tenant_id, row.event_id) != (tenant_id, event_id):
                steps = []
            tenant_id, event_id, seq = row.tenant_id, row.event_id, row.seq
            steps.append((row.right_version, frozenset(map(Meter, row.meters or ()))))
            right = _right(row, steps, prices)
            if right != Amount(row.to_pico, row.to_min_pico):
                given = "no price" if right is None else f"{right.whole} with a minimum charge of {right.min_charge}"
                return f"{event_id} seq {seq}", f"it says {row.to_pico} with {row.to_min_pico}, its prices give {given}"
    return None


def _right(row: Row[Any], steps: list[tuple[UUID, frozenset[Meter]]], prices: Prices) -> Amount | None:
    s = schedule_of(row, row.tenant_id, steps, prices)
    return None if s is None else amount_at(row, s)
