"""Budgets in Valkey: what is spent of each, as admission counts it. They can be rebuilt from ledger and holds.

The counter of a budget holds what is posted on it and what of it is outstanding, in nano. Admission moves it: by the
hold at the door, to the charge at the end. Here it is made when Valkey does not have it, and once a minute brought back
into the interval that is certain: not less than what is posted, not more than that and all that is outstanding of the
tenant. Where something is posted while both are read, the higher figure is taken: it can only err towards refusing.

The counters of the next day or month are made some minutes before it begins, when nothing can have been spent of it:
at midnight nobody waits for Postgres, which may even be away.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

from billing import queries
from billing.budget_queries import Part, spent_pico
from core import keyspace
from core.clock import Clock
from core.credit_figure import read_figure
from core.db import Sessions, transaction
from core.demand import Demand
from core.errors import PlatformError
from core.logging import get_logger
from core.money import MAX_BALANCE_NANO, nano_up
from core.resp import Part as Argument
from core.resp import RespClient, script
from tenants import tenants
from tenants.types import LimitMetric

KNOWN = keyspace.PREFIX + "budgets"
PLACE = keyspace.PREFIX + "budgets_at"
KEPT = timedelta(days=3)  # after its period
AHEAD = timedelta(minutes=15)  # of its period
ATTEMPTS = 3
PAGE = 200
PAGES_MAX = 50  # of one run; the next goes on where it ended
TELLING_NANO = 1_000_000  # less is what rounding to nano makes

log = get_logger(__name__)

# KEYS: credit, out, known, counters…. ARGV: version of the ledger that was read, nano outstanding before it was read,
# '1' to take both when more is posted since, tenant, then of each counter: name, end of its period in µs, posted nano.
# Answers 0 when more is posted since and nothing was set.
MAKE = script("""
local raw = redis.call('MGET', KEYS[1])[1]
local v, sum = 0, 0
if raw then
  local _
  _, v, sum = struct.unpack('<ddd', raw)
else
  for _, nano in ipairs(redis.call('HVALS', KEYS[2])) do sum = sum + nano end
end
if v > tonumber(ARGV[1]) then
  if ARGV[3] ~= '1' then return 0 end
  sum = sum + ARGV[2]
end
for i = 4, #KEYS do
  local at = 3 * i - 7
  if redis.call('EXISTS', KEYS[i]) == 0 then redis.call('SET', KEYS[i], ARGV[at + 2] + sum) end
  redis.call('HSET', KEYS[3], ARGV[at], ARGV[4] .. ' ' .. ARGV[at + 1])
end
return 1
""")

# KEYS: credit, counters…. ARGV: version of the ledger that was read, then what is posted on each counter, nano.
# Answers by how much each was off. When more is posted since, a counter is raised and never lowered.
CLAMP = script("""
local raw, v, o = redis.call('MGET', KEYS[1])[1], 0, 0
if raw then
  local _
  _, v, o = struct.unpack('<ddd', raw)
end
local sure = raw and v <= tonumber(ARGV[1])
local off = {}
for i = 2, #KEYS do
  local value, posted = tonumber(redis.call('GET', KEYS[i])), tonumber(ARGV[i])
  local right = value
  if value and value < posted then
    right = posted
  elseif value and sure and value > posted + o then
    right = posted + o
  end
  if value ~= right then redis.call('SET', KEYS[i], right) end
  off[i - 1] = value and value - right or 0
end
return off
""")

_COUNTER = re.compile(
    r"(?P<level>key|project|tenant):(?P<owner>[0-9a-f]{32})(?::m:(?P<model>[0-9a-f]{32}))?"
    r":spend:(?:(?P<total>t)|d:(?P<day>\d{4}-\d\d-\d\d)|m:(?P<month>\d{4}-\d\d))(?::soft|:dark)?"
)


class Repair(msgspec.Struct):
    """What a run of `clamp` did."""

    budgets: int = 0
    removed: int = 0  # their period ended days ago
    ahead: int = 0  # made for the next period
    off: int = 0
    off_nano: int = 0  # without sign


def part_of(counter: str, zone: ZoneInfo) -> Part:
    """Return what usage a budget's counter counts: from and until when, of which project, key and model.

    A day is as long as it is in that zone: 23 to 25 hours.

    Raises:
        ValueError: it is no budget's counter.
    """
    found = _COUNTER.fullmatch(counter)
    if found is None:
        raise ValueError(f"No budget is counted in {counter[:200]!r}.")
    start, until = None, None
    if found["day"]:
        first = date.fromisoformat(found["day"])
        start, until = _begin(first, zone), _begin(first + timedelta(days=1), zone)
    elif found["month"]:
        first = date.fromisoformat(found["month"] + "-01")
        start, until = _begin(first, zone), _begin((first + timedelta(days=31)).replace(day=1), zone)
    owner = UUID(hex=found["owner"])
    project = owner if found["level"] == "project" else None
    key = owner if found["level"] == "key" else None
    return start, until, project, key, UUID(hex=found["model"]) if found["model"] else None


def following(counter: str, zone: ZoneInfo) -> tuple[str, int]:
    """Return the counter of the next day or month of the same budget, and when that ends, Unix µs."""
    start, until, *_ = part_of(counter, zone)
    if start is None or until is None:
        raise ValueError(f"{counter[:200]!r} has no next period.")
    monthly = ":spend:m:" in counter
    first = until.astimezone(zone).date()
    was = start.astimezone(zone).date().isoformat()
    named = counter.replace(was[:7], first.isoformat()[:7]) if monthly else counter.replace(was, first.isoformat())
    after = (first + timedelta(days=31)).replace(day=1) if monthly else first + timedelta(days=1)
    return named, int(_begin(after, zone).timestamp()) * 1_000_000


def window_of(metric: LimitMetric, zone: ZoneInfo, at: datetime) -> tuple[datetime | None, datetime | None]:
    """Return the period of a budget that an instant is in: from (included) and until (not included); None: always."""
    today = at.astimezone(zone).date()
    if metric is LimitMetric.SPEND_PER_DAY:
        return _begin(today, zone), _begin(today + timedelta(days=1), zone)
    if metric is LimitMetric.SPEND_PER_MONTH:
        first = today.replace(day=1)
        return _begin(first, zone), _begin((first + timedelta(days=31)).replace(day=1), zone)
    return None, None


def projected_pico(spent_pico: int, start: datetime, until: datetime, now: datetime) -> int:
    """Return what a period's spend comes to at its end when it goes on as it went so far, rounded down.

    The period is as long as it is in its zone: of a day with 25 hours, 13 are over at noon.
    """
    over_us = (now - start) // timedelta(microseconds=1)
    if over_us <= 0:
        return spent_pico
    return spent_pico * max(over_us, (until - start) // timedelta(microseconds=1)) // over_us


def _begin(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def make_loader(sessions: Sessions, client: RespClient) -> Callable[[UUID, tuple[Demand, ...]], Awaitable[None]]:
    """Return the `budget_loader` of admission: makes the counters of a tenant's budgets that are not there."""

    async def load(tenant_id: UUID, spends: tuple[Demand, ...]) -> None:
        counters = [demand.counter for demand in spends]
        credit, out = keyspace.credit(tenant_id), keyspace.outstanding(tenant_id)
        keys = [credit, out, KNOWN, *map(keyspace.counter, counters)]
        for attempt in range(1, ATTEMPTS + 1):
            figure = await read_figure(client, tenant_id)
            before = figure.outstanding if figure else 0
            version, posted, _ = await _posted(sessions, tenant_id, counters)
            arguments: list[Argument] = [version, before, "1" if attempt == ATTEMPTS else "", tenant_id.hex]
            for demand, nano in zip(spends, posted, strict=True):
                arguments += [demand.counter, demand.until_us, nano]
            if await client.eval(MAKE, keys, arguments):
                return

    return load


