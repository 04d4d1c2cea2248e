"""The script library and its encoded calls. Pure: bytes in, bytes out; layouts stand at the head of each script."""

import hashlib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from struct import Struct
from uuid import UUID

import msgspec

from core import keyspace
from core.demand import Demand, DemandKind, Unit
from core.money import MAX_BALANCE_NANO
from core.resp import Part, pack
from scheduler.caps import Caps
from scheduler.types import Entitlement, Packed, Prepared
from tenants.types import LimitMode

_FOLDER = Path(__file__).resolve().parent / "scripts"
_SHARED = ("common", "leases", "entitlements", "pace", "queue", "giveback", "preempt")
_FUNCTIONS = ("acquire", "release", "register", "recount", "tick", "heartbeat", "epoch", "caps")
_WITH_ACQUIRE = ("blocks",)
_AFTER_ACQUIRE = ("preempt", "tick", "heartbeat", "epoch", "caps")
_HEAD = """#!lua name=tidegate_{0}
local function function_name(name) return 'tg_' .. name .. '_{0}' end
"""


def _library() -> tuple[str, str]:
    """Return the library's text and the part of its names that changes with it, so that versions live side by side."""
    texts = {name: (_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in (*_SHARED, *_FUNCTIONS)}
    texts["acquire"] += "".join((_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in _WITH_ACQUIRE)
    # What only one function needs stays with it, and `acquire` has names enough without those of preemption, which only
    # comes after it: Lua allows 200 local names in one block.
    order = sorted(texts, key=lambda name: name in _AFTER_ACQUIRE)
    parts = [texts[name] if name in _SHARED else f"do\n{texts[name]}\nend" for name in order]
    body = "\n".join(parts)
    tag = hashlib.sha256(body.encode()).hexdigest()[:8]
    return _HEAD.format(tag) + body, tag


LIBRARY, _TAG = _library()
ACQUIRE, RELEASE, REGISTER, RECOUNT, TICK, HEARTBEAT, EPOCH, SET_CAPS, YIELD, PRESS, BLOCK, CHARGE = (
    f"tg_{name}_{_TAG}" for name in (*_FUNCTIONS, "yield", "press", "block", "charge")
)
NO_FUNCTION = "ERR Function not found"
HAS_LIBRARY = "already exists"

OFFSET = keyspace.PREFIX + "offset_us"  # tests move the server's time with it
SETTLE = keyspace.PREFIX + "settle"
WAITERS = keyspace.PREFIX + "waiters"
UNCLAIMED = keyspace.PREFIX + "unclaimed"
AWAITED = keyspace.PREFIX + "awaited"
GLOBAL = "global"

KINDS = 4  # of a lease's second byte: its tier plus so much for each time it was preempted
KEEP_PLACE = -1  # waits of `yield`

KEEP = -2  # charges of `release`: leave the money as it is
REMOVE = -1  # nothing was used and no usage event will come
UNSERVED = -3  # the same, and as if it had never come: no rate counts it
AS_ESTIMATED = -1  # tokens of `release`
COUNT_MAX = MAX_BALANCE_NANO  # what a limit counts as at most: Lua's numbers are whole up to 2^53

MINUTE_S = 60
_RATES = {Unit.REQUEST: "rpm", Unit.INPUT_TOKEN: "itpm", Unit.OUTPUT_TOKEN: "otpm"}
_MODES = frozenset(LimitMode) - {LimitMode.HARD}

_ACQUIRE_TAIL = Struct("<5s32s7sBdddd2s").pack
_RELEASE_TAIL = Struct("<5s32s7sdddd2s").pack
_LEASE = Struct("<cBddddd").pack
_BLOCK = Struct("<B10d").pack
_UNUSED = Struct("<4d").pack
_REQUEST, _ACQUIRE_NEXT, _RELEASE_NEXT, _END = b"$32\r\n", b"\r\n$33\r\n", b"\r\n$32\r\n", b"\r\n"


class Code(IntEnum):
    """The first element of each answer."""

    GRANTED = 1  # see `Grant.reply`
    QUEUED = 2  # the same; in the second place: estimated wait µs, what was full (`core.waits`), its limit, how many
    # wait before it, and by tier how many were ever granted while somebody waited
    REFUSED = 3  # then: which of `Prepared.named` (-1: money), retry after s
    BUSY = 4  # then: retry after s, why (`Busy`), what was full, its limit, how many wait before it
    UNKNOWN_CREDIT = 5
    EPOCH = 6
    SETTLING = 7  # then: µs left
    UNKNOWN_BUDGET = 8
    UNKNOWN_FORM = 9
    NEWER_LAYOUT = 10  # of `epoch`: replicas of a version that keeps its keys otherwise have taken over


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


def record_of(demand: Demand) -> str:
    """Return whose record a limit is counted in: its counter's name without what is counted.

    A mode stays, and a window other than a minute is added: each has a record of its own.

    Raises:
        ValueError: the name does not end with what is counted.
    """
    rest, _, last = demand.counter.rpartition(":")
    mode = ""
    if last in _MODES:
        mode, (rest, _, last) = f":{last}", rest.rpartition(":")
    wanted = "conc" if demand.kind is DemandKind.CONCURRENCY else _RATES[demand.unit]
    if last != wanted or not rest:
        raise ValueError(f"A counter of this kind is named <whose>:{wanted} or <whose>:{wanted}:<mode>.")
    other = "" if demand.kind is DemandKind.CONCURRENCY or demand.window_s == MINUTE_S else f":w{demand.window_s}"
    return rest + mode + other


def packed_names(prepared: Prepared, caps: tuple[Demand, ...]) -> list[Part]:
    """Return the keys that every request of `prepared` goes by, in the order of its form; the cap of all first."""
    records = dict.fromkeys(map(record_of, prepared.concurrencies + prepared.rates))
    names = [keyspace.counter(cap.counter) for cap in caps] + [keyspace.record(name) for name in records]
    if prepared.tenant:
        tenant_id = UUID(hex=prepared.tenant)
        names += [keyspace.counter(spend.counter) for spend in prepared.spends]
        names += [keyspace.credit(tenant_id), keyspace.outstanding(tenant_id)]
    return list(names)


def form_text(prepared: Prepared, caps: tuple[Demand, ...]) -> bytes:
    """Return what every request of `prepared` demands, without names, as the scripts read it. See common.lua."""
    limited = prepared.concurrencies + prepared.rates
    places = {name: place for place, name in enumerate(dict.fromkeys(map(record_of, limited)), start=1)}

    def figures(demand: Demand) -> tuple[int, int]:
        return demand.amount, min(demand.limit, COUNT_MAX)

    concurrencies = [(places[record_of(d)], *figures(d), int(d.enforced)) for d in prepared.concurrencies]
    rates = [
        (places[record_of(d)], *figures(d), d.window_s * 1_000_000, int(d.unit), int(d.enforced))
        for d in prepared.rates
    ]
    spends = [(figures(d)[1], int(d.enforced)) for d in prepared.spends] if prepared.tenant else []
    model = prepared.model
    head = (model.deployment_id.hex, model.inflight_max, model.waiting_max, prepared.weight)
    counted = ([figures(cap) for cap in caps], len(places), concurrencies, rates, spends)
    entitled = entitlements_text(prepared.entitlements)
    return msgspec.msgpack.encode((*head, *counted, int(bool(prepared.tenant)), entitled))


def entitlements_text(entitlements: tuple[Entitlement, ...]) -> str:
    """Return what tenants are entitled to as the scripts read it, the same for all callers. See entitlements.lua."""
    ordered = sorted(entitlements, key=lambda entitlement: entitlement.owner)
    return ";".join(f"{e.owner} {e.guarantee} {e.deserved} {e.capability}" for e in ordered)


def form_id(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def acquire_prefix(names: list[Part], form: str, owner: str, *, epoch: bytes, replica: str, text: bytes = b"") -> bytes:
    """Encode everything of `acquire` but what a request brings; with the form's text it is one part more."""
    keys: list[Part] = [keyspace.lease(replica), *names]
    return _open_ended(["FCALL", ACQUIRE, len(keys), *keys, epoch, form, owner], 3 if text else 2)


def acquire_call(  # noqa: PLR0917 - in the order of the script's
    prefix: bytes, request: bytes, tier: int, hold: int, wait_us: float, input_tokens: int, output_tokens: int
) -> bytes:
    """Encode the call. `request` is the id in hex."""
    return prefix + _ACQUIRE_TAIL(
        _REQUEST, request, _ACQUIRE_NEXT, tier, hold, wait_us, input_tokens, output_tokens, _END
    )


def with_form(acquire: bytes, text: bytes) -> bytes:
    """Complete a call of `acquire` that was begun for one part more, for a server that may not know the form."""
    return acquire + b"$%d\r\n%b\r\n" % (len(text), text)


def release_prefix(tenant: str, names: list[Part], *, epoch: bytes, replica: str) -> bytes:
    """Encode everything of `release` but what a request brings.

    Args:
        tenant: empty without money.
        names: of `packed_names`; none when they are not at hand, and the server reads them in the lease.
        epoch: the server's life.
        replica: who gives back.
    """
    keys: list[Part] = [keyspace.lease(replica), *names]
    return _open_ended(["FCALL", RELEASE, len(keys), *keys, epoch, tenant], 2)


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


def yield_call(request: bytes, wait_us: int, *, epoch: bytes, replica: str) -> bytes:
    """Encode `yield`: the request waits again for so long, or keeps its place (`KEEP_PLACE`)."""
    return call(YIELD, [keyspace.lease(replica)], [epoch, request, wait_us])


def press_call(deployment: str, *, epoch: bytes) -> bytes:
    """Encode `press`: the head of that line may have waited long."""
    return call(PRESS, [keyspace.PREFIX + "m:" + deployment], [epoch, deployment])


def lease_text(
    packed: Packed, owner: str, *, tier: int, at_us: int, hold: int, tokens: tuple[int, int], preempted: int = 0
) -> bytes:
    """Return the lease of a granted request. See common.lua."""
    names = " ".join([owner, *map(str, packed.names)])
    return _LEASE(b"G", tier + KINDS * preempted, at_us, *tokens, hold, 0) + (packed.form + names).encode()


def register_call(request: bytes, lease: bytes, text: bytes, *, epoch: bytes, replica: str) -> bytes:
    """Encode `register` for a running request; `text` is its form."""
    return call(REGISTER, [keyspace.lease(replica)], [epoch, request, lease, text])


def block_call(
    block: bytes,
    packed: Packed,
    owner: str,
    *,
    epoch: bytes,
    replica: str,
    tier: int,
    blocks: int,
    used: tuple[int, int, int],
    wanted: tuple[int, ...],
    unused: Iterable[tuple[int, int, int, int]] = (),
    text: bytes = b"",
) -> bytes:
    """Encode `block`: it holds `used` (places, tokens, nano), and `wanted` more where that is far from every limit.

    Args:
        block: its id in hex.
        packed: the caller's names and form.
        owner: as of its requests.
        epoch: the server's life.
        replica: whose block it is.
        tier: of its requests.
        blocks: how many this replica has.
        used: places, tokens reserved by them, nano.
        wanted: places, tokens, requests, input tokens, output tokens, nano.
        unused: of rates, with the time of the answer that gave them: time µs, requests, input and output tokens.
        text: the form's, for a server that may not know it.
    """
    given = b"".join(_UNUSED(*one) for one in unused)
    args: list[Part] = [epoch, packed.form, owner, block, _BLOCK(tier, blocks, *used, *wanted), given, text]
    return call(BLOCK, [keyspace.lease(replica), *packed.names], args)


def charge_call(block: bytes, tenant: str, nano: int, charges: list[Part], *, epoch: bytes, replica: str) -> bytes:
    """Encode `charge`: `charges` are request ids in hex and nano; so much is left under the block's own id."""
    tenant_id = UUID(hex=tenant)
    keys: list[Part] = [keyspace.lease(replica), keyspace.credit(tenant_id), keyspace.outstanding(tenant_id)]
    return call(CHARGE, keys, [epoch, block, nano, *charges])
