"""How a tenant pays changes both ways, and its limit; the books stay right, and each change stays."""

import asyncio
from datetime import timedelta
from uuid import UUID

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from billing import credit_figures, seals, terms, verify
from billing.metrics import poster_metrics
from billing.posting import Posting, ensure_partitions
from billing.types import BillingMode, PriceSchedule, UsageEvent
from core.clock import ManualClock, SystemClock
from core.db import Sessions, transaction
from core.errors import PlatformError
from core.money import parse_pico
from core.settings import Database
from core.usage import TokenUsage
from tests.factories import billing as make
from tests.factories.billing_world import World
from tests.factories.credit_figures import figure_of
from tests.integration.billing.test_lots import balances
from tests.integration.billing.test_verify import owner_of

NOW = SystemClock().now()
PREPAID, POSTPAID = BillingMode.PREPAID, BillingMode.POSTPAID


async def to(sessions: Sessions, tenant_id: UUID, mode: BillingMode, limit: str = "0") -> bool:
    async with transaction(sessions) as session:
        pico = parse_pico(limit)
        return await terms.change(session, tenant_id, mode, pico, by="operator", note="agreed", now=NOW)


def usage(tenant_id: UUID, s: PriceSchedule, units: str, *, before_s: int = 0) -> UsageEvent:
    """Usage for that price, admitted when it changed or so long before."""
    made = make.event(tenant_id, s, TokenUsage(parse_pico(units) // 2_000_000, 0, 0, 0, 0))
    at_us = int((NOW - timedelta(seconds=before_s)).timestamp()) * 1_000_000 + (0 if before_s else 60_000_000)
    return msgspec.structs.replace(made, admitted_at_us=at_us, ended_at_us=at_us + 1_000_000)


async def world_of(sessions: Sessions, **how: str) -> tuple[UUID, PriceSchedule, Posting]:
    prices = await make.publish_prices(sessions)
    tenant_id = await make.tenant(sessions, **how)  # type: ignore[arg-type]  # its keywords
    posting = Posting(sessions, ManualClock(NOW), poster_metrics(CollectorRegistry()))
    return tenant_id, make.schedule(prices, tenant_id), posting


async def is_right(sessions: Sessions) -> None:
    async with transaction(sessions) as session:
        assert await verify.verify(session) is None


async def test_from_prepaid_to_postpaid_credit_is_used_first_and_back(sessions: Sessions) -> None:
    """5.00 paid, then a limit of 10.00: 8.00 used are 5.00 paid and 3.00 unbilled. Back: late usage and new credit."""
    tenant_id, s, posting = await world_of(sessions, credit="5")
    assert await to(sessions, tenant_id, POSTPAID, "10")
    assert await make.available(sessions, tenant_id) == parse_pico("15")
    await posting.post([usage(tenant_id, s, "8")])
    assert await make.available(sessions, tenant_id) == parse_pico("7")
    found = await balances(sessions, tenant_id)
    assert (found.get("liability.credit_paid"), found["asset.unbilled"]) == (None, -parse_pico("3"))

    assert await to(sessions, tenant_id, PREPAID)
    assert await make.available(sessions, tenant_id) == 0  # nobody is let in
    await make.add_credit(sessions, tenant_id, "2", "new")
    assert await make.available(sessions, tenant_id) == parse_pico("2")
    await posting.post([usage(tenant_id, s, "6", before_s=120)])  # admitted while it was postpaid: 2 paid, 4 unbilled
    assert (await balances(sessions, tenant_id))["asset.unbilled"] == -parse_pico("7")
    await posting.post([usage(tenant_id, s, "1")])  # admitted since: the platform's
    found = await balances(sessions, tenant_id)
    assert (found["asset.unbilled"], found["expense.overrun"]) == (-parse_pico("7"), -parse_pico("1"))
    await is_right(sessions)

    assert await to(sessions, tenant_id, POSTPAID, "7.5")
    assert await make.available(sessions, tenant_id) == parse_pico("0.5")
    await is_right(sessions)
    async with transaction(sessions) as session:
        kept = await terms.history(session, tenant_id, 10)
    assert [(one.mode, one.credit_limit_pico) for one in kept] == [
        (POSTPAID, parse_pico("7.5")),
        (PREPAID, parse_pico("10")),
        (POSTPAID, parse_pico("10")),
        (PREPAID, 0),
    ]


async def test_a_tenant_opened_postpaid_can_pay_in_advance(sessions: Sessions) -> None:
    tenant_id, s, posting = await world_of(sessions, limit="10")
    assert await to(sessions, tenant_id, PREPAID)
    await make.add_credit(sessions, tenant_id, "2", "first")
    await posting.post([usage(tenant_id, s, "2")])
    assert "asset.unbilled" not in await balances(sessions, tenant_id)
    await is_right(sessions)


async def test_a_limit_is_never_below_what_is_unbilled(sessions: Sessions) -> None:
    tenant_id, s, posting = await world_of(sessions, limit="10")
    await posting.post([usage(tenant_id, s, "6")])
    with pytest.raises(PlatformError) as refused:
        await to(sessions, tenant_id, POSTPAID, "5.999999999999")
    assert refused.value.code == "CREDIT_LIMIT_TOO_LOW"
    assert [await to(sessions, tenant_id, POSTPAID, limit) for limit in ("6", "6", "1000000000")] == [True, False, True]
    assert await make.available(sessions, tenant_id) == parse_pico("999999994")
    for mode, limit in ((PREPAID, "1"), (POSTPAID, "-1"), (POSTPAID, "1000000001")):
        with pytest.raises(PlatformError) as refused:
            await to(sessions, tenant_id, mode, limit)
        assert refused.value.code == "INVALID_AMOUNT"
    await is_right(sessions)


async def test_changes_and_postings_at_once_keep_every_bound(sessions: Sessions) -> None:
    """P3: ten of 1.00 each are posted while the limit moves between 4 and 9 and the way of paying changes."""
    tenant_id, s, posting = await world_of(sessions, credit="3")

    await ensure_partitions(sessions, SystemClock(), 1)
    wanted = ((POSTPAID, "9"), (POSTPAID, "4"), (PREPAID, "0"), (POSTPAID, "5"))
    changes = [to(sessions, tenant_id, mode, limit) for mode, limit in wanted]
    posts = [posting.post([usage(tenant_id, s, "1")]) for _ in range(10)]
    done = await asyncio.gather(*changes, *posts, return_exceptions=True)
    failed = [one for one in done if isinstance(one, BaseException)]
    assert {getattr(one, "code", repr(one)) for one in failed} <= {"CREDIT_LIMIT_TOO_LOW"}
    await is_right(sessions)
    found = await balances(sessions, tenant_id)
    used = parse_pico("3") - found.get("liability.credit_paid", 0)
    assert used - found.get("asset.unbilled", 0) - found.get("expense.overrun", 0) == parse_pico("10")


async def test_the_figure_at_the_door_follows(world: World) -> None:
    tenant_id, _ = await world.tenant("5")
    await credit_figures.refresh(world.client, world.sessions, tenant_id)
    await to(world.sessions, tenant_id, POSTPAID, "10")
    await credit_figures.refresh(world.client, world.sessions, tenant_id, correct=True)
    assert (await figure_of(world.client, tenant_id)).available == 15 * 10**9


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger_balance SET credit_limit = credit_limit + 1 WHERE bounded AND credit_limit > 0",
        "UPDATE billing_profile SET mode = 'postpaid', prepaid_since = NULL",
        "UPDATE billing_profile SET prepaid_since = prepaid_since + interval '1 second'",
    ],
)
async def test_a_change_by_hand_is_found(sessions: Sessions, database_settings: Database, statement: str) -> None:
    tenant_id, _, _ = await world_of(sessions, limit="10")
    await to(sessions, tenant_id, PREPAID)
    async with transaction(sessions) as session:
        await seals.seal(session)
    await is_right(sessions)
    with owner_of(database_settings) as owner:
        assert owner.execute(statement).rowcount == 1
    async with transaction(sessions) as session:
        found = await verify.verify(session)
    assert found is not None
    assert (found.table, found.row.split()[0]) == ("billing_profile and credit_terms", str(tenant_id))
