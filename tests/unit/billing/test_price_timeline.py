"""At any instant there is exactly one price, and later publications do not change what was priced before."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from billing import pricing
from billing.price_table import NEVER_US, PriceTable, VersionPrices
from billing.types import PriceItem, PriceSchedule
from core.money import Currency, format_pico
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make

TENANT, OTHER = UUID(int=5), UUID(int=6)
CHANGE_US = 1_794_787_200_000_000  # 2026-11-16T00:00:00Z


def version(number: int, items: list[PriceItem]) -> VersionPrices:
    return VersionPrices(UUID(int=number), Currency.USD, items)


def at(table: PriceTable, us: int, tenant_id: UUID = TENANT, tier: Tier = Tier.STANDARD) -> PriceSchedule | None:
    return table.schedule(make.MODEL, tier, Currency.USD, tenant_id, us)


def test_a_price_change_in_the_middle_of_a_month() -> None:
    """2.00 until 2026-11-16T00:00Z, then 1.60: 40M tokens before and 60M after are 80.00 and 96.00."""
    versions = [version(n, make.items({"input": price, "output": "6"})) for n, price in ((1, "2.00"), (2, "1.60"))]
    table = PriceTable(list(zip((0, CHANGE_US), versions, strict=True)), as_of_us=0)

    def billed(tokens: int, us: int) -> str:
        found = at(table, us)
        assert found is not None
        return format_pico(pricing.rate(TokenUsage(tokens), found))

    assert billed(40_000_000, CHANGE_US - 100_000) == "80.000000000000"  # admitted 23:59:59.9, whenever it ends
    assert billed(60_000_000, CHANGE_US) == "96.000000000000"  # admitted at exactly 00:00:00
    assert billed(40_000_000, CHANGE_US - 1) == "80.000000000000"
    assert table.next_change_us(Currency.USD, CHANGE_US - 1) == CHANGE_US
    assert table.next_change_us(Currency.USD, CHANGE_US) == NEVER_US


instants = st.integers(0, 20)
offers = st.tuples(st.sampled_from(Tier), st.sampled_from([None, TENANT]))
lists = st.dictionaries(offers, st.integers(1, 999), min_size=1)


def items_of(found: dict[tuple[Tier, UUID | None], int]) -> list[PriceItem]:
    return [
        item
        for (tier, tenant_id), price in found.items()
        for item in make.items({"input": f"{price}", "output": "1"}, tier=tier, tenant_id=tenant_id)
    ]


@given(st.dictionaries(instants, lists), st.tuples(st.integers(0, 20), lists), instants, st.sampled_from(Tier))
def test_there_is_one_price_at_any_instant_and_it_stays(
    published: dict[int, dict[tuple[Tier, UUID | None], int]],
    later: tuple[int, dict[tuple[Tier, UUID | None], int]],
    us: int,
    tier: Tier,
) -> None:
    """Against the plainest model: the last list that began, in it the tenant's own price, else the list's."""
    versions = [(begin, version(begin, items_of(found))) for begin, found in published.items()]
    table = PriceTable(versions, as_of_us=0)
    begun = [begin for begin in published if begin <= us]
    for tenant_id in (TENANT, OTHER):
        found = at(table, us, tenant_id, tier)
        right = None
        if begun:
            listed = published[max(begun)]
            right = listed.get((tier, tenant_id), listed.get((tier, None)))
        assert (found and found.input) == (right and right * 1_000_000)
        assert found is None or found.price_version_id == UUID(int=max(begun))
        ahead = max((us, *published)) + 1 + later[0]  # what takes effect after all of them
        more = PriceTable([*versions, (ahead, version(99, items_of(later[1])))], as_of_us=0)
        assert at(more, us, tenant_id, tier) == found
