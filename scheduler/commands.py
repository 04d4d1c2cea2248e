"""The scripts and their encoded calls. Pure: bytes in, bytes out; the layouts are stated at the head of each script."""

from enum import IntEnum
from pathlib import Path

import msgspec

from catalog.types import ServedModel
from core import keyspace
from core.demand import Demand
from core.resp import Part, Script, pack, script
from scheduler.types import Prepared

_FOLDER = Path(__file__).resolve().parent / "scripts"
_COMMON = (_FOLDER / "common.lua").read_text(encoding="utf-8")


def _load(name: str) -> Script:
    text = (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    return script(text.replace("--#common\n", _COMMON))


ACQUIRE = _load("acquire")
RELEASE = _load("release")
REGISTER = _load("register")
TICK = _load("tick")
HEARTBEAT = _load("heartbeat")
EPOCH = _load("epoch")
HOT = (ACQUIRE, RELEASE, REGISTER)

OFFSET = keyspace.PREFIX + "offset_us"  # tests move the server's time with it
SETTLE = keyspace.PREFIX + "settle"
WAITERS = keyspace.PREFIX + "waiters"
QUEUES = keyspace.PREFIX + "queues"
UNCLAIMED = keyspace.PREFIX + "unclaimed"
AWAITED = keyspace.PREFIX + "awaited"
GLOBAL = "global"

KEEP = ""  # charges of `release`: leave the money as it is
REMOVE = "-"  # nothing was used and no usage event will come


class Code(IntEnum):
    """The first element of each answer."""

    GRANTED = 1  # then: 0, credit left or -1, each concurrency's remaining, each rate's remaining and reset s
    QUEUED = 2  # the same with the estimated wait in s in the second place
    REFUSED = 3  # then: which of `Prepared.named` (-1: money), retry after s
    BUSY = 4  # then: retry after s
    UNKNOWN_CREDIT = 5
    EPOCH = 6
    SETTLING = 7  # then: µs left


def queue(deployment: str) -> str:
    return f"{keyspace.PREFIX}q:{deployment}"


def _out_keys(tenant: str) -> tuple[str, str]:
    return f"{keyspace.PREFIX}credit:{tenant}", f"{keyspace.PREFIX}out:{tenant}"


def _open_ended(parts: list[Part], more: int) -> bytes:
    """Encode the command's beginning; `more` bulk strings follow."""
    body = pack(*parts).split(b"\r\n", 1)[1]
    return b"*%d\r\n%b" % (len(parts) + more, body)


def _amounts(demands: tuple[Demand, ...]) -> str:
    return " ".join(f"{d.counter}={d.amount}" for d in demands)


def lease_text(prepared: Prepared, caps: tuple[Demand, ...], model: ServedModel, tenant: str) -> str:
    """Return the lease after state and tier. See common.lua."""
    rates = " ".join(f"{d.counter}={d.amount}={d.window_s * 1_000_000}" for d in prepared.rates)
    concurrencies = _amounts(prepared.concurrencies)
    return f"|{model.deployment_id.hex}|{tenant}|{_amounts(caps)}|{concurrencies}|{rates}"


def acquire_prefix(
    prepared: Prepared, caps: tuple[Demand, ...], model: ServedModel, *, tenant: str, epoch: bytes, replica: str
) -> bytes:
    """Encode everything of `acquire` but request id, tier, hold and wait."""
    counted = caps + prepared.concurrencies
    deployment = model.deployment_id.hex
    keys: list[Part] = [keyspace.EPOCH, OFFSET, SETTLE, WAITERS]
    keys += [keyspace.counter(d.counter) for d in counted]
    keys += [keyspace.lease(replica), keyspace.deployment(model.deployment_id), queue(deployment), QUEUES]
    keys += _out_keys(tenant)
    keys += [keyspace.counter(d.counter) for d in prepared.rates]
    numbers = [len(caps), len(prepared.concurrencies), len(prepared.rates), model.inflight_max, model.waiting_max]
    for demand in counted:
        numbers += [demand.limit, demand.amount]
    for demand in prepared.rates:
        numbers += [demand.limit, demand.amount, demand.window_s * 1_000_000]
    lease = lease_text(prepared, caps, model, tenant)
    args: list[Part] = [epoch, msgspec.msgpack.encode(numbers), replica, lease, deployment]
    return _open_ended(["EVALSHA", ACQUIRE.sha, len(keys), *keys, *args], 4)


def acquire_call(prefix: bytes, request: str, tier: int, hold: str, wait_us: int) -> bytes:
    wait = str(wait_us)
    tail = f"$32\r\n{request}\r\n$1\r\n{tier}\r\n${len(hold)}\r\n{hold}\r\n${len(wait)}\r\n{wait}\r\n"
    return prefix + tail.encode()


def release_prefix(
    prepared: Prepared, caps: tuple[Demand, ...], model: ServedModel, *, tenant: str, epoch: bytes, replica: str
) -> tuple[bytes, bytes]:
    """Encode `release` but for what comes between the two pieces: request id and charge."""
    counted = caps + prepared.concurrencies
    keys = [keyspace.EPOCH, OFFSET, WAITERS, *(keyspace.counter(d.counter) for d in counted)]
    keys += [keyspace.lease(replica), keyspace.deployment(model.deployment_id), *_out_keys(tenant)]
    amounts = [d.amount for d in counted] if any(d.amount != 1 for d in counted) else []
    head = _open_ended(["EVALSHA", RELEASE.sha, len(keys), *keys, epoch, replica, tenant], 2 + len(amounts))
    return head, b"".join(b"$%d\r\n%d\r\n" % (len(str(amount)), amount) for amount in amounts)


def release_call(packed: tuple[bytes, bytes], request: str, charge: str) -> bytes:
    return packed[0] + f"$32\r\n{request}\r\n${len(charge)}\r\n{charge}\r\n".encode() + packed[1]


def bare_release_call(request: str, charge: str, *, tenant: str, epoch: bytes, replica: str) -> bytes:
    """Encode `release` of a request of which only tenant and charge are known; its lease says the rest."""
    keys = [keyspace.EPOCH, OFFSET, WAITERS, keyspace.lease(replica), keyspace.PREFIX, *_out_keys(tenant)]
    return pack("EVALSHA", RELEASE.sha, len(keys), *keys, epoch, replica, tenant, request, charge)


def register_call(
    request: str, lease: str, hold: str, *, model: ServedModel, tenant: str, epoch: bytes, replica: str
) -> bytes:
    """Encode `register` for a running request. `lease` begins with state and tier."""
    keys = [keyspace.EPOCH, OFFSET, keyspace.lease(replica), keyspace.deployment(model.deployment_id)]
    keys += _out_keys(tenant)
    return pack("EVALSHA", REGISTER.sha, len(keys), *keys, epoch, request, lease, hold, replica)
