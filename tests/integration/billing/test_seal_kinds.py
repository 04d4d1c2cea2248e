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


PINNED = {
    "billing_profile": "created_at currency min_charge_account mode overrun_account revenue_account tenant_id",
    "credit_adjustment": "amount_pico body_sha256 id idempotency_key kind needs_approval note requested_at "
    "requested_by tenant_id",
    "credit_lot": "account_id created_at priority source tenant_id",
    "credit_terms": "changed_by credit_limit id mode note number since tenant_id",
    "ledger_account": "code created_at currency id normal",
    "ledger_balance": "account_id bounded credit_limit",
    "ledger_period": "begun_at month state",
    "price_book": "created_at currency for_plan id name",
    "price_version": "book_id created_at id note state",
    "rerating": "body_sha256 charge_more currency id idempotency_key note requested_at requested_by "
    "right_version since until wrong_versions",
    "rerating_tenant": "charge_pico charged_pico counted credit_pico credited_pico done done_events events "
    "given_pico overrun_pico requests run_id tenant_id uncharged uncharged_pico unpriced",
    "usage_day": "closed_at day",
    "usage_decision": "action decided_at decided_by id reason tenant_id",
    "usage_quarantine": "admitted_at amount_pico id model outcome payload quarantined_at raw_usage reason tenant_id",
}
FILLED = """
    SELECT table_name, array_agg(column_name::text ORDER BY column_name::text) FROM information_schema.columns
    WHERE table_schema = 'public' AND table_name = ANY(:tables)
      AND (is_nullable = 'NO' OR column_default IS NOT NULL OR is_identity = 'YES' OR is_generated = 'ALWAYS')
    GROUP BY table_name
"""


async def test_no_migration_changes_what_was_sealed(sessions: Sessions) -> None:
    """The columns that every row fills, by table: one more, and all seals of the versions before are wrong.

    A column that is new allows null and has no default, or the record of its table leaves it out.
    """
    async with transaction(sessions) as session:
        tables = sorted({record.table for record in seal_queries.RECORDS.values()})
        found = {name: set(names) for name, names in await session.execute(text(FILLED), {"tables": tables})}
    for record in seal_queries.RECORDS.values():
        found[record.table] -= set(record.without)
    assert {table: " ".join(sorted(names)) for table, names in found.items()} == PINNED
