"""Operators: how a tenant pays, and its credit limit."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import Field

from api.adjustments import Why
from api.deps import CurrentWork, ReadSession, TenantId
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import BillingModeName, Input, Output, PositiveAmount, problems
from billing import credit_figures, terms
from billing.tasks import ask_refresh
from billing.terms import Terms
from billing.types import BillingMode as LedgerMode
from core.ids import IdKind, format_id
from core.money import format_pico, parse_pico
from tenants import tenants
from tenants.types import BillingMode

router = APIRouter(route_class=GuardedRoute, tags=["credit and usage"])

HISTORY_MAX = 100


class BillingTermsIn(Input):
    """How the tenant pays from now on."""

    billing_mode: BillingModeName
    credit_limit: PositiveAmount = Field(
        "0", description="Postpaid: the most that may be unbilled, never below what is."
    )
    note: Why


class BillingTermsOut(Output):
    """How the tenant pays since an instant."""

    billing_mode: BillingModeName
    credit_limit: str = Field(description="Prepaid after postpaid: what usage admitted before may still use.")
    since: datetime
    changed_by: str
    note: str


class BillingTermsHistory(Output):
    """The terms that hold, then those before, at most 100."""

    items: list[BillingTermsOut]


def _shown(found: Terms) -> BillingTermsOut:
    return BillingTermsOut(
        billing_mode=BillingMode(found.mode.value),
        credit_limit=format_pico(found.credit_limit_pico),
        since=found.since,
        changed_by=found.changed_by,
        note=found.note,
    )


@router.get(f"{TENANT}/billing-terms", summary="Read how a tenant pays, and did")
async def get_billing_terms(tenant_id: TenantId, session: ReadSession) -> BillingTermsHistory:
    await tenants.get(session, tenant_id)
    return BillingTermsHistory(items=[_shown(one) for one in await terms.history(session, tenant_id, HISTORY_MAX)])


@router.put(f"{TENANT}/billing-terms", summary="Change how a tenant pays", responses=problems(400, 409))
async def put_billing_terms(tenant_id: TenantId, body: BillingTermsIn, work: CurrentWork) -> BillingTermsOut:
    """Make it prepaid, or postpaid with a limit. The same terms again change nothing."""
    await tenants.get(work.session, tenant_id)
    operator = work.caller.operator
    by = f"operator:{format_id(IdKind.OPERATOR, operator.id)}" if operator else "system"
    changed = await terms.change(
        work.session,
        tenant_id,
        LedgerMode(body.billing_mode.value),
        parse_pico(body.credit_limit, param="credit_limit"),
        by=by,
        note=body.note,
        now=work.services.clock.now(),
    )
    if changed:
        await tenants.set_billing_mode(work.session, tenant_id, body.billing_mode)
    before, *_ = [*(await terms.history(work.session, tenant_id, 2))[1:], None]
    answer = _shown((await terms.history(work.session, tenant_id, 1))[0])
    was = None if before is None else _shown(before)
    work.act.on(
        tenant_id,
        changed=changed,
        note=body.note,
        billing_mode={"from": was and was.billing_mode.value, "to": answer.billing_mode.value},
        credit_limit={"from": was and was.credit_limit, "to": answer.credit_limit},
    )
    await ask_refresh(work.session, tenant_id, correct=True)

    async def refresh() -> None:
        await credit_figures.refresh(work.services.valkey, work.services.sessions, tenant_id, correct=True)

    work.act.after_commit.append(refresh)
    return answer
