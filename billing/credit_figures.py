"""The credit figures in Valkey that admission decides by. They can be rebuilt from ledger and spools at any time.

``credit:<tenant>`` holds (packed: `core.credit_figure`) nano that the ledger says may be spent, the ledger version that
comes from, and the sum of ``out:<tenant>``, which holds per request what is held or used and not yet posted. A figure
that is not there is made with that sum, so nothing is added to it before. Scripts read it by MGET, for which a hash of
an earlier version is no figure. All are whole numbers below 2^53.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import msgspec

from billing import queries
from billing.spool_reader import SpoolReader
from billing.types import Balance, UsageEvent
from core import keyspace
from core.clock import Clock
from core.credit_figure import CreditFigure, read_figure
from core.db import Sessions, transaction
from core.ids import uuid7_time
from core.logging import get_logger
from core.money import nano_down, nano_up
from core.resp import Part, RespClient, script

IDS_PER_CALL = 500
CALLS_AT_ONCE = 200
SPOOL_PAGE = 5000
SCAN_ROUNDS_MAX = 40
OUT_SUM_MAX = 20_000  # entries that one script call adds up
SETTLED_AFTER_S = 120  # an entry so old is looked up in the ledger: its removal may have been lost

_log = get_logger(__name__)

# KEYS: credit, out. ARGV: a, v, then the requests that are posted. Idempotent: entries go once, figures only forward.
SETTLE = script("""
local posted = 0
for i = 3, #ARGV do
  local nano = redis.call('HGET', KEYS[2], ARGV[i])
  if nano then
    redis.call('HDEL', KEYS[2], ARGV[i])
    posted = posted + nano
  end
end
local raw = redis.call('MGET', KEYS[1])[1]
if raw then
  local a, v, o = struct.unpack('<ddd', raw)
  if v < tonumber(ARGV[2]) then a, v = ARGV[1], ARGV[2] end
  redis.call('SET', KEYS[1], struct.pack('<ddd', a, v, o - posted))
end
return 1
""")

# KEYS: credit, out. ARGV: a, v, '1' to set them also when v is the same. Makes the figure when there is none.
SET_FIGURE = script("""
local raw, o = redis.call('MGET', KEYS[1])[1], 0
if raw then
  local _, v, known = struct.unpack('<ddd', raw)
  if v > tonumber(ARGV[2]) or (v == tonumber(ARGV[2]) and ARGV[3] ~= '1') then return 0 end
  o = known
else
  for _, nano in ipairs(redis.call('HVALS', KEYS[2])) do o = o + nano end
end
redis.call('SET', KEYS[1], struct.pack('<ddd', ARGV[1], ARGV[2], o))
return 1
""")

# KEYS: credit, out. ARGV: request, nano, … Entries already there are left alone.
REGISTER = script("""
local added = 0
for i = 1, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) == 1 then added = added + ARGV[i + 1] end
end
local raw = added ~= 0 and redis.call('MGET', KEYS[1])[1]
if raw then
  local a, v, o = struct.unpack('<ddd', raw)
  redis.call('SET', KEYS[1], struct.pack('<ddd', a, v, o + added))
end
return 1
""")

# KEYS: credit, out. ARGV: entries at most. Puts o right; answers what it was off by, in whole nano.
RESUM = script("""
local raw = redis.call('MGET', KEYS[1])[1]
if not raw or redis.call('HLEN', KEYS[2]) > tonumber(ARGV[1]) then return 0 end
local a, v, o = struct.unpack('<ddd', raw)
local sum = 0
for _, nano in ipairs(redis.call('HVALS', KEYS[2])) do sum = sum + nano end
if o ~= sum then redis.call('SET', KEYS[1], struct.pack('<ddd', a, v, sum)) end
return o - sum
""")


class Drift(msgspec.Struct):
    """What a reconciliation found and put right."""

    tenants: int = 0
    figures: int = 0  # a that did not come from the ledger's present balance
    figures_nano: int = 0  # their differences, without sign
    leftovers: int = 0  # entries of requests that are posted already
    sums: int = 0  # o that was not the sum of its entries
    sums_nano: int = 0  # their differences, without sign


def _keys(tenant_id: UUID) -> tuple[str, str]:
    return keyspace.credit(tenant_id), keyspace.outstanding(tenant_id)


async def set_figure(client: RespClient, balance: Balance, *, correct: bool = False) -> None:
    """Make or move forward a tenant's figure; `correct` sets one of the same version anew. A newer one stays."""
    arguments: tuple[Part, ...] = (nano_down(balance.available_pico), balance.version, "1" if correct else "")
    await client.eval(SET_FIGURE, _keys(balance.tenant_id), arguments)


async def refresh(client: RespClient, sessions: Sessions, tenant_id: UUID, *, correct: bool = False) -> None:
    """Bring a tenant's figure up to its ledger balance, e.g. after a top-up was committed.

    `correct` also sets one of the same version anew: credit expired, and nothing was posted.

    Raises:
        RespUnavailable: Valkey is away; the minute's reconciliation will do it.
    """
    async with transaction(sessions) as session:
        balances = await queries.balances(session, [tenant_id])
    for balance in balances:
        await set_figure(client, balance, correct=correct)


def make_loader(sessions: Sessions, client: RespClient) -> Callable[[UUID], Awaitable[None]]:
    """Return the `credit_loader` of admission: sets the figure of a tenant that has none there.

    A tenant without an account gets a figure of 0, so that it is refused and not asked for again and again.
    """

    async def load(tenant_id: UUID) -> None:
        async with transaction(sessions) as session:
            balances = await queries.balances(session, [tenant_id])
        if balances:
            await set_figure(client, balances[0])
        else:
            await client.eval(SET_FIGURE, _keys(tenant_id), (0, 0, ""))

    return load


