"""The three tiers: one word for price and for schedule."""

from enum import IntEnum


class Tier(IntEnum):
    """Ordered: a larger one goes first and costs more."""

    BATCH = 0
    STANDARD = 1
    PRIORITY = 2

    @property
    def label(self) -> str:
        """The word users meet: ``batch``, ``standard`` or ``priority``."""
        return self.name.lower()
