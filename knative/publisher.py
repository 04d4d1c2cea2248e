"""The controller's side of `{tg}:state`: one script, fenced by the epoch, so that an old leader changes nothing."""

from uuid import UUID

import msgspec

from core import keyspace
from core.load import parse_load
from core.resp import RespClient, script
from knative.types import WAKE_MS, DeploymentState

NO_KEY = -2  # PTTL of what is not there

# Epochs stay far below 2^53 (see knative.leader), so that Lua's numbers hold them exactly.
_PUBLISH = script("""
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old and cjson.decode(old)['epoch'] > tonumber(ARGV[2]) then return 0 end
if old == ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
""")
_WITHDRAW = script("""
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old or cjson.decode(old)['epoch'] > tonumber(ARGV[2]) then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
""")


async def publish(client: RespClient, state: DeploymentState) -> bool:
    """Write a state and tell the gateways; False when it was there already or a later one is."""
    raw = msgspec.json.encode(state)
    args = (state.deployment, state.epoch, raw, keyspace.STATE_CHANNEL)
    return bool(await client.eval(_PUBLISH, (keyspace.STATE,), args))


async def withdraw(client: RespClient, deployment: str, epoch: int) -> bool:
    """Remove the state of a deployment that is no more, unless a later epoch wrote it."""
    return bool(await client.eval(_WITHDRAW, (keyspace.STATE,), (deployment, epoch)))


async def read_epochs(client: RespClient) -> dict[str, int]:
    """Return each published deployment and the epoch of its state."""
    flat = await client.call("HGETALL", keyspace.STATE)
    decode = msgspec.json.Decoder(DeploymentState).decode
    return {field.decode(): decode(raw).epoch for field, raw in zip(flat[::2], flat[1::2], strict=True)}


class Activity(msgspec.Struct, frozen=True):
    """What admission says of a deployment; `last_us` is 0 when nobody ever called."""

    inflight: int = 0
    waiting: int = 0
    last_us: int = 0
    woken: bool = False
    wished_us: int = 0  # how long ago that was first wished for
    held: int = 0  # callers that wait for it, over all gateways


async def read_activity(client: RespClient, deployment_ids: list[UUID]) -> dict[UUID, Activity]:
    """Read counters and wakes of these deployments, in one write."""
    loads = [client.call("MGET", keyspace.deployment(deployment_id)) for deployment_id in deployment_ids]
    wakes = [client.call("PTTL", keyspace.wake(deployment_id)) for deployment_id in deployment_ids]
    helds = [client.call("ZCARD", keyspace.held(deployment_id)) for deployment_id in deployment_ids]
    found = {}
    for deployment_id, raw, wake, held in zip(deployment_ids, loads, wakes, helds, strict=True):
        load, left_ms = parse_load((await raw)[0]), int(await wake)
        found[deployment_id] = Activity(
            load.inflight,
            load.waiting,
            load.last_us,
            woken=left_ms != NO_KEY,
            wished_us=max(0, WAKE_MS - left_ms) * 1000 if left_ms >= 0 else 0,
            held=int(await held),
        )
    return found
