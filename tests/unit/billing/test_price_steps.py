"""Long-context steps, minimum charges and discounts, against values worked by hand and an independent library."""

from decimal import Decimal
from uuid import UUID

import msgspec
import pytest
from genai_prices import Usage
from genai_prices.types import ModelPrice, TieredPrices
from genai_prices.types import Tier as TheirStep
from hypothesis import given
from hypothesis import strategies as st

from billing import pricing, receipts
from billing.price_table import VersionPrices, discounted, off_ppm, percent_text, resolve
from billing.types import Meter, Outcome, PriceDiscount, PriceItem, PriceSchedule, PriceStep
from core.errors import PlatformError
from core.money import Currency, format_pico, parse_pico
from core.tiers import Tier
from core.usage import TokenUsage
from tests.factories import billing as make

TENANT, OTHER = UUID(int=5), UUID(int=6)
LONG = 200_000
LISTED = {"input": "1.25", "cached_input": "0.125", "output": "10"}
UNITS = ("input", "cached_input", "cache_write", "output", "reasoning")
ABOVE = {"input": "2.50", "cached_input": "0.25", "output": "15"}


def prices(
    listed: dict[str, str], steps: dict[int, dict[str, str]] | None = None, tenant_id: UUID | None = None
) -> list[PriceItem]:
    """Items of a list and of its steps, by the threshold of each."""
    items = make.items(listed, tenant_id=tenant_id)
    for above, meters in (steps or {}).items():
        items += [msgspec.structs.replace(item, above_tokens=above) for item in make.items(meters, tenant_id=tenant_id)]
    return items


def schedule(items: list[PriceItem], tenant_id: UUID = OTHER) -> PriceSchedule:
    return make.schedule(VersionPrices(UUID(int=1), Currency.USD, items), tenant_id)


# ---- steps: by hand, at 1.25 / 0.125 / 10 up to 200,000 input tokens and 2.50 / 0.25 / 15 above


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ((200_000, 0, 0, 1000, 0), "0.26"),  # 0.25 + 0.01: exactly the threshold is not above it
        ((200_001, 0, 0, 1000, 0), "0.5150025"),  # 0.5000025 + 0.015: the whole request, output too
        ((1, 200_000, 0, 0, 0), "0.0500025"),  # what was cached counts towards the threshold: 200,000 at 0.25
        ((0, 100_000, 100_001, 0, 10), "0.2751525"),  # cache write at 2.50, cached at 0.25, reasoning at 15
        ((199_999, 0, 0, 500_000, 0), "5.24999875"),  # output does not count
    ],
)
def test_a_step_prices_the_whole_request_by_its_total_input(parts: tuple[int, ...], right: str) -> None:
    s = schedule(prices(LISTED, {LONG: ABOVE}))
    assert pricing.rate(TokenUsage(*parts), s) == parse_pico(right)


def test_the_last_step_that_is_exceeded_holds() -> None:
    s = schedule(
        prices({"input": "1", "output": "1"}, {100: {"input": "2", "output": "1"}, 10: {"input": "5", "output": "1"}})
    )
    assert [step.above for step in s.steps] == [10, 100]
    found = [pricing.rate(TokenUsage(n), s) for n in (10, 11, 100, 101)]
    assert found == [10_000_000, 55_000_000, 500_000_000, 202_000_000]  # a cheaper step makes more input cost less


def test_a_step_names_every_meter_that_has_a_price_without_it() -> None:
    with pytest.raises(PlatformError, match="no cached_input price above 200,000 input tokens"):
        schedule(prices(LISTED, {LONG: {"input": "2.50", "output": "15"}}))
    with pytest.raises(PlatformError, match="no output price above 200,000 input tokens"):
        schedule(prices({"input": "1", "output": "1"}, {LONG: {"input": "2.50"}}))


def test_a_tenants_own_price_is_of_its_step() -> None:
    items = [*prices(LISTED, {LONG: ABOVE}), *prices({}, {LONG: {"input": "2.00"}}, TENANT)]
    mine, theirs = schedule(items, TENANT), schedule(items)
    assert (mine.input, mine.steps[0].input, mine.steps[0].output) == (1_250_000, 2_000_000, 15_000_000)
    assert theirs.steps[0].input == 2_500_000


# ---- the hold


@pytest.mark.parametrize(
    ("tokens", "right"),
    [((200_000, 1000), "0.26"), ((200_001, 1000), "0.5150025"), ((0, 0), "0")],
)
def test_the_hold_is_priced_at_the_step_that_may_be_reached(tokens: tuple[int, int], right: str) -> None:
    assert pricing.worst_case(schedule(prices(LISTED, {LONG: ABOVE})), *tokens) == parse_pico(right)


