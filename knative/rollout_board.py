"""Where gateways and the controller meet over rollouts, in Valkey: who serves which configuration, and figures.

A gateway says which configuration revision it serves as soon as it does, and again every second. It is live while its
heartbeat is, so one that died holds nothing up for longer than that.
"""

from collections.abc import Collection
from uuid import UUID

import msgspec

from core import keyspace
from core.load import parse_load
from core.resp import RespClient
from knative.arm_figures import Figures
from knative.types import DeploymentState

FIGURES_KEPT_S = 172_800
NAMES_MAX = 1000  # replicas that said something once; beyond it those that are not live are forgotten
_decode_state = msgspec.json.Decoder(DeploymentState).decode
_decode_figures = msgspec.json.Decoder(Figures).decode


async def acknowledge(client: RespClient, replica: str, revision: int) -> None:
    """Say that this gateway serves a configuration revision: no request is resolved by an older one any more."""
    await client.call("HSET", keyspace.SERVING, replica, revision)


async def behind(client: RespClient, fence: int) -> tuple[str, ...]:
    """Return the live gateways that do not serve this revision, or a later one, yet."""
    seconds, micros = await client.call("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    beating = {raw.decode() for raw in await client.call("ZRANGEBYSCORE", keyspace.BEAT, now_ms, "+inf")}
    flat = await client.call("HGETALL", keyspace.SERVING)
    serving = {field.decode(): int(raw) for field, raw in zip(flat[::2], flat[1::2], strict=True)}
    if len(serving) > NAMES_MAX and (gone := sorted(serving.keys() - beating)):
        await client.call("HDEL", keyspace.SERVING, *gone)
    return tuple(sorted(replica for replica in beating if serving.get(replica, -1) < fence))


async def states(client: RespClient) -> dict[UUID, DeploymentState]:
    """Return what the controller published of every deployment."""
    flat = await client.call("HGETALL", keyspace.STATE)
    return {UUID(hex=field.decode()): _decode_state(raw) for field, raw in zip(flat[::2], flat[1::2], strict=True)}


async def loads(client: RespClient, deployment_ids: Collection[UUID]) -> dict[UUID, int]:
    """Return how many requests run on or wait for each deployment, over all gateways."""
    found = {}
    for deployment_id in deployment_ids:
        load = parse_load(await client.call("GET", keyspace.deployment(deployment_id)))
        found[deployment_id] = load.inflight + load.waiting
    return found


async def publish_figures(client: RespClient, rollout_id: UUID, replica: str, figures: Figures) -> None:
    """Replace what this gateway counted."""
    key = keyspace.arms(rollout_id)
    await client.call("HSET", key, replica, msgspec.json.encode(figures))
    await client.call("EXPIRE", key, FIGURES_KEPT_S)


async def read_figures(client: RespClient, rollout_id: UUID) -> list[Figures]:
    """Return what each gateway counted last."""
    return [_decode_figures(raw) for raw in await client.call("HVALS", keyspace.arms(rollout_id))]


async def forget(client: RespClient, rollout_id: UUID) -> None:
    """Drop a rollout's figures; what decided it is written down."""
    await client.call("DEL", keyspace.arms(rollout_id))
