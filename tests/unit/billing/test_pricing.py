"""Rating against values worked out by hand, by public bug reports and by an independent price library."""

from decimal import Decimal
from uuid import UUID

import pytest
from genai_prices import Usage
from genai_prices.types import ModelPrice
from hypothesis import given
from hypothesis import strategies as st

from billing import holds, pricing
from billing.types import Outcome, PriceSchedule
from core.money import Currency, format_pico, parse_pico
from core.tiers import Tier
from core.usage import TokenUsage

TENANT = UUID(int=5)


def schedule(
    input_: str, cached: str, output: str, *, reasoning: str = "", cache_write: str = "", request: str = "0"
) -> PriceSchedule:
    """Prices per million tokens, as people write them; a request's price is per request."""
    return PriceSchedule(
        UUID(int=1),
        Currency.USD,
        Tier.STANDARD,
        input=parse_pico(input_) // 10**6,
        cached_input=parse_pico(cached) // 10**6,
        cache_write=parse_pico(cache_write or input_) // 10**6,
        output=parse_pico(output) // 10**6,
        reasoning=parse_pico(reasoning or output) // 10**6,
        request=parse_pico(request),
    )


# prices, disjoint parts (uncached, cached, cache write, output, reasoning), right value
BY_HAND = {
    "mixed cached and reasoning": (("2.00", "0.20", "6.00"), (2105, 10240, 0, 360, 640), "0.012258"),
    "cut after 137 tokens": (("3.00", "3.00", "15.00"), (4000, 0, 0, 137, 0), "0.014055"),
    "cached charged once": (("1.25", "0.625", "10"), (5005, 257955, 0, 1744, 0), "0.184918125"),
    "streamed as buffered": (("0.80", "0.08", "4"), (4, 2455, 0, 23, 0), "0.0002916"),
    "total contains cached": (("2.50", "1.25", "0"), (100_000, 900_000, 0, 0, 0), "1.375"),
    "input excludes cached": (("1", "0.1", "5"), (56322, 72960, 0, 87, 0), "0.064053"),
    "cached image tokens": (("1.5", "0.15", "9"), (140, 24503, 0, 3110, 0), "0.03187545"),
    "completion contains reasoning": (("30", "30", "180"), (14746, 0, 0, 584, 1360), "0.79230"),
    "half price for batch": (("0.625", "0.0625", "5"), (2000, 6000, 0, 1500, 0), "0.009125"),
    "cache writes by their total": (("3", "0.3", "15"), (3, 10000, 184_457, 0, 0), "0.55638"),
    "below a nano": (("0.0375", "0.0375", "0"), (0, 7, 0, 0, 0), "0.0000002625"),
}


@pytest.mark.parametrize("case", BY_HAND, ids=list(BY_HAND))
def test_rate_is_exact(case: str) -> None:
    prices, parts, right = BY_HAND[case]
    assert pricing.rate(TokenUsage(*parts), schedule(*prices)) == parse_pico(right)


def test_a_million_small_events_add_up_exactly() -> None:
    one = pricing.rate(TokenUsage(input_cached=7), schedule("0.0375", "0.0375", "0"))
    assert format_pico(sum(one for _ in range(1_000_000))) == "0.262500000000"


def test_hold_and_release_of_the_cut_stream() -> None:
    s = schedule("3.00", "0.30", "15.00")
    hold = holds.hold_nano(s, 4000, 2000)
    assert hold == 42_000_000  # 0.042
    billed = pricing.charge(TokenUsage(input_uncached=4000, output=137), s, Outcome.CLIENT_ABORT)
    assert format_pico(billed) == "0.014055000000"
    assert format_pico(hold * 1000 - billed) == "0.027945000000"


@pytest.mark.parametrize(
    ("outcome", "usage", "right"),
    [
        (Outcome.TIMEOUT, TokenUsage(input_uncached=4000), "0"),
        (Outcome.UPSTREAM_ERROR, TokenUsage(input_uncached=4000, output=12), "0"),
        (Outcome.PREEMPTED, TokenUsage(input_uncached=4000, output=12), "0"),
        (Outcome.CLIENT_ABORT, TokenUsage(input_uncached=4000), "0"),
        (Outcome.COMPLETED, TokenUsage(input_uncached=4000), "0.0121"),  # embeddings make no output tokens
        (Outcome.COMPLETED, TokenUsage(), "0"),
    ],
)
def test_only_what_was_delivered_is_charged(outcome: Outcome, usage: TokenUsage, right: str) -> None:
    assert pricing.charge(usage, schedule("3.00", "3.00", "15.00", request="0.0001"), outcome) == parse_pico(right)


@pytest.mark.parametrize("part", ["input_uncached", "input_cached", "input_cache_write", "output", "reasoning"])
def test_a_negative_part_is_refused(part: str) -> None:
    usage = TokenUsage(**{"input_uncached": 10_000, part: -1})
    with pytest.raises(ValueError, match="negative"):
        pricing.charge(usage, schedule("1", "1", "1"), Outcome.TIMEOUT)


def test_an_amount_beyond_an_event_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond"):
        pricing.rate(TokenUsage(output=10**12), schedule("1", "1", "10"))


counts = st.integers(0, 10_000_000)
prices = st.integers(0, 500_000_000)  # pico per token: up to 500 per million, six decimals
usages = st.builds(TokenUsage, counts, counts, counts, counts, counts)
schedules = st.builds(PriceSchedule, st.just(UUID(int=1)), st.just(Currency.USD), st.just(Tier.STANDARD), *[prices] * 5)


@given(usages, schedules)
def test_an_independent_library_finds_the_same_price(usage: TokenUsage, s: PriceSchedule) -> None:
    price = ModelPrice(
        input_mtok=Decimal(s.input) / 10**6,
        cache_read_mtok=Decimal(s.cached_input) / 10**6,
        cache_write_mtok=Decimal(s.cache_write) / 10**6,
        output_mtok=Decimal(s.output) / 10**6,
    )
    theirs = price.calc_price(
        Usage(
            input_tokens=usage.input_total,
            cache_read_tokens=usage.input_cached,
            cache_write_tokens=usage.input_cache_write,
            output_tokens=usage.output_total,
        )
    )["total_price"]
    one_price = PriceSchedule(
        s.price_version_id, s.currency, s.tier, s.input, s.cached_input, s.cache_write, s.output, s.output
    )
    assert pricing.rate(usage, one_price) == int(theirs * 10**12)


@given(usages, schedules)
def test_the_worst_case_is_never_exceeded(usage: TokenUsage, s: PriceSchedule) -> None:
    assert pricing.rate(usage, s) <= pricing.worst_case(s, usage.input_total, usage.output_total)


@given(usages, usages, schedules)
def test_rating_is_additive(one: TokenUsage, two: TokenUsage, s: PriceSchedule) -> None:
    both = TokenUsage(
        one.input_uncached + two.input_uncached,
        one.input_cached + two.input_cached,
        one.input_cache_write + two.input_cache_write,
        one.output + two.output,
        one.reasoning + two.reasoning,
    )
    assert pricing.rate(one, s) + pricing.rate(two, s) == pricing.rate(both, s)
