"""Asking for adjustments of a tenant's money, and what follows them, for the routes that do."""

from api.deps import Work, responsible_of
from billing import credit_figures
from billing.adjustment_kinds import Adjustment
from billing.adjustments import Asked
from billing.credits import balance
from billing.tasks import ask_refresh
from core.ids import new_uuid
from core.money import PICO_PER_UNIT


async def asked_by(work: Work, note: str, key: str = "") -> Asked:
    """Who asks, why, and above which sum a second person must agree. Without a key, one of its own."""
    alone_max_pico = work.services.settings.books.adjust_alone_max * PICO_PER_UNIT
    return Asked(await responsible_of(work), note, key or new_uuid().hex, alone_max_pico, work.services.clock.now())


async def follow(work: Work, done: Adjustment) -> None:
    """Have Valkey follow: at once, so that the next call is admitted by it; the worker does it where that fails."""
    correct = done.new_terms is not None
    await ask_refresh(work.session, done.tenant_id, correct=correct)

    async def refresh() -> None:
        services = work.services
        if done.billed is not None and done.state == "posted":
            async with services.sessions() as session:
                now = await balance(session, done.tenant_id)
            await credit_figures.settle(services.valkey, done.tenant_id, now, [done.billed.event_id])
        else:
            await credit_figures.refresh(services.valkey, services.sessions, done.tenant_id, correct=correct)

    work.act.after_commit.append(refresh)
