"""Which of the generations under one idempotency key is billed."""

from random import Random
from uuid import UUID

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from billing.idempotency import WINDOW_US, Known, decide
from billing.types import PriceSchedule, UsageEvent
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier
from tests.factories import billing as make

TENANTS = (UUID(int=1), UUID(int=2))
SCHEDULE = PriceSchedule(UUID(int=9), Currency.USD, Tier.STANDARD, 2, 1, 2, 6, 6)
HOUR_US = 3_600_000_000


def _event(tenant: UUID, digest: bytes, hour: int) -> UsageEvent:
    event = make.event(tenant, SCHEDULE, event_id=new_uuid())
    return msgspec.structs.replace(event, idempotency=digest, admitted_at_us=hour * HOUR_US)


events = st.lists(
    st.builds(_event, st.sampled_from(TENANTS), st.sampled_from([b"a" * 16, b"b" * 16]), st.integers(1, 80)),
    min_size=1,
    max_size=12,
)


def _post(batches: list[list[UsageEvent]]) -> dict[UUID, Known]:
    rows: dict[UUID, Known] = {}
    for batch in batches:
        for row in decide(rows.values(), batch):
            assert row.event_id not in rows
            rows[row.event_id] = row
    return rows


@given(events, st.randoms(), st.integers(1, 5))
def test_in_any_order_and_batches_no_two_of_a_day_are_billed_and_none_is_lost(
    offered: list[UsageEvent], random: Random, size: int
) -> None:
    """P11, and P6 of what repeats: deliveries may be repeated, reordered and split."""
    stream = offered + random.choices(offered, k=len(offered))
    random.shuffle(stream)
    rows = _post([stream[at : at + size] for at in range(0, len(stream), size)])
    assert rows.keys() == {event.id for event in offered}
    billed = [row for row in rows.values() if row.repeat_of is None]
    for one in billed:
        for other in billed:
            same = one is not other and (one.tenant_id, one.digest) == (other.tenant_id, other.digest)
            assert not same or abs(one.admitted_us - other.admitted_us) >= WINDOW_US
    for row in rows.values():
        if row.repeat_of is not None:
            bill = rows[row.repeat_of]
            assert bill.repeat_of is None
            assert (bill.tenant_id, bill.digest) == (row.tenant_id, row.digest)
            assert abs(bill.admitted_us - row.admitted_us) < WINDOW_US


def test_a_day_later_the_key_means_another_request() -> None:
    first, soon, later = (_event(TENANTS[0], b"k" * 16, hour) for hour in (10, 33, 34))
    rows = _post([[first, soon, later]])
    assert [rows[event.id].repeat_of for event in (first, soon, later)] == [None, first.id, None]


def test_two_tenants_never_meet() -> None:
    mine, theirs = (_event(tenant, b"k" * 16, 10) for tenant in TENANTS)
    assert [row.repeat_of for row in decide([], [mine, theirs])] == [None, None]
