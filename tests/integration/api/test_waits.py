"""What the gateway tells admission of how long a request may wait for a place."""

import pytest

from core.tiers import Tier
from tests.factories.stack import Stack, chat

TIERS = {"priority": Tier.PRIORITY, "default": Tier.STANDARD, "standard": Tier.STANDARD}


@pytest.mark.parametrize(
    ("tier", "headers", "waits_s"),
    [
        ("priority", {}, 2.0),
        ("default", {}, 10.0),
        ("priority", {"x-retry-attempt": "1"}, 0.0),  # only where nobody waits
        ("standard", {"x-stainless-retry-count": "2"}, 0.0),
        ("default", {"x-stainless-retry-count": "0"}, 10.0),
        ("default", {"x-tidegate-max-wait": "25", "x-retry-attempt": "2"}, 25.0),
        ("priority", {"x-tidegate-max-wait": "900"}, 30.0),
        ("default", {"x-retry-attempt": "many"}, 10.0),
    ],
)
async def test_waits_by_tier_and_try(stack: Stack, tier: str, headers: dict[str, str], waits_s: float) -> None:
    answer = await stack.client.post("/v1/chat/completions", json=chat("hi", service_tier=tier), headers=headers)
    assert answer.status_code == 200
    [(_, wait_s, asked)] = stack.rig.admission.calls
    assert wait_s == waits_s
    assert asked is TIERS[tier]
