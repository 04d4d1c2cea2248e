"""Why a request waited, in words."""

import pytest

from core.tiers import Tier
from core.waits import Full, Wait, passed, words


@pytest.mark.parametrize(
    ("wait", "waited_us", "preemptions", "text"),
    [
        (
            Wait(Full.MODEL_PLACES, 64, 2_000_000, 5, 0, 1, 3),
            1_840_000,
            0,
            (
                "Waited 1.8 s: the model's 64 places for its tier were taken; about 2.0 s were expected;"
                " requests that went before: 3 of priority, 1 of standard."
            ),
        ),
        (Wait(Full.TURN, 0, 0, 2), 40_000, 0, "Waited 40 ms: others waited before it."),
        (
            Wait(Full.MODEL_TOKENS, 120_000, 0, 0),
            150_000,
            1,
            (
                "Waited 0.1 s: the model's memory for 120,000 tokens, as its tier may fill it, was taken;"
                " its place went to a higher tier once, and it waited again."
            ),
        ),
        (
            Wait(Full.CAPABILITY, 5, 0, 0),
            2_000_000,
            2,
            (
                "Waited 2.0 s: the 5 places your organisation may have on this model were taken;"
                " its place went to a higher tier 2 times, and it waited again."
            ),
        ),
        (Wait(99, 5, 0, 0), 2_000_000, 0, "Waited 2.0 s: what it needed was taken."),
    ],
)
def test_one_sentence_says_why(wait: Wait, waited_us: int, preemptions: int, text: str) -> None:
    assert words(wait, waited_us, preemptions) == text


def test_what_was_full_has_a_word_also_when_a_later_version_says_it() -> None:
    assert [Wait(n, 0, 0, 0).label for n in (1, 6, 99)] == ["platform_places", "turn", "other"]


def test_those_that_went_before_do_not_count_the_request_itself() -> None:
    assert passed((5, 7, 9), (5, 9, 12), Tier.STANDARD) == (0, 1, 3)
    assert passed((5, 7, 9), (5, 7, 0), Tier.BATCH) == (0, 0, 0)  # the counts began anew in between
    assert passed((5, 7, 9), (), Tier.BATCH) == ()
