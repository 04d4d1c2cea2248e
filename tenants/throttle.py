"""Tries to sign in, and mails asked for, counted by whom and from where; too many lock for a while, longer each time.

What counts is what was typed: an account that does not exist is locked like one that does. A try is counted before it
is made, so that many at once are no way around.
"""

import ipaddress
import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from tenants import credentials
from tenants import sign_in_queries as queries

FORGET_AFTER = timedelta(hours=1)  # without another try
FIRST_LOCK_S = 30
LONGEST_LOCK_S = 900
IPV6_PREFIX = 64  # what one customer of a provider has


@dataclass(frozen=True, slots=True)
class Counter:
    """One thing that tries are counted of. The first `free` tries lock nothing."""

    digest: bytes
    free: int
    code: str = "SIGN_IN_LOCKED"


def of_account(pepper: bytes, email: str) -> Counter:
    return Counter(credentials.digest(pepper, f"sign-in account {email.strip().lower()}"), 5)


def of_address(pepper: bytes, address: str) -> Counter:
    """Of where a try comes from; IPv6 counts by network."""
    return Counter(credentials.digest(pepper, f"sign-in address {_network(address)}"), 20)


def of_reset(pepper: bytes, address: str) -> Counter:
    """Of the address that asks for links to a new password."""
    return Counter(credentials.digest(pepper, f"reset address {_network(address)}"), 10, "TOO_MANY_RESETS")


def of_invites(pepper: bytes, place: str) -> Counter:
    """Of the invites that one tenant mails, or the operators: strangers get no flood of them."""
    return Counter(credentials.digest(pepper, f"invites {place}"), 100, "TOO_MANY_INVITES")


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return "unknown"
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((found.packed, IPV6_PREFIX), strict=False))


async def take(session: AsyncSession, now: datetime, *counters: Counter) -> None:
    """Count a try of each.

    Raises:
        PlatformError: rate_limited with the seconds to wait, when one of them is locked.
    """
    for counter in counters:
        taken = await queries.take_try(
            session,
            counter.digest,
            now,
            forget_before=now - FORGET_AFTER,
            free=counter.free,
            first_s=FIRST_LOCK_S,
            most_s=LONGEST_LOCK_S,
        )
        if not taken:
            until = await queries.locked_until(session, counter.digest) or now
            raise PlatformError(
                counter.code,
                ErrorKind.RATE_LIMITED,
                "Too many tries. Wait before the next one.",
                retry_after_s=max(1, math.ceil((until - now).total_seconds())),
            )


async def give_back(session: AsyncSession, now: datetime, *counters: Counter) -> None:
    """Take back a try that was a good one; what failed before stays counted."""
    for counter in counters:
        await queries.give_try_back(session, counter.digest, now)


async def clear(session: AsyncSession, counter: Counter) -> None:
    """Forget all tries: somebody signed in, or proved by mail who they are."""
    await queries.clear_tries(session, counter.digest)


async def forget(session: AsyncSession, now: datetime, most: int) -> None:
    """Delete at most `most` counters that matter no more."""
    await queries.forget_tries(session, now - FORGET_AFTER, most)
