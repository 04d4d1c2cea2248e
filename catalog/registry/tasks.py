"""What the worker does for the registry."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from catalog.registry import intakes, manifest, queries, versions, work
from catalog.registry.types import IntakeState
from core import outbox
from core.db import transaction
from core.logging import get_logger
from core.tasks import Job, Periodic, Task, TaskContext

SWEEP_MAX = 100
QUIET = timedelta(minutes=2)  # work that nobody has touched for so long is asked for again
_mover = work.Mover()

log = get_logger(__name__)


async def _work(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    """Move an intake on for a moment, and ask for the next one while there is more."""
    desk = work.open_desk(context.settings, context.sessions, context.clock)
    if await work.work(_mover, desk, UUID(hex=arguments["intake_id"])):
        await outbox.add(session, intakes.WORK, arguments)


async def sweep(context: TaskContext) -> None:
    """Give up what was not completed in time, delete what is left of what is over, ask again for work that stands."""
    now = context.clock.now()
    async with transaction(context.sessions) as session:
        for row in await queries.expired(session, now, SWEEP_MAX):
            intakes.close(row, IntakeState.CANCELLED, now=now, error="It was not complete in time.")
        for intake_id in await queries.stalled(session, now, now - QUIET, SWEEP_MAX):
            await outbox.add(session, intakes.WORK, {"intake_id": intake_id.hex})
        over = await queries.with_parts(session, SWEEP_MAX)
    desk = work.open_desk(context.settings, context.sessions, context.clock)
    for intake_id in over:
        await work.tidy(desk, intake_id)


async def sign_anew(context: TaskContext) -> None:
    """After the signing key was turned: sign manifests with the new one, so that the old one may be dropped."""
    async with transaction(context.sessions) as session:
        await versions.sign_anew(session, manifest.keys_of(context.settings.secrets))


async def warn_of_deprecated(context: TaskContext) -> None:
    """Say in the log which versions are deployed although their date has passed."""
    async with transaction(context.sessions) as session:
        for version in await versions.deprecated_in_use(session, context.clock.now()):
            log.warning("model_version.deprecated_in_use", version=version.reference, note=version.deprecation_note)


TASKS: tuple[Task, ...] = (
    Job(intakes.WORK, _work, timeout_s=60),
    Periodic("registry.sweep", sweep, every_s=60),
    Periodic("registry.sign_anew", sign_anew, every_s=3600),
    Periodic("registry.warn_of_deprecated", warn_of_deprecated, every_s=21_600),
)