async def clamp(sessions: Sessions, client: RespClient, clock: Clock) -> Repair:
    """Bring every known budget into the interval that is certain; remove those whose period ended three days ago.

    Raises:
        RespUnavailable, RespError: Valkey is away; the next run does it.
    """
    repair, cursor = Repair(), await client.call("GET", PLACE) or b"0"
    for _ in range(PAGES_MAX):
        cursor, flat = await client.call("HSCAN", KNOWN, cursor, "COUNT", PAGE)
        known = dict(zip(flat[::2], flat[1::2], strict=True))
        await _clamp_page(sessions, client, clock.now_us(), known, repair)
        await client.call("SET", PLACE, cursor)
        if cursor == b"0":
            break
    return repair


async def _clamp_page(
    sessions: Sessions, client: RespClient, now_us: int, known: dict[bytes, bytes], repair: Repair
) -> None:
    oldest_us, soon_us = now_us - KEPT // timedelta(microseconds=1), now_us + AHEAD // timedelta(microseconds=1)
    tenants_of: dict[UUID, list[str]] = {}
    over: list[str] = []
    ending: set[str] = set()
    for name, value in known.items():
        tenant, until_us = value.decode().split()
        if 0 < int(until_us) < oldest_us:
            over.append(name.decode())
        else:
            tenants_of.setdefault(UUID(hex=tenant), []).append(name.decode())
        if now_us < int(until_us) < soon_us:
            ending.add(name.decode())
    if over:
        await client.call("DEL", *map(keyspace.counter, over))
        await client.call("HDEL", KNOWN, *over)
        repair.removed += len(over)
    for tenant_id, counters in tenants_of.items():
        zone = await _clamp(sessions, client, tenant_id, counters, repair)
        for counter in ending.intersection(counters):
            made, ends_us = following(counter, zone)
            await client.call("SET", keyspace.counter(made), 0, "NX")
            await client.call("HSET", KNOWN, made, f"{tenant_id.hex} {ends_us}")
            repair.ahead += 1


async def _clamp(
    sessions: Sessions, client: RespClient, tenant_id: UUID, counters: Sequence[str], repair: Repair
) -> ZoneInfo:
    version, posted, zone = await _posted(sessions, tenant_id, counters)
    keys = [keyspace.credit(tenant_id), *map(keyspace.counter, counters)]
    found: list[int] = await client.eval(CLAMP, keys, [version, *posted])
    repair.budgets += len(counters)
    for counter, off in zip(counters, found, strict=True):
        if abs(off) > TELLING_NANO:
            repair.off += 1
            repair.off_nano += abs(off)
            log.warning("budget.repaired", tenant_id=tenant_id.hex, counter=counter, off_nano=off)
    return zone


async def _posted(sessions: Sessions, tenant_id: UUID, counters: Sequence[str]) -> tuple[int, list[int], ZoneInfo]:
    """Return the tenant's version of the ledger, read first, what is posted on each budget, in nano, and its zone."""
    async with transaction(sessions) as session:
        balances = await queries.balances(session, [tenant_id])
        try:
            zone = ZoneInfo((await tenants.get(session, tenant_id)).tz)
        except PlatformError:
            zone = ZoneInfo("UTC")
        parts = [part_of(counter, zone) for counter in counters]
        sums = await spent_pico(session, tenant_id, parts)
    return balances[0].version if balances else 0, [min(nano_up(pico), MAX_BALANCE_NANO) for pico in sums], zone
