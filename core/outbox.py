"""The outbox: work that must follow a commit. A row is written with it, and stays until its effect is committed.

The worker relays open rows through the broker, which may lose or repeat them: a row that was sent and is not done is
sent again, later each time, and the lock on the row lets only one job at a time make its effect.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from core import outbox_queries as queries
from core.db import transaction
from core.logging import get_logger, redact
from core.tasks import Job, TaskContext

ATTEMPTS_MAX = 12  # over some five hours
BATCH = 100
ERROR_CHARACTERS_MAX = 300
KEEP_DONE = timedelta(days=7)
PRUNE_MAX = 10_000

log = get_logger(__name__)


class Outcome(StrEnum):
    """Of one delivery."""

    DONE = "done"
    SKIPPED = "skipped"  # done already, or being done
    FAILED = "failed"


async def add(session: AsyncSession, task: str, arguments: Mapping[str, Any]) -> None:
    """Ask for a job after this transaction's commit.

    Args:
        session: the transaction; a rollback takes the row with it.
        task: the name of a `core.tasks.Job`.
        arguments: JSON values, ids as text; no secret.
    """
    await queries.insert(session, task, arguments)


async def claim(context: TaskContext) -> Sequence[int]:
    """Return the rows to send now, oldest first, and note that they are sent: at most `BATCH`."""
    async with transaction(context.sessions) as session:
        return await queries.claim(session, context.clock.now(), ATTEMPTS_MAX, BATCH)


async def execute(context: TaskContext, jobs: Mapping[str, Job], row_id: int) -> Outcome:
    """Make the effect of a row and mark it done, in one transaction; note a failure."""
    try:
        async with transaction(context.sessions) as session:
            found = await queries.lock_open(session, row_id)
            if found is None:
                return Outcome.SKIPPED
            task, arguments = found
            job = jobs[task]  # a row of an unknown name fails like any other
            async with asyncio.timeout(job.timeout_s):
                await job.run(context, session, arguments)
            await queries.mark_done(session, row_id, context.clock.now())
    except Exception as error:  # noqa: BLE001 - whatever it was, the row stays, says why, and is tried again
        await _note_failure(context, row_id, error)
        return Outcome.FAILED
    return Outcome.DONE


async def _note_failure(context: TaskContext, row_id: int, error: Exception) -> None:
    reason = redact(f"{type(error).__name__}: {error}")[:ERROR_CHARACTERS_MAX]
    async with transaction(context.sessions) as session:
        noted = await queries.mark_failed(session, row_id, reason)
    if noted is None:
        return
    task, attempts = noted
    event = "outbox.given_up" if attempts >= ATTEMPTS_MAX else "outbox.failed"
    log.warning(event, row=row_id, task=task, attempts=attempts, error=reason)


async def count(context: TaskContext) -> tuple[int, int]:
    """Return how many rows wait, and how many were given up and need somebody to look."""
    async with transaction(context.sessions) as session:
        return await queries.count(session, ATTEMPTS_MAX)


async def prune(context: TaskContext) -> None:
    """Forget rows that were done a week ago."""
    async with transaction(context.sessions) as session:
        await queries.prune(session, context.clock.now() - KEEP_DONE, PRUNE_MAX)
