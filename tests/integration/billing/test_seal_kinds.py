"""What a seal says of a row stays what it was: over versions of this program, and over all that may change of it."""

from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import text

from billing import seal_queries, seals, terms, verify
from billing.types import BillingMode
from core.clock import SystemClock
from core.db import Sessions, transaction
from core.money import parse_pico
from tests.factories import billing as make

NOW = SystemClock().now()
# The facts of these rows by the SQL of the first version that sealed them; homes have seals made by it.
FIRST_VERSION = {
    "billing_profile": "SELECT jsonb_strip_nulls(to_jsonb(t) - ARRAY['version']::text[])::text"
    " FROM billing_profile t WHERE tenant_id = :tenant",
    "ledger_balance": "SELECT jsonb_strip_nulls(to_jsonb(t) - ARRAY['debit', 'credit']::text[])::text"
    " FROM ledger_balance t JOIN ledger_account a ON a.id = t.account_id"
    " WHERE a.tenant_id = :tenant AND a.code IN ('asset.unbilled', 'liability.credit_paid') AND t.bounded",
}


async def keys(sessions: Sessions, tenant_id: UUID) -> dict[str, str]:
    find = """
        SELECT id FROM ledger_account
        WHERE tenant_id = :tenant AND code IN ('asset.unbilled', 'liability.credit_paid') ORDER BY id LIMIT 1
    """
    async with transaction(sessions) as session:
        account = (await session.execute(text(find), {"tenant": tenant_id})).scalar_one()
    return {"billing_profile": str(tenant_id), "ledger_balance": str(account)}


async def facts(sessions: Sessions, named: dict[str, str]) -> dict[str, str]:
    async with transaction(sessions) as session:
        return {kind: (await seal_queries.record_facts(session, kind, [key]))[key] for kind, key in named.items()}


@pytest.mark.parametrize("how", [{"credit": "5"}, {"limit": "10"}])
async def test_terms_that_change_leave_old_seals_as_they_are(sessions: Sessions, how: dict[str, str]) -> None:
    """Sealed by the version before terms could change, which covered mode and limit: it still verifies after them."""
    tenant_id = await make.tenant(sessions, **how)  # type: ignore[arg-type]  # its keywords
    named = await keys(sessions, tenant_id)
    async with transaction(sessions) as session:
        first = {
            kind: (await session.execute(text(statement), {"tenant": tenant_id})).scalar_one()
            for kind, statement in FIRST_VERSION.items()
        }
        assert await seals.seal(session)
    assert await facts(sessions, named) == first
    for number, (mode, limit) in enumerate((("postpaid", "20"), ("prepaid", "0"), ("postpaid", "7.5"))):
        async with transaction(sessions) as session:
            at = NOW + timedelta(seconds=number)
            pico = parse_pico(limit)
            assert await terms.change(session, tenant_id, BillingMode(mode), pico, by="operator", note="agreed", now=at)
        async with transaction(sessions) as session:
            await seals.seal(session)
        async with transaction(sessions) as session:
            assert await verify.verify(session) is None
        assert await facts(sessions, named) == first


def test_what_a_kind_of_record_leaves_out_stays() -> None:
    """Another column left out makes every seal of the versions before it wrong: it needs `first`, or another name."""
    execution = ("state", "needs_approval", "executed_by", "executed_at", "finished_at")
    first = {
        "ledger_account": (),
        "ledger_balance": ("debit", "credit"),
        "billing_profile": ("version",),
        "credit_lot": (),
        "credit_adjustment": ("state", "decided_by", "decided_at", "tx_id"),
        "decision": (),
        "price_book": (),
        "price_version": (),
        "usage_quarantine": (),
        "rerating": execution,
        "rerating_tenant": (),
        "rerating_end": (),
        "ledger_period": (),
    }
    assert {kind: seal_queries.RECORDS[kind].without for kind in first} == first
