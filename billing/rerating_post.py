"""One batch of a re-rating: rate events again, give back or charge the difference, and write a line for each.

Counting does the same without posting. A batch is one transaction under the lock of the run and, when it posts, of the
tenant's money; the run goes on after the last event of its last committed batch, and the table of lines takes an event
once per run. So a run that is killed and goes on, or runs in two places, has one effect per event.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncSession

from billing import ledger, lots, posting_queries, price_book
from billing import rerating_queries as queries
from billing.ledger import Charge
from billing.price_table import VersionPrices
from billing.rerating_rate import Amount, Taken, amount, give_back, patched, split
from billing.two_people import ALONE_WINDOW
from billing.types import Meter, Outcome, PriceSchedule, Transaction, Transfer
from core.db import Sessions, transaction
from core.ids import IdKind, format_id, new_uuid
from core.money import Currency
from core.tiers import Tier
from core.usage import TokenUsage
from tenants import audit
from tenants.types import SYSTEM

EVENTS_MAX = 2000  # of one batch, those that the run is not about too
KIND = "rerating"

Prices = dict[UUID, VersionPrices]
OnMoved = Callable[[AsyncSession, UUID], Awaitable[None]]


class Change(msgspec.Struct, frozen=True):
    """What an event came to, and comes to."""

    row: Row[Any]
    before: Amount
    after: Amount

    @property
    def pico(self) -> int:
        return self.after.whole - self.before.whole


class Rated(msgspec.Struct):
    """The events of a batch: those to change, those that would cost more and are left, those without a price."""

    changes: list[Change]
    uncharged: list[Change]
    unpriced: int

    @property
    def credit(self) -> int:
        return -sum(change.pico for change in self.changes if change.pico < 0)

    @property
    def charge(self) -> int:
        return sum(change.pico for change in self.changes if change.pico > 0)


class Posted(msgspec.Struct):
    """What a batch posts, and what of it reached the tenant or was borne by the platform."""

    given: int = 0
    overrun: int = 0
    lines: list[tuple[Change, UUID]] = []
    moves: list[dict[str, Any]] = []


async def step(
    sessions: Sessions, run_id: UUID, prices: Prices, *, alone_max_pico: int, now: datetime, on_moved: OnMoved
) -> bool:
    """Do one batch of a run that counts or executes; tells whether there may be more to do.

    Args:
        sessions: where.
        run_id: which run.
        prices: published versions met before; new ones are entered.
        alone_max_pico: above which sum in 24 hours a second operator is needed. A run of one person stops there, and
            waits for another.
        now: the instant that decides which lots have expired.
        on_moved: called in the transaction for a tenant whose money moved.
    """
    async with transaction(sessions) as session:
        run = await queries.lock_run(session, run_id)
        if run is None or run.state not in ("counting", "running"):
            return False
        counting = run.state == "counting"
        place = await queries.next_tenant(session, run_id, counting=counting)
        if place is None:
            await _end(session, run, alone_max_pico, now)
            return False
        tenant_id = place.tenant_id
        profile = None if counting else (await posting_queries.lock_profiles(session, [tenant_id]))[0]
        after = place.counted_after if counting else place.done_after
        rows = await queries.events(session, tenant_id, run, after or UUID(int=0), EVENTS_MAX)
        rated = await _rate(session, tenant_id, run, [row for row in rows if row.concerned], prices)
        values: dict[str, Any] = {
            "finished": len(rows) < EVENTS_MAX,
            "after": rows[-1].id if rows else after,
            "events": len(rated.changes),
            "credit": rated.credit,
            "charge": rated.charge,
        }
        if profile is None:
            values |= {"uncharged": len(rated.uncharged), "unpriced": rated.unpriced}
            values["uncharged_pico"] = sum(change.pico for change in rated.uncharged)
            await queries.add_counted(session, tenant_id, run_id, values)
            return True
        if await _too_much(session, run, rated, alone_max_pico, now):
            return False
        posted = await _post(session, tenant_id, (run, profile), rated.changes, now)
        await queries.add_done(session, tenant_id, run_id, {**values, "given": posted.given, "overrun": posted.overrun})
        if rated.changes:
            await on_moved(session, tenant_id)
        if values["finished"]:
            details = {"events": place.done_events + len(rated.changes), "note": run.note}
            audit.record(session, SYSTEM, "rerating.post", tenant_id=tenant_id, target_id=run_id, details=details)
        return True


async def _end(session: AsyncSession, run: Row[Any], alone_max_pico: int, now: datetime) -> None:
    """Every tenant is counted, or done."""
    values = {**queries.execution_of(run), "finished": None}
    if run.state == "counting":
        sums = await queries.run(session, run.id)
        if sums is not None:
            values["needs_approval"] = sums.credit_pico + sums.charge_pico > alone_max_pico
        await queries.set_state(session, run.id, {**values, "state": "counted"})
        return
    await queries.set_state(session, run.id, {**values, "state": "done", "finished": now})
    audit.record(session, SYSTEM, "rerating.finish", target_id=run.id, details={"note": run.note})


async def _too_much(session: AsyncSession, run: Row[Any], rated: Rated, alone_max_pico: int, now: datetime) -> bool:
    """Stop a run of one person that would move more than one person may; another can execute the rest."""
    if run.needs_approval:
        return False
    moved = await queries.moved_alone_pico(session, run.executed_answer, now - ALONE_WINDOW)
    if moved + rated.credit + rated.charge <= alone_max_pico:
        return False
    nobody: dict[str, Any] = dict.fromkeys(("by", "answers", "person", "at", "finished"))
    values = {**nobody, "state": "counted", "needs_approval": True}
    await queries.set_state(session, run.id, values)
    return True


async def _rate(
    session: AsyncSession, tenant_id: UUID, run: Row[Any], rows: Sequence[Row[Any]], prices: Prices
) -> Rated:
    history: dict[UUID, list[tuple[UUID, frozenset[Meter]]]] = {}
    meters = frozenset(map(Meter, run.meters or ()))
    if meters:
        touched = [row.id for row in rows if row.seq]
        for line in await queries.history(session, tenant_id, touched) if touched else ():
            history.setdefault(line.event_id, []).append((line.right_version, frozenset(map(Meter, line.meters or ()))))
    named = {version for lines in history.values() for version, _ in lines} | {row.price_version_id for row in rows}
    await load(session, prices, {*named, run.right_version})
    rated = Rated([], [], 0)
    for row in rows:
        steps = [*history.get(row.id, ()), (run.right_version, meters)] if meters else [(run.right_version, meters)]
        s = schedule_of(row, tenant_id, steps, prices)
        after = None if s is None else amount_at(row, s)
        if after is None:
            rated.unpriced += 1
            continue
        change = Change(row, Amount(row.amount_pico, row.min_charge_pico), after)
        (rated.changes if change.pico <= 0 or run.charge_more else rated.uncharged).append(change)
    return rated


async def load(session: AsyncSession, prices: Prices, versions: Iterable[UUID]) -> None:
    for version_id in set(versions) - prices.keys():
        found = await price_book.load_version(session, version_id)
        if found is not None:
            prices[version_id] = found


def schedule_of(
    row: Row[Any], tenant_id: UUID, steps: Iterable[tuple[UUID, frozenset[Meter]]], prices: Prices
) -> PriceSchedule | None:
    """Return an event's prices after re-ratings (version, meters) of it; None where one of them has no price for it."""
    found = _schedule(row, tenant_id, row.price_version_id, prices)
    for version_id, meters in steps:
        right = _schedule(row, tenant_id, version_id, prices)
        if right is None or (meters and found is None):
            return None
        found = right if found is None else patched(found, right, meters)
    return found


