"""What the worker does for billing."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from billing import (
    anchors,
    budgets,
    credit_figures,
    idempotency,
    lots,
    posting,
    quarantine_queries,
    queries,
    reconcile,
    rerating,
    rerating_post,
    seal_queries,
    seals,
    usage_days,
    verify,
)
from core import outbox
from core.db import transaction
from core.logging import get_logger
from core.money import PICO_PER_UNIT
from core.tasks import Job, Periodic, Task, TaskContext
from tenants import api_keys

REFRESH_CREDIT = "billing.refresh_credit"
RERATE_BATCHES = 50  # of one job: the worker has other work
SEALS_MAX = 100  # of one run
DIFFERENCES_LOGGED_MAX = 100
KEY_USE_WINDOW = timedelta(hours=1)

log = get_logger(__name__)


class LedgerWrongError(Exception):
    """The books do not add up; the log names the row."""


async def verify_ledger(context: TaskContext) -> None:
    """Add the books up again; a wrong row is an error in the log and a failed task in the figures."""
    async with transaction(context.sessions) as session:
        finding = await verify.verify(session, anchors.load(context.settings.home))
    context.figures.set("ledger_wrong", "1 when the last verification found a wrong row.", int(finding is not None))
    context.figures.set(
        "ledger_verified_seconds", "When the books were verified last.", context.clock.now_us() // 1_000_000
    )
    if finding is not None:
        log.error("ledger.found_wrong", table=finding.table, row=finding.row, problem=finding.problem)
        raise LedgerWrongError(f"{finding.table} {finding.row}")


async def reconcile_books(context: TaskContext) -> None:
    """Compare events, rollups and ledger, and Valkey's figures with the ledger; a difference is an error in the log."""
    _, found = await reconcile.books(context.sessions)
    async with context.valkey() as client:
        _, off = await reconcile.figures(context.sessions, client)
    for one in (*found, *off)[:DIFFERENCES_LOGGED_MAX]:
        log.error("ledger.differs", tenant_id=one.tenant_id.hex, problem=one.problem)
    text = "Tenants whose events, rollups and ledger differ, by a pico or more."
    context.figures.set("reconcile_books_wrong", text, len(found))
    context.figures.set("reconcile_figures_wrong", "Credit figures in Valkey that are not the ledger's.", len(off))


async def seal_ledger(context: TaskContext) -> None:
    """Seal what was posted since, and anchor the newest seal in the log and on this disk.

    A chain that does not have the anchor is left as it is: an error in the log, a figure and a failed task.
    """
    text = "1 when sealing was refused because the seals in the database are not those anchored here."
    for _ in range(SEALS_MAX):
        try:
            count, newest, moved = await anchors.seal(context.sessions, context.settings.home)
        except seals.AnchorLostError as lost:
            context.figures.set("ledger_anchor_lost", text, 1)
            log.exception("ledger.anchor_lost", seal=lost.broken.row, problem=lost.broken.problem)
            raise LedgerWrongError(f"ledger_seal {lost}") from lost
        context.figures.set("ledger_anchor_lost", text, 0)
        if moved:
            log.info("ledger.head_anchored", seq=newest.seq, hash=newest.hash.hex(), leaves=count)
        if count < seals.SEAL_MAX:
            break
    async with transaction(context.sessions) as session:
        waiting = await seal_queries.waiting(session)
    context.figures.set("ledger_unsealed_rows", "Rows of the books that wait for their seal, after sealing.", waiting)


async def ensure_partitions(context: TaskContext) -> None:
    """Make the partitions of usage events ahead; the poster makes one that is missing by itself."""
    await posting.ensure_partitions(context.sessions, context.clock)


async def drop_usage_days(context: TaskContext) -> None:
    """Drop the usage events that the policy no longer keeps; days that must stay are told in the log."""
    keep_days = context.settings.retention.usage_days
    now, anchor = context.clock.now(), anchors.load(context.settings.home)
    _, staying, wrong = await usage_days.drop_due(context.sessions, now, keep_days, "policy", anchor=anchor)
    for one in staying:
        log.info("usage.day_stays", day=f"{one.day}", why=one.hindrance)
    if wrong is not None:
        raise LedgerWrongError(f"{wrong.table} {wrong.row}")


