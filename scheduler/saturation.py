"""How many of a deployment's replicas are full by what their engines said last, for gateways. See `scraper`."""

import asyncio
from uuid import UUID

import msgspec

from core import keyspace
from core.resp import RespClient, RespError, RespUnavailable
from engine.figures import EngineFigures
from scheduler import caps
from scheduler.scraper import Reading

READ_TIMEOUT_S = 0.1
OLD_US = 5_000_000  # the scraper reads each second; what is older says nothing of now

_reading = msgspec.json.Decoder(Reading)


def part_full(reading: Reading, now_us: int) -> float:
    """Return the part of the replicas that is full, 0 to 1; 0 when the reading is old or of nobody."""
    if abs(now_us - reading.at_us) > OLD_US or not reading.replicas:
        return 0.0
    return sum(map(_is_full, reading.replicas.values())) / len(reading.replicas)


async def read_part_full(client: RespClient, deployment_id: UUID, now_us: int) -> float:
    """Return the part of a deployment's replicas that is full; 0 when nobody knows, or not soon."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            raw = await client.call("HGET", keyspace.FIGURES, deployment_id.hex)
    except (RespError, RespUnavailable, TimeoutError):
        return 0.0
    return part_full(_reading.decode(raw), now_us) if raw is not None else 0.0


def _is_full(figures: EngineFigures) -> bool:
    return caps.fullness(figures.waiting, figures.kv_used) >= 1
