"""The script library and its encoded calls. Pure: bytes in, bytes out; layouts stand at the head of each script."""

import hashlib
from enum import IntEnum
from pathlib import Path
from struct import Struct

import msgspec

from core import keyspace
from core.demand import Demand
from core.money import MAX_BALANCE_NANO
from core.resp import Part, pack
from scheduler.caps import Caps
from scheduler.types import Prepared

_FOLDER = Path(__file__).resolve().parent / "scripts"
_FILES = ("common", "queue", "acquire", "release", "register", "tick", "heartbeat", "epoch", "caps")
_HEAD = """#!lua name=tidegate_{0}
local function function_name(name) return 'tg_' .. name .. '_{0}' end
"""


def _library() -> tuple[str, str]:
    """Return the library's text and the part of its names that changes with it, so that versions live side by side."""
    body = "\n".join((_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in _FILES)
    tag = hashlib.sha256(body.encode()).hexdigest()[:8]
    return _HEAD.format(tag) + body, tag


LIBRARY, _TAG = _library()
ACQUIRE, RELEASE, REGISTER, TICK, HEARTBEAT, EPOCH, SET_CAPS = (
    f"tg_{name}_{_TAG}" for name in ("acquire", "release", "register", "tick", "heartbeat", "epoch", "caps")
)
NO_FUNCTION = "ERR Function not found"
HAS_LIBRARY = "already exists"

OFFSET = keyspace.PREFIX + "offset_us"  # tests move the server's time with it
SETTLE = keyspace.PREFIX + "settle"
WAITERS = keyspace.PREFIX + "waiters"
UNCLAIMED = keyspace.PREFIX + "unclaimed"
AWAITED = keyspace.PREFIX + "awaited"
GLOBAL = "global"

KEEP = -2  # charges of `release`: leave the money as it is
REMOVE = -1  # nothing was used and no usage event will come
AS_ESTIMATED = -1  # tokens of `release`
COUNT_MAX = MAX_BALANCE_NANO  # what a limit counts as at most: Lua's numbers are whole up to 2^53

_ACQUIRE_TAIL = Struct("<5s32s7sBdddd2s").pack
_RELEASE_TAIL = Struct("<5s32s7sdddd2s").pack
_LEASE = Struct("<cBddddd").pack
_REQUEST, _ACQUIRE_NEXT, _RELEASE_NEXT, _END = b"$32\r\n", b"\r\n$33\r\n", b"\r\n$32\r\n", b"\r\n"


class Code(IntEnum):
    """The first element of each answer."""

    GRANTED = 1  # see `Grant.reply`
    QUEUED = 2  # the same with the estimated wait in s in the second place
    REFUSED = 3  # then: which of `Prepared.named` (-1: money), retry after s
    BUSY = 4  # then: retry after s, why (`Busy`)
    UNKNOWN_CREDIT = 5
    EPOCH = 6
    SETTLING = 7  # then: µs left
    UNKNOWN_BUDGET = 8
    UNKNOWN_SPEC = 9


class Busy(IntEnum):
    """Why a model is busy."""

    FULL = 1  # no place, and none to wait in
    TOO_LATE = 2  # it would not be served before the caller loses patience


def call(name: str, keys: list[Part], args: list[Part]) -> bytes:
    """Encode a call of the library."""
    return pack("FCALL", name, len(keys), *keys, *args)


def _open_ended(parts: list[Part], more: int) -> bytes:
    """Encode the command's beginning; `more` bulk strings follow."""
    body = pack(*parts).split(b"\r\n", 1)[1]
    return b"*%d\r\n%b" % (len(parts) + more, body)


def spec_text(prepared: Prepared, caps: tuple[Demand, ...]) -> bytes:
    """Return what every request of `prepared` demands, as the scripts read it; the cap of all first. See common.lua."""

    def counted(demands: tuple[Demand, ...]) -> list[tuple[str, int, int, int]]:
        return [(d.counter, d.amount, min(d.limit, COUNT_MAX), int(d.enforced)) for d in demands]

    rates = [
        (d.counter, d.amount, min(d.limit, COUNT_MAX), d.window_s * 1_000_000, int(d.unit), int(d.enforced))
        for d in prepared.rates
    ]
    model, tenant = prepared.model, prepared.tenant
    spends = prepared.spends if tenant else ()
    limits = (model.inflight_max, model.waiting_max)
    whole = (model.deployment_id.hex, tenant, *limits, counted(caps), counted(prepared.concurrencies), counted(spends))
    return msgspec.msgpack.encode((*whole, rates, prepared.owner, prepared.weight))


def spec_id(text: bytes) -> str:
    """Long enough for a lease to be more than 64 bytes: a hash of such values is found in without a search."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def acquire_prefix(spec: str, *, epoch: bytes, replica: str) -> bytes:
    """Encode everything of `acquire` but what a request brings."""
    return _open_ended(["FCALL", ACQUIRE, 1, keyspace.lease(replica), epoch, spec], 2)


def acquire_call(  # noqa: PLR0917 - in the order of the script's
    prefix: bytes, request: bytes, tier: int, hold: int, wait_us: float, input_tokens: int, output_tokens: int
) -> bytes:
    """Encode the call. `request` is the id in hex."""
    return prefix + _ACQUIRE_TAIL(
        _REQUEST, request, _ACQUIRE_NEXT, tier, hold, wait_us, input_tokens, output_tokens, _END
    )


def with_spec(acquire: bytes, text: bytes) -> bytes:
    """Return the call of `acquire` with the spec's text, for a server that may not know it."""
    return b"*9" + acquire[2:] + b"$%d\r\n%b\r\n" % (len(text), text)


def release_prefix(tenant: str, *, epoch: bytes, replica: str) -> bytes:
    """Encode everything of `release` but what a request brings; `tenant` is empty without money."""
    return _open_ended(["FCALL", RELEASE, 1, keyspace.lease(replica), epoch, tenant], 2)


def release_call(  # noqa: PLR0917 - in the order of the script's
    prefix: bytes, request: bytes, charge: int, input_tokens: int, output_tokens: int, cached_tokens: int
) -> bytes:
    """Encode the call. `cached_tokens`: of the input, those that came from a prefix cache."""
    tokens = (input_tokens, output_tokens, cached_tokens)
    return prefix + _RELEASE_TAIL(_REQUEST, request, _RELEASE_NEXT, charge, *tokens, _END)


def caps_call(deployment: str, caps: Caps, *, epoch: bytes) -> bytes:
    """Encode `caps`: what the deployment (hex) may hold from now on."""
    figures: list[Part] = [caps.most, int(caps.tokens), repr(caps.saturation)]
    return call(SET_CAPS, [keyspace.PREFIX + "m:" + deployment], [epoch, deployment, *figures])


def lease_text(spec: str, *, tier: int, at_us: int, hold: int, input_tokens: int, output_tokens: int) -> bytes:
    """Return the lease of a granted request. See common.lua."""
    return _LEASE(b"G", tier, at_us, input_tokens, output_tokens, hold, 0) + spec.encode()


def register_call(request: bytes, lease: bytes, text: bytes, *, epoch: bytes, replica: str) -> bytes:
    """Encode `register` for a running request; `text` is its spec."""
    return call(REGISTER, [keyspace.lease(replica)], [epoch, request, lease, text])