def _schedule(row: Row[Any], tenant_id: UUID, version_id: UUID, prices: Prices) -> PriceSchedule | None:
    version = prices.get(version_id)
    return None if version is None else version.schedule(row.model_id, Tier(row.tier), tenant_id)


def amount_at(row: Row[Any], s: PriceSchedule) -> Amount | None:
    """Return what a row of usage comes to; None where that is beyond what one event may be."""
    usage = TokenUsage(row.input_uncached, row.input_cached, row.input_cache_write, row.output, row.reasoning)
    try:
        return amount(usage, s, Outcome(row.outcome))
    except ValueError:
        return None


async def _post(
    session: AsyncSession, tenant_id: UUID, who: tuple[Row[Any], Row[Any]], changes: Sequence[Change], now: datetime
) -> Posted:
    """Post a transaction for what comes back and one for what is charged, per month of admission.

    `who` is the run and the tenant's profile.
    """
    posted = Posted()
    months: dict[tuple[int, int], list[Change]] = {}
    for change in changes:
        at = change.row.admitted_at.astimezone(UTC)
        months.setdefault((at.year, at.month), []).append(change)
    pool = await _paid(session, tenant_id, [change.row.tx_id for change in changes if change.pico < 0], now)
    for month in months.values():
        down = [change for change in month if change.pico <= 0]
        if down:
            await _give(session, who, down, pool, posted)
    for month in months.values():
        up = [change for change in month if change.pico > 0]
        if up:
            await _charge(session, tenant_id, who, up, posted)
    lines = [_line(who[0], change, tx_id) for change, tx_id in posted.lines]
    if lines:
        await queries.insert_lines(session, tenant_id, lines)
        await queries.insert_moves(session, posted.moves)
    return posted