async def note_key_use(context: TaskContext) -> None:
    """Tell the tenants' keys when they were used last, to the minute."""
    async with transaction(context.sessions) as session:
        uses = await queries.last_uses(session, context.clock.now() - KEY_USE_WINDOW)
        await api_keys.mark_used(session, uses)


async def watch_quarantine(context: TaskContext) -> None:
    """Show how much usage waits in quarantine for a decision, and for how long."""
    async with transaction(context.sessions) as session:
        waiting = await quarantine_queries.waiting(session)
    age_s = 0 if waiting.since is None else (context.clock.now() - waiting.since) // timedelta(seconds=1)
    context.figures.set("quarantine_waiting", "Usage events in quarantine that nobody decided on.", waiting.events)
    context.figures.set("quarantine_oldest_seconds", "How long the oldest of them waits.", age_s)


async def expire_credit(context: TaskContext) -> None:
    """Take back what is left in expired lots, and lower the figures of tenants one of whose lots expires about now."""
    now = context.clock.now()
    async with transaction(context.sessions) as session:
        due = await lots.due(session, now)
        sinking = await lots.figures_due(session, now)
    for tenant_id in due:
        async with transaction(context.sessions) as session:
            expired_pico = await lots.expire(session, tenant_id, now)
        log.info("credit.expired", tenant_id=tenant_id.hex, amount_pico=expired_pico)
    if due or sinking:
        async with context.valkey() as client:
            for tenant_id in dict.fromkeys((*due, *sinking)):
                await credit_figures.refresh(client, context.sessions, tenant_id, correct=True)


async def clamp_budgets(context: TaskContext) -> None:
    """Bring the budgets in Valkey back to what is certain."""
    async with context.valkey() as client:
        repair = await budgets.clamp(context.sessions, client, context.clock)
    text = "By how much counters of budgets in Valkey were off at the last comparison."
    context.figures.set("budget_drift_nano", text, repair.off_nano)


async def ask_refresh(session: AsyncSession, tenant_id: UUID, *, correct: bool = False) -> None:
    """Have the tenant's figure in Valkey brought up to the ledger after this transaction's commit, come what may.

    `correct`: although no transaction moved it, e.g. its limit changed.
    """
    await outbox.add(session, REFRESH_CREDIT, {"tenant_id": tenant_id.hex, "correct": correct})


async def _refresh_credit(context: TaskContext, _session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    async with context.valkey() as client:
        tenant_id, correct = UUID(hex=arguments["tenant_id"]), bool(arguments.get("correct"))
        await credit_figures.refresh(client, context.sessions, tenant_id, correct=correct)


async def _rerate(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    """Do some batches of a re-rating, each its own transaction, and ask for the next job while there is more."""
    run_id, prices = UUID(hex=arguments["run_id"]), rerating_post.Prices()
    alone_max_pico = context.settings.books.adjust_alone_max * PICO_PER_UNIT
    for _ in range(RERATE_BATCHES):
        now = context.clock.now()
        if not await rerating_post.step(
            context.sessions, run_id, prices, alone_max_pico=alone_max_pico, now=now, on_moved=ask_refresh
        ):
            return
    await outbox.add(session, rerating.JOB, arguments)


TASKS: tuple[Task, ...] = (
    Periodic("billing.verify_ledger", verify_ledger, every_s=3600, timeout_s=1800, apart=True),
    Periodic("billing.reconcile_books", reconcile_books, every_s=3600, timeout_s=600, apart=True),
    Periodic("billing.seal_ledger", seal_ledger, every_s=300),
    Periodic("billing.ensure_partitions", ensure_partitions, every_s=3600),
    Periodic("billing.drop_usage_days", drop_usage_days, every_s=21_600, timeout_s=3600, apart=True),
    Periodic("billing.note_key_use", note_key_use, every_s=300),
    Periodic("billing.forget_repeats", idempotency.forget, every_s=3600),
    Periodic("billing.watch_quarantine", watch_quarantine, every_s=60),
    Periodic("billing.expire_credit", expire_credit, every_s=60, timeout_s=50),
    Periodic("billing.clamp_budgets", clamp_budgets, every_s=60, timeout_s=50),
    Job(REFRESH_CREDIT, _refresh_credit, timeout_s=10),
    Job(rerating.JOB, _rerate, timeout_s=120),
)
