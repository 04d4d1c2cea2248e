"""Decides, pure, whether a usage event may be billed, and writes it as a line for COPY."""

from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from uuid import UUID

import msgspec

from billing import pricing
from billing.price_table import VersionPrices
from billing.types import UsageEvent
from core.money import Currency, format_pico
from core.waits import Wait

FIRST_DAY = date(2024, 1, 1).toordinal()  # as in ensure_usage_partition
EPOCH_DAY = date(1970, 1, 1).toordinal()
DAYS_AHEAD_MAX = 2
MS_PER_DAY = 86_400_000
US_PER_DAY = 86_400_000_000
BIGINT_MAX = 2**63 - 1
TEXT_MAX_CHARS = 1000
PREEMPTIONS_MAX = 100  # far more than admission allows
LAST_US = 253_402_300_799_999_999  # the end of the year 9999


def day_number(event_id: UUID) -> int:
    """Return the day of a UUIDv7 (proleptic ordinal, UTC): the partition of its event, whatever clock read it later."""
    return (event_id.int >> 80) // MS_PER_DAY + EPOCH_DAY


@lru_cache(maxsize=256)
def _month_of_day(day: int) -> int:
    at = date.fromordinal(EPOCH_DAY + day)
    return at.year * 12 + at.month


def month_number(us: int) -> int:
    """Return a number that all instants of one month (UTC) share."""
    return _month_of_day(us // US_PER_DAY)


def day_in_range(day: int, today: int) -> bool:
    """Whether events of that day are taken at all."""
    return FIRST_DAY <= day <= today + DAYS_AHEAD_MAX


def objection(
    event: UsageEvent,
    prices: VersionPrices | None,
    currency: Currency | None,
    today: int,
    closed: AbstractSet[int] = frozenset(),
) -> str:
    """Return why the event must not be billed by itself, or an empty text.

    Args:
        event: what the gateway wrote.
        prices: the published version the event names; None when there is none.
        currency: the tenant's; None when it has no account.
        today: ordinal of the day.
        closed: ordinals of days whose events may be dropped already.
    """
    if event.quarantine:
        return event.quarantine[:TEXT_MAX_CHARS]
    shape = _malformed(event, today)
    if shape:
        return shape
    if closed and day_number(event.id) in closed:
        return "its day is closed; whether it was billed before can no longer be told"
    if currency is None:
        return "the tenant has no account"
    if event.currency is not currency:
        return f"the tenant is billed in {currency.value}, the event is in {event.currency.value}"
    return _misrated(event, prices)


def _misrated(event: UsageEvent, prices: VersionPrices | None) -> str:
    if prices is None:
        return "no such price version is published"
    schedule = prices.schedule(event.model_id, event.tier, event.tenant_id)
    if schedule is None or prices.currency is not event.currency:
        return "the price version has no price for this model, tier and currency"
    try:
        right = pricing.charge(event.usage, schedule, event.outcome)
    except ValueError as error:
        return str(error)
    if right != event.amount_pico:
        return f"the amount is {format_pico(event.amount_pico)}, the price version gives {format_pico(right)}"
    return ""


def min_charge(event: UsageEvent, prices: VersionPrices | None) -> int:
    """Return the part of an unobjectionable event's amount that lifts it to the minimum charge. Pico."""
    schedule = None if prices is None else prices.schedule(event.model_id, event.tier, event.tenant_id)
    return 0 if schedule is None else pricing.min_charge(event.amount_pico, event.usage, schedule)


def _malformed(event: UsageEvent, today: int) -> str:
    if event.id.version != 7:
        return "the id is not a UUIDv7"
    usage = event.usage
    numbers = (
        *(usage.input_uncached, usage.input_cached, usage.input_cache_write, usage.output, usage.reasoning),
        *(event.amount_pico, event.admitted_at_us, event.ended_at_us, event.queue_us, event.ttft_us),
        *(event.preemptions, event.waste_tokens, event.waste_us),
        *(() if event.wait is None else msgspec.structs.astuple(event.wait)),
    )
    if min(numbers) < 0:
        return "a number is negative"
    if max(numbers) > BIGINT_MAX or max(event.admitted_at_us, event.ended_at_us) > LAST_US:
        return "a number is too large"
    if event.preemptions > PREEMPTIONS_MAX:
        return "it was preempted more often than a request can be"
    if not 0 <= event.http_status <= 999:
        return "the status is no HTTP status"
    return _mistimed(event, today)


def _mistimed(event: UsageEvent, today: int) -> str:
    if not day_in_range(day_number(event.id), today):
        return "the id's own time is out of range"
    for us in (event.admitted_at_us, event.ended_at_us):
        if not day_in_range(us // US_PER_DAY + EPOCH_DAY, today):
            return "it was admitted or ended at a time that is out of range"
    return ""


def plain(value: str) -> str:
    """Return text that Postgres takes: without NUL, bounded."""
    return value[:TEXT_MAX_CHARS].replace("\0", "")


NOT_PREEMPTED = "\\N\t\\N\t\\N"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\0": None})


def _field(value: str) -> str:
    if value.isascii() and value.isprintable() and "\\" not in value and len(value) <= TEXT_MAX_CHARS:
        return value
    return value[:TEXT_MAX_CHARS].translate(_ESCAPES)


@lru_cache(maxsize=4096)
def _second(second: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)).strftime("%Y-%m-%d %H:%M:%S")


def instant(us: int) -> str:
    """Return a timestamptz as text, to the microsecond."""
    return f"{_second(us // 1_000_000)}.{us % 1_000_000:06d}+00"


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    return date.fromordinal(number).isoformat()


def _waste(e: UsageEvent) -> str:
    return f"{e.preemptions}\t{e.waste_tokens}\t{e.waste_us}"


@lru_cache(maxsize=65_536)
def _hex(number: int) -> str:
    """Return a UUID's digits; made once for those of tenants, keys and models, which come again and again."""
    return f"{number:032x}"


def _wait(wait: Wait | None) -> str:
    return "\\N" if wait is None else f"{{{','.join(map(str, msgspec.structs.astuple(wait)))}}}"


def copy_line(e: UsageEvent, tx: str, min_charge_pico: int) -> str:
    """Return the event in COPY's text format, in the order of `posting_queries`' columns; `tx` is its transaction."""
    u = e.usage
    return (
        f"{e.id.int:032x}\t{_hex(e.tenant_id.int)}\t{_day(day_number(e.id))}\t{tx}\t"
        f"{_hex(e.project_id.int)}\t{_hex(e.key_id.int)}\t{_hex(e.model_id.int)}\t{_hex(e.version_id.int)}\t"
        f"{_hex(e.deployment_id.int)}\t{_hex(e.price_version_id.int)}\t{_field(e.model)}\t"
        f"{_field(e.endpoint)}\t{e.tier:d}\t{e.currency}\t{e.outcome}\t{e.count_source}\t"
        f"{'t' if e.stream else 'f'}\t{e.http_status}\t{u.input_uncached}\t{u.input_cached}\t{u.input_cache_write}\t"
        f"{u.output}\t{u.reasoning}\t{e.amount_pico}\t{min_charge_pico}\t{instant(e.admitted_at_us)}\t{instant(e.ended_at_us)}\t"
        f"{e.queue_us}\t{e.ttft_us}\t{_field(e.upstream_id)}\t"
        f"{_waste(e) if e.preemptions else NOT_PREEMPTED}\t{_wait(e.wait)}\n"
    )