async def _paid(
    session: AsyncSession, tenant_id: UUID, usage_txs: Sequence[UUID], now: datetime
) -> dict[UUID, list[Taken]]:
    pool: dict[UUID, list[Taken]] = {}
    if usage_txs:
        for row in await queries.taken(session, tenant_id, set(usage_txs), now):
            source = Taken(row.account_id, int(row.amount), row.open, row.unearned_account, row.used_account)
            pool.setdefault(row.usage_tx, []).append(source)
    return pool


Moves = dict[tuple[UUID, UUID], int]
"""Amounts by the account that is debited and the one that is credited."""


def _add(moves: Moves, debit: UUID, credit: UUID, pico: int) -> None:
    if pico:
        moves[debit, credit] = moves.get((debit, credit), 0) + pico


async def _give(
    session: AsyncSession,
    who: tuple[Row[Any], Row[Any]],
    changes: Sequence[Change],
    pool: dict[UUID, list[Taken]],
    posted: Posted,
) -> None:
    run, profile = who
    usage, lifted = split((change.before, change.after) for change in changes)
    moves: Moves = {}
    pots = _pots(moves, profile, usage, lifted)
    tx_id = new_uuid()
    by_tx: dict[UUID, int] = {}
    for change in changes:
        by_tx[change.row.tx_id] = by_tx.get(change.row.tx_id, 0) - change.pico
    for usage_tx, wanted in by_tx.items():
        for part in give_back(pool.get(usage_tx, ()), wanted):
            source = part.source
            to = source.account if source.open or source.used is None else source.used
            _drain(moves, pots, to, part.amount)
            if source.open and source.unearned is not None and source.used is not None:
                _add(moves, source.unearned, source.used, part.amount)
            if source.open and source.account != profile.overrun_account:
                posted.given += part.amount
            posted.moves.append({"tx": tx_id, "usage_tx": usage_tx, "account": source.account, "amount": -part.amount})
    posted.lines += [(change, tx_id) for change in changes]
    await ledger.post(session, [_transaction(tx_id, run, profile, changes, moves)])


