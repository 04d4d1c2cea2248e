"""Which replicas have read the beginning of a prompt before: what this gateway sent where, by hashes of its blocks.

A prompt is cut at fixed places (`ENDS`), close together at its beginning and farther apart behind. Each block's key is
made from the end of the block and the key before it. Two prompts that begin alike and then part have keys in common as
far as they begin alike; two that differ only in places that nobody looks at are taken to be alike, as is a collision in
64 bits: that costs a cache miss, and reading all of every prompt would cost more. The first key comes from a seed that
hangs on the deployment and on the salt of the caller's cache: a tenant's prompt meets only its own, as in the engine.
Keys are Python's hashes of bytes (SipHash under a key that each process draws at its start) and mean nothing in another
process.
"""

from bisect import bisect_right
from collections.abc import Iterator

PROMPT_BYTES_MAX = 1 << 20  # what comes after is not looked at
SAMPLE_BYTES = 512  # of the end of a block
ENTRY_BYTES = 180  # a key, a mask and their share of the dictionary, as measured with 64 replicas
_STEPS = ((1024, 256), (8192, 1024), (65_536, 4096), (PROMPT_BYTES_MAX, 16384))  # up to here, a block of so much


def _ends() -> Iterator[int]:
    at = 0
    for until, size in _STEPS:
        while at < until:
            at += size
            yield at


ENDS = tuple(_ends())  # of the blocks, in bytes from the prompt's beginning
_LOOKED_AT = tuple((max(start, end - SAMPLE_BYTES), end) for start, end in zip((0, *ENDS), ENDS, strict=False))


def block_keys(prompt: bytes, begin: int, seed: int) -> list[int]:
    """Return the keys of the whole blocks of `prompt` from `begin` on; none when it is shorter than the first."""
    keys = []
    key = seed
    for start, end in _LOOKED_AT[: bisect_right(ENDS, len(prompt) - begin)]:
        key = hash((key, prompt[begin + start : begin + end]))
        keys.append(key)
    return keys


Level = tuple[int, int]
"""So many blocks from the beginning are with these replicas, as a mask of their bits."""


class PrefixTable:
    """Which replicas were sent a block, as a mask by key. Bounded in bytes: what was not used for longest goes first.

    It has two generations: what is noted goes to the younger one, and when that holds half of the bound the older one
    is dropped and the younger takes its place. So a key lives for as long as half of the bound takes to be filled with
    others, at least, and noting one costs no list of all by their age.
    """

    def __init__(self, bytes_max: int) -> None:
        self._half = max(1, bytes_max // ENTRY_BYTES // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, keys: list[int], among: int) -> list[Level]:
        """Return how far the replicas of the mask `among` have the prompt: levels of rising depth, each of fewer."""
        young, old = self._young.get, self._old.get
        levels: list[Level] = []
        depth = last = 0
        for key in keys:
            mask = (young(key, 0) | old(key, 0)) & among
            if mask != last:
                if last:
                    levels.append((depth, last))
                if not mask:
                    return levels
                last = mask
            elif not mask:
                return levels
            depth += 1
        if last:
            levels.append((depth, last))
        return levels

    def note(self, keys: list[int], bit: int) -> None:
        """The replica of this bit is reading these blocks."""
        young = self._young
        for key in keys:
            young[key] = young.get(key, 0) | bit
        if len(young) >= self._half:
            self._young, self._old = {}, young


def bytes_known(levels: list[Level], bit: int) -> int:
    """Return how many bytes from the beginning the replica of this bit has."""
    for depth, mask in reversed(levels):
        if mask & bit:
            return ENDS[depth - 1]
    return 0
