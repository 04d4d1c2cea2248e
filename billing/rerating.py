"""Re-rating after a wrong price: usage rated again at the right one, what was paid too much given back.

A run names the wrong published versions, the right one, and which usage. It is counted first, without effect; then an
operator executes it, above a limit another person than who asked. Events keep what they were billed; the differences
are lines of their own (`usage_rerating`), and their sum is what the run's transactions move.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import errors, price_book, two_people
from billing import rerating_queries as queries
from billing.lots import NOTE_MAX_CHARS
from billing.types import Meter
from core import outbox
from core.idempotency import KEY_MAX_CHARS, key_reused
from core.ids import new_uuid
from core.money import Currency
from core.tiers import Tier
from tenants.types import Responsible

JOB = "billing.rerate"
VERSIONS_MAX = 100
MODELS_MAX = 100


class Wanted(msgspec.Struct, frozen=True):
    """Which usage is rated again, and at what. Without models, tiers or meters: all of them.

    Usage admitted from `since` (included) to `until` (not included) that stands at a wrong version. What would cost
    more is left as it is, unless `charge_more`.
    """

    wrong: tuple[UUID, ...]
    right: UUID
    since: datetime
    until: datetime
    models: tuple[UUID, ...] = ()
    tiers: tuple[Tier, ...] = ()
    meters: tuple[Meter, ...] = ()
    charge_more: bool = False


class Run(msgspec.Struct, frozen=True):
    """A run as it stands. Pico. The first figures are the count's, those from `done_events` on the execution's.

    `requests` is how many may be concerned by the sums of minutes: more than `events` where events are gone or were put
    right before. `given_pico` is what of the credited went back to the tenants: not what the platform had borne, nor
    what had been paid with credit that expired since.
    """

    id: UUID
    wanted: Wanted
    currency: str
    note: str
    state: str  # counting, counted, running, done, cancelled
    needs_approval: bool
    requested_by: UUID
    requested_at: datetime
    executed_by: UUID | None
    executed_at: datetime | None
    finished_at: datetime | None
    tenants: int
    requests: int
    events: int
    credit_pico: int
    charge_pico: int
    uncharged: int
    uncharged_pico: int
    unpriced: int
    done_events: int
    credited_pico: int
    given_pico: int
    charged_pico: int
    overrun_pico: int
    replayed: bool = False


class TenantPart(msgspec.Struct, frozen=True):
    """What a run means, or did, for one tenant; as in `Run`."""

    tenant_id: UUID
    requests: int
    counted: bool
    events: int
    credit_pico: int
    charge_pico: int
    uncharged: int
    uncharged_pico: int
    unpriced: int
    done: bool
    done_events: int
    credited_pico: int
    given_pico: int
    charged_pico: int
    overrun_pico: int


async def ask(
    session: AsyncSession, wanted: Wanted, *, by: Responsible, note: str, idempotency_key: str, now: datetime
) -> Run:
    """Ask for a run, once per idempotency key; the worker counts what it would do.

    Raises:
        PlatformError: INVALID_RERATING, INVALID_RANGE, NOT_FOUND (a version), IDEMPOTENCY_KEY_REUSED.
    """
    body = sha256(msgspec.json.encode((wanted, note))).digest()
    if not 0 < len(idempotency_key) <= KEY_MAX_CHARS:
        raise errors.invalid_rerating(f"An idempotency key has 1 to {KEY_MAX_CHARS} characters.", "idempotency_key")
    await queries.lock_key(session, idempotency_key)
    before = await queries.run_of_key(session, idempotency_key)
    if before is not None:
        if bytes(before.body_sha256) != body:
            raise key_reused()
        return msgspec.structs.replace(_run(before), replayed=True)
    currency = await _checked(session, wanted, note)
    run_id = new_uuid()
    await queries.insert_run(
        session,
        {
            "id": run_id,
            "currency": currency.value,
            "wrong": list(wanted.wrong),
            "right": wanted.right,
            "models": list(wanted.models) or None,
            "tiers": [int(tier) for tier in wanted.tiers] or None,
            "meters": [meter.value for meter in wanted.meters] or None,
            "since": wanted.since,
            "until": wanted.until,
            "charge_more": wanted.charge_more,
            "note": note,
            "key": idempotency_key,
            "body": body,
            "by": by.operator_id,
            "people": list(by.people),
            "answers": by.answers,
            "now": now,
        },
    )
    await queries.insert_tenants(session, run_id)
    await outbox.add(session, JOB, {"run_id": run_id.hex})
    return await get(session, run_id)


async def _checked(session: AsyncSession, wanted: Wanted, note: str) -> Currency:
    if not 0 < len(note) <= NOTE_MAX_CHARS:
        raise errors.invalid_rerating(f"Say why, in 1 to {NOTE_MAX_CHARS} characters.", "note")
    if wanted.until <= wanted.since:
        raise errors.invalid_range("The time ends after it begins.")
    if not 0 < len(wanted.wrong) <= VERSIONS_MAX or wanted.right in wanted.wrong:
        raise errors.invalid_rerating(
            f"Name 1 to {VERSIONS_MAX} wrong versions, and another one that is right.", "wrong"
        )
    if len(wanted.models) > MODELS_MAX:
        raise errors.invalid_rerating(f"At most {MODELS_MAX} models; without any, all.", "models")
    currencies = set()
    for version_id in (wanted.right, *wanted.wrong):
        version = await price_book.load_version(session, version_id)
        if version is None:
            raise errors.no_version(version_id)
        currencies.add(version.currency)
    if len(currencies) > 1:
        raise errors.invalid_rerating("The versions are in different currencies.", "right")
    return currencies.pop()


async def get(session: AsyncSession, run_id: UUID) -> Run:
    """Return a run.

    Raises:
        PlatformError: NOT_FOUND.
    """
    row = await queries.run(session, run_id)
    if row is None:
        raise errors.no_rerating(run_id)
    return _run(row)


async def search(session: AsyncSession, *, after: UUID | None, limit: int) -> Sequence[Run]:
    """Return runs, newest first."""
    return [_run(row) for row in await queries.runs(session, after, limit)]


async def tenants_of(session: AsyncSession, run_id: UUID, *, offset: int, limit: int) -> Sequence[TenantPart]:
    """Return a run's tenants, those to whom it means most first.

    Raises:
        PlatformError: NOT_FOUND.
    """
    await get(session, run_id)
    rows = await queries.tenants(session, run_id, offset=offset, limit=limit)
    return [TenantPart(**_facts(row, TenantPart)) for row in rows]


async def execute(session: AsyncSession, run_id: UUID, *, by: Responsible, alone_max_pico: int, now: datetime) -> Run:
    """Let a counted run have its effect; the worker does it. Doing it again only wakes the worker.

    Raises:
        PlatformError: NOT_FOUND, RERATING_NOT_COUNTED, RERATING_OVER (cancelled), SECOND_PERSON_NEEDED,
            SIGN_IN_TO_DECIDE, OPERATOR_NOT_CONFIRMED, NOBODY_ANSWERS.
    """
    row = await queries.lock_run(session, run_id)
    if row is None:
        raise errors.no_rerating(run_id)
    if row.state == "counting":
        raise errors.rerating_not_counted()
    if row.state == "cancelled":
        raise errors.rerating_over(row.state)
    if row.state == "counted":
        sums = await get(session, run_id)
        alone = await queries.moved_alone_pico(session, by.answers, now - two_people.ALONE_WINDOW)
        if row.needs_approval or alone + sums.credit_pico + sums.charge_pico > alone_max_pico:
            two_people.require_other(by, row.requested_by, row.requested_people)
            if row.answered_by is None:
                raise errors.nobody_answers() if row.requested_people is not None else errors.asked_by_nobody()
        values = {
            "state": "running",
            "needs_approval": _agreed(by, row),
            "by": by.operator_id,
            "answers": by.answers,
            "person": by.answers if by.signed_in else None,
            "at": now,
            "finished": None,
        }
        await queries.set_state(session, run_id, values)
    if row.state != "done":
        await outbox.add(session, JOB, {"run_id": run_id.hex})
    return await get(session, run_id)


async def cancel(session: AsyncSession, run_id: UUID, *, now: datetime) -> Run:
    """End a run that is not done; what it did stays. Doing it again changes nothing.

    Raises:
        PlatformError: NOT_FOUND, RERATING_OVER (done).
    """
    row = await queries.lock_run(session, run_id)
    if row is None:
        raise errors.no_rerating(run_id)
    if row.state == "done":
        raise errors.rerating_over(row.state)
    if row.state != "cancelled":
        values = queries.execution_of(row)
        await queries.set_state(session, run_id, {**values, "state": "cancelled", "finished": now})
    return await get(session, run_id)


def _agreed(by: Responsible, row: Row[Any]) -> bool:
    """Whether two people stand for the run: who asked for it, and another who executes it."""
    other = two_people.is_other(by, row.requested_by, row.requested_people)
    return by.signed_in and row.answered_by is not None and other


def _run(row: Row[Any]) -> Run:
    wanted = Wanted(
        tuple(row.wrong_versions),
        row.right_version,
        row.since,
        row.until,
        tuple(row.models or ()),
        tuple(map(Tier, row.tiers or ())),
        tuple(map(Meter, row.meters or ())),
        row.charge_more,
    )
    return Run(wanted=wanted, **_facts(row, Run))


def _facts(row: Row[Any], kind: type[Run] | type[TenantPart]) -> dict[str, Any]:
    """The columns that a noun has, sums as integers."""
    found = {name: getattr(row, name) for name in kind.__struct_fields__ if name in row._fields}
    return {name: int(value) if isinstance(value, Decimal) else value for name, value in found.items()}
