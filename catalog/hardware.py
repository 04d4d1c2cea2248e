"""What engines run on: a *hardware profile*, and how much of it an engine may have. Pure.

Memory is in MiB, as drivers report it (an "80 GB" card has 81,920 or a little less).
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

UNIT_MIB = 2048  # a logical unit of a shared card
SPARE_PART = 0.92  # of a card's memory that an engine may take; the rest is the driver's and what is measured badly


class Vendor(StrEnum):
    """Who makes the accelerator; cpu: there is none."""

    NVIDIA = "nvidia"
    CAMBRICON = "cambricon"
    CPU = "cpu"


class Share(StrEnum):
    """What of a card an engine has."""

    WHOLE = "whole"
    HAMI = "hami"  # a slice that the engine sees as the whole card
    TIME_SLICED = "time-sliced"  # a part by agreement: the engine sees all of the card's memory
    MIG = "mig"  # a partition in hardware, seen as a card


class HardwareProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica is given: `cards` of a kind, and of each `units` when it is shared. On the CPU: the memory."""

    vendor: Vendor = Vendor.NVIDIA
    card: Annotated[str, Meta(max_length=64)] = ""
    memory_mib: Annotated[int, Meta(ge=1, le=16_777_216)] = 81_920  # of one whole card
    cards: Annotated[int, Meta(ge=1, le=1024)] = 1
    share: Share = Share.WHOLE
    units: Annotated[int, Meta(ge=0, le=8192)] = 0

    @property
    def seen_mib(self) -> int:
        """What an engine is told that one card has."""
        return self.units * UNIT_MIB if self.share in {Share.HAMI, Share.MIG} else self.memory_mib

    @property
    def part(self) -> float:
        """The part of what it sees that an engine may take."""
        if self.share is Share.TIME_SLICED:
            return self.units * UNIT_MIB / self.memory_mib
        return SPARE_PART

    @property
    def budget_mib(self) -> int:
        """What an engine may take of one card."""
        return int(self.seen_mib * self.part)


# Ten times the compute capability, by the beginning of a card's name (NVIDIA, "CUDA GPU Compute Capability").
_CAPABILITY = MappingProxyType(
    {
        **dict.fromkeys(("V100",), 70),
        **dict.fromkeys(("T4", "RTX 20"), 75),
        **dict.fromkeys(("A100", "A800", "A30"), 80),
        **dict.fromkeys(("A10", "A16", "A40", "RTX 30", "RTX A"), 86),
        **dict.fromkeys(("L4", "L20", "RTX 40", "RTX 6000 ADA"), 89),
        **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), 90),
        **dict.fromkeys(("B100", "B200", "GB200"), 100),
        **dict.fromkeys(("B300", "GB300"), 103),
    }
)


def capability(profile: HardwareProfile) -> int:
    """Return a card's compute capability times ten; 0 when the card is not known here, or has none."""
    if profile.vendor is not Vendor.NVIDIA:
        return 0
    name = profile.card.upper().replace("NVIDIA", "").replace("TESLA", "").replace("GEFORCE", "").strip(" -")
    known = [card for card in _CAPABILITY if name.startswith(card)]
    return _CAPABILITY[max(known, key=len)] if known else 0


def batch_bound(gpu_gb: float, kv_gb_per_request: float) -> int:
    """Return how many requests one pod holds at once by its memory: a fifth is kept free, and each may double.

    80 GB and 1.2 GB a request give 26.
    """
    if gpu_gb <= 0 or kv_gb_per_request <= 0:
        raise ValueError("Memory and the need of a request are positive.")
    return max(1, int(gpu_gb * 0.8 / (kv_gb_per_request * 2)))


def batch_bound_mb(gpu_mb: int, kv_mb: int) -> int:
    """Return the batch bound of what a deployment states, in MB; 0 where it states nothing."""
    return batch_bound(gpu_mb / 1000, kv_mb / 1000) if gpu_mb and kv_mb else 0
