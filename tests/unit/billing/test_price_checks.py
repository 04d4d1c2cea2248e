"""What is said about a list of prices before it is published: differences, mistakes, and what is odd."""

from uuid import UUID

import msgspec
import pytest

from billing.price_checks import PriceChange, changes, check_given, warnings
from billing.price_table import VersionPrices
from billing.types import Meter, PriceDiscount, PriceItem
from core.errors import PlatformError
from core.money import Currency
from core.tiers import Tier
from tests.factories import billing as make

TENANT = UUID(int=5)
GOOD = {"input": "2", "cached_input": "0.2", "output": "6"}


def codes(before: list[PriceItem], after: list[PriceItem]) -> list[tuple[str, str]]:
    """The code of each warning, and its message behind the first colon or from where it speaks of prices."""
    prices = VersionPrices(UUID(int=1), Currency.USD, after)
    return [(one.code, one.message) for one in warnings(before, after, prices)]


def at(items: list[PriceItem], above: int) -> list[PriceItem]:
    return [msgspec.structs.replace(item, above_tokens=above) for item in items]


def test_a_good_list_has_no_warnings() -> None:
    tiers = [
        *make.items({"input": "1", "cached_input": "0.1", "output": "3"}, tier=Tier.BATCH),
        *make.items(GOOD),
        *at(make.items({"input": "4", "cached_input": "0.4", "output": "9"}), 200_000),
        *make.items({"input": "3", "output": "9"}, tier=Tier.PRIORITY),
        *make.items({"input": "1.9"}, tenant_id=TENANT),
    ]
    assert codes([], tiers) == []
    assert codes(tiers, tiers) == []


ODD = {
    "CACHED_ABOVE_INPUT": ({"input": "1.5", "cached_input": "1.6", "output": "6"}, [], "cached input is dearer than"),
    "TIER_ORDER": (
        GOOD,
        make.items({"input": "2.1", "cached_input": "0.1", "output": "1"}, tier=Tier.BATCH),
        "input, cache_write is dearer than in tier standard",
    ),
    "OWN_ABOVE_LIST": (
        GOOD,
        make.items({"output": "7"}, tenant_id=TENANT),
        "output, reasoning is dearer than the list",
    ),
    "STEP_CHEAPER": (
        GOOD,
        at(make.items({"input": "1", "cached_input": "0.2", "output": "6"}), 9),
        "input, cache_write is cheaper above 9 input tokens",
    ),
    "LARGE_CHANGE": (GOOD | {"output": "60.01"}, [], "goes from 6.000000 to 60.010000"),
    "LARGE_CHANGE down": (GOOD | {"cached_input": "0.019999"}, [], "goes from 0.200000 to 0.019999"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_is_named(case: str) -> None:
    listed, more, says = ODD[case]
    ((found, message),) = codes(make.items(GOOD), [*make.items(listed), *more])
    assert found == case.split(maxsplit=1)[0]
    assert says in message


def test_a_tier_or_contract_that_is_gone_is_named() -> None:
    before = [*make.items(GOOD), *make.items(GOOD, tier=Tier.BATCH), *make.items({"input": "1"}, tenant_id=TENANT)]
    found = codes(before, make.items(GOOD))
    assert [code for code, _ in found] == ["DROPPED", "DROPPED"]
    assert "tier batch has no price any more" in found[0][1]
    assert "its own prices no more" in found[1][1]
    plan = VersionPrices(UUID(int=1), Currency.USD, make.items(GOOD))
    of_plan = warnings([*make.items(GOOD), *make.items(GOOD, tier=Tier.BATCH)], make.items(GOOD), plan, for_plan=True)
    assert [one.message.rpartition("so that ")[2] for one in of_plan] == ["the list's holds."]


def test_differences_name_each_price_that_changed() -> None:
    before = [*make.items(GOOD), *make.items({"input": "1.5"}, tenant_id=TENANT)]
    after = [*make.items({"input": "2", "cached_input": "0.3", "output": "6", "request": "0.01"})]
    standard = (make.MODEL, Tier.STANDARD)
    assert changes(before, after) == [
        PriceChange(*standard, Meter.CACHED_INPUT, None, 0, 200_000, 300_000),
        PriceChange(*standard, Meter.REQUEST, None, 0, None, 10_000_000_000),
        PriceChange(*standard, Meter.INPUT, TENANT, 0, 1_500_000, None),
    ]
    assert changes(after, after) == []


def test_a_call_that_contradicts_itself_is_refused() -> None:
    one = make.items({"input": "2"})
    off = PriceDiscount(TENANT, make.MODEL, Tier.STANDARD, 1)
    for items, discounts, says in (
        ([*one, *make.items({"input": "3"})], [], "input price of model .* twice"),
        (at(make.items({"min_charge": "1"}), 5), [], "per request: it has no step"),
        (at(one, -5), [], "a number of input tokens"),
        ([], [off, off], "discount of model .* twice"),
    ):
        with pytest.raises(PlatformError, match=says):
            check_given(items, discounts, "USD")
    check_given([*one, *at(one, 5), *make.items({"input": "2"}, tenant_id=TENANT)], [off], "USD")
