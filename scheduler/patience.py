"""How long a retry waits for a place. Pure.

A request is served in time when its first token comes in time after its *first* try. Who was refused as too late was
told to come back when the queue is shorter, which is later than that. Were such retries to wait again, they would be
served in the place of newcomers that can still be in time, and after a burst the queue would stay full of them.
"""

from core.tiers import Tier

DOUBLINGS_MAX = 10


def of_retry(wait_s: float, tier: Tier, tries: int) -> float:
    """Return how many seconds the retry waits; with 0 or less it gets a place only where nobody waits.

    Args:
        wait_s: what a first try of this tier waits.
        tier: of the request. Batch waits minutes: its retries have spent their pauses, of 1, 2, 4 … s, and no more.
        tries: those before this one.
    """
    if tries <= 0:
        return wait_s
    if tier is not Tier.BATCH:
        return 0.0
    return wait_s - (2.0 ** min(tries, DOUBLINGS_MAX) - 1.0)
