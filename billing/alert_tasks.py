"""What the worker does about crossings and alerts on credit: looks at all of them, and tells people by mail."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy.ext.asyncio import AsyncSession

from billing import alert_letters, credit_alerts, crossings
from billing.alert_letters import Place
from billing.crossings import Crossing
from core import mail
from core.errors import PlatformError
from core.sealing import sealing_key
from core.tasks import Job, Periodic, Task, TaskContext
from tenants import api_keys, members, projects, tenants
from tenants.roles import Permission
from tenants.types import Tenant


async def sweep_budgets(context: TaskContext) -> None:
    """Emit crossings that the poster did not see: it was killed, or a limit was set below what is spent."""
    await crossings.sweep(context.sessions, context.clock)


async def sweep_credit(context: TaskContext) -> None:
    """Raise and end alerts on credit."""
    await credit_alerts.sweep(context.sessions, context.clock)


async def forecast_credit(context: TaskContext) -> None:
    """The same with the forecast of days left, which is a scan of a week's usage."""
    await credit_alerts.sweep(context.sessions, context.clock, forecast=True)


def highest(found: Sequence[Crossing]) -> list[Crossing]:
    """Return of each budget and period the highest of the thresholds crossed at once: one line in a mail."""
    kept: dict[tuple[object, ...], Crossing] = {}
    for one in sorted(found, key=lambda crossing: crossing.threshold):
        kept[one.owner_id, one.metric, one.mode, one.model, one.window, one.limit_pico] = one
    return list(kept.values())


async def _tell_crossings(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    tenant_id = UUID(hex=arguments["tenant_id"])
    found = highest(await crossings.named(session, tenant_id, [UUID(hex=one) for one in arguments["crossings"]]))
    tenant = await tenants.get(session, tenant_id)
    by_project: dict[UUID | None, list[tuple[Crossing, str]]] = {}
    for crossing in found:
        by_project.setdefault(crossing.project_id, []).append((crossing, await _name(session, tenant, crossing)))
    for project_id, named in by_project.items():
        for person in await members.who_hold(session, tenant_id, Permission.BILLING_READ, project_id):
            letter = alert_letters.crossed(person, named, _place(tenant))
            await mail.post(session, letter, sealing_key=sealing_key(context.settings.secrets.sealing))


async def _tell_credit_alert(context: TaskContext, session: AsyncSession, arguments: Mapping[str, Any]) -> None:
    tenant_id = UUID(hex=arguments["tenant_id"])
    alert = await credit_alerts.get(session, tenant_id, UUID(hex=arguments["alert"]))
    try:
        tenant = await tenants.get(session, tenant_id)
    except PlatformError:
        return  # the books of a tenant that has no people
    if alert is None:
        return
    for person in await members.who_hold(session, tenant_id, Permission.BILLING_READ):
        letter = alert_letters.credit(person, alert, _place(tenant))
        await mail.post(session, letter, sealing_key=sealing_key(context.settings.secrets.sealing))


def _place(tenant: Tenant) -> Place:
    return Place(tenant.name, tenant.currency.value, ZoneInfo(tenant.tz))


async def _name(session: AsyncSession, tenant: Tenant, crossing: Crossing) -> str:
    if crossing.level == "tenant":
        return tenant.name
    if crossing.level == "project":
        return (await projects.get(session, tenant.id, crossing.owner_id)).name
    return (await api_keys.get(session, tenant.id, crossing.owner_id)).name


TASKS: tuple[Task, ...] = (
    Periodic("billing.sweep_budgets", sweep_budgets, every_s=300),
    Periodic("billing.sweep_credit", sweep_credit, every_s=60, timeout_s=50),
    Periodic("billing.forecast_credit", forecast_credit, every_s=900),
    Job(crossings.TELL, _tell_crossings, timeout_s=60),
    Job(credit_alerts.TELL, _tell_credit_alert, timeout_s=60),
)