def _pots(moves: Moves, profile: Row[Any], usage: int, lifted: int) -> list[list[Any]]:
    """Return what each of the two revenues gives back; where one rises, the other pays that, too."""
    revenue, minimums = profile.revenue_account, profile.min_charge_account
    if usage > 0:
        _add(moves, minimums, revenue, usage)
        usage, lifted = 0, usage + lifted
    if lifted > 0:
        _add(moves, revenue, minimums, lifted)
        usage, lifted = usage + lifted, 0
    return [[revenue, -usage], [minimums, -lifted]]


def _drain(moves: Moves, pots: list[list[Any]], to: UUID, pico: int) -> None:
    for pot in pots:
        part = min(pot[1], pico)
        pot[1] -= part
        pico -= part
        _add(moves, pot[0], to, part)


async def _charge(
    session: AsyncSession,
    tenant_id: UUID,
    who: tuple[Row[Any], Row[Any]],
    changes: Sequence[Change],
    posted: Posted,
) -> None:
    run, profile = who
    revenue, minimums, overrun = profile.revenue_account, profile.min_charge_account, profile.overrun_account
    sources = (await lots.sources_of(session, [tenant_id])).get(tenant_id, [])
    moves: Moves = {}
    tx_id = new_uuid()
    by_tx: dict[UUID, list[Change]] = {}
    for change in sorted(changes, key=lambda one: (one.row.admitted_at, one.row.id)):
        by_tx.setdefault(change.row.tx_id, []).append(change)
    for usage_tx, mine in by_tx.items():
        charges = [_as_charge(moves, profile, change) for change in mine]
        transfers, over = ledger.usage_transfers(
            charges, sources, revenue=revenue, min_charges=minimums, overrun=overrun
        )
        posted.overrun += over
        taken: dict[UUID, int] = {}
        for one in transfers:
            _add(moves, one.debit, one.credit, one.amount)
            if one.credit in (revenue, minimums):
                taken[one.debit] = taken.get(one.debit, 0) + one.amount
        for account, pico in taken.items():
            posted.moves.append({"tx": tx_id, "usage_tx": usage_tx, "account": account, "amount": pico})
    posted.lines += [(change, tx_id) for change in changes]
    await ledger.post(session, [_transaction(tx_id, run, profile, changes, moves)])


def _as_charge(moves: Moves, profile: Row[Any], change: Change) -> Charge:
    usage, lifted = split([(change.before, change.after)])
    if usage < 0:
        _add(moves, profile.revenue_account, profile.min_charge_account, -usage)
        usage, lifted = 0, usage + lifted
    elif lifted < 0:
        _add(moves, profile.min_charge_account, profile.revenue_account, -lifted)
        usage, lifted = usage + lifted, 0
    row = change.row
    minute = row.admitted_at.replace(second=0, microsecond=0)
    return Charge(usage, row.model_id, Tier(row.tier), minute, lifted)


def _transaction(tx_id: UUID, run: Row[Any], profile: Row[Any], changes: Sequence[Change], moves: Moves) -> Transaction:
    began = min(change.row.admitted_at for change in changes)
    return Transaction(
        tx_id,
        profile.tenant_id,
        KIND,
        Currency(profile.currency),
        tuple(Transfer(debit, credit, pico) for (debit, credit), pico in moves.items()),
        actor=f"operator:{format_id(IdKind.OPERATOR, run.executed_by)}",
        note=run.note,
        effective_at=began.replace(second=0, microsecond=0),
    )


def _line(run: Row[Any], change: Change, tx_id: UUID) -> dict[str, Any]:
    row = change.row
    return {
        "event": row.id,
        "seq": row.seq + 1,
        "run": run.id,
        "tx": tx_id,
        "version": row.version_id if run.meters else run.right_version,
        "from": change.before.whole,
        "from_min": change.before.min_charge,
        "to": change.after.whole,
        "to_min": change.after.min_charge,
        "project": row.project_id,
        "model_id": row.model_id,
        "model": row.model,
        "tier": row.tier,
        "price_version": row.price_version_id,
        "outcome": row.outcome,
        "admitted_at": row.admitted_at,
    }
