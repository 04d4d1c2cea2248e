"""Tries to sign in, and mails asked for, counted by whom and from where; too many lock for a while, longer each time.

Whoever types wrong passwords locks themselves out first: a try counts for the account at the address it comes from, and
a device that the account was signed in on before counts for itself alone. The account as a whole, and the address as a
whole, lock far later, for what comes from many addresses or tries many accounts.

What counts is what was typed: an account that does not exist is locked like one that does. A try is counted before it
is made, so that many at once are no way around. After the free ones a lock is 30 s, doubled each time up to 15 minutes:
beyond them there are at most 96 tries a day.

| counted of | free | forgotten after | guesses a day at most |
|---|---|---|---|
| an account from one address (IPv6: one /64) | 5 | a day | 5 + 96 |
| an account from all addresses that are no known device of it | 100 | a day | 100 + 96 |
| a known device of an account | 10 | a day | 10 + 96 |
| an address, at all accounts together | 100 | an hour | 2,400 |
| codes of a second factor of an account; a password asked for again in a session | 5 | a day | 5 + 96 |
"""

import ipaddress
import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from core.errors import ErrorKind, PlatformError
from tenants import credentials
from tenants import sign_in_queries as queries

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
FIRST_LOCK_S = 30
LONGEST_LOCK_S = 900
IPV6_PREFIX = 64  # what one customer of a provider has


@dataclass(frozen=True, slots=True)
class Counter:
    """One thing that tries are counted of. The first `free` tries lock nothing."""

    digest: bytes
    free: int
    code: str = "SIGN_IN_LOCKED"
    forget_after: timedelta = HOUR  # without another try


def of_sign_in(pepper: bytes, email: str, address: str, device: str = "") -> tuple[Counter, ...]:
    """Of a try at a password. `device`: the one that it comes from, when the account was signed in on it before."""
    account = email.strip().lower()
    if device:
        return (Counter(credentials.digest(pepper, f"sign-in device {device} {account}"), 10, forget_after=DAY),)
    return (
        of_pair(pepper, email, address),
        Counter(credentials.digest(pepper, f"sign-in account {account}"), 100, forget_after=DAY),
        Counter(credentials.digest(pepper, f"sign-in address {_network(address)}"), 100),
    )


def of_pair(pepper: bytes, email: str, address: str) -> Counter:
    """Of an account from one address; IPv6 counts by network."""
    text = f"sign-in pair {_network(address)} {email.strip().lower()}"
    return Counter(credentials.digest(pepper, text), 5, forget_after=DAY)


def of_second_factor(pepper: bytes, email: str) -> Counter:
    """Of codes: who tries them has the password already, so that strangers lock nobody here."""
    return Counter(credentials.digest(pepper, f"second factor {email.strip().lower()}"), 5, forget_after=DAY)


def of_proof(pepper: bytes, person_id: UUID) -> Counter:
    """Of the own password, asked for again in a session: who tries has the session already."""
    return Counter(credentials.digest(pepper, f"proof {person_id.hex}"), 5, forget_after=DAY)


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
            forget_before=now - counter.forget_after,
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
    await queries.forget_tries(session, now - DAY, most)
