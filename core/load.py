"""The load of a deployment, as the scheduler's scripts write it and the controller reads it."""

from struct import Struct

import msgspec

LAYOUT = Struct("<10d")  # scheduler/scripts/common.lua: read_load


class Load(msgspec.Struct, frozen=True):
    """`last_us`: of the last grant or release, server time; 0 when nobody ever called."""

    inflight: int = 0
    waiting: int = 0
    last_us: int = 0
    tokens: float = 0.0  # reserved by what is in flight, as estimated
    waiting_batch: int = 0  # of `waiting`
    waiting_standard: int = 0


def parse_load(raw: bytes | None) -> Load:
    """Return the load in the value of `keyspace.deployment`; nobody ever called when there is none."""
    if raw is None:
        return Load()
    inflight, waiting, last_us, tokens, _, _, _, _, batch, standard = LAYOUT.unpack(raw)
    return Load(int(inflight), int(waiting), int(last_us), tokens, int(batch), int(standard))