Settlement = tuple[UUID, Balance | None, Sequence[UUID]]  # tenant, its balance now, its requests that are posted


async def settle(client: RespClient, tenant_id: UUID, balance: Balance | None, ids: Sequence[UUID]) -> None:
    """Take posted requests out of the outstanding ones and set the new balance; repeating it changes nothing."""
    await settle_all(client, [(tenant_id, balance, ids)])


async def settle_all(client: RespClient, settlements: Iterable[Settlement]) -> None:
    """Settle many tenants, many calls in one write.

    Raises:
        RespUnavailable, RespError: some may be done; doing all again is safe.
    """
    calls = []
    for tenant_id, balance, ids in settlements:
        figure: tuple[Part, ...] = (nano_down(balance.available_pico), balance.version) if balance else (0, 0)
        for at in range(0, len(ids), IDS_PER_CALL):
            names = [one.hex for one in ids[at : at + IDS_PER_CALL]]
            calls.append((_keys(tenant_id), (*figure, *names)))
    for keys, args in calls[:1]:
        await client.eval(SETTLE, keys, args)  # the server has the script now
    for at in range(1, len(calls), CALLS_AT_ONCE):
        chunk = calls[at : at + CALLS_AT_ONCE]
        await asyncio.gather(*(client.call("EVALSHA", SETTLE.sha, 2, *keys, *args) for keys, args in chunk))


async def register(client: RespClient, events: Iterable[UsageEvent]) -> None:
    """Enter the charges of events that are not posted yet, where they are missing."""
    by_tenant: dict[UUID, list[Part]] = {}
    for event in events:
        by_tenant.setdefault(event.tenant_id, []).extend((event.id.hex, nano_up(max(0, event.amount_pico))))
    for tenant_id, entries in by_tenant.items():
        for at in range(0, len(entries), 2 * IDS_PER_CALL):
            await client.eval(REGISTER, _keys(tenant_id), entries[at : at + 2 * IDS_PER_CALL])


async def register_spool(client: RespClient, folder: Path) -> int:
    """Enter all unposted events of a spool folder, after Valkey lost its data; returns how many there are."""
    reader, count = SpoolReader(folder), 0
    while events := reader.read(SPOOL_PAGE):
        await register(client, events)
        count += len(events)
    return count


async def reconcile(sessions: Sessions, client: RespClient, clock: Clock) -> Drift:
    """Compare every figure with the ledger, put right what is off, and say how much it was."""
    drift, last = Drift(), UUID(int=0)
    while True:
        async with transaction(sessions) as session:
            page = await queries.balances_after(session, last)
        known = await asyncio.gather(*(read_figure(client, balance.tenant_id) for balance in page))
        for balance, figure in zip(page, known, strict=True):
            if figure is not None:  # else nobody asked for it yet
                drift.tenants += 1
                await _correct_figure(sessions, client, balance, figure, drift)
                await _drop_leftovers(sessions, client, clock, balance.tenant_id, drift)
        if len(page) < queries.PAGE_MAX:
            return drift
        last = page[-1].tenant_id


async def _correct_figure(
    sessions: Sessions, client: RespClient, balance: Balance, known: CreditFigure, drift: Drift
) -> None:
    nano, version, _ = known
    if version > balance.version or nano == nano_down(balance.available_pico):
        return  # moved forward since the ledger was read, or right
    if version < balance.version:
        await set_figure(client, balance)  # it is on its way
        return
    # The page may be older than the figure: a limit changed, or credit expired, and the version is the same. So both
    # are read again, the figure first: the ledger is ahead of it, never behind.
    figure = await read_figure(client, balance.tenant_id)
    async with transaction(sessions) as session:
        (balance,) = await queries.balances(session, [balance.tenant_id])
    right = nano_down(balance.available_pico)
    if figure is None or figure.version != balance.version or figure.available == right:
        return
    drift.figures += 1
    drift.figures_nano += abs(figure.available - right)
    _tell(balance.tenant_id, "available", figure.available - right)
    await set_figure(client, balance, correct=True)


async def _drop_leftovers(sessions: Sessions, client: RespClient, clock: Clock, tenant_id: UUID, drift: Drift) -> None:
    credit, out = _keys(tenant_id)
    old = await _old_entries(client, out, clock.now() - timedelta(seconds=SETTLED_AFTER_S))
    if old:
        async with transaction(sessions) as session:
            posted = await queries.settled_ids(session, tenant_id, old, uuid7_time(min(old)))
        await settle(client, tenant_id, None, sorted(posted))
        drift.leftovers += len(posted)
        if posted:
            _log.warning("credit.leftovers_dropped", tenant_id=tenant_id.hex, requests=len(posted))
    off: int = await client.eval(RESUM, (credit, out), (OUT_SUM_MAX,))
    if off:
        drift.sums += 1
        drift.sums_nano += abs(off)
        _tell(tenant_id, "outstanding", off)


def _tell(tenant_id: UUID, figure: str, off_nano: int) -> None:
    _log.warning("credit.figure_repaired", tenant_id=tenant_id.hex, figure=figure, off_nano=off_nano)


async def _old_entries(client: RespClient, out: str, before: datetime) -> list[UUID]:
    """Return outstanding requests admitted before that instant, at most as many as a bounded scan meets."""
    cursor: Part = 0
    old: list[UUID] = []
    for _ in range(SCAN_ROUNDS_MAX):
        cursor, found = await client.call("HSCAN", out, cursor, "COUNT", IDS_PER_CALL)
        for name in found[::2]:
            request = UUID(hex=name.decode())
            if uuid7_time(request).astimezone(UTC) < before:
                old.append(request)
        if cursor == b"0":
            break
    return old
