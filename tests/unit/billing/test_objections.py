"""Usage that cannot be is not billed: times that are out of range would open a month that never closes."""

from datetime import UTC, date, datetime

import msgspec
import pytest

from billing import assess
from billing.price_table import VersionPrices
from core.ids import new_uuid
from core.money import Currency
from tests.factories import billing as make

TODAY = date(2026, 11, 30)


@pytest.mark.parametrize(
    ("at", "taken"),
    [
        (datetime(2024, 1, 1, tzinfo=UTC), True),  # the first day that events are kept of
        (datetime(2023, 12, 31, 23, 59, 59, tzinfo=UTC), False),
        (datetime(2026, 12, 2, 23, 59, 59, tzinfo=UTC), True),  # a gateway's clock may be ahead by up to two days
        (datetime(2026, 12, 3, tzinfo=UTC), False),
        (datetime(1970, 1, 1, tzinfo=UTC), False),
        (datetime(9999, 12, 31, tzinfo=UTC), False),
    ],
)
def test_an_event_is_of_a_time_that_can_be(at: datetime, taken: bool) -> None:
    tenant_id = new_uuid()
    prices = VersionPrices(new_uuid(), Currency.USD, make.items(make.PRICES))
    right = make.event(tenant_id, make.schedule(prices, tenant_id), event_id=make.uuid7_at(1_790_000_000))
    now_us = int(datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()) * 1_000_000
    right = msgspec.structs.replace(right, admitted_at_us=now_us, ended_at_us=now_us)
    assert assess.objection(right, prices, Currency.USD, TODAY.toordinal()) == ""
    us = int(at.timestamp()) * 1_000_000
    for field in ("admitted_at_us", "ended_at_us"):
        said = assess.objection(msgspec.structs.replace(right, **{field: us}), prices, Currency.USD, TODAY.toordinal())
        assert ("out of range" in said) is not taken
