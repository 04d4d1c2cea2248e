"""Operators: how a tenant pays, and its credit limit."""

from datetime import datetime

from fastapi import APIRouter, Response
from pydantic import Field

from api.adjustments import Why
from api.admin.asking import asked_by, follow
from api.deps import CurrentWork, ReadSession, TenantId
from api.guard import GuardedRoute
from api.permissions import TENANT
from api.schemas import BillingModeName, Input, Output, PositiveAmount, problems
from billing import adjustments, terms
from billing.adjustment_kinds import NewTerms
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
    waiting: str | None = Field(None, description="New terms on which a second person has to decide.")


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


@router.put(
    f"{TENANT}/billing-terms",
    summary="Change how a tenant pays",
    responses={
        **problems(400, 403, 409),
        202: {"model": BillingTermsOut, "description": "A second person has to decide: it is above the limit."},
    },
)
async def put_billing_terms(
    tenant_id: TenantId, body: BillingTermsIn, work: CurrentWork, response: Response
) -> BillingTermsOut:
    """Make it prepaid, or postpaid with a limit. The same terms again change nothing.

    What may be owed more counts to what one person does alone in 24 hours. Above that the answer is 202 with the terms
    that still hold, and `waiting` is the adjustment on which a second person decides.
    """
    await tenants.get(work.session, tenant_id)
    before = (await terms.history(work.session, tenant_id, 1))[0]
    new = NewTerms(LedgerMode(body.billing_mode.value), parse_pico(body.credit_limit, param="credit_limit"))
    done = await adjustments.change_terms(work.session, tenant_id, new, await asked_by(work, body.note))
    waits = done is not None and done.state == "pending"
    if done is not None and not waits:
        await tenants.set_billing_mode(work.session, tenant_id, body.billing_mode)
    was, answer = _shown(before), _shown((await terms.history(work.session, tenant_id, 1))[0])
    work.act.on(
        tenant_id,
        changed=done is not None and not waits,
        note=body.note,
        billing_mode={"from": was.billing_mode.value, "to": body.billing_mode.value},
        credit_limit={
            "from": was.credit_limit,
            "to": answer.credit_limit if not waits else format_pico(new.credit_limit_pico),
        },
        waits=format_id(IdKind.ADJUSTMENT, done.id) if done is not None and waits else None,
    )
    if done is None:
        return answer
    await follow(work, done)
    if waits:
        response.status_code = 202
        return answer.model_copy(update={"waiting": format_id(IdKind.ADJUSTMENT, done.id)})
    return answer
