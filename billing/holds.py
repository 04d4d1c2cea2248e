"""The money a request must be good for before it starts, as a demand for the admission script. Pure."""

from uuid import UUID

from billing.pricing import worst_case
from billing.types import PriceSchedule
from core.demand import Demand, DemandKind
from core.money import nano_up

REFUSAL = "INSUFFICIENT_CREDIT"


def demand(tenant_id: UUID, s: PriceSchedule, *, prompt_tokens: int, output_tokens: int) -> Demand:
    """Return the hold: the worst case at the frozen prices, in nano, rounded up.

    `prompt_tokens` is an upper estimate; `output_tokens` is `max_tokens` times the number of choices.
    """
    amount = nano_up(worst_case(s, prompt_tokens, output_tokens))
    return Demand(DemandKind.MONEY, tenant_id.hex, amount, 0, REFUSAL)
