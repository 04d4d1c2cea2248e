"""The money a request must be good for before it starts. Pure."""

from billing.pricing import worst_case
from billing.types import PriceSchedule
from core.money import nano_up


def hold_nano(s: PriceSchedule, prompt_tokens: int, output_tokens: int) -> int:
    """Return the hold: the worst case at the frozen prices, in nano, rounded up.

    `prompt_tokens` is an upper estimate; `output_tokens` is `max_tokens` times the number of choices.
    """
    return nano_up(worst_case(s, prompt_tokens, output_tokens))