def test_a_request_of_0_15_is_held_at_0_15_and_not_at_the_short_price() -> None:
    """LiteLLM PR 40002: the reserve took the short-context price, so that five of these passed a cap of 0.45."""
    s = schedule(prices({"input": "0.10", "output": "1"}, {LONG: {"input": "0.50", "output": "2.5"}}))
    assert pricing.worst_case(s, 290_000, 2000) == parse_pico("0.15")
    assert 0.45 // 0.15 == 3


counts, units = st.integers(0, 600_000), st.integers(0, 500_000_000)
usages = st.builds(TokenUsage, counts, counts, counts, counts, counts)
stepped = st.builds(PriceStep, st.integers(1, 1_500_000), *[units] * 5)
schedules = st.builds(
    lambda base, request, minimum, steps: msgspec.structs.replace(
        base, request=request, minimum=minimum, steps=tuple(sorted(steps, key=lambda step: step.above))
    ),
    st.builds(PriceSchedule, st.just(UUID(int=1)), st.just(Currency.USD), st.just(Tier.STANDARD), *[units] * 5),
    st.integers(0, 10**12),
    st.integers(0, 10**13),
    st.lists(stepped, max_size=3, unique_by=lambda step: step.above),
)


@given(usages, schedules, st.sampled_from(Outcome), st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_charge_is_above_its_hold(
    used: TokenUsage, s: PriceSchedule, outcome: Outcome, more_in: int, more_out: int
) -> None:
    hold = pricing.worst_case(s, used.input_total + more_in, used.output_total + more_out)
    assert pricing.charge(used, s, outcome) <= hold


@given(usages, schedules, st.sampled_from(Outcome))
def test_the_lines_of_a_receipt_add_up(used: TokenUsage, s: PriceSchedule, outcome: Outcome) -> None:
    amount = pricing.charge(used, s, outcome)
    shown = receipts.lines(used, s, amount)
    assert sum(parse_pico(line.amount) for line in shown) == amount
    lifted = [parse_pico(line.amount) for line in shown if line.meter is Meter.MIN_CHARGE]
    assert (
        sum(lifted) == pricing.min_charge(amount, used, s) == (max(0, amount - pricing.rate(used, s)) if amount else 0)
    )


@given(usages, schedules, st.sampled_from(TokenUsage.__struct_fields__), st.integers(1, 10**6))
def test_more_of_any_part_never_costs_less_where_no_step_is_cheaper(
    used: TokenUsage, s: PriceSchedule, part: str, more: int
) -> None:
    """Monotone: also across a step, as long as the step makes nothing cheaper; what is cheaper gets a warning."""
    rising: list[PriceStep] = []
    for step in s.steps:
        below = rising[-1] if rising else s
        rising.append(PriceStep(step.above, *(max(getattr(below, name), getattr(step, name)) for name in UNITS)))
    s = msgspec.structs.replace(s, steps=tuple(rising))
    larger = msgspec.structs.replace(used, **{part: getattr(used, part) + more})
    assert pricing.rate(used, s) <= pricing.rate(larger, s)
    assert pricing.charge(used, s, Outcome.COMPLETED) <= pricing.charge(larger, s, Outcome.COMPLETED)


@given(usages, usages, schedules)
def test_rating_is_additive_where_no_step_or_price_per_request_applies(
    one: TokenUsage, two: TokenUsage, s: PriceSchedule
) -> None:
    s = msgspec.structs.replace(s, request=0, steps=())
    both = TokenUsage(*(getattr(one, name) + getattr(two, name) for name in TokenUsage.__struct_fields__))
    assert pricing.rate(one, s) + pricing.rate(two, s) == pricing.rate(both, s)
    assert pricing.rate(TokenUsage(), s) == 0


@given(usages, schedules)
def test_an_independent_library_finds_the_same_price_with_steps(used: TokenUsage, s: PriceSchedule) -> None:
    """Their tiers price a whole request by its input too; reasoning, what is per request they do not know."""

    def theirs(name: str) -> TieredPrices:
        steps = [TheirStep(start=step.above, price=Decimal(getattr(step, name)) / 10**6) for step in s.steps]
        return TieredPrices(base=Decimal(getattr(s, name)) / 10**6, tiers=steps)

    price = ModelPrice(
        input_mtok=theirs("input"),
        cache_read_mtok=theirs("cached_input"),
        cache_write_mtok=theirs("cache_write"),
        output_mtok=theirs("output"),
    )
    total = price.calc_price(
        Usage(
            input_tokens=used.input_total,
            cache_read_tokens=used.input_cached,
            cache_write_tokens=used.input_cache_write,
            output_tokens=used.output_total,
        )
    )["total_price"]
    no_reasoning = msgspec.structs.replace(used, output=used.output_total, reasoning=0)
    assert pricing.rate(no_reasoning, msgspec.structs.replace(s, request=0)) == int(total * 10**12)


# ---- the minimum charge: 0.0001 per request, at 0.05 / 0.20


@pytest.mark.parametrize(
    ("usage", "outcome", "charged", "lifted"),
    [
        (TokenUsage(3, output=1), Outcome.COMPLETED, "0.0001", "0.00009965"),
        (TokenUsage(900, output=40), Outcome.COMPLETED, "0.0001", "0.000047"),
        (TokenUsage(2000), Outcome.COMPLETED, "0.0001", "0"),  # exactly the minimum
        (TokenUsage(2001), Outcome.COMPLETED, "0.00010005", "0"),
        (TokenUsage(3, output=1), Outcome.CLIENT_ABORT, "0.0001", "0.00009965"),
        (TokenUsage(3), Outcome.CLIENT_ABORT, "0", "0"),  # before the first token
        (TokenUsage(3, output=1), Outcome.UPSTREAM_ERROR, "0", "0"),
        (TokenUsage(3), Outcome.TIMEOUT, "0", "0"),
        (TokenUsage(3, output=1), Outcome.PREEMPTED, "0", "0"),
        (TokenUsage(), Outcome.COMPLETED, "0", "0"),
    ],
)
def test_a_request_that_is_charged_costs_at_least_the_minimum(
    usage: TokenUsage, outcome: Outcome, charged: str, lifted: str
) -> None:
    s = schedule(prices({"input": "0.05", "output": "0.20", "min_charge": "0.0001"}))
    amount = pricing.charge(usage, s, outcome)
    assert (amount, pricing.min_charge(amount, usage, s)) == (parse_pico(charged), parse_pico(lifted))
    assert amount <= pricing.worst_case(s, usage.input_total, usage.output_total)


def test_a_free_model_with_a_minimum_costs_the_minimum() -> None:
    s = schedule(prices({"input": "0", "output": "0", "min_charge": "0.0001"}))
    assert pricing.charge(TokenUsage(1), s, Outcome.COMPLETED) == parse_pico("0.0001")


# ---- discounts


@pytest.mark.parametrize(
    ("unit_pico", "percent", "right"),
    [
        (37_500, "12.5", 32_812),  # 32,812.5: half to even
        (37_500, "4.2", 35_925),
        (3, "50", 2),  # 1.5
        (5, "50", 2),  # 2.5
        (1, "50", 0),  # 0.5
        (7, "0.0001", 7),  # 6.999993
        (1_000_000, "100", 0),
        (9, "33.3333", 6),  # 6.000003
    ],
)
def test_a_discount_is_rounded_half_to_even(unit_pico: int, percent: str, right: int) -> None:
    assert discounted(unit_pico, off_ppm(percent)) == right


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_discounts_agree_with_exact_decimals(unit_pico: int, ppm: int) -> None:
    exact = Decimal(unit_pico) * (10**6 - ppm) / 10**6
    assert discounted(unit_pico, ppm) == int(exact.quantize(Decimal(1), rounding="ROUND_HALF_EVEN"))
    assert off_ppm(percent_text(ppm)) == ppm


@pytest.mark.parametrize("percent", ["0", "100.0001", "0.00001", "-1", "x", "NaN"])
def test_discounts_that_cannot_be_are_refused(percent: str) -> None:
    with pytest.raises(PlatformError):
        off_ppm(percent)


def test_a_discount_is_off_every_unit_price_of_its_offer_but_not_off_the_minimum_or_the_tenants_own() -> None:
    items = prices({**LISTED, "request": "0.002", "min_charge": "0.01"}, {LONG: ABOVE})
    items += prices({"output": "9"}, tenant_id=TENANT)
    items += make.items(LISTED, tier=Tier.BATCH)
    found = resolve(items, [PriceDiscount(TENANT, make.MODEL, Tier.STANDARD, off_ppm("10"))])
    assert found[: len(items)] == items
    assert {(i.above_tokens, i.meter): i.unit_price_pico for i in found if i.tenant_id == TENANT} == {
        (0, Meter.INPUT): 1_125_000,
        (0, Meter.CACHED_INPUT): 112_500,
        (0, Meter.OUTPUT): 9_000_000,
        (0, Meter.REQUEST): 1_800_000_000,
        (LONG, Meter.INPUT): 2_250_000,
        (LONG, Meter.CACHED_INPUT): 225_000,
        (LONG, Meter.OUTPUT): 13_500_000,
    }
    mine = schedule(found, TENANT)
    assert format_pico(mine.minimum) == "0.010000000000"
    with pytest.raises(PlatformError, match="has no price there"):
        resolve(items, [PriceDiscount(TENANT, make.MODEL, Tier.PRIORITY, 1)])
